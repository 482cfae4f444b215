"""The HTML page of a report. Everything it needs is inside, so that it opens without a network."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from altair import SCHEMA_VERSION

from fedquilt.display.thinning import Row, plain
from fedquilt.report.collect import Collection, RunFolder, collect
from fedquilt.report.figure import MAX_TABLE_ROWS, Control, Figure, Section
from fedquilt.report.figures import run_sections
from fedquilt.report.study_figures import study_sections

_SNIPPET = "window.vegaEmbed = vegaEmbed;"
MAX_PROBLEMS = 20  # Problems of one run that are listed
# Only scripts and styles inside the page run. Nothing is loaded, except by a live page from its
# own server. Vega computes its expressions with `Function`.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Content:
    """The text and the charts of a page, without the scripts that every page has.

    Attributes:
        title: Title of the page.
        body: HTML of the main part.
        charts: Charts by the name of their figure, and the data that they share, as values that
            JSON can hold.
    """

    title: str
    body: str
    charts: dict[str, Any]

    def to_json(self) -> str:
        """Return the content as JSON. It is safe inside a script element of a page."""
        return _json({"title": self.title, "body": self.body, "charts": self.charts})


def page(
    folders: Sequence[Path], *, live: bool = False, metric: str = "", trust: bool = False
) -> str:
    """Return the whole HTML page for one run, several runs or a study.

    Args:
        folders: Folders of runs, or the folder of a study.
        live: True: the page listens to server-sent events at `events`, and shows the content at
            `content.json` anew after each of them. False: the page asks for nothing.
        metric: Name of the metric to show. Empty: the main one.
        trust: True: run code that settings in the folders name, and add it to the user's list.

    Raises:
        ConfigError: A folder has no run, the runs cannot be compared, no run has the metric, or the
            extra `report` is not installed.
    """
    return document(content(folders, metric=metric, trust=trust), live)


def content(folders: Sequence[Path], *, metric: str = "", trust: bool = False) -> Content:
    """Return what the page of some folders shows, without the scripts that every page has.

    Args:
        folders: Folders of runs, or the folder of a study.
        metric: Name of the metric to show. Empty: the main one.
        trust: True: run code that settings in the folders name, and add it to the user's list.
    """
    collection = collect(folders, metric)
    return content_of(collection, sections_of(collection, trust))


def sections_of(collection: Collection, trust: bool = False) -> list[Section]:
    """Return the sections of a report.

    Args:
        collection: Runs that were read.
        trust: True: run code that their settings name.
    """
    if not collection.runs:
        return []
    if collection.is_single:
        return run_sections(collection.runs[0], collection.metric, trust)
    return study_sections(collection, trust)


def content_of(collection: Collection, sections: Sequence[Section]) -> Content:
    """Return the content of a page.

    Args:
        collection: Runs that were read.
        sections: Sections of the report, as `sections_of` returns them.
    """
    data: dict[str, Any] = {}
    shown = {
        figure.name: {
            "controls": [list(control.options) for control in figure.controls],
            "specs": {
                json.dumps(list(key)): _spec(chart.to_dict(), data)
                for key, chart in figure.charts.items()
            },
        }
        for section in sections
        for figure in section.figures
    }
    parts = [_header(collection), _contents(sections), *map(_section, sections)]
    title = f"fedquilt report: {collection.title}"
    return Content(title, "\n".join(parts), {"figures": shown, "data": data})


def document(shown: Content, live: bool = False) -> str:
    """Return the whole page around some content.

    Args:
        shown: Content of the page.
        live: True: the page replaces its content when its server has new data.
    """
    policy = _POLICY.format(connect="'self'" if live else "'none'")
    scripts = [_bundle(), _asset("page.js")] + ([_asset("live.js")] if live else [])
    inline = "\n".join(f"<script>{script}</script>" for script in scripts)
    status = '<p id="live" role="status">Waiting for new rounds.</p>' if live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(shown.title)}</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<main id="main" tabindex="-1">
{status}
<div id="content">
{shown.body}
</div>
</main>
<script type="application/json" id="charts">{_json(shown.charts)}</script>
{inline}
</body>
</html>
"""


