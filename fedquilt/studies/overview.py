"""Summary of a study for `print` and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquilt.display import Overview
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from fedquilt.studies.study import Study


def overview_of(study: Study) -> Overview:
    """Return the first table of a study, or the reason why there is none."""
    names = ", ".join(entry.name for entry in study.plan.entries)
    planned = len(study.plan.entries) * len(study.plan.seeds)
    title = f"study of {names}: {len(study.results)} of {planned} runs are finished"
    if not study.results:
        return Overview(title)
    try:
        table = study.tables()[0]
    except ConfigError as error:
        return Overview(title, notes=str(error).splitlines())
    rows = [[cell.starred for cell in row] for row in table.cells]
    return Overview(title, table.head, rows, table.notes)
