"""Runs that are compared: checks, verdicts and costs over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.milestones import check_target
from fedquilt.runs.summaries import (
    labels_of,
    share_label,
)
from fedquilt.studies.frames import metric_names
from fedquilt.studies.number_text import (
    points_text,
    spread_of,
)
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import (
    CostToTarget,
    Spread,
    Verdict,
    best_entry,
    by_entry,
    check_alike,
    cost_to_percentages,
    cost_to_target,
    values_by_seed,
)


@dataclass(frozen=True)
class Comparison:
    """Rows that can be compared, and the request."""

    rows: Mapping[str, Sequence[Result]]  # Runs of each row, by the name of the row.
    seeds: tuple[int, ...]  # Seeds that were planned, ascending.
    metric: str  # Name of the metric, never empty.
    target: float | None  # Value of the metric for which costs are shown. None: none are.
    baseline: str  # Row whose best main figure the cost tables refer to. Empty: no cost tables.

    @staticmethod
    def of(
        results: Iterable[Result],
        seeds: Iterable[int],
        metric: str,
        target: float | None,
        baseline: str,
    ) -> Comparison:
        """Check the runs and the request, and return the comparison.

        Args:
            results: Runs of all rows.
            seeds: Seeds that were planned. Empty: all seeds that any row has.
            metric: Name of the metric. Empty: the main one.
            target: Value of the metric for which costs are shown. None: none are.
            baseline: Row whose best main figure the cost tables refer to. Empty: no cost tables.

        Raises:
            ConfigError: There are no runs, their data, tasks or main metrics differ, or the metric,
                target or baseline does not exist.
        """
        runs = list(results)
        _check_comparable(runs)
        name = metric or runs[0].main
        _check_metric(runs, name)
        if target is not None:
            check_target(target, name, runs[0].is_in_percent(name))
        rows = by_entry(runs)
        if baseline and baseline not in rows:
            raise ConfigError(f"the baseline {baseline!r} was asked for.{nearest(baseline, rows)}")
        planned = set(seeds) or {result.seed for result in runs}
        return Comparison(rows, tuple(sorted(planned)), name, target, baseline)

    @cached_property
    def runs(self) -> list[Result]:
        """Return the runs of all rows in one list, row by row."""
        return [result for runs in self.rows.values() for result in runs]

    @cached_property
    def percent(self) -> bool:
        """Return True if tables show the metric in percent."""
        return self.runs[0].is_in_percent(self.metric)

    @cached_property
    def shares(self) -> list[str]:
        """Return all shares that have the metric in any run, in the order of the first row.

        They are texts as summaries have them, such as "0.5".
        """
        return list(dict.fromkeys(s for result in self.runs for s in result.metric(self.metric)))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return the text that tables show for each share: a name by the method, or the number."""
        named = {
            share: label
            for result in self.runs
            for share, label in labels_of(result.summary).items()
        }
        return {share: share_label(share, named) for share in self.shares}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return for each share the row that is marked as best, or the reason why none is."""
        higher = self.runs[0].prefers_higher(self.metric)
        show = points_text if self.percent else "{:.4g}".format
        verdicts: dict[str, Verdict] = {}
        for share in self.shares:
            values = {
                name: values_by_seed(runs, share, self.metric) for name, runs in self.rows.items()
            }
            verdicts[share] = best_entry(values, higher, show)
        return verdicts

    @cached_property
    def target_costs(self) -> dict[str, dict[str, CostToTarget]]:
        """Return the cost to the target by row and then by share; empty without a target."""
        if self.target is None:
            return {}
        return {
            name: cost_to_target(runs, self.target, self.metric) for name, runs in self.rows.items()
        }

    @cached_property
    def baseline_costs(self) -> dict[str, dict[float, CostToTarget]]:
        """Return the cost to percentages of the baseline's best figure, by row and then percentage.

        Empty: there is no baseline, or it was never evaluated.
        """
        return cost_to_percentages(self.runs, self.baseline) if self.has_baseline else {}

    @cached_property
    def has_baseline(self) -> bool:
        """Return True if at least one run of the baseline has an evaluated round.

        A baseline that diverges at once has none. Without a baseline the result is False.
        """
        return any(result.best_figure is not None for result in self.rows.get(self.baseline, ()))

    def spread(self, name: str, share: str, metric: str) -> Spread | None:
        """Return mean and deviation over seeds of a metric of a row. None: no run has the figure.

        Args:
            name: Name of the row.
            share: Share of the model, as a summary names it.
            metric: Name of the metric.
        """
        return spread_of(values_by_seed(self.rows[name], share, metric).values())


def _check_comparable(runs: Sequence[Result]) -> None:
    """Refuse an empty list, and runs of different data, tasks or main metrics.

    Both are a `ConfigError`. A run whose summary names no data or task fits all others.
    """
    if not runs:
        raise ConfigError(
            "a comparison was asked for; there are no runs. Give at least one finished run."
        )
    properties: dict[str, dict[str, dict[str, None]]] = {"data": {}, "task": {}, "main metric": {}}
    for result in runs:
        values = (result.summary.get("data"), result.summary.get("task"), result.main)
        for by_value, value in zip(properties.values(), values, strict=True):
            if value is not None:  # Summaries of early versions do not name their task.
                by_value.setdefault(str(value), {})[result.entry] = None
    check_alike(properties)


def _check_metric(runs: Sequence[Result], metric: str) -> None:
    if any(result.metric(metric) for result in runs):
        return
    names = dict.fromkeys(name for result in runs for name in metric_names(result))
    raise ConfigError(
        f"the metric {metric!r} was asked for; no run has it.{nearest(metric, names)}"
    )
