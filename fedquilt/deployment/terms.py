"""Method, link and task as plain values, from which a device rebuilds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import fedquilt.runs.registries  # noqa: F401  # Classes that settings select by name
from fedquilt.config.resolve import resolved
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.methods import Method
from fedquilt.names import is_file, is_reference, split_file
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Link
from fedquilt.tasks import Classification, Task

MAX_NAME = 80  # Characters of a server's text in messages


@dataclass(frozen=True)
class Terms:
    """Method, link and task of a federation, which a request carries as settings."""

    method: Method
    link: Link = PERFECT
    task: Task = Classification()

    @staticmethod
    def of(federation: Federation) -> dict[str, Any]:
        """Return a federation's method, link and task as nested plain values, for `read`."""
        terms = Terms(federation.method, federation.link, federation.world.task)
        plain: dict[str, Any] = write(terms)
        return plain

    @staticmethod
    def read(plain: Mapping[str, Any], allowed: Collection[str] = ()) -> Terms:
        """Return method, link and task from plain values.

        Args:
            plain: Settings of a request.
            allowed: References to code, such as "mine.py:Mine", that the device's owner has named.
                Others are refused before they are imported.

        Raises:
            ConfigError: The values name other code, or have problems, which it lists.
        """
        return resolved(Terms, permitted(dict(plain), allowed), {}, "the request")


def permitted(plain: Any, allowed: Collection[str]) -> Any:
    """Return plain values in which references to code are those of the device's owner.

    A reference to a file is permitted if the owner has named a file of the same name with the same
    object, wherever it is. The owner's file runs, and not the server's. A reference to a module is
    permitted if the owner has named it. Keys of tables may not be references.

    Args:
        plain: Nested plain values that come from a server.
        allowed: References that the owner has named, such as "/home/me/mine.py:Mine".

    Raises:
        ConfigError: The values name other code. Nothing was imported.
    """
    if isinstance(plain, str):
        return _permitted_name(plain, allowed) if is_reference(plain) else plain
    if isinstance(plain, Mapping):
        for key in plain:
            if isinstance(key, str) and is_reference(key):
                raise _foreign(key, allowed)
        return {key: permitted(value, allowed) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [permitted(value, allowed) for value in plain]
    return plain


def _permitted_name(name: str, allowed: Collection[str]) -> str:
    for reference in allowed:
        if name == reference:
            return reference
        if is_file(name) and is_file(reference) and _object_of(name) == _object_of(reference):
            return reference
    raise _foreign(name, allowed)


def _object_of(reference: str) -> tuple[str, str]:
    """Return the name of a reference's file, without folders, and the name of the object in it."""
    path, attribute = split_file(reference)
    return PurePath(path).name, attribute


def _foreign(name: str, allowed: Collection[str]) -> ConfigError:
    """Return the error for code that a device's owner has not named."""
    short = name[:MAX_NAME]
    local = short
    if is_file(name):
        local = ":".join(part for part in _object_of(name) if part)[:MAX_NAME]
    return ConfigError(
        f"the server names the code {short!r}; the owner of this device allows "
        f"{', '.join(map(repr, allowed)) or 'no code'}. A device runs only code that its owner has "
        f"and names: fedquilt join --allow {local} on the device would work."
    )
