"""Notes of messages: JSON with a checksum, and strict readers of its values."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.checks import whole
from fedquilt.errors import BudgetError, FormatError
from fedquilt.storage.tensor_files import bounded_json
from fedquilt.terms import Budget, Client, Submodel

VERSION = 1  # Version of the format. A device refuses any other.
MAX_NOTE_BYTES = 4 << 20  # Largest note. A layout of ResNet-18 has 11 kB.
MAX_NOTE_DEPTH = 24  # Nested brackets in a note
MAX_REASON = 500  # Characters of a device's reason
_SEAL = "sha256"  # Last key of a note
_SEALED = re.compile(rb', "sha256": "([0-9a-f]{64})"\}$')


def checksum(note: bytes, files: Sequence[bytes]) -> str:
    """Return the SHA-256 of a note and of files in hex. Lengths of all parts are hashed too."""
    digest = hashlib.sha256()
    for part in (note, *files):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sealed_note(plain: Mapping[str, Any], files: Sequence[bytes]) -> bytes:
    """Return values as a note, whose last key has a checksum of the note and of files."""
    text = json.dumps(dict(plain)).encode()
    seal = f', "{_SEAL}": "{checksum(text, files)}"}}'.encode()
    return text[:-1] + seal


def read_note(note: bytes, files: Sequence[bytes], kind: str) -> dict[str, Any]:
    """Return the values of a note.

    Args:
        note: JSON, as `sealed_note` returned it.
        files: Files of the same message, which the checksum covers.
        kind: Kind that the message must have, such as "request".

    Raises:
        FormatError: The message is damaged, or has another kind or version.
    """
    if len(note) > MAX_NOTE_BYTES:
        raise FormatError(f"its note has {len(note):,} bytes; {MAX_NOTE_BYTES:,} are allowed")
    seal = _SEALED.search(note)
    if seal is None or checksum(note[: seal.start()] + b"}", files) != seal[1].decode():
        raise FormatError("it is damaged: its checksum differs from the one that was written")
    plain = bounded_json(note, MAX_NOTE_DEPTH)
    if not isinstance(plain, dict) or plain.get("kind") != kind:
        raise FormatError(f"it is no {kind}")
    if plain.get("version") != VERSION:
        raise FormatError(
            f"it has version {str(plain.get('version'))[:20]} of the format; this fedquilt reads "
            f"version {VERSION}"
        )
    return plain


def client_note(client: Client) -> dict[str, Any]:
    """Return a client as plain values, for `read_client`."""
    return {
        "id": client.id,
        "budget": client.budget.bounds,
        "size": client.size,
        "turn": client.turn,
    }


def read_client(plain: Any) -> Client:
    """Return a client from plain values. Others than a client's raise a FormatError."""
    if not isinstance(plain, dict) or not isinstance(plain.get("budget"), dict):
        raise FormatError("it has no client with a budget")
    bounds = plain["budget"]
    known = {"share", "macs", "params", "memory"}
    if not bounds or not bounds.keys() <= known or not all(map(is_number, bounds.values())):
        raise FormatError(f"the budget of its client is no table of {', '.join(sorted(known))}")
    try:
        budget = Budget(**bounds)
    except BudgetError as error:
        raise FormatError(f"the budget of its client cannot be read: {error}") from error
    return Client(whole_in(plain, "id"), budget, whole_in(plain, "size"), whole_in(plain, "turn"))


def submodel_in(job: Any, key: str) -> Submodel:
    """Return the sub-model under a key of a job. Other values raise a FormatError."""
    if not isinstance(job, dict):
        raise FormatError("a job is no table")
    return Submodel.from_dict(job.get(key))  # type: ignore[arg-type]  # It refuses other types.


def whole_in(plain: Mapping[str, Any], key: str, least: int = 0) -> int:
    """Return the whole number under a key of a note.

    Args:
        plain: Values of the note.
        key: Key of the number.
        least: Smallest number that is accepted.

    Raises:
        FormatError: It is no such number.
    """
    value = plain.get(key)
    if not isinstance(value, int) or not whole(value, least) or value >= 2**63:
        raise FormatError(f"its {key} is no whole number from {least} on")
    return value


def text_in(plain: Mapping[str, Any], key: str) -> str:
    """Return the text under a key of a note. Other values raise a FormatError."""
    value = plain.get(key)
    if not isinstance(value, str):
        raise FormatError(f"its {key} is no text")
    return value


def is_number(value: object) -> bool:
    """Return True if a value is a finite number. Booleans do not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_shape(value: object) -> bool:
    """Return True if a value is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(whole(size) and size < 2**40 for size in value)
