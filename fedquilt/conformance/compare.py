"""Comparison of two runs by their final states and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from fedquilt.conformance.failures import CheckError
from fedquilt.runs.run import Run
from fedquilt.terms import Submodel

TOLERANCE = 1e-9  # Largest difference between two runs in float64 that count as equal.


def check_same(one: Run, other: Run, first: str, second: str, tolerance: float = TOLERANCE) -> None:
    """Refuse two runs whose final states or records differ.

    Args:
        one: A run.
        other: Another run with the same number of rounds.
        first: Name of the first run in messages.
        second: Name of the second run in messages.
        tolerance: Largest difference that counts as equal. 0 compares to the last bit.
    """
    names = f"{first} and {second}"
    state, other_state = (dict(_tensors(run.server, "")) for run in (one, other))
    if unmatched := sorted(state.keys() ^ other_state.keys()):
        raise CheckError(
            f"{names} keep unequal tensors: only one of them has {', '.join(unmatched[:3])}."
        )
    for name, value in state.items():
        _check_tensors(value, other_state[name], f"{names} differ", name, tolerance)

    for record, other_record in zip(one.records, other.records, strict=True):
        figures, other_figures = (
            dict(_figures(compared.to_dict(), "")) for compared in (record, other_record)
        )
        for name in (*figures, *other_figures):
            pair = figures.get(name), other_figures.get(name)
            if not _is_close(*pair, tolerance):
                values = f"{pair[0]} and {pair[1]}"
                raise CheckError(f"{names} have unequal {name} in round {record.round}: {values}.")


def _check_tensors(one: Tensor, other: Tensor, told: str, name: str, tolerance: float) -> None:
    if one.shape != other.shape:
        raise CheckError(
            f"{told} in the shape of {name}: {tuple(one.shape)} and {tuple(other.shape)}."
        )
    distance = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if not distance <= tolerance:  # This also refuses NaN.
        raise CheckError(
            f"{told} by {distance:.2g} in {name}; at most {tolerance:g} counts as equal."
        )


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    """Return True if two figures are equal up to a tolerance. None: a run lacks the figure."""
    if one is None or other is None:
        return one is other
    return one == other or abs(one - other) <= tolerance


def _figures(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record with their names, except seconds, which always differ."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("seconds", "server_seconds"):
                yield from _figures(part, f"{path} {key}".strip())
    elif isinstance(value, (int, float)):
        yield path, value


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a server's state with their names."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path} {key}".strip())
    elif is_dataclass(value) and not isinstance(value, Submodel):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{path} {field.name}".strip())
