"""Output of the commands: bars and frames on a terminal, plain text elsewhere."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from fedquilt.studies import table as studies


def console_for(for_json: bool = False) -> Console:
    """Return a console on standard output.

    Args:
        for_json: True: standard output is for JSON alone. The console is on standard error, and is
            quiet unless that is a terminal.
    """
    return Console(
        stderr=for_json, quiet=for_json and not sys.stderr.isatty(), highlight=False, emoji=False
    )


def say(console: Console, text: str) -> None:
    """Print a line unchanged, without markup and without breaking it at the terminal's width."""
    console.print(text, markup=False, soft_wrap=True)


def print_json(value: object, file: TextIO | None = None) -> None:
    """Print a value as indented JSON, with null in place of NaN and infinite numbers.

    Args:
        value: Value of plain types.
        file: Stream. None: standard output.
    """
    print(json.dumps(_numbers(value), indent=2, allow_nan=False), file=file or sys.stdout)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(console: Console, name: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Show entries as rows of a table, framed on a terminal and aligned by spaces elsewhere.

    Columns whose values are tables or lists are left out. JSON output has them.

    Args:
        console: Console for the table.
        name: Title of the first column, which has the names of the entries.
        entries: Cells of each row by the title of their column. All rows have the same columns.
    """
    if not entries:
        say(console, f"{name}: none")
        return
    columns = [
        key
        for key, value in next(iter(entries.values())).items()
        if not isinstance(value, (dict, list))
    ]
    rows = [[key, *(_cell(entry[column]) for column in columns)] for key, entry in entries.items()]
    right = [
        False,
        *(all(_cell(entry[c])[:1].isdecimal() for entry in entries.values()) for c in columns),
    ]
    if console.is_terminal:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ROUNDED)
        for title, number in zip((name, *columns), right, strict=True):
            table.add_column(title, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))  # Text, so that brackets are not read as markup.
        console.print(table)
        return
    rows.insert(0, [name, *columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        say(
            console,
            "  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells).rstrip(),
        )


def show_text_table(console: Console, table: studies.Table) -> None:
    """Print a table of a study with its notes: framed on a terminal, else aligned by spaces.

    The best cells are bold on a terminal.
    """
    if not console.is_terminal:
        say(console, table.text)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    framed = Table(box=box.ROUNDED, title=Text(table.title), title_justify="left")
    for index, (title, is_number) in enumerate(zip(table.head, table.right_aligned, strict=True)):
        is_name = index == 0  # Cells of numbers are broken into lines before a name is cut off.
        framed.add_column(Text(title), justify="right" if is_number else "left", no_wrap=is_name)
    for row in table.cells:
        framed.add_row(*(Text(cell.starred, style="bold" if cell.is_best else "") for cell in row))
    console.print(framed)
    for note in table.notes:
        say(console, note)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
