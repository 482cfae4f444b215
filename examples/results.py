"""Stored runs, and the tables that pages make of them.

    python examples/results.py    # fill in the marked tables of docs/results from the folders in results/

A run that a page reports is a folder `results/PAPER/NAME/` of at most 100 kB: `config.toml` has the command and every
setting, `rounds.jsonl.gz` one record per round, and `summary.json` the last round and the best one. There are no
weights. Costs that are computed without training have no rounds.

A table is marked by a comment in front of it. The comment names the value of each column and the runs of each row:

    <!-- results
    columns: accuracy 1.0 % | best accuracy 1.0 % | seconds s
    FedAvg: fedrescue/digits-fedavg-*
    -->

A column is a path of keys in `summary.json` and a unit of `UNITS`. Two of them with ` / ` between share a cell, and `@`
stands for what a row adds to its runs (`Split-Mix, 0.2: splitmix/figure7-splitmix-* @ 0.2`). Several runs give mean ±
deviation of the population. What a cell has in brackets, the paper's number, is kept, and so are rows without runs.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
MAX_BYTES = 100_000  # of one folder
UNITS = {"%": (100.0, 1), "GB": (1e-9, 1), "s": (1.0, 0), "M": (1e-6, 2), "count": (1.0, 0)}  # factor, decimals
MARKED = re.compile(r"<!-- results\n(?P<mark>.*?)\n-->\n(?P<table>(?:\|[^\n]*\n)+)", re.DOTALL)
CELL = re.compile(r"(?P<bold>\*\*)?(?P<value>.*?)(?:\*\*)?(?P<paper> \([^()]*\))?")


# --- folders ----------------------------------------------------------------------------------------------------


def store(
    folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Write a run's folder.

    Args:
        folder: Folder to create or to overwrite.
        config: Everything that repeats the run, as tables of plain values.
        summary: The run in one object. Keys are paths of a table's columns.
        rounds: One record per round. Without any, `rounds.jsonl.gz` is left out.
    """
    lines = "".join(json.dumps(_short(record)) + "\n" for record in rounds)
    files = {
        "config.toml": toml(config).encode(),
        "summary.json": (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    if lines:
        files["rounds.jsonl.gz"] = gzip.compress(lines.encode(), mtime=0)
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        raise ValueError(f"{folder} would take {size:,} bytes; at most {MAX_BYTES:,} are stored.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run, oldest first; of a folder without rounds, none."""
    file = folder / "rounds.jsonl.gz"
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()] if file.exists() else []


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with seconds and loss to six digits, which no table shows more of."""
    return {
        name: float(f"{value:.6g}") if name in ("seconds", "loss") and value is not None else value
        for name, value in record.items()
    }


def toml(config: Mapping[str, Any]) -> str:
    """Return tables of plain values as TOML, which the standard library can read but not write."""
    plain = [f"{_key(key)} = {_value(value)}" for key, value in config.items() if not isinstance(value, Mapping)]
    for name, table in config.items():
        if isinstance(table, Mapping):
            plain += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(plain) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    match value:
        case Mapping():
            return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)  # inf and nan are TOML's words too
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}.")


# --- tables -----------------------------------------------------------------------------------------------------


def filled(page: str, results: Path = ROOT / "results") -> str:
    """Return a page with every marked table's numbers computed from the stored runs."""
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
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in [*labels, *values]) + "|")
    if missing := settings.keys() - named:
        raise ValueError(f"no row of the table has these names: {sorted(missing)}.")
    return f"<!-- results\n{mark}\n-->\n" + "\n".join(lines) + "\n"


def row_of(runs: str, columns: Sequence[str], results: Path) -> list[str]:
    """Return the cells of one row, in the units of the columns; a run that is not there is an error."""
    pattern, _, insert = runs.partition(" @ ")
    summaries = [summary_of(folder) for folder in sorted(results.glob(pattern))]
    if not summaries:
        raise ValueError(f"{results / pattern} has no stored run.")
    return [
        " / ".join(_shown(summaries, value.replace("@", insert)) for value in column.split(" / ")) for column in columns
    ]


def _shown(summaries: Sequence[Mapping[str, Any]], column: str) -> str:
    """Return one value of some runs in its unit; a value may itself be a mean and a deviation, over clients."""
    *path, unit = column.split()
    factor, decimals = UNITS[unit]
    values = [_at(summary, path) for summary in summaries]
    if isinstance(values[0], Mapping):
        (spread,) = values
        mean, deviation = spread["mean"], spread["deviation"] or None
    else:
        mean = statistics.fmean(values)
        deviation = statistics.pstdev(values) if len(values) > 1 else None
    shown = f"{factor * mean:,.{decimals}f}"
    return shown if deviation is None else f"{shown} ± {factor * deviation:,.{decimals}f}"


def _at(summary: Any, path: Sequence[str]) -> Any:
    for key in path:
        summary = summary[key]
    return summary


def _cell(old: str, new: str) -> str:
    """Return the new value in the place of the old one; the paper's number and bold type stay."""
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
