"""The paper's numbers beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fedquilt.runs.summaries import NOTHING
from fedquilt.studies.papers import FULL, Preset, paper_number
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import Spread, by_entry, run_notes
from fedquilt.studies.table import Table
from fedquilt.studies.values import TableValue

HEAD = ("row", "column", "paper", "measured", "difference")


def comparison_table(preset: Preset, results: Iterable[Result], scale: str = FULL) -> Table:
    """Return the paper's and the measured numbers of a preset, one line for each row and column.

    Measured numbers are means over seeds, ± the sample deviation where there are several. Lines
    that have neither number are left out.

    Args:
        preset: Table or figure of a paper.
        results: Runs of its rows. `Result.entry` is the name of the row.
        scale: Scale at which they were run. It decides the notes.
    """
    runs = by_entry(results)
    lines = []
    for row in preset.rows:
        for column, paper in zip(preset.columns, row.paper, strict=True):
            spread = spread_of(runs.get(row.name, []), column.parsed)
            if spread is None and not paper:
                continue
            measured = NOTHING if spread is None else spread_text(spread, column.parsed)
            difference = _difference(paper, spread, column.parsed)
            lines.append([row.name, column.title, paper or NOTHING, measured, difference])
    title = f"{preset.name}: {preset.title}"
    return Table(title, HEAD, lines, [*_notes(preset, runs, scale)])


def spread_of(results: Sequence[Result], value: TableValue) -> Spread | None:
    """Return mean and sample deviation of a value over runs. None: no run has it.

    A value that is itself a mean over clients has their deviation. Over several seeds, these means
    and deviations are averaged, and an averaged deviation of 0 becomes None.

    Args:
        results: Runs of one row, with different seeds.
        value: Number to read from each run.
    """
    numbers = [number for result in results if (number := value.of(result)) is not None]
    if not numbers:
        return None
    tables = [number for number in numbers if isinstance(number, Mapping)]
    if not tables:
        return Spread.of([number for number in numbers if not isinstance(number, Mapping)])
    mean = sum(table["mean"] for table in tables) / len(tables)
    deviation = sum(table["deviation"] for table in tables) / len(tables)
    # A deviation of 0 means that all clients are equal. It is not shown.
    return Spread(mean, deviation or None, len(tables))


def spread_text(spread: Spread, value: TableValue) -> str:
    """Return mean ± deviation in the unit of a value, or the mean alone without a deviation."""
    shown = value.shown(spread.mean)
    return shown if spread.deviation is None else f"{shown} ± {value.shown(spread.deviation)}"


def _difference(paper: str, spread: Spread | None, value: TableValue) -> str:
    """Return measured minus paper as text, in the unit of a value.

    A dash is returned if one of the two is missing. Zero has no minus sign.

    Args:
        paper: Number as the paper prints it, in the unit of the value. Empty: none.
        spread: Measured numbers, before the unit is applied. None: none were measured.
        value: Value whose unit and decimals are used.
    """
    number = paper_number(paper)
    if number is None or spread is None:
        return NOTHING
    text = value.shown(spread.mean - number / value.factor)
    is_zero = not any(digit in text for digit in "123456789")
    return text.lstrip("-") if is_zero else text


def _notes(preset: Preset, runs: Mapping[str, Sequence[Result]], scale: str) -> Iterator[str]:
    if preset.scale(scale).note:
        yield f"Scale {scale}: {preset.scale(scale).note}"
    yield from preset.notes
    for column in preset.columns:
        is_missing = all(spread_of(results, column.parsed) is None for results in runs.values())
        if runs and is_missing and not column.parsed.depends_on_round:
            yield f"{column.title}: no run has {column.value!r}, which the column shows."
    for row in preset.rows:
        yield from run_notes(row.name, runs.get(row.name, []), preset.seeds_at(scale))
