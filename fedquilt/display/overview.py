"""A summary of an object: a title, a small table, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_ROWS = 12  # Rows of a table, and entries of a list, before the rest is only counted
_RIGHT = ' style="text-align: right"'
_LEFT = ' style="text-align: left"'


@dataclass(frozen=True)
class Overview:
    """A title, a table and notes that describe an object.

    Characters that are not printable, such as those that control a terminal, are replaced. In HTML
    all text is escaped.

    Attributes:
        title: One line. Empty: none.
        head: Titles of the columns. Empty: the table has no head.
        rows: Cells of each row.
        notes: Lines below the table.
        picture: SVG that `html` has below the table. It is not escaped. Empty: none.
    """

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    picture: str = ""

    @property
    def text(self) -> str:
        """Return title, table and notes as lines. Columns are aligned by spaces."""
        lines = [[_printable(cell) for cell in row] for row in self._lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = []
        for line in lines:
            columns = zip(line, widths, self._right_aligned, strict=True)
            cells = [
                text.rjust(width) if right else text.ljust(width) for text, width, right in columns
            ]
            body.append("  ".join(cells).rstrip())
        title = [_printable(self.title)] if self.title else []
        return "\n".join([*title, *body, *map(_printable, self.notes)])

    @property
    def html(self) -> str:
        """Return the same as a fragment of HTML, with all text escaped."""
        title = f"<div><b>{_escaped(self.title)}</b></div>" if self.title else ""
        notes = "".join(f"<div>{_escaped(note)}</div>" for note in self.notes)
        return f"<div>{title}{self._html_table()}{self.picture}{notes}</div>"

    def _html_table(self) -> str:
        if not self.rows:
            return ""
        styles = [_RIGHT if right else _LEFT for right in self._right_aligned]
        head = "".join(
            f'<th scope="col"{style}>{_escaped(text)}</th>'
            for style, text in zip(styles, self.head, strict=False)
        )
        rows = []
        for row in self.rows:
            cells = zip(styles, row, strict=True)
            line = "".join(f"<td{style}>{_escaped(text)}</td>" for style, text in cells)
            rows.append(f"<tr>{line}</tr>")
        top = f"<thead><tr>{head}</tr></thead>" if head else ""
        return f"<table>{top}<tbody>{''.join(rows)}</tbody></table>"

    @property
    def _lines(self) -> list[Sequence[str]]:
        return [*([self.head] if self.head and self.rows else []), *self.rows]

    @property
    def _right_aligned(self) -> list[bool]:
        """Return for each column True if all its cells are numbers. The first is never."""
        columns = list(zip(*self.rows, strict=True))
        return [
            number > 0 and all(cell[:1].isdecimal() or cell in ("–", "nan") for cell in column)
            for number, column in enumerate(columns)
        ]


class Readable:
    """An object that `print` and notebooks show as its overview.

    A class that derives from it has `_overview`. Its `repr` is one line: the name of the class, and
    the title of the overview.
    """

    def _overview(self) -> Overview:
        raise NotImplementedError(f"{type(self).__name__} has no overview")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_printable(self._overview().title)})"

    def __str__(self) -> str:
        return self._overview().text

    def _repr_html_(self) -> str:
        return self._overview().html


def shortened(
    rows: Sequence[Sequence[str]], noun: str, most: int = MAX_ROWS
) -> tuple[list[Sequence[str]], list[str]]:
    """Return the first rows of a table, and a note that counts the others.

    Args:
        rows: All rows.
        noun: Word for several rows, such as "budgets".
        most: Largest number of rows that are returned. At or above their number it has no effect.

    Returns:
        The rows, and a list with the note. The list is empty if no row was left out.
    """
    left_out = len(rows) - most
    return list(rows[:most]), [f"… and {left_out:,} more {noun}"] if left_out > 0 else []


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)


def _escaped(text: str) -> str:
    return escape(_printable(text))
