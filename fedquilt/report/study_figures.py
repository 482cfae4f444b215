"""Figures of several runs, and of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedquilt.display.curves import curves
from fedquilt.display.thinning import Row, thinned
from fedquilt.errors import FedquiltError
from fedquilt.report import charts, sentences, tables
from fedquilt.report.collect import Collection, RunFolder
from fedquilt.report.details import detail_figures
from fedquilt.report.figure import Control, Figure, Section
from fedquilt.report.figures import mask_sections, quilt_figure, thinning_note
from fedquilt.report.prepared import prepare_again
from fedquilt.report.quilt import quilt_of

MAX_QUILTS = 6  # Rows of a study whose quilt is drawn


def study_sections(collection: Collection, trust: bool = False) -> list[Section]:
    """Return the sections of a report of several runs.

    Args:
        collection: The runs, and the plan of their study.
        trust: True: run code that their settings name.
    """
    sections = [
        Section("results", collection.metric or "Results", tuple(comparison_figures(collection))),
        Section(
            "tables",
            "Tables",
            notes=() if collection.tables else ("There are no tables yet.",),
            tables=[
                (table.title, table.head, [[cell.starred for cell in row] for row in table.cells])
                for table in collection.tables
            ],
        ),
    ]
    if table_notes := [note for table in collection.tables for note in table.notes]:
        sections[-1] = replace(sections[-1], notes=tuple(table_notes))
    if details := detail_figures(collection.results, collection.metric):
        sections.append(Section("details", "Further results", tuple(details)))
    first_runs = _first_runs(collection)
    shown = dict(list(first_runs.items())[:MAX_QUILTS])
    sections += mask_sections(shown, trust)
    sections.append(_quilts(first_runs, trust))
    settings = [
        (f"{run.result.entry}, seed {run.result.seed}", run.config) for run in collection.runs
    ]
    text = "\n\n".join(f"# {title}\n{config}" for title, config in settings[:MAX_QUILTS])
    notes = (f"Of {len(settings)} runs the first {MAX_QUILTS} are listed.",)
    sections.append(
        Section(
            "settings", "Settings", notes=notes if len(settings) > MAX_QUILTS else (), code=text
        )
    )
    return sections


def comparison_figures(collection: Collection) -> list[Figure]:
    """Return curves over seeds, and the metric against bytes and against parameters.

    The list is empty if nothing was evaluated.

    Args:
        collection: The runs, with the metric to show.
    """
    results, metric = collection.results, collection.metric
    labels = tables.labels_of_shares(results)
    rows = [row for run in collection.runs for row in tables.curve_rows(run, metric, labels)]
    final = tables.final_rows(results, metric)
    figures = []
    percent, higher = results[0].is_in_percent(metric), results[0].prefers_higher(metric)
    if rows:
        figures.append(_curves(rows, final, metric, percent, higher))
    figures += _fronts(final, metric, percent, higher)
    return figures


def _curves(
    rows: Sequence[Row], final: Sequence[Row], metric: str, percent: bool, higher: bool
) -> Figure:
    """Return the figure of curves with mean and deviation over seeds, for a share to choose.

    Args:
        rows: Points of all runs.
        final: Figures of the last evaluation by row and share.
        metric: Name of the metric.
        percent: True if it is a rate.
        higher: True if more of it is better.
    """
    spreads = tables.spread_rows(rows)
    drawn = thinned(spreads, ["entry", "share"])
    axes = tables.usable_axes(spreads) or {"round": "round"}
    shares = {share: share for share in dict.fromkeys(row["share"] for row in drawn)}
    by_share = {share: [row for row in drawn if row["share"] == share] for share in shares}
    widest = next(iter(shares), "")
    return Figure(
        "curves",
        f"{metric} over the rounds",
        sentences.of_comparison(final, widest, percent, higher),
        {
            (share, x): curves(part, metric, x, title, "entry", percent)
            for share, part in by_share.items()
            for x, title in axes.items()
        },
        (Control("Share", shares), Control("Horizontal axis", axes)),
        [
            {
                name: row[name]
                for name in ("entry", "share", "round", "value", "low", "high", "seeds")
            }
            for row in drawn
        ],
        (*_band_note(drawn), *thinning_note(spreads, drawn)),
    )


def _band_note(drawn: Sequence[Row]) -> tuple[str, ...]:
    if all(row["seeds"] == 1 for row in drawn):
        return ()
    return ("Bands are the mean ± the sample deviation over seeds.",)


def _fronts(final: Sequence[Row], metric: str, percent: bool, higher: bool) -> list[Figure]:
    """Return the metric against bytes and parameters, with their Pareto fronts.

    Args:
        final: Figures of the last evaluation by row and share.
        metric: Name of the metric.
        percent: True if it is a rate.
        higher: True if more of it is better.
    """
    costs = {
        "bytes": ("Bytes", "bytes sent by all clients, both ways"),
        "params": ("Parameters", "parameters of the device's net"),
    }
    figures = []
    for cost, (title, axis) in costs.items():
        points = tables.pareto_rows(final, cost, higher)
        if points:
            figures.append(
                Figure(
                    f"pareto-{cost}",
                    f"{title} against {metric}",
                    sentences.of_pareto(points, metric),
                    {(): charts.pareto(points, metric, axis, percent)},
                    (),
                    [
                        {
                            "entry": row["entry"],
                            "share": row["share"],
                            title.lower(): row["cost"],
                            metric: row["value"],
                            "on the front": "yes" if row["front"] else "",
                        }
                        for row in points
                    ],
                )
            )
    return figures


def _first_runs(collection: Collection) -> dict[str, RunFolder]:
    """Return the run of the first seed of each row."""
    first_runs: dict[str, RunFolder] = {}
    for run in collection.runs:
        first_runs.setdefault(run.result.entry, run)
    return first_runs


def _quilts(first_runs: Mapping[str, RunFolder], trust: bool) -> Section:
    """Return the quilts of the rows of a study, and the growth of models.

    Args:
        first_runs: Runs of the first seeds by row.
        trust: True: run code that their settings name.
    """
    figures: list[Figure] = []
    notes = ["Which positions each round trained, in the run of each method's first seed."]
    grown: list[Row] = []
    for index, (entry, folder) in enumerate(list(first_runs.items())[:MAX_QUILTS]):
        try:
            quilt = quilt_of(prepare_again(folder, trust), folder.records)
        except FedquiltError as error:
            notes.append(f"There is no quilt of {entry}: {error}")
            continue
        if quilt.rounds and quilt.axes:
            figures.append(replace(quilt_figure(quilt, entry), name=f"quilt-{index}"))
        if quilt.grows:
            grown += [{"entry": entry, **row} for row in quilt.growth]
    if len(first_runs) > MAX_QUILTS:
        notes.append(f"The first {MAX_QUILTS} of {len(first_runs)} methods are shown.")
    if grown:
        sentence = sentences.of_growth([row for row in grown if row["entry"] == grown[0]["entry"]])
        chart = charts.growth(grown)
        figures.append(Figure("growth", "Size of the model", sentence, {(): chart}, (), grown))
    return Section("quilts", "Quilts", tuple(figures), tuple(notes))
