"""Make the pictures of docs/gallery from real runs on a CPU, and the sentences of docs/gallery.md.

    make gallery
    python tools/gallery.py quilts deployment     # these pictures alone

Runs are kept in build/gallery. A run that is finished there is not repeated. A sentence below a
picture is computed from its numbers and replaces the text between two comments of the page:

    <!-- sentence quilts -->
    <!-- end -->

It needs the extras `report`, `images` and `flower`. Screenshots of pages also need playwright and
chromium, and are left out with a message where one of them is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import altair as alt
from faulty_devices import DAMAGED, DEPLOYED_ROUNDS, HASTY, OFFLINE, deployed
from PIL import Image

from fedquilt.cli.main import main as fedquilt_command
from fedquilt.display.curves import chart_of, color_of, curves, value_axis
from fedquilt.report import charts, page
from fedquilt.report.collect import RunFolder, collect
from fedquilt.report.masks import mask_figure, masks_of
from fedquilt.report.prepared import prepare_again
from fedquilt.report.quilt import Quilt, quilt_of
from fedquilt.report.sentences import of_participation
from fedquilt.report.tables import curve_rows, participation_rows, spread_rows
from fedquilt.round import Record
from fedquilt.runs.summaries import figure_text
from fedquilt.studies.result import Result
from fedquilt.studies.stored import read_stored
from fedquilt.units import size

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
RUNS = ROOT / "build" / "gallery"
RESULTS = ROOT / "results"
CHROMIUM = Path("/usr/bin/chromium")
# Files in docs/segmentation.md: name and content
FILES = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SCALE = 1.5  # Pixels of a PNG file per pixel of the chart
MAX_BYTES = 200_000  # Size of a picture
MAX_COLORS = 128  # Colours of a picture

TITLES = {
    "heterofl": "HeteroFL",
    "fedrolex": "FedRolex",
    "feddropout": "Federated Dropout",
    "splitmix": "Split-Mix",
}
QUILT_AXIS = "stages.1.0"  # The hidden layer of the perceptron
HIDDEN = 64  # Its units
# All methods, by what clients train
GROUPS = {
    "the whole net on every client": (
        "fedavg",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedprox",
        "fednova",
        "fedbn",
        "progfed",
    ),
    "sub-models of one net": (
        "scaffold",
        "heterofl",
        "sheterofl",
        "feddropout",
        "fedrolex",
        "splitmix",
    ),
    "nested nets in one step": ("fedrescue", "fedseq", "fedrush", "fedslim", "fjord"),
    "nets of their own, distillation": ("local", "feddf", "dsfl", "fedet", "rafl"),
}
GROWTH = {
    "FedAvg": "progfed/table3-cifar10-fedavg-seed*",
    "ProgFed": "progfed/table3-cifar10-progfed-seed*",
}


@dataclass(frozen=True)
class Place:
    """Folders of the gallery, and the length of its runs."""

    out: Path = PAGE.parent / "gallery"  # Folder of the pictures
    runs: Path = RUNS  # Folder of the runs
    rounds: int = 0  # Rounds of every run. 0: as many as the picture needs

    def command(self, words: str, rounds: int, name: str) -> str:
        """Return a command with its number of rounds and its folder.

        Args:
            words: The command without both.
            rounds: Number of rounds, if all are trained.
            name: Name of the folder of the runs.
        """
        return f"{words} --rounds {self.rounds or rounds} --out {self.shown(self.runs / name)}"

    @staticmethod
    def shown(folder: Path) -> Path:
        """Return a folder as commands in the checkout name it."""
        return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder


@dataclass(frozen=True)
class Picture:
    """A picture of the gallery: how its runs are made, and how they are drawn."""

    draw: Callable[[Place], tuple[alt.TopLevelMixin, str]]  # Returns the chart and its sentence
    command: Callable[[Place], str] = lambda place: ""  # Command of its runs. Empty: there is none
    folder: str = ""  # Folder below that of the runs where the command runs. Empty: the checkout


# --- quilts -------------------------------------------------------------------------------------


def quilts_command(place: Place) -> str:
    """Return the command of the runs of four methods with small devices alone."""
    return place.command(
        "fedquilt compare heterofl fedrolex feddropout splitmix --model mlp"
        f" --set model.hidden=[{HIDDEN}] --clients 6 --cohort 3 --epochs 1"
        " --set evaluation.every=16"
        """ --set 'fleet.budgets={name="uniform",shares=[0.5,0.25,0.125]}'""",
        64,
        "quilts",
    )


def runs_by_method(folder: Path) -> dict[str, RunFolder]:
    """Return the runs of a study of one seed, by method."""
    return {run.result.entry: run for run in collect([folder]).runs}


def quilts_of(place: Place) -> dict[str, Quilt]:
    """Return the quilts of the four methods, by name."""
    return {
        name: quilt_of(prepare_again(run), run.records)
        for name, run in runs_by_method(place.runs / "quilts").items()
    }


def draw_quilts(place: Place) -> tuple[alt.TopLevelMixin, str]:
    """Draw four quilts of one axis side by side, coloured by the smallest budget."""
    panels, never = [], []
    for name, quilt in quilts_of(place).items():
        times = quilt.times(QUILT_AXIS)
        if untrained := times.count(0):
            never.append(f"{TITLES[name]} never trains {untrained} of {len(times)} positions")
        cells = quilt.cells(QUILT_AXIS)
        chart = charts.quilt(cells, QUILT_AXIS, "smallest", quilt.budgets)
        chart = chart.properties(width=190, height=200, title=TITLES[name])
        panels.append(chart.encode(y=_positions(title="position" if not panels else "")))
    rounds = len(next(iter(quilts_of(place).values())).rounds)
    rest = f"{'; '.join(never)}; the others reach all of them" if never else "All are trained"
    sentence = f"In {rounds} rounds of three clients, {rest}."
    return alt.hconcat(*panels, spacing=8).resolve_scale(color="shared"), sentence


def _positions(title: str) -> alt.Y:
    return alt.Y(
        "start:Q",
        title=title,
        scale=alt.Scale(reverse=True, nice=False, domain=[0, HIDDEN]),
        axis=alt.Axis(grid=False, tickMinStep=1),
    )


# --- all methods --------------------------------------------------------------------------------


def methods_command(place: Place) -> str:
    """Return the command of the runs of all methods on the demo's data."""
    names = " ".join(name for group in GROUPS.values() for name in group)
    return place.command(f"fedquilt compare {names} --set evaluation.every=1", 12, "methods")


