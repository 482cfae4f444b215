"""Fill in the tables and draw the curves of docs/results from the stored results in results/.

    make results

A table is marked by a comment in front of it. The comment names the value of each column and the
results of each row:

    <!-- results
    columns: accuracy 1.0 % | best accuracy 1.0 % | seconds s
    FedAvg: fedrescue/digits-fedavg-*
    -->

A column is a value of `fedquilt/studies/values.py`. Two of them with ` / ` between share a cell,
and `@` stands for what a row adds to its results (`λ 0.2: splitmix/figure7-splitmix-* @ 0.2`).
Several results give mean ± sample deviation, and a dash if none of them reached a target. What a
cell has in brackets, the paper's number, is kept, and so are rows without results.

A figure is marked in front of the image by the metric on its vertical axis and the results of each
curve. It has one panel each for rounds, bytes and multiply-adds:

    <!-- curves
    metric: accuracy
    FedAvg: progfed/table3-cifar10-fedavg-seed*
    -->
    ![Accuracy over rounds, bytes and multiply-adds](progfed-cifar10.svg)

An SVG file ends with a digest of its points. Only a figure whose points have changed is drawn
again, which needs the extra `report`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedquilt.report.collect import RunFolder
from fedquilt.report.tables import curve_rows, spread_rows
from fedquilt.runs.summaries import NOTHING
from fedquilt.studies.published import spread_of, spread_text
from fedquilt.studies.result import Result
from fedquilt.studies.stored import read_stored
from fedquilt.studies.values import TableValue

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
MARKED = re.compile(r"<!-- results\n(?P<mark>.*?)\n-->\n(?P<table>(?:\|[^\n]*\n)+)", re.DOTALL)
CURVES = re.compile(r"<!-- curves\n(?P<mark>.*?)\n-->\n!\[[^\]]*\]\((?P<file>[^)]+)\)", re.DOTALL)
CELL = re.compile(r"(?P<bold>\*\*)?(?P<value>.*?)(?:\*\*)?(?P<paper> \([^()]*\))?")
# Horizontal axes of the panels of a figure: column, title, and the factor on its numbers.
PANELS = (
    ("round", "round", 1.0),
    ("bytes", "GB, both ways", 1e-9),
    ("macs", "multiply-adds of all clients, 10¹²", 1e-12),
)
PANEL_SIZE = {"width": 250, "height": 220}  # Pixels


def filled(page: str, results: Path = ROOT / "results") -> str:
    """Return a page in which every marked table has the numbers of the stored results."""
    return MARKED.sub(lambda found: _filled_table(found["mark"], found["table"], results), page)


def _filled_table(mark: str, table: str, results: Path) -> str:
    settings = dict(line.split(": ", 1) for line in mark.splitlines())
    columns = settings.pop("columns").split(" | ")
    head, rule, *rows = table.splitlines()
    named = set()
    lines = [head, rule]
    for row in rows:
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        labels, values = cells[: -len(columns)], cells[-len(columns) :]
        name = ", ".join(label for label in labels if label).replace("**", "")
        if name in settings:
            named.add(name)
            computed = row_of(settings[name], columns, results)
            values = [_cell(old, new) for old, new in zip(values, computed, strict=True)]
        lines.append(
            "|" + "|".join(f" {cell} " if cell else " " for cell in [*labels, *values]) + "|"
        )
    if missing := settings.keys() - named:
        raise ValueError(f"no row of the table has these names: {sorted(missing)}.")
    return f"<!-- results\n{mark}\n-->\n" + "\n".join(lines) + "\n"


def row_of(pattern: str, columns: Sequence[str], folder: Path) -> list[str]:
    """Return the cells of a row in the units of the columns. A row without results is an error."""
    glob, _, insert = pattern.partition(" @ ")
    results = [read_stored(path) for path in sorted(folder.glob(glob))]
    if not results:
        raise ValueError(f"{folder / glob} has no stored result.")
    return [
        " / ".join(
            _shown(results, TableValue.parse(text.replace("@", insert)))
            for text in column.split(" / ")
        )
        for column in columns
    ]


def _shown(results: Sequence[Result], value: TableValue) -> str:
    """Return mean and deviation of a value over results, of which each must have it.

    A dash is returned for the cost of a target that none of them reached.
    """
    if value.is_cost and all(value.of(result) is None for result in results):
        return NOTHING
    for result in results:
        if value.of(result) is None:
            raise ValueError(
                f"the result of {result.entry}, seed {result.seed} has no {' '.join(value.path)}."
            )
    spread = spread_of(results, value)
    assert spread is not None
    return spread_text(spread, value)


def _cell(old: str, new: str) -> str:
    """Return the new value in place of the old one. The paper's number and bold type stay."""
    parts = CELL.fullmatch(old)
    assert parts is not None
    bold = parts["bold"] or ""
    return f"{bold}{new}{bold}{parts['paper'] or ''}"


