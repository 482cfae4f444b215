"""The chart of a run: a metric over rounds, with one line for each share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedquilt.display.curves import curves, load_altair
from fedquilt.display.thinning import Row, thinned
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.round import Record

if TYPE_CHECKING:
    import altair


def metric_rows(records: Iterable[Record], metric: str, request: str) -> list[Row]:
    """Return a row with `round`, `share` and `value` for each share of each evaluated round.

    A value that is not finite is None.

    Args:
        records: Records of a run.
        metric: Name of a metric. Empty: the task's main one.
        request: Beginning of an error, which says what the user asked for.

    Raises:
        ConfigError: No round was evaluated, or none recorded the metric. The message lists those
            that were recorded.
    """
    graded = [record for record in records if record.grades.metrics]
    if not graded:
        raise ConfigError(f"{request}; no round was evaluated, so that there is nothing to draw.")
    name = metric or graded[-1].grades.main
    rows = [
        {
            "round": record.round,
            "share": share,
            "value": value if math.isfinite(value) else None,
        }
        for record in graded
        for share, value in record.grades.metrics.get(name, {}).items()
    ]
    if not rows:
        names = list(dict.fromkeys(m for record in graded for m in record.grades.metrics))
        raise ConfigError(
            f"{request}; no round recorded the metric {name!r}.{nearest(name, names)}"
        )
    return rows


def titled(
    rows: Sequence[Row], metric: str, series: str, percent: bool, title: str
) -> altair.LayerChart:
    """Return curves over rounds with a title, which says how many rounds are drawn if not all are.

    Args:
        rows: Points with `round`, `value` and the column `series`, and maybe `low` and `high`.
        metric: Name of the metric, for the axis.
        series: Column that tells curves apart, such as "share".
        percent: True: values are fractions that are shown in percent.
        title: Title of the chart.
    """
    drawn = thinned(rows, [series])
    num_rounds, num_drawn = (len({row["round"] for row in points}) for points in (rows, drawn))
    notes = []
    if num_drawn < num_rounds:
        notes = [f"{num_drawn:,} of {num_rounds:,} evaluated rounds are drawn."]
    chart = curves(drawn, metric, series=series, percent=percent)
    params = load_altair().TitleParams(title, subtitle=notes, anchor="start")
    named: altair.LayerChart = chart.properties(title=params)
    return named


def run_chart(
    records: Iterable[Record], metric: str, labels: Mapping[str, str], title: str, is_rate: bool
) -> altair.LayerChart:
    """Return the chart of one run: a metric over rounds, with one line for each share.

    Args:
        records: Records of the run.
        metric: Name of the metric, which a record must have.
        labels: Names of shares in the legend, by share as text. A share that is not named is shown
            as a number.
        title: Title of the chart.
        is_rate: True: the metric is a fraction that is shown in percent.
    """
    rows = metric_rows(records, metric, f"a chart of {metric} was asked for")
    shares = sorted({row["share"] for row in rows}, key=float, reverse=True)
    names = {share: labels.get(share) or f"{float(share):g}" for share in shares}
    named = [{**row, "share": names[row["share"]]} for row in rows]
    return titled(named, metric, "share", is_rate, title)