@cache
def _bundle() -> str:
    """Return the scripts of Vega, Vega-Lite and Vega-Embed, of the version that charts need."""
    version = ".".join(SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(_SNIPPET, vl_version=version).replace(
        "</script", "<\\/script"
    )


@cache
def _asset(name: str) -> str:
    return (files("fedquilt.report") / name).read_text(encoding="utf-8")


def _spec(spec: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return a chart with names in place of its data, which is added to `data` once."""
    found = spec.get("data", {})
    if "values" in found:
        text = json.dumps(found["values"], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        data[name] = found["values"]
        spec = {**spec, "data": {"name": name}}
    if "layer" in spec:
        spec = {**spec, "layer": [_spec(layer, data) for layer in spec["layer"]]}
    return spec


def _json(value: Any) -> str:
    """Return JSON that cannot end a script element, whatever texts it has."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _header(collection: Collection) -> str:
    """Return the heading of the page, the runs it is about, and everything that is damaged."""
    rows = [
        {
            "run": run.result.entry,
            "seed": run.result.seed,
            "rounds": run.records[-1].round if run.records else 0,
            "state": "finished" if run.finished else "not finished",
            "data": str(run.result.summary.get("data", "–")),
            "folder": str(run.path),
        }
        for run in collection.runs
    ]
    notes = "".join(f"<p>{_text(note)}</p>" for note in collection.notes)
    table = _table("Runs", rows) if rows else "<p>No run has begun yet.</p>"
    damaged = "".join(_problems(run) for run in collection.runs if run.problems)
    return f"<header><h1>{_text(collection.title)}</h1>{table}{notes}{damaged}</header>"


def _problems(run: RunFolder) -> str:
    items = "".join(f"<li>{_text(problem)}</li>" for problem in run.problems[:MAX_PROBLEMS])
    more = len(run.problems) - MAX_PROBLEMS
    rest = f"<p>And {more:,} more.</p>" if more > 0 else ""
    return (
        f'<div class="problems"><p>The folder {_text(run.path)} is not complete. '
        f"What could be read is shown.</p><ul>{items}</ul>{rest}</div>"
    )


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#{_text(section.name)}">{_text(section.title)}</a></li>'
        for section in sections
    )
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if links else ""


def _section(section: Section) -> str:
    notes = "".join(f"<p>{_text(note)}</p>" for note in section.notes)
    figures = "".join(map(_figure, section.figures))
    tables = "".join(_text_table(title, head, rows) for title, head, rows in section.tables)
    code = ""
    if section.code:
        code = (
            "<details><summary>Settings as text</summary>"
            f'<pre tabindex="0">{_text(section.code)}</pre></details>'
        )
    empty = "" if notes or figures or tables or code else "<p>Nothing was recorded.</p>"
    return (
        f'<section id="{_text(section.name)}"><h2>{_text(section.title)}</h2>'
        f"{notes}{figures}{tables}{code}{empty}</section>"
    )


def _figure(figure: Figure) -> str:
    name = _text(figure.name)
    controls = "".join(
        _select(figure.name, index, control) for index, control in enumerate(figure.controls)
    )
    bar = f'<div class="controls">{controls}</div>' if controls else ""
    notes = "".join(f"<p>{_text(note)}</p>" for note in figure.notes)
    numbers = ""
    if figure.rows:
        table = _table(figure.title, figure.rows)
        numbers = f"<details><summary>Numbers of this chart</summary>{table}</details>"
    return (
        f'<figure id="{name}"><h3>{_text(figure.title)}</h3>{bar}'
        f'<div class="chart" data-figure="{name}" role="img" '
        f'aria-label="{_text(figure.title)}. {_text(figure.sentence)}"></div>'
        f"<figcaption><p>{_text(figure.sentence)}</p>{notes}</figcaption>{numbers}</figure>"
    )


def _select(figure: str, index: int, control: Control) -> str:
    """Return a select element.

    Args:
        figure: Name of the figure.
        index: Position of the control.
        control: Its options.
    """
    if len(control.options) < 2:
        return ""
    name = _text(f"{figure}-{index}")
    options = "".join(
        f'<option value="{_text(key)}">{_text(text)}</option>'
        for key, text in control.options.items()
    )
    return (
        f'<label for="{name}">{_text(control.label)} <select id="{name}" '
        f'data-for="{_text(figure)}" data-index="{index}" autocomplete="off">{options}</select>'
        "</label>"
    )


def _table(title: str, rows: Sequence[Row]) -> str:
    """Return a table of rows, of which at most `MAX_TABLE_ROWS` are shown."""
    head = list(rows[0])
    body = [[_cell(row.get(name)) for name in head] for row in rows[:MAX_TABLE_ROWS]]
    if len(rows) > MAX_TABLE_ROWS:
        title = f"{title} (the first {MAX_TABLE_ROWS} of {len(rows):,} rows)"
    return _text_table(title, head, body)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts that can be scrolled by keyboard.

    Args:
        title: Its caption.
        head: Titles of the columns.
        rows: Cells of all rows.
    """
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(title)}"><table>'
        f"<caption>{_text(title)}</caption><thead><tr>{columns}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )
