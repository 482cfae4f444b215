"""Numbers of a comparison as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedquilt.runs.summaries import (
    NOTHING,
    figure_text,
)
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import (
    Spread,
)

Show = Callable[[float], str]  # Formats a number.


def spread_of(values: Iterable[float]) -> Spread | None:
    """Return mean and sample deviation of some values. None: there are no values."""
    numbers = list(values)
    return Spread.of(numbers) if numbers else None


def spread_text(spread: Spread | None, percent: bool) -> str:
    """Return `61.2 ± 0.8%`, or with four significant digits where it is not a rate.

    Without a deviation only the mean is shown. Without a spread the result is a dash.

    Args:
        spread: Mean and deviation, as shares of 1 for a rate. None: there are no values.
        percent: True if it is a rate, which is shown in percent.
    """
    if spread is None:
        return NOTHING
    if spread.deviation is None:
        return figure_text(spread.mean, percent)
    if percent:
        return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}%"
    return f"{spread.mean:.4g} ± {spread.deviation:.2g}"


def mean_text(runs: Iterable[Result], number: Callable[[Result], float | None], show: Show) -> str:
    """Return the formatted mean over the runs that have a number, or a dash if none has.

    Args:
        runs: Runs of one row.
        number: Returns the number of a run, or None if the run does not have it.
        show: Formats the mean.
    """
    numbers = [number(result) for result in runs]
    spread = spread_of(value for value in numbers if value is not None)
    return NOTHING if spread is None else show(spread.mean)


def points_text(difference: float) -> str:
    """Return a difference of rates in percentage points: `0.50 points` for 0.005."""
    return f"{100 * difference:.2f} points"


def count_text(mean: float) -> str:
    """Return a mean of counts with one decimal, or with none if that decimal is 0."""
    return f"{mean:,.1f}".removesuffix(".0")
