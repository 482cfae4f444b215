"""Bounds on the number of points that charts draw, and numbers that JSON can hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

MAX_POINTS = 500  # Points of a line
MAX_NUMBER = 1e300  # Larger numbers are not drawn, because axes cannot hold them

Row = dict[str, Any]  # Cells of a row by column. Values are texts, numbers or None
T = TypeVar("T")


def number(value: object) -> float | None:
    """Return a number as a float that charts can draw. None: it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if abs(converted) <= MAX_NUMBER else None  # False for NaN


def evenly(items: Sequence[T], bound: int = MAX_POINTS) -> list[T]:
    """Return at most `bound` items at even distances, with the first and the last one.

    Args:
        items: Items in order.
        bound: Largest number of items, at least 2. All items are returned if there are no more.
    """
    if len(items) <= bound:
        return list(items)
    step = (len(items) - 1) / (bound - 1)
    return [items[round(index * step)] for index in range(bound)]


def thinned(rows: Sequence[Row], line: Sequence[str], bound: int = MAX_POINTS) -> list[Row]:
    """Return the rows of each line, thinned to at most `bound` points.

    Args:
        rows: Rows of several lines, each in order.
        line: Columns whose values name the line of a row.
        bound: Largest number of points of a line.
    """
    by_line: dict[tuple[Hashable, ...], list[Row]] = {}
    for row in rows:
        by_line.setdefault(tuple(row[name] for name in line), []).append(row)
    return [row for points in by_line.values() for row in evenly(points, bound)]


def bins(count: int, bound: int) -> list[tuple[int, int]]:
    """Return at most `bound` ranges (start, stop) of nearly equal size that cover 0 to `count`.

    Args:
        count: Number of items.
        bound: Largest number of ranges.
    """
    num_bins = min(count, bound)
    edges = [index * count // num_bins for index in range(num_bins + 1)] if num_bins else []
    return [(start, edges[index + 1]) for index, start in enumerate(edges[:-1])]


def plain(value: Any) -> Any:
    """Return a value that JSON can hold. Numbers that are not finite, or huge, become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    return value if type(value) is int and abs(value) < 2**53 else number(value)
