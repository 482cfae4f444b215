"""Comparison of two runs by their final states and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from fedquilt.conformance.failures import CheckError
from fedquilt.runs.run import Run
from fedquilt.terms import Submodel

TOLERANCE = 1e-9  # Largest difference between two runs in float64 that count as equal.


def check_same(
    run: Run, other_run: Run, name: str, other_name: str, tolerance: float = TOLERANCE
) -> None:
    """Refuse two runs whose final states or records differ. Seconds are not compared.

    Args:
        run: A run.
        other_run: Another run with the same number of rounds.
        name: Name of the first run in messages.
        other_name: Name of the other run in messages.
        tolerance: Largest difference that counts as equal. 0 compares to the last bit.

    Raises:
        CheckError: They differ. The message names the first tensor or figure that does.
    """
    names = f"{name} and {other_name}"
    state = dict(_tensors(run.server, ""))
    other_state = dict(_tensors(other_run.server, ""))
    if unmatched := sorted(state.keys() ^ other_state.keys()):
        raise CheckError(
            f"{names} keep unequal tensors: only one of them has {', '.join(unmatched[:3])}."
        )
    for key, tensor in state.items():
        problem = _difference(tensor, other_state[key], tolerance)
        if problem:
            raise CheckError(f"{names} differ {problem.format(key)}")

    for record, other_record in zip(run.records, other_run.records, strict=True):
        figures = dict(_figures(record.to_dict(), ""))
        other_figures = dict(_figures(other_record.to_dict(), ""))
        for key in (*figures, *other_figures):
            figure, other_figure = figures.get(key), other_figures.get(key)
            if not _is_close(figure, other_figure, tolerance):
                raise CheckError(
                    f"{names} have unequal {key} in round {record.round}: {figure} and "
                    f"{other_figure}."
                )


def _difference(tensor: Tensor, other: Tensor, tolerance: float) -> str:
    """Describe how two tensors differ, with {} for their name.

    The result is empty if they have equal shapes and differ by at most `tolerance` everywhere.
    """
    if tensor.shape != other.shape:
        return f"in the shape of {{}}: {tuple(tensor.shape)} and {tuple(other.shape)}."
    distance = 0.0
    if tensor.numel():
        distance = float((tensor.double() - other.double()).abs().max())
    if distance <= tolerance:
        return ""
    return f"by {distance:.2g} in {{}}; at most {tolerance:g} counts as equal."  # NaN ends here.


def _is_close(figure: float | None, other: float | None, tolerance: float) -> bool:
    """Return True if two figures are equal up to a tolerance.

    None means that a run lacks the figure. It equals only None.
    """
    if figure is None or other is None:
        return figure is other
    return figure == other or abs(figure - other) <= tolerance


def _figures(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a record with their names, except seconds, which always differ.

    Args:
        value: Record as plain values, or a part of it.
        path: Name of the part: keys with spaces between them. Empty: the whole record.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("seconds", "server_seconds"):
                yield from _figures(part, f"{path} {key}".strip())
    elif isinstance(value, (int, float)):
        yield path, value


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in a server's state, client states included, with their names.

    Args:
        value: The state, or a part of it.
        path: Name of the part: keys with spaces between them. Empty: the whole state.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path} {key}".strip())
    elif is_dataclass(value) and not isinstance(value, Submodel):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{path} {field.name}".strip())