# --- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """A figure of a page: the file, the metric, and the points of all curves."""

    file: str  # Name of the SVG file, beside the page
    metric: str
    rows: list[dict[str, Any]]  # Points with `entry`, `value`, `low`, `high` and the axes

    @property
    def digest(self) -> str:
        """Return the comment at the end of the SVG file, which differs if the points do."""
        text = json.dumps([self.metric, self.rows], sort_keys=True)
        return f"<!-- points {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def curves_of(page: str, results: Path = ROOT / "results") -> list[Curves]:
    """Return the marked figures of a page, with the points of the stored results."""
    figures = []
    for found in CURVES.finditer(page):
        settings = dict(line.split(": ", 1) for line in found["mark"].splitlines())
        metric = settings.pop("metric")
        rows = [
            point
            for entry, pattern in settings.items()
            for point in _points(entry, sorted(results.glob(pattern)), metric)
        ]
        missing = settings.keys() - {row["entry"] for row in rows}
        if missing:
            raise ValueError(f"{found['file']}: no stored result has {metric} of {missing}.")
        figures.append(Curves(found["file"], metric, rows))
    return figures


def _points(entry: str, folders: Sequence[Path], metric: str) -> list[dict[str, Any]]:
    """Return the mean and deviation over seeds by evaluated round, with costs in the axes' units.

    Args:
        entry: Name of the curve.
        folders: Stored results, one for each seed.
        metric: Name of the metric, of share 1.
    """
    runs = [RunFolder(path, replace(read_stored(path), entry=entry)) for path in folders]
    spreads = spread_rows(row for run in runs for row in curve_rows(run, metric, {}))
    return [
        {
            "entry": entry,
            **{name: float(f"{row[name]:.6g}") for name in ("value", "low", "high")},
            **{name: float(f"{factor * row[name]:.6g}") for name, _, factor in PANELS},
        }
        for row in spreads
        if row["share"] == "1"
    ]


def draw(figure: Curves, out: Path) -> None:
    """Write a figure as SVG: one panel for each horizontal axis, with bands over seeds."""
    from fedquilt.display.curves import chart_of, color_of, load_altair, names_of, value_axis

    alt = load_altair()
    names = names_of(figure.rows, "entry")
    panels = []
    for column, title, _ in PANELS:
        base = chart_of(figure.rows).encode(
            x=alt.X(f"{column}:Q", title=title, axis=alt.Axis(tickCount=5)),
            color=color_of("entry", names, "method"),
        )
        band = base.mark_area(opacity=0.18).encode(
            y=value_axis(figure.metric, True, "low"), y2=alt.Y2("high:Q")
        )
        line = base.mark_line(strokeWidth=1.5).encode(y=value_axis(figure.metric, True))
        panels.append(alt.layer(band, line).properties(**PANEL_SIZE))
    chart = alt.hconcat(*panels).configure(background="white")
    chart = chart.configure_legend(orient="bottom", columns=2, labelLimit=400)
    chart.save(str(out), format="svg")
    out.write_text(out.read_text().rstrip("\n") + "\n" + figure.digest)


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        old = page.read_text()
        new = filled(old)
        page.write_text(new)
        for figure in curves_of(new):
            out = PAGES / figure.file
            if not out.exists() or not out.read_text().endswith(figure.digest):
                draw(figure, out)
                print(out.relative_to(ROOT), "has been drawn")
        print(page.relative_to(ROOT), "has changed" if new != old else "is as it was")


if __name__ == "__main__":
    main()