def draw_methods(place: Place) -> tuple[alt.TopLevelMixin, str]:
    """Draw accuracy against bytes of all methods, in a panel for each kind of method."""
    runs = runs_by_method(place.runs / "methods")
    points = {
        name: [row for row in curve_rows(run, "accuracy", {}) if row["share"] == "1"]
        for name, run in runs.items()
    }
    sent = [row["bytes"] for rows in points.values() for row in rows if row["bytes"]]
    scale = alt.Scale(type="log", domain=[min(sent) * 0.8, max(sent) * 1.25], nice=False)
    panels = []
    for title, names in GROUPS.items():
        rows = [row for name in names for row in points[name]]
        chart = curves([row for row in rows if row["bytes"]], "accuracy", "bytes", series="entry")
        x = alt.X("bytes:Q", scale=scale, title="bytes, both ways", axis=BYTES)
        y = value_axis("accuracy", True)
        y.scale = alt.Scale(domain=[0, 1])
        layers = [
            layer.encode(x=x, y=y, color=color_of("entry", names, "")) for layer in chart.layer
        ]
        layers[-1] = layers[-1].encode(shape=_shapes(names))
        if silent := [rows[-1] for rows in points.values() if not rows[-1]["bytes"]]:
            layers += _silent([row for row in silent if row["entry"] in names], names)
        panels.append(
            alt.layer(*layers, data=chart.data).properties(width=300, height=210, title=title)
        )
    grid = alt.concat(*panels, columns=2, spacing=20)
    cheapest = min(runs.values(), key=lambda run: _bytes(run.result) or float("inf"))
    dearest = max(runs.values(), key=lambda run: _bytes(run.result))
    sentence = (
        f"In {len(cheapest.records)} rounds, between {size(_bytes(cheapest.result))} "
        f"({cheapest.result.entry}) and {size(_bytes(dearest.result))} ({dearest.result.entry}) "
        "are sent."
    )
    return grid.resolve_scale(color="independent", shape="independent"), sentence


def _shapes(names: Sequence[str]) -> alt.Shape:
    """Return shapes that share the legend of the colours."""
    scale = alt.Scale(domain=list(names))
    return alt.Shape("entry:N", scale=scale, sort=None, legend=alt.Legend(title=""))


BYTES = alt.Axis(format="~s", values=[1e5, 3e5, 1e6, 3e6, 1e7, 3e7])


def _bytes(result: Result) -> int:
    return int(result.summary["bytes_down"] + result.summary["bytes_up"])


