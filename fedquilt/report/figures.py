"""Figures of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from altair import Chart

from fedquilt.data.plot import counts as sample_counts
from fedquilt.display.curves import curves
from fedquilt.display.thinning import MAX_POINTS, Row, thinned
from fedquilt.errors import FedquiltError
from fedquilt.report import charts, sentences, tables
from fedquilt.report.collect import RunFolder
from fedquilt.report.details import detail_figures
from fedquilt.report.figure import Control, Figure, Section
from fedquilt.report.masks import mask_figure, masks_of
from fedquilt.report.prepared import prepare_again
from fedquilt.report.quilt import MAX_COLUMNS, MAX_ROWS, Quilt, budget_names, quilt_of
from fedquilt.runs.run import Run

MAX_CLIENTS = 100  # Clients whose samples are drawn
MAX_ABSENCES = 100  # Absent clients that are listed


def run_sections(folder: RunFolder, metric: str, trust: bool = False) -> list[Section]:
    """Return the sections of a report of one run.

    Args:
        folder: The run.
        metric: Name of the metric to show. Empty: nothing was evaluated.
        trust: True: run code that its settings name.
    """
    run, reason = _prepared(folder, trust)
    quilt: Quilt | None = None
    if run is not None:
        try:
            quilt = quilt_of(run, folder.records)
        except FedquiltError as error:
            reason = str(error)
    results = (*curve_figures(folder, metric), *detail_figures([folder.result], metric))
    sections = [
        Section("results", metric or "Results", results),
        quilt_section(folder, quilt, reason),
    ]
    if run is not None:
        sections[1:1] = mask_sections({"Masks": folder}, trust)
        sections.append(fleet_section(run))
    sections += [participation_section(folder, quilt), cost_section(folder)]
    sections.append(Section("settings", "Settings", code=folder.config or "They are not known."))
    return sections


def _prepared(folder: RunFolder, trust: bool) -> tuple[Run | None, str]:
    """Return the prepared run of a folder. None: the reason why there is none is the text."""
    try:
        return prepare_again(folder, trust), ""
    except FedquiltError as error:
        return None, str(error)


def mask_sections(folders: Mapping[str, RunFolder], trust: bool) -> list[Section]:
    """Return the section on masks of segmentations. Empty: no run is a segmentation.

    Args:
        folders: Runs by the title of their figure.
        trust: True: run code that their settings name.
    """
    figures: list[Figure] = []
    notes: list[str] = []
    for title, folder in folders.items():
        try:
            run = prepare_again(folder, trust)
        except FedquiltError:  # The section on quilts says so.
            continue
        try:
            masks = masks_of(folder, run, trust)
        except FedquiltError as error:
            notes.append(f"There are no masks of {folder.result.entry}: {error}")
            continue
        if masks is not None:
            figures.append(mask_figure(masks, title, f"masks-{len(figures)}"))
    if not figures and not notes:
        return []
    return [Section("masks-section", "Masks", tuple(figures), tuple(notes))]


def curve_figures(folder: RunFolder, metric: str) -> list[Figure]:
    """Return the figure of a metric over rounds and costs. Empty: nothing was evaluated.

    Args:
        folder: The run.
        metric: Name of the metric.
    """
    labels = tables.labels_of_shares([folder.result])
    rows = tables.curve_rows(folder, metric, labels)
    if not rows:
        return []
    percent = folder.result.is_in_percent(metric)
    drawn = thinned([row for row in rows if row["value"] is not None], ["share"])
    axes = tables.usable_axes(rows) or {"round": "round"}
    sentence = sentences.of_curves(rows, metric, percent, folder.result.prefers_higher(metric))
    return [
        Figure(
            "curves",
            f"{metric} by share",
            sentence,
            {(x,): curves(drawn, metric, x, title, "share", percent) for x, title in axes.items()},
            (Control("Horizontal axis", axes),),
            [{"share": row["share"], "round": row["round"], metric: row["value"]} for row in drawn],
            thinning_note(rows, drawn),
        )
    ]


def thinning_note(rows: Sequence[Row], drawn: Sequence[Row]) -> tuple[str, ...]:
    """Return a sentence on points that are not drawn, in a tuple that is empty if all are.

    Args:
        rows: All points.
        drawn: Points that are drawn.
    """
    if len(drawn) == len(rows):
        return ()
    invalid = sum(1 for row in rows if row["value"] is None)
    notes = []
    if invalid:
        notes.append(
            f"{sentences.plural(invalid, 'figure')} that are no finite numbers are left out."
        )
    if len(drawn) < len(rows) - invalid:
        notes.append(
            f"{len(drawn):,} of {len(rows) - invalid:,} points are drawn, at most {MAX_POINTS} of "
            "a line."
        )
    return tuple(notes)


def quilt_section(folder: RunFolder, quilt: Quilt | None, reason: str) -> Section:
    """Return the section of the quilt, or a section that says why there is none.

    Args:
        folder: The run.
        quilt: Its quilt. None: it cannot be computed.
        reason: Why it cannot be computed.
    """
    if quilt is None or not quilt.rounds or not quilt.axes:
        note = reason or "no round with a known cohort is recorded, or no axis of the model is cut."
        return Section("quilt-section", "Quilt", notes=(f"There is no quilt: {note}",))
    source = "is computed from the settings, by calling the method's plan again"
    if quilt.recorded:
        source = "has the positions in the records, because plans depend on the state of the server"
    note = (
        f"Which positions of the model each round trained. It {source}. Updates that were lost, "
        "late or refused do not count."
    )
    return Section("quilt-section", "Quilt", (quilt_figure(quilt),), (note, *_omissions(quilt)))


def _omissions(quilt: Quilt) -> list[str]:
    """Return sentences on rounds and plans that the quilt lacks."""
    notes = []
    if quilt.unrecorded:
        notes.append(
            f"{sentences.plural(quilt.unrecorded, 'plan')} of a client and round were too long to "
            "be recorded, and are left out."
        )
    if quilt.omitted:
        notes.append(
            f"{sentences.plural(len(quilt.omitted), 'round')} in which clients did not reply are "
            "left out, because the records do not say which clients."
        )
    return notes


def quilt_figure(quilt: Quilt, title: str = "Trained positions") -> Figure:
    """Return the figure of a quilt, with controls for its axis, colour and rounds.

    Args:
        quilt: The quilt, with at least one axis and round.
        title: Heading above the figure.
    """
    axes = {axis.name: f"{axis.name} ({axis.size} positions)" for axis in quilt.axes}
    colors = {"times": "clients a round", "smallest": "smallest budget"}
    periods = {"first": "all rounds"}
    if quilt.is_binned:
        periods = {"first": f"first {MAX_COLUMNS} rounds", "all": "all rounds"}
    cells = {
        (axis, period): quilt.cells(axis, period == "all") for axis in axes for period in periods
    }
    shown: dict[tuple[str, ...], Chart] = {
        (axis.name, color, period): charts.quilt(
            cells[axis.name, period], axis.name, color, quilt.budgets, axis.size
        )
        for axis in quilt.axes
        for color in colors
        for period in periods
    }
    controls = [Control("Axis", axes), Control("Colour", colors), Control("Rounds", periods)]
    name = quilt.axes[0].name
    times = quilt.times(name)
    notes = []
    if any(quilt.has_equal_parts(axis.name) for axis in quilt.axes):
        notes.append(
            f"A column with more than {MAX_ROWS} different parts is drawn in {MAX_ROWS} equal ones."
        )
    if quilt.is_binned:
        notes.append(f"All rounds are drawn in {MAX_COLUMNS} columns of several rounds each.")
    return Figure(
        "quilt",
        title,
        sentences.of_quilt(times, name, len(quilt.rounds)),
        shown,
        tuple(controls),
        [
            {"axis": axis.name, "position": position, "trained": count}
            for axis in quilt.axes
            for position, count in enumerate(quilt.times(axis.name))
        ],
        tuple(notes),
    )


def fleet_section(run: Run) -> Section:
    """Return the section on clients: their budgets, and their samples by class.

    Args:
        run: The prepared run.
    """
    totals: dict[str, int] = {}
    for budget, name in budget_names(run).items():
        totals[name] = totals.get(name, 0) + run.fleet.counts[budget]
    rows: list[Row] = [{"budget": name, "clients": count} for name, count in totals.items()]
    figures = [
        Figure("fleet", "Budgets", sentences.of_fleet(rows), {(): charts.fleet(rows)}, (), rows)
    ]
    notes = [f"{run.fleet.cohort} of {run.fleet.num_clients} clients are asked in a round."]
    if str(run.link):
        notes.append(f"Link: {run.link}.")
    if run.absent:
        notes.append(f"The samples of clients are not known: {run.absent}")
    else:
        figures += _sample_figures(run)
    return Section("fleet-section", "Clients", tuple(figures), tuple(notes))


def _sample_figures(run: Run) -> list[Figure]:
    """Return the figure of samples by client and class. Empty: targets are not classes."""
    data = run.data
    if not data.has_classes or data.targets.dim() > 1:  # Masks and sequences have many classes.
        return []
    table = sample_counts(data, "class", MAX_CLIENTS).tolist()
    rows: list[Row] = [
        {
            "client": client,
            "label": data.class_names[label] if label < len(data.class_names) else str(label),
            "samples": samples,
        }
        for client, row in enumerate(table)
        for label, samples in enumerate(row)
    ]
    sizes = [sum(row) for row in table]
    classes = [sum(1 for samples in row if samples) for row in table]
    notes: tuple[str, ...] = ()
    if data.num_clients > len(table):
        notes = (f"The first {len(table)} of {data.num_clients:,} clients are shown.",)
    sentence = sentences.of_samples(sizes, classes)
    chart = charts.samples(rows)
    return [Figure("samples", "Samples by class", sentence, {(): chart}, (), rows, notes)]


def participation_section(folder: RunFolder, quilt: Quilt | None) -> Section:
    """Return the section on clients that took part, and on updates that were lost.

    Args:
        folder: The run.
        quilt: Its quilt, which has the positions that the link lost. None: they are not known.
    """
    records = folder.records
    if not records:
        return Section("participation-section", "Participation", notes=("There are no records.",))
    rows = tables.participation_rows(records)
    sentence = sentences.of_participation(rows, len(records))
    figures = [
        Figure(
            "participation",
            "Clients a round",
            sentence,
            {(): charts.participation(rows)},
            (),
            rows,
            _bin_note(len(records)),
        )
    ]
    if quilt is not None and quilt.rounds and (quilt.planned != quilt.arrived).any():
        lost = quilt.lost
        figures.append(
            Figure(
                "lost",
                "Lost positions",
                sentences.of_lost(lost),
                {(): charts.lost(lost)},
                (),
                lost,
            )
        )
    if quilt is not None and quilt.grows:
        growth = quilt.growth
        sentence = sentences.of_growth(growth)
        chart = charts.growth(growth)
        figures.append(Figure("growth", "Size of the model", sentence, {(): chart}, (), growth))
    absences = tables.absence_rows(records)
    listed = [[str(row[name]) for name in ABSENCE_HEAD] for row in absences[:MAX_ABSENCES]]
    title = "Updates that did not count"
    if len(absences) > MAX_ABSENCES:
        title += f" (the first {MAX_ABSENCES} of {len(absences):,})"
    shown = [(title, ABSENCE_HEAD, listed)] if listed else []
    return Section("participation-section", "Participation", tuple(figures), tables=shown)


ABSENCE_HEAD = ("round", "client", "fate", "reason")


def cost_section(folder: RunFolder) -> Section:
    """Return the section on bytes, multiply-adds and seconds of the rounds.

    Args:
        folder: The run.
    """
    records = folder.records
    if not records:
        return Section("costs-section", "Costs", notes=("There are no records.",))
    rows = tables.cost_rows(records)
    units = {"bytes": "bytes", "multiply-adds": "multiply-adds", "seconds": "seconds"}
    by_unit = {
        unit: [row for row in rows if unit in row["cost"]]
        for unit in units
        if any(unit in row["cost"] for row in rows)
    }
    if not by_unit:
        return Section("costs-section", "Costs", notes=("The rounds cost nothing.",))
    sentence = sentences.of_costs(
        sum(record.bytes_down for record in records),
        sum(record.bytes_up for record in records),
        sum(record.macs for record in records),
        len(records),
    )
    figure = Figure(
        "costs",
        "Costs of a round",
        sentence,
        {(unit,): charts.costs(part, unit) for unit, part in by_unit.items()},
        (Control("Cost", {unit: units[unit] for unit in by_unit}),),
        rows,
        _bin_note(len(records)),
    )
    return Section("costs-section", "Costs", (figure,))


def _bin_note(rounds: int) -> tuple[str, ...]:
    if rounds <= tables.MAX_BINS:
        return ()
    return (f"{rounds:,} rounds are drawn as {tables.MAX_BINS} bars, each a mean of its rounds.",)
