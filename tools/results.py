"""Fill in the tables of docs/results from the stored results in results/.

    make results

A table is marked by a comment in front of it. The comment names the value of each column and the
results of each row:

    <!-- results
    columns: accuracy 1.0 % | best accuracy 1.0 % | seconds s
    FedAvg: fedrescue/digits-fedavg-*
    -->

A column is a value of `fedquilt/studies/values.py`. Two of them with ` / ` between share a cell,
and `@` stands for what a row adds to its results (`λ 0.2: splitmix/figure7-splitmix-* @ 0.2`).
Several results give mean ± sample deviation. What a cell has in brackets, the paper's number, is
kept, and so are rows without results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fedquilt.studies.published import spread_of, spread_text
from fedquilt.studies.result import Result
from fedquilt.studies.stored import read_stored
from fedquilt.studies.values import TableValue

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
MARKED = re.compile(r"<!-- results\n(?P<mark>.*?)\n-->\n(?P<table>(?:\|[^\n]*\n)+)", re.DOTALL)
CELL = re.compile(r"(?P<bold>\*\*)?(?P<value>.*?)(?:\*\*)?(?P<paper> \([^()]*\))?")


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
    """Return mean and deviation of a value over results, of which each must have it."""
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


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        old = page.read_text()
        new = filled(old)
        page.write_text(new)
        print(page.relative_to(ROOT), "has changed" if new != old else "is as it was")


if __name__ == "__main__":
    main()