def _silent(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[alt.Chart]:
    """Return a dashed line for methods that send nothing, at their last accuracy."""
    if not rows:
        return []
    base = chart_of([{**row, "text": f"{row['entry']}: sends nothing"} for row in rows])
    y = value_axis("accuracy", True)
    rule = base.mark_rule(strokeDash=[5, 4]).encode(y=y, color=color_of("entry", names, ""))
    text = base.mark_text(align="left", dx=4, dy=-6).encode(y=y, x=alt.value(0), text="text:N")
    return [rule, text]


# --- growth -------------------------------------------------------------------------------------


def draw_growth(place: Place) -> tuple[alt.TopLevelMixin, str]:
    """Draw what a growing model sends in a round, and its accuracy by bytes, on CIFAR-10."""
    runs = [
        RunFolder(path, replace(read_stored(path), entry=entry))
        for entry, pattern in GROWTH.items()
        for path in sorted(RESULTS.glob(pattern))
    ]
    first = {run.result.entry: run for run in reversed(runs)}
    steps = [
        {"entry": entry, "round": record.round, "kilobytes": _client_kilobytes(record)}
        for entry in GROWTH
        for record in first[entry].records
        if record.round % 10 == 1
    ]
    cost = (
        chart_of(steps)
        .mark_line(interpolate="step-after", strokeWidth=2)
        .encode(
            x=alt.X("round:Q", title="round"),
            y=alt.Y("kilobytes:Q", title="kB of a client and round, both ways"),
            color=color_of("entry", list(GROWTH), "method"),
        )
        .properties(width=330, height=230)
    )
    rows = spread_rows(row for run in runs for row in curve_rows(run, "accuracy", {}))
    points = [{**row, "gigabytes": row["bytes"] / 1e9} for row in rows if row["share"] == "1"]
    base = chart_of(points).encode(
        x=alt.X("gigabytes:Q", title="GB of all clients, both ways"),
        color=color_of("entry", list(GROWTH), "method"),
    )
    y = value_axis("accuracy", True)
    band = base.mark_area(opacity=0.2).encode(
        y=value_axis("accuracy", True, "low"), y2=alt.Y2("high:Q")
    )
    accuracy = alt.layer(band, base.mark_line(strokeWidth=2).encode(y=y))
    accuracy = accuracy.properties(width=330, height=230)
    grown = [row["kilobytes"] for row in steps if row["entry"] == "ProgFed"]
    last = {row["entry"]: row for row in points}
    ends = ", ".join(
        f"{entry} ends at {figure_text(row['value'], True)} after {row['gigabytes']:.1f} GB"
        for entry, row in last.items()
    )
    sentence = (
        f"A client of ProgFed sends and receives {min(grown):.0f} kB in the first round and "
        f"{max(grown):.0f} kB with the whole model; {ends}."
    )
    return alt.hconcat(cost, accuracy, spacing=30), sentence


def _client_kilobytes(record: Record) -> float:
    return round((record.bytes_down + record.bytes_up) / record.clients / 1e3, 3)


# --- deployment ---------------------------------------------------------------------------------


def draw_deployment(place: Place) -> tuple[alt.TopLevelMixin, str]:
    """Draw what became of the requests of each round, above the accuracy of three shares."""
    run = deployed(place.rounds or DEPLOYED_ROUNDS)
    folder = RunFolder(place.runs, Result("FedRolex", 0, {}, tuple(run.records)))
    rows = participation_rows(run.records)
    phases = [
        {"first": first - 0.5, "last": last + 0.5, "middle": (first + last) / 2, "text": text}
        for first, last, text in (OFFLINE, DAMAGED, HASTY)
        if first <= len(run.records)
    ]
    width = {"width": 640}
    rounds = alt.Scale(domain=[0.5, len(run.records) + 0.5], nice=False)
    bars = charts.participation(rows).properties(height=150, **width)
    bars = bars.encode(
        x=alt.X("before:Q", scale=rounds, title=None, axis=alt.Axis(grid=False, tickMinStep=1)),
        y=alt.Y("low:Q", title="devices", axis=alt.Axis(format="d"), scale=alt.Scale(zero=True)),
    )
    x = alt.X("round:Q", scale=rounds, title="round", axis=alt.Axis(format="d", tickMinStep=1))
    lines = curves(curve_rows(folder, "accuracy", {}), "accuracy")
    layers = [layer.encode(x=x) for layer in lines.layer]
    bands = (
        chart_of(phases)
        .mark_rect(opacity=0.12, color=charts.GRAY)
        .encode(x=alt.X("first:Q", scale=rounds), x2="last:Q")
    )
    lines = alt.layer(bands, *layers, data=lines.data).properties(height=150, **width)
    labels = chart_of(phases).mark_text(dy=-8, fontSize=11)
    labels = labels.encode(x=alt.X("middle:Q"), y=alt.value(0), text="text:N")
    above = alt.layer(bars, labels.properties(height=150, **width))
    chart = alt.vconcat(above, lines, spacing=10)
    return chart.resolve_scale(color="independent", shape="independent"), of_participation(
        rows, len(run.records)
    )


# --- masks --------------------------------------------------------------------------------------


def masks_command(place: Place) -> str:
    """Write the files of docs/segmentation.md, and return the command that trains on them."""
    folder = place.runs / "shapes"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.findall((ROOT / "docs" / "segmentation.md").read_text()):
        (folder / name).write_text(content)
    return f"fedquilt compare shapes.toml --rounds {place.rounds or 20} --out ../masks"


def draw_masks(place: Place) -> tuple[alt.TopLevelMixin, str]:
    """Draw images of shapes, and the masks that nets of three sizes predict."""
    (run,) = runs_by_method(place.runs / "masks").values()
    masks = masks_of(run, prepare_again(run))
    assert masks is not None, "the run is a segmentation"
    figure = mask_figure(masks)
    return figure.charts[()], figure.sentence


# --- pages --------------------------------------------------------------------------------------

# Screenshots of reports of the runs of `quilts`: the page, its width and height, and its colours
SCREENSHOTS: dict[str, tuple[str, int, int, Literal["light", "dark"]]] = {
    "report-study-light": ("study", 1000, 1500, "light"),
    "report-run-dark": ("run", 1000, 1500, "dark"),
    "report-study-narrow": ("study", 400, 1500, "light"),
}


def photograph(place: Place) -> list[Path]:
    """Write screenshots of the report of a study and of one of its runs, with chromium."""
    from playwright.sync_api import sync_playwright

    folders = {"study": place.runs / "quilts", "run": place.runs / "quilts" / "fedrolex" / "seed0"}
    written = []
    with sync_playwright() as play, contextlib.chdir(ROOT):
        browser = play.chromium.launch(
            executable_path=str(CHROMIUM), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        for name, (shown, width, height, scheme) in SCREENSHOTS.items():
            file = place.runs / f"{shown}.html"
            folder = folders[shown]
            file.write_text(page([place.shown(folder)]))
            size_of_page = {"width": width, "height": height}
            tab = browser.new_page(viewport=size_of_page, color_scheme=scheme)
            tab.goto(file.as_uri())
            tab.evaluate("fedquilt.ready")
            written.append(place.out / f"{name}.png")
            tab.screenshot(path=str(written[-1]))
            tab.close()
        browser.close()
    return written


# --- all pictures -------------------------------------------------------------------------------

PICTURES = {
    "quilts": Picture(draw_quilts, quilts_command),
    "methods": Picture(draw_methods, methods_command),
    "growth": Picture(draw_growth),
    "masks": Picture(draw_masks, masks_command, "shapes"),
    "deployment": Picture(draw_deployment),
}


def make(name: str, place: Place) -> str:
    """Train the runs of a picture, if they are missing, draw it, and return its sentence.

    Args:
        name: A key of `PICTURES`.
        place: Folders and number of rounds.

    Raises:
        RuntimeError: A command failed, or the picture is too large.
    """
    picture = PICTURES[name]
    command = picture.command(place)
    with contextlib.chdir(place.runs / picture.folder if picture.folder else ROOT):
        if command and fedquilt_command(shlex.split(command)[1:]) != 0:
            raise RuntimeError(f"{command!r} failed.")
        chart, sentence = picture.draw(place)
    place.out.mkdir(parents=True, exist_ok=True)
    file = place.out / f"{name}.png"
    styled = chart.configure(background="white").configure_title(fontSize=13)
    styled.configure_legend(labelLimit=300).save(str(file), scale_factor=SCALE)
    shrink(file)
    return sentence


def shrink(file: Path) -> None:
    """Reduce a picture to `MAX_COLORS` colours, which makes its file several times smaller.

    Raises:
        RuntimeError: It is larger than `MAX_BYTES` even so.
    """
    with Image.open(file) as image:
        reduced = image.convert("RGB").quantize(MAX_COLORS, dither=Image.Dither.NONE)
    reduced.save(file, optimize=True)
    if file.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{file} has {file.stat().st_size:,} of at most {MAX_BYTES:,} bytes.")


def filled(text: str, sentences: Mapping[str, str]) -> str:
    """Return the text of the page with sentences between their comments.

    Args:
        text: Text of the page.
        sentences: Sentences by the name of their picture.
    """
    for name, sentence in sentences.items():
        begin, end = f"<!-- sentence {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"the page has no place for the sentence of {name}.")
        wrapped = "\n".join(textwrap.wrap(sentence, 120, break_long_words=False))
        text = f"{before}{begin}{wrapped}\n{rest[rest.index(end) :]}"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the pictures that are named, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PICTURES, "pages"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME")
    chosen = parser.parse_args(arguments).names or names
    place = Place()
    sentences = {name: make(name, place) for name in chosen if name != "pages"}
    PAGE.write_text(filled(PAGE.read_text(), sentences))
    if "pages" not in chosen:
        return
    if importlib.util.find_spec("playwright") is None or not CHROMIUM.exists():
        print(f"screenshots are left out: they need playwright and {CHROMIUM}.")
        return
    for file in photograph(place):
        shrink(file)


if __name__ == "__main__":
    main()
