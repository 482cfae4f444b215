"""Charts of a study: a metric over rounds, with the mean and the spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedquilt.display.thinning import Row
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.plot import metric_rows, titled
from fedquilt.studies.comparison import Comparison
from fedquilt.studies.result import Result

if TYPE_CHECKING:
    import altair


def study_chart(
    results: Sequence[Result], metric: str = "", share: float | None = None
) -> altair.LayerChart:
    """Return a chart with one line for each entry: the mean of a metric over seeds, by round.

    The band is the mean ± the sample deviation, where a round has several seeds. A round at which a
    seed has no number has no mean.

    Args:
        results: Runs that are finished.
        metric: Name of a metric. Empty: the task's main one.
        share: Share of the model that was evaluated. None: the widest one that all entries have.

    Raises:
        ConfigError: There are no runs, they cannot be compared, or none has the metric or share.
    """
    request = f"a chart of {metric or 'the main metric'} was asked for"
    if not results:
        raise ConfigError(f"{request}; no run of the study is finished.")
    compared = Comparison.of(results, (), metric, None, "")
    name = compared.metric
    rows_by_entry = {
        entry: [
            row
            for result in runs
            for row in metric_rows(result.records, name, f"{request} for {entry}")
        ]
        for entry, runs in compared.rows.items()
    }
    key = _share_key(rows_by_entry, share, request)
    rows: list[Row] = []
    for entry, entry_rows in rows_by_entry.items():
        rows += _means([row for row in entry_rows if row["share"] == key], entry)
    seeds = len({result.seed for result in results})
    title = f"share {float(key):g}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
    return titled(rows, name, "entry", compared.percent, title)


def _share_key(rows_by_entry: dict[str, list[Row]], share: float | None, request: str) -> str:
    """Return the key of a share that all entries have.

    Args:
        rows_by_entry: Rows with the key `share`, by the name of an entry.
        share: Share that was asked for. None: the widest one is returned.
        request: Beginning of an error, which says what the user asked for.

    Raises:
        ConfigError: Some entry has no figure for the share, or entries have no share in common.
    """
    keys = [{str(row["share"]) for row in rows} for rows in rows_by_entry.values()]
    common = sorted(set.intersection(*keys), key=float, reverse=True)
    if not common:
        raise ConfigError(f"{request}; the entries have no share in common.")
    if share is None:
        return common[0]
    for key in common:
        if float(key) == share:
            return key
    raise ConfigError(f"{request} at share {share:g}.{nearest(f'{share:g}', common)}")


def _means(rows: Sequence[Row], entry: str) -> list[Row]:
    """Return a row with `value`, and with `low` and `high` if there are several seeds, by round."""
    values_by_round: dict[int, list[float | None]] = {}
    for row in rows:
        values_by_round.setdefault(row["round"], []).append(row["value"])
    means: list[Row] = []
    for number, values in sorted(values_by_round.items()):
        figures = [value for value in values if value is not None]
        mean = math.nan if len(figures) < len(values) else statistics.fmean(figures)
        point: Row = {
            "entry": entry,
            "round": number,
            "value": mean if math.isfinite(mean) else None,
            "seeds": len(values),
        }
        if len(figures) > 1 and point["value"] is not None:
            deviation = statistics.stdev(figures)
            point |= {"low": mean - deviation, "high": mean + deviation}
        means.append(point)
    return means
