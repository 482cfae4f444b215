"""The fingerprint of a run: the values that must not change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.tasks import Classification, NextToken

if TYPE_CHECKING:
    from fedquilt.runs.run import Run

# Bytes of a tensor that are hashed. Of a larger tensor, evenly spaced rows are hashed.
MAX_HASHED_BYTES = 64 << 20
ROSTER = "roster"  # Entry `fleet` of a run whose clients join and change while it goes on
_PARTITION = ("data.parts", "data.test_parts", "data.validation_parts")
MAX_COMPARED_VALUES = 16  # Largest length of a sequence whose values are compared one by one


class Leaf(NamedTuple):
    """A plain value that must not change when a run is resumed."""

    name: str  # Dotted name
    value: Any
    is_default: bool = False  # True if it belongs to a field that has its default value


def fingerprint(run: Run) -> dict[str, Any]:
    """Return the values that must not change when a run is resumed, by dotted name.

    Tensors and long lists are represented by checksums.
    """
    return {leaf.name: leaf.value for leaf in leaves_of(run)}


def leaves_of(run: Run) -> list[Leaf]:
    """Return the leaves of all parts of a run that must not change when it is resumed.

    The number of rounds is not among them. If the clients are those of a roster, neither are the
    fleet and the partition of the data.
    """
    world = run.world
    has_roster = run.engine.has_roster
    parts = {
        "method": run.method,
        "model": world.family.layout,
        "initial": [*world.family.init(world.seed).values()],
        "constants": world.family.constants,
        "data": run.data,
        "fleet": ROSTER if has_roster else run.fleet,
        "engine": type(run.engine).__name__,
        "link": run.link,
        "seed": world.seed,
        "device": run.engine.device.type,
        "precision": world.precision,
        # Runs of earlier versions had these tasks, and nothing about them in their checkpoints.
        **({} if world.task in (Classification(), NextToken()) else {"task": world.task}),
        **evaluated_on(run),
    }
    leaves = [leaf for name, value in parts.items() for leaf in _leaves(name, value)]
    return [leaf for leaf in leaves if not (has_roster and is_of_partition(leaf.name))]


def is_of_partition(name: str) -> bool:
    """Return True if an entry of a fingerprint says which client has which samples."""
    return name.startswith(_PARTITION)


def evaluated_on(run: Run) -> dict[str, str]:
    """Return the samples of the evaluation as an entry `evaluated_on`.

    The result is empty for test samples, because earlier versions had no entry for them.
    """
    return {} if run.evaluation.on == "test" else {"evaluated_on": run.evaluation.on}


def _leaves(name: str, value: Any, is_default: bool = False) -> Iterator[Leaf]:
    """Yield a value as plain values that are the same in another process. Arrays are hashed.

    Args:
        name: Name of the value.
        value: A plain value, or one that consists of such values.
        is_default: True if the value is the default of a field.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        yield Leaf(name, value, is_default)
    elif isinstance(value, (Tensor, np.ndarray)):
        yield Leaf(
            name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_digest(value)}"
        )
    elif isinstance(digest_of_value := getattr(value, "fingerprint", None), str):
        yield Leaf(name, digest_of_value, is_default)
    elif is_dataclass(value) and not isinstance(value, type):
        yield Leaf(name, type(value).__name__, is_default)
        for field in fields(value):
            inner = getattr(value, field.name)
            yield from _leaves(f"{name}.{field.name}", inner, _has_default(field, inner))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        leaves = [
            leaf
            for position, inner in enumerate(value)
            for leaf in _leaves(f"{name}[{position}]", inner)
        ]
        if len(value) > MAX_COMPARED_VALUES:
            text = json.dumps([(leaf.name, leaf.value) for leaf in leaves])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            leaves = [Leaf(name, f"{len(value)} values {digest}")]
        yield from leaves
    elif isinstance(value, (torch.dtype, torch.device, np.generic)):
        yield Leaf(name, str(value), is_default)
    else:  # Only the name of a function or another object is the same in another process.
        yield Leaf(name, getattr(value, "__qualname__", type(value).__qualname__), is_default)


def is_same(first: Any, second: Any) -> bool:
    """Return True if a resumed run may have the second value in place of the first.

    This holds if both consist of the same leaves. Arrays are compared by checksum, and functions
    and other objects by name only.
    """
    first_leaves = {leaf.name: leaf.value for leaf in _leaves("", first)}
    second_leaves = {leaf.name: leaf.value for leaf in _leaves("", second)}
    return first_leaves == second_leaves


def _has_default(field: Field[Any], value: Any) -> bool:
    """Return True if a field has its default value.

    Tensors and fields with a default factory give False.

    Args:
        field: Field of a dataclass.
        value: Value of the field in some instance.
    """
    usual = field.default
    return (
        usual is not MISSING
        and type(value) is type(usual)
        and not isinstance(value, Tensor)
        and value == usual
    )


def _digest(array: Tensor | np.ndarray) -> str:
    """Return a checksum of an array's bytes, in 16 hexadecimal digits.

    Of an array above `MAX_HASHED_BYTES`, evenly spaced rows are hashed.
    """
    rows = array
    if array.ndim and array.nbytes:
        stride = -(-array.nbytes // MAX_HASHED_BYTES)  # Rounded up
        rows = array[::stride]
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]


def check_same_run(saved: Mapping[str, Any], leaves: Sequence[Leaf], request: str) -> None:
    """Refuse to resume with other settings, and list the differences.

    A checkpoint of an earlier version has no entry for a field that was added since. Such a field
    may have its default, at which it has no effect.

    Args:
        saved: Entries of a checkpoint by name.
        leaves: Entries of the run that is to be resumed.
        request: Beginning of the message, such as "the run in runs/one was to be resumed".

    Raises:
        ConfigError: Some entries differ. The message lists them.
    """
    current = {leaf.name: leaf.value for leaf in leaves}
    added = {leaf.name for leaf in leaves if leaf.is_default and leaf.name not in saved}
    # Saved entries went through JSON, so that current ones are converted in the same way.
    names = [
        name
        for name in {**saved, **current}
        if name not in added and saved.get(name) != json.loads(json.dumps(current.get(name)))
    ]
    if names:
        missing = "nothing"
        lines = [
            f"{name}: {saved.get(name, missing)} there, {current.get(name, missing)} here"
            for name in names
        ]
        raise ConfigError(
            f"{request}, but it is another one. These differ:\n  "
            + "\n  ".join(lines)
            + "\n  Ask for what it was, or name another folder."
        )
