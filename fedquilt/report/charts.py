"""Charts from plain rows. Each function returns an Altair chart with its rows inside.

Colours are those of Okabe and Ito, and viridis, which colour-blind people can tell apart. Lines and
points also differ in their shape. Columns have fixed names, so that names in the data never become
part of an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fedquilt.display.curves import (
    COLORS,
    TITLES,
    chart_of,
    color_of,
    names_of,
    value_axis,
)
from fedquilt.display.thinning import Row

GRAY = "#8C8C8C"
PICTURE_SIDE = 96  # Pixels of a picture of a mask
PICTURE_GAP = 8  # Pixels between two of them


def _share_shape(rows: Sequence[Row]) -> Any:
    """Return a shape for every share, with a legend that is visible on light and dark pages."""
    return alt.Shape(
        "share:N",
        legend=alt.Legend(title="share", symbolFillColor=GRAY, symbolStrokeColor=GRAY),
        scale=alt.Scale(domain=names_of(rows, "share")),
        sort=None,
    )


def quilt(
    rows: Sequence[Row],
    axis: str,
    color: str = "times",
    classes: Sequence[str] = (),
    size: int = 0,
) -> alt.Chart:
    """Return a quilt: the positions of an axis that each round trained.

    Args:
        rows: Cells with `first` and `last` round, `start` and `stop` position, `times` (mean number
            of clients a round that trained it) and `smallest` (the smallest budget of these).
        axis: Name of the axis, for the title.
        color: `times` or `smallest`.
        classes: Budgets from the smallest on, for the legend of `smallest`.
        size: Number of positions of the axis, which are all drawn. 0: up to the last trained.
    """
    if color == "times":
        shade = alt.Color(
            "times:Q",
            title="clients a round",
            scale=alt.Scale(scheme="viridis", domainMin=0),
        )
    else:
        shade = color_of("smallest", list(classes) or names_of(rows, "smallest"), "smallest budget")
    positions = alt.Scale(reverse=True, nice=False)
    if size:
        positions.domain = [0, size]
    return (
        chart_of(rows)
        .transform_calculate(before="datum.first - 0.5", after="datum.last + 0.5")
        .mark_rect(strokeWidth=0)
        .encode(
            x=_rounds("before"),
            x2="after:Q",
            y=alt.Y(
                "start:Q",
                title=f"position on axis {axis}",
                scale=positions,
                axis=alt.Axis(grid=False, tickMinStep=1),
            ),
            y2="stop:Q",
            color=shade,
            tooltip=["first:Q", "last:Q", "start:Q", "stop:Q", "times:Q", "smallest:N"],
        )
    )


def fleet(rows: Sequence[Row]) -> alt.Chart:
    """Return bars of the number of clients by budget, from rows with `budget` and `clients`."""
    return (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("clients:Q", title="clients", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("budget:N", title="budget", sort=None),
            color=alt.value(COLORS[0]),
            tooltip=["budget:N", "clients:Q"],
        )
        .properties(height=max(60, 28 * len(rows)))
    )


def samples(rows: Sequence[Row]) -> alt.Chart:
    """Return the samples of clients by class, from rows with `client`, `label` and `samples`."""
    return (
        chart_of(rows)
        .mark_rect()
        .encode(
            x=alt.X("client:O", title="client", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("label:N", title="class", sort=None),
            color=alt.Color("samples:Q", title="samples", scale=alt.Scale(scheme="viridis")),
            tooltip=["client:O", "label:N", "samples:Q"],
        )
    )


def participation(rows: Sequence[Row]) -> alt.Chart:
    """Return stacked bars of clients a round by what became of them.

    Args:
        rows: Rows with `first`, `last`, `fate` and `clients`, as `tables.participation_rows`.
    """
    return _bars_by_round(rows, "clients", "clients a round", "fate")


def lost(rows: Sequence[Row]) -> alt.Chart:
    """Return the part of all planned positions that the link lost, by round.

    Args:
        rows: Rows with `first`, `last` and `lost`, a share in [0, 1].
    """
    return _bars_by_round(rows, "lost", "part of positions lost", "")


def costs(rows: Sequence[Row], title: str) -> alt.Chart:
    """Return bars of mean costs a round.

    Args:
        rows: Rows with `first`, `last`, `cost` and `amount`, all with the same unit.
        title: Title of the vertical axis.
    """
    return _bars_by_round(rows, "amount", f"{title} a round", "cost")


def _bars_by_round(
    rows: Sequence[Row], field: str, title: str, color: str, stacked: bool = True
) -> alt.Chart:
    """Return bars by round, one series for each value of the column `color`.

    Args:
        rows: Rows with `first` and `last` round and the field.
        field: Column of the numbers.
        title: Title of the vertical axis.
        color: Column that tells series apart. Empty: there is one.
        stacked: True: series are on top of each other. False: each begins at zero.
    """
    chart = chart_of(rows).transform_calculate(before="datum.first - 0.5", after="datum.last + 0.5")
    if stacked:
        chart = chart.transform_stack(stack=field, as_=["low", "high"], groupby=["first"])
    else:
        chart = chart.transform_calculate(low="0", high=f"datum.{field}")
    percent = alt.Axis(format="%") if field == "lost" else alt.Axis(format="~s")
    shown = ["first:Q", "last:Q", f"{field}:Q"]
    names = names_of(rows, color) if color else []
    return chart.mark_rect(opacity=1.0 if stacked else 0.7).encode(
        x=_rounds("before"),
        x2="after:Q",
        y=alt.Y("low:Q", title=title, axis=percent, scale=alt.Scale(zero=True)),
        y2="high:Q",
        color=color_of(color, names, TITLES.get(color, color)) if color else alt.value(COLORS[0]),
        tooltip=[*shown, f"{color}:N"] if color else shown,
    )


def _rounds(field: str) -> alt.X:
    """Return a horizontal position for rounds, with ticks at whole numbers."""
    return alt.X(
        f"{field}:Q",
        title="round",
        scale=alt.Scale(zero=False, nice=False),
        axis=alt.Axis(grid=False, tickMinStep=1, format="~d"),
    )


def pareto(
    rows: Sequence[Row], metric: str, cost_title: str, percent: bool = True
) -> alt.LayerChart:
    """Return a metric against a cost, with the Pareto front as a line.

    Args:
        rows: Points with `entry`, `share`, `value`, `cost` and `front`, as `tables.pareto_rows`.
        metric: Name of the metric.
        cost_title: Title of the horizontal axis.
        percent: True if the metric is a rate.
    """
    ticks = alt.Axis(format="~s", labelOverlap=True, tickCount=6)
    x = alt.X("cost:Q", title=cost_title, axis=ticks, scale=alt.Scale(zero=False))
    front = (
        chart_of(rows)
        .transform_filter("datum.front")
        .mark_line(color=GRAY, strokeDash=[4, 3], interpolate="step-after")
        .encode(x=x, y=value_axis(metric, percent), order="cost:Q")
    )
    points = (
        chart_of(rows)
        .mark_point(size=90, filled=True, opacity=1)
        .encode(
            x=x,
            y=value_axis(metric, percent),
            color=color_of("entry", names_of(rows, "entry"), "method"),
            shape=_share_shape(rows),
            strokeWidth=alt.condition("datum.front", alt.value(2), alt.value(0)),
            stroke=alt.value(GRAY),
            tooltip=["entry:N", "share:N", "value:Q", "cost:Q", "front:N", "seeds:Q"],
        )
    )
    return alt.layer(front, points)


def robustness(rows: Sequence[Row], percent: bool = True) -> alt.Chart:
    """Return robust against standard figures, from rows as `tables.robust_rows` returns them.

    Args:
        rows: Points with `entry`, `share`, `standard` and `robust`.
        percent: True if the figures are rates.
    """
    axis = alt.Axis(format=".0%") if percent else alt.Axis(format="~g")
    return (
        chart_of(rows)
        .mark_point(size=90, filled=True, opacity=1)
        .encode(
            x=alt.X("standard:Q", title="standard", axis=axis, scale=alt.Scale(zero=False)),
            y=alt.Y("robust:Q", title="robust", axis=axis, scale=alt.Scale(zero=False)),
            color=color_of("entry", names_of(rows, "entry"), "method"),
            shape=_share_shape(rows),
            tooltip=["entry:N", "share:N", "standard:Q", "robust:Q"],
        )
    )


def bars(
    rows: Sequence[Row], metric: str, series: str = "entry", percent: bool = True
) -> alt.Chart:
    """Return grouped bars of a metric by share, with one bar for each series.

    Args:
        rows: Rows with `share`, `value` and the column `series`.
        metric: Name of the metric.
        series: Column that tells bars apart.
        percent: True if the metric is a rate.
    """
    axis = alt.Axis(format=".0%") if percent else alt.Axis(format="~g")
    names = names_of(rows, series)
    return (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=alt.X("share:N", title="share", sort=None, axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset(f"{series}:N", sort=None, scale=alt.Scale(domain=names)),
            y=alt.Y("value:Q", title=metric, axis=axis),
            color=color_of(series, names, TITLES.get(series, series)),
            tooltip=["share:N", f"{series}:N", "value:Q"],
        )
    )


def growth(rows: Sequence[Row]) -> alt.Chart:
    """Return the size of a growing model by round, from `first`, `last` and `params` of rows."""
    color = "entry" if any("entry" in row for row in rows) else ""
    return _bars_by_round(rows, "params", "parameters of the model", color, stacked=False)


def pictures(rows: Sequence[Row], columns: Sequence[str], num_rows: int) -> alt.Chart:
    """Return pictures side by side, from rows with `sample`, `column` and the address `url`.

    Args:
        rows: One row for each picture.
        columns: Titles of the columns, from left to right.
        num_rows: Number of rows of pictures.
    """
    across = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)
    side = alt.expr(
        f"min({PICTURE_SIDE}, bandwidth('x') - 4)"
    )  # A narrow page has smaller pictures.
    return (
        chart_of(rows)
        .mark_image(width=side, height=side)
        .encode(
            x=alt.X("column:N", title=None, scale=alt.Scale(domain=list(columns)), axis=across),
            y=alt.Y("sample:O", title="test sample", axis=alt.Axis(labelAngle=0)),
            url="url:N",
            tooltip=["sample:O", "column:N"],
        )
        .properties(
            width=len(columns) * (PICTURE_SIDE + PICTURE_GAP),
            height=num_rows * (PICTURE_SIDE + PICTURE_GAP),
        )
    )
