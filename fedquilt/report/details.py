"""Figures of what only some runs record: attacks, further metrics, and the use of devices."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.report import charts, sentences, tables
from fedquilt.report.figure import Control, Figure
from fedquilt.studies.result import Result


def detail_figures(results: Sequence[Result], metric: str) -> list[Figure]:
    """Return figures of what only some runs record: attacks, other metrics, use of the devices.

    Args:
        results: Runs of all rows.
        metric: Name of the metric that has figures of its own.
    """
    figures = []
    percent = results[0].is_in_percent() if results else True
    if robust := tables.robust_rows(results):
        sentence = sentences.of_robustness(robust, percent)
        chart = charts.robustness(robust, percent)
        figures.append(
            Figure("robustness", "Standard and robust", sentence, {(): chart}, (), robust)
        )
    figures += _metric_figures(results, metric)
    if used := tables.utilization_rows(results):
        chart = charts.bars(
            [{**row, "share": row["entry"]} for row in used], "part of the limits used", "nets"
        )
        sentence = sentences.of_utilization(used)
        figures.append(Figure("utilization", "Use of the devices", sentence, {(): chart}, (), used))
    return figures


def _metric_figures(results: Sequence[Result], metric: str) -> list[Figure]:
    """Return one figure of all other metrics of the last evaluation, for a metric to choose.

    Args:
        results: Runs of all rows.
        metric: Name of the metric that is left out.
    """
    rows = [row for row in tables.metric_rows(results) if row["metric"] != metric]
    names = {name: name for name in dict.fromkeys(row["metric"] for row in rows)}
    if not names:
        return []
    first = next(iter(names))
    own = [row for row in rows if row["metric"] == first]
    percent = {name: results[0].is_in_percent(name) for name in names}
    share = own[0]["share"]
    return [
        Figure(
            "metrics",
            "Other metrics",
            f"{first}: "
            + sentences.of_comparison(own, share, percent[first], results[0].prefers_higher(first)),
            {
                (name,): charts.bars(
                    [row for row in rows if row["metric"] == name], name, "entry", percent[name]
                )
                for name in names
            },
            (Control("Metric", names),),
            [
                {name: row[name] for name in ("metric", "entry", "share", "value", "seeds")}
                for row in rows
            ],
        )
    ]
