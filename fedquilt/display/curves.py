"""The chart of a metric along an axis, as Altair makes it.

`run.plot`, `study.plot` and the pages of `fedquilt report` share it. Altair is imported when a
chart is made, because it is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedquilt.display.thinning import Row, plain
from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install

if TYPE_CHECKING:
    import altair

# Okabe and Ito 2008. Black is left out, because it cannot be seen on a dark page.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#B8A800")
WIDTH = 640
HEIGHT = 300
TITLES = {"entry": "method"}  # Titles of columns in legends, where they differ


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


def chart_of(rows: Sequence[Row], title: str = "") -> altair.Chart:
    """Return a chart without marks that has the rows inside.

    Args:
        rows: Rows of the chart. Numbers that JSON cannot hold become None.
        title: Title of the chart. Empty: none.
    """
    alt = load_altair()
    chart: altair.Chart = alt.Chart(alt.Data(values=plain(rows)), width=WIDTH, height=HEIGHT)
    return chart.properties(title=title) if title else chart


def value_axis(metric: str, percent: bool, field: str = "value") -> Any:
    """Return the vertical position for a metric, which need not begin at zero.

    Args:
        metric: Name of the metric, as the title of the axis.
        percent: True if the metric is a rate, which is shown in percent.
        field: Column of the values.
    """
    alt = load_altair()
    axis = alt.Axis(format=".0%") if percent else alt.Axis(format="~g")
    return alt.Y(f"{field}:Q", title=metric, axis=axis, scale=alt.Scale(zero=False))


def color_of(field: str, names: Sequence[Any], title: str) -> Any:
    """Return the colours of the values of a column, with a legend.

    Args:
        field: Column of the names.
        names: Its values, in the order of the legend.
        title: Title of the legend.
    """
    alt = load_altair()
    colors = [COLORS[index % len(COLORS)] for index in range(len(names))]
    return alt.Color(
        f"{field}:N",
        legend=alt.Legend(title=title, symbolOpacity=1),  # That of a band would be pale.
        scale=alt.Scale(domain=list(names), range=colors),
        sort=None,
    )


def names_of(rows: Sequence[Row], field: str) -> list[Any]:
    """Return the different values of a column, in the order of the rows."""
    return list(dict.fromkeys(row[field] for row in rows))


def curves(
    rows: Sequence[Row],
    metric: str,
    x: str = "round",
    x_title: str = "round",
    series: str = "share",
    percent: bool = True,
) -> altair.LayerChart:
    """Return curves of a metric, one for each series, with a band where rows have `low` and `high`.

    Curves differ in colour, and their points in shape.

    Args:
        rows: Points with `value`, the columns `x` and `series`, and maybe `low` and `high`. All of
            them are drawn.
        metric: Name of the metric, for the axis.
        x: Column on the horizontal axis.
        x_title: Title of that axis.
        series: Column that tells curves apart.
        percent: True if the metric is a rate.
    """
    alt = load_altair()
    names = names_of(rows, series)
    title = TITLES.get(series, series)
    axis = alt.Axis(format="~s")
    if x == "round":
        axis = alt.Axis(format="~d", tickMinStep=1)
    base = chart_of(rows).encode(
        x=alt.X(f"{x}:Q", title=x_title, axis=axis, scale=alt.Scale(zero=False)),
        color=color_of(series, names, title),
    )
    shown = alt.Tooltip("value:Q", format=".2%" if percent else ".4g", title=metric)
    lines = base.mark_line(point=False, strokeWidth=2).encode(y=value_axis(metric, percent))
    points = base.mark_point(size=40, filled=True, opacity=1).encode(
        y=value_axis(metric, percent),
        shape=alt.Shape(f"{series}:N", title=title, scale=alt.Scale(domain=names), sort=None),
        tooltip=[f"{series}:N", alt.Tooltip(f"{x}:Q", title=x_title), shown],
    )
    layers = [lines, points]
    if any("low" in row and row["low"] != row["high"] for row in rows):
        band = base.mark_area(opacity=0.18).encode(
            y=value_axis(metric, percent, "low"), y2=alt.Y2("high:Q")
        )
        layers.insert(0, band)
    chart: altair.LayerChart = alt.layer(*layers)
    return chart
