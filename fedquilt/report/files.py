"""Charts of a report as image files, for papers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from altair import Chart, LayerChart

from fedquilt.errors import ConfigError
from fedquilt.report.figure import Figure, Section
from fedquilt.storage.files import why

ImageFormat = Literal["png", "svg", "pdf"]
SCALE = 2.0  # Pixels of a PNG per pixel of the page


def save_charts(sections: Sequence[Section], out: Path, format: ImageFormat) -> list[Path]:
    """Write the charts of a report into a folder, and return the files.

    A figure with controls has one file for each option of its first control. The other controls
    have their first option.

    Args:
        sections: Sections of the report.
        out: Folder, which is created if necessary. Files of the same names are replaced.
        format: Format of the files.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for section in sections:
            for figure in section.figures:
                for name, chart in _shown(figure):
                    path = out / f"{name}.{format}"
                    options = {"scale_factor": SCALE} if format == "png" else {}
                    chart.properties(title=figure.title).save(str(path), **options)
                    written.append(path)
    except OSError as error:
        raise ConfigError(f"charts were to be written to {out}; {why(error)}.") from error
    return written


def _shown(figure: Figure) -> Iterator[tuple[str, Chart | LayerChart]]:
    """Yield the charts of a figure that are written, each with the name of its file."""
    used: set[str] = set()
    for key, chart in figure.charts.items():
        if key[1:] != figure.preselected[1:]:
            continue
        name = figure.name
        if key and len(figure.controls[0].options) > 1:
            name = f"{name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', key[0]).strip('-.') or 'option'}"
        while name in used:  # Names that differ in other characters alone.
            name += "-"
        used.add(name)
        yield name, chart
