"""A table of text cells, written as plain text, Markdown, LaTeX, CSV or plain values."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.summaries import NOTHING

FORMATS = ("text", "markdown", "latex", "csv", "json")
_BEST = " *"  # Mark behind the best cell in formats without bold type.
# Characters that LaTeX reads as commands, or that its usual fonts do not have. A bracket or an
# asterisk behind the end of a row would be read as an argument of \\.
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "[": "{[}",
        "]": "{]}",
        "*": "{*}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        '"': "''",
        "±": r"$\pm$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "−": "$-$",
        "≤": r"$\le$",
        "≥": r"$\ge$",
        "–": "--",
        "—": "---",
        "…": r"\ldots{}",
        "γ": r"$\gamma$",
        "λ": r"$\lambda$",
        "ρ": r"$\rho$",
    }
)


@dataclass(frozen=True)
class Cell:
    """Text of one cell, and a flag that marks it as the best of its column."""

    text: str = NOTHING
    is_best: bool = False  # True: the cell is marked as the best of its column.

    @property
    def starred(self) -> str:
        """Return the text with an asterisk behind it if the cell is marked."""
        return self.text + _BEST if self.is_best else self.text


@dataclass(frozen=True)
class Table:
    """Rows of text under a head, with a title above and notes below.

    Attributes:
        title: Line above the table. Empty: none.
        head: Titles of the columns.
        rows: Cells of each row, one for each column. A string is a cell that is not marked.
        notes: Lines below the table.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.head) for row in self.rows), "a row has another length"

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """Return all rows as lists of cells. Strings become cells that are not marked."""
        return [
            [Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows
        ]

    @cached_property
    def right_aligned(self) -> list[bool]:
        """Return for each column True if it is aligned to the right, as columns of numbers are.

        The dash for a missing number counts as a number. The first column has names and is aligned
        to the left.
        """
        columns = zip(*self.cells, strict=True) if self.cells else [() for _ in self.head]
        is_number = [all(_is_numeric(cell.text) for cell in column) for column in columns]
        return [False, *is_number[1:]] if is_number else []

    def render(self, format: str) -> str:
        """Return the table in one of the text formats: text, markdown, latex or csv.

        Any other format, JSON included, is a `ConfigError`.
        """
        if format not in FORMATS or format == "json":
            raise ConfigError(
                f"a table in the format {format!r} was asked for.{nearest(format, FORMATS[:-1])}"
            )
        text: str = getattr(self, format)
        return text

    @property
    def text(self) -> str:
        """Return title, head, rows and notes as lines, with columns that are aligned by spaces.

        Marked cells have an asterisk behind them.
        """
        has_best = [
            any(cell.is_best for cell in column) for column in zip(*self.cells, strict=True)
        ]
        has_best = has_best or [False for _ in self.head]

        def padded(text: str, column: int) -> str:
            """Append space for a mark in columns with a marked cell, so that digits are aligned."""
            return text + " " * len(_BEST) if has_best[column] else text

        lines = [[padded(text, column) for column, text in enumerate(self.head)]]
        for row in self.cells:
            lines.append(
                [
                    cell.starred if cell.is_best else padded(cell.text, column)
                    for column, cell in enumerate(row)
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = ["  ".join(self._aligned(line, widths)).rstrip() for line in lines]
        return "\n".join([*([self.title] if self.title else []), *body, *self.notes])

    def _aligned(self, texts: Sequence[str], widths: Sequence[int]) -> list[str]:
        columns = zip(texts, widths, self.right_aligned, strict=True)
        return [text.rjust(width) if right else text.ljust(width) for text, width, right in columns]

    @property
    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, with marked cells in bold type."""
        rule = ["---:" if right else "---" for right in self.right_aligned]
        lines = [list(map(_markdown, self.head)), rule]
        for row in self.cells:
            lines.append([_bold(_markdown(cell.text), cell, "**{}**") for cell in row])
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = [f"**{_markdown(self.title)}**"] if self.title else []
        return "\n\n".join([*title, body, *map(_markdown, self.notes)])

    @property
    def latex(self) -> str:
        r"""Return a LaTeX `table` with a `tabular` in it, which needs no package.

        The title is the caption, marked cells are bold, and notes are paragraphs below.
        """
        columns = "".join("r" if right else "l" for right in self.right_aligned)
        lines = [" & ".join(_latex(text) for text in self.head) + r" \\", r"\hline"]
        for row in self.cells:
            cells = [_bold(_latex(cell.text), cell, r"\textbf{{{}}}") for cell in row]
            lines.append(" & ".join(cells) + r" \\")
        caption = [rf"\caption{{{_latex(self.title)}}}"] if self.title else []
        notes = [rf"\par\smallskip {_latex(note)}" for note in self.notes]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                *caption,
                rf"\begin{{tabular}}{{{columns}}}",
                r"\hline",
                *lines,
                r"\hline",
                r"\end{tabular}",
                *notes,
                r"\end{table}",
            ]
        )

    @property
    def csv(self) -> str:
        """Return head and rows as comma-separated values, without title and notes.

        Marked cells have an asterisk behind them.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows([cell.starred for cell in row] for row in self.cells)
        return file.getvalue().removesuffix("\n")

    @property
    def plain(self) -> dict[str, Any]:
        """Return the table as values that JSON can hold.

        Cells are texts without a mark. `best` lists row and column of marked cells, both from 0 on.
        """
        best = [
            [row, column]
            for row, cells in enumerate(self.cells)
            for column, cell in enumerate(cells)
            if cell.is_best
        ]
        return {
            "title": self.title,
            "head": list(self.head),
            "rows": [[cell.text for cell in row] for row in self.cells],
            "best": best,
            "notes": list(self.notes),
        }


def render(tables: Sequence[Table], format: str) -> str:
    """Return several tables in a text format of `Table.render`, with an empty line between them."""
    return "\n\n".join(table.render(format) for table in tables)


def _is_numeric(text: str) -> bool:
    number = text.lstrip("-−")
    return text == NOTHING or number[:1].isdecimal() or number.startswith(("nan", "inf"))


def _bold(text: str, cell: Cell, frame: str) -> str:
    return frame.format(text) if cell.is_best else text


def _markdown(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("|", r"\|").replace("*", r"\*")
    return escaped.replace("_", r"\_").replace("<", "&lt;")


def _latex(text: str) -> str:
    """Return text with all special characters escaped for LaTeX.

    A hyphen before a number becomes a minus sign.
    """
    return re.sub(r"(?<!\S)-(?=\d)", "−", text).translate(_LATEX)
