"""Charts of metrics over rounds, as Altair makes them.

Charts are drawn from flat rows, so that a run, a study and a page can use the same function. Altair
is imported when a chart is made, because it is an extra.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.names import nearest
from fedquilt.round import Record

if TYPE_CHECKING:
    import altair

Row = dict[str, Any]

MAX_POINTS = 4000  # Points of a chart. Altair refuses more than 5000.
# Okabe and Ito's colours, which colour-blind people can tell apart, without yellow and black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def load_altair() -> Any:
    """Return the module `altair`.

    Raises:
        ConfigError: It is not installed. The message says what to install.
    """
    try:
        import altair
    except ImportError as error:
        raise ConfigError(
            f"a chart needs Altair, which is not installed: {how_to_install('report')}."
        ) from error
    return altair


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


def thinned(rows: Sequence[Row], most: int = MAX_POINTS) -> tuple[list[Row], str]:
    """Return rows of evenly spaced rounds, the last included, and a sentence on what is left out.

    Args:
        rows: Rows with the key `round`.
        most: Largest number of rows. If there are no more, all are returned.

    Returns:
        The rows, and the sentence. It is empty if no row was left out.
    """
    if len(rows) <= most:
        return list(rows), ""
    rounds = sorted({row["round"] for row in rows})
    step = math.ceil(len(rounds) / max(1, most * len(rounds) // len(rows) - 1))
    kept = {*rounds[::step], rounds[-1]}
    note = f"{len(kept):,} of {len(rounds):,} evaluated rounds are drawn."
    return [row for row in rows if row["round"] in kept], note


def curves(
    rows: Sequence[Row],
    *,
    by: str,
    order: Sequence[str],
    title: str,
    value_title: str,
    is_rate: bool,
) -> altair.LayerChart:
    """Return a chart of a figure over rounds, with one line for each value of the column `by`.

    Lines differ in colour and in their dashes.

    Args:
        rows: Rows with `round`, `value` and the column `by`. Rows with `low` and `high` also get a
            band.
        by: Column that lines are distinguished by, such as "share".
        order: Values of that column in the order of the legend.
        title: Title of the chart.
        value_title: Title of the vertical axis.
        is_rate: True: values are fractions that are shown in percent.
    """
    alt = load_altair()
    drawn, note = thinned(rows)
    format = ".1%" if is_rate else ".4~g"
    title_params = alt.TitleParams(title, subtitle=[note] if note else [], anchor="start")
    numbers = [row["round"] for row in drawn]
    ticks = min(10, max(1, max(numbers) - min(numbers)))  # Few rounds have no halves as ticks.
    rounds = alt.X("round:Q", title="round", axis=alt.Axis(format="d", tickCount=ticks))
    scale = alt.Scale(domain=list(order), range=list(COLOURS))
    colour = alt.Color(
        f"{by}:N", scale=scale, legend=alt.Legend(symbolType="stroke", symbolOpacity=1)
    )
    base = alt.Chart(alt.Data(values=drawn), title=title_params).encode(x=rounds, color=colour)
    value = alt.Y(
        "value:Q", title=value_title, axis=alt.Axis(format=format), scale=alt.Scale(zero=False)
    )
    lines = base.mark_line().encode(
        y=value,
        strokeDash=alt.StrokeDash(f"{by}:N", sort=list(order), legend=None),
        tooltip=[
            alt.Tooltip(f"{by}:N"),
            alt.Tooltip("round:Q"),
            alt.Tooltip("value:Q", format=format, title=value_title),
        ],
    )
    points = base.mark_circle(size=24, opacity=1).encode(y=value)
    layers = [lines, points]
    if any("low" in row for row in drawn):
        band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q"), y2="high:Q")
        layers.insert(0, band)
    chart: altair.LayerChart = alt.layer(*layers).properties(width=480, height=280)
    return chart


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
    return curves(
        named,
        by="share",
        order=list(names.values()),
        title=title,
        value_title=metric,
        is_rate=is_rate,
    )
