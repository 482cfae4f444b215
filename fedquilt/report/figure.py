"""A figure of a report: one or several charts to choose from, a sentence, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedquilt.display.thinning import Row

if TYPE_CHECKING:
    import altair as alt

MAX_TABLE_ROWS = 200  # Rows of a table below a chart


@dataclass(frozen=True)
class Control:
    """A choice between charts of a figure, which the page shows as a select element."""

    label: str
    options: Mapping[str, str]  # Text of each option by its key, the first one preselected


@dataclass(frozen=True)
class Figure:
    """A chart with its sentence and its numbers.

    Attributes:
        name: Short name for addresses and files, such as "curves".
        title: Heading above the chart.
        sentence: One sentence, computed from the data. It is also the text alternative.
        charts: Charts by the keys of the chosen options, in the order of the controls. Without
            controls the key is ().
        controls: Choices between charts.
        rows: Rows of the table below the chart.
        notes: Further sentences, such as that points were thinned.
    """

    name: str
    title: str
    sentence: str
    charts: Mapping[tuple[str, ...], alt.Chart | alt.LayerChart] = field(repr=False)
    controls: tuple[Control, ...] = ()
    rows: Sequence[Row] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def preselected(self) -> tuple[str, ...]:
        """Return the key of the chart that is shown first."""
        return tuple(next(iter(control.options)) for control in self.controls)


@dataclass(frozen=True)
class Section:
    """A part of a page: figures, or text alone."""

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()  # Paragraphs of plain text
    code: str = ""  # Text that is shown as it is, such as settings
    # Tables of texts with their titles
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()
