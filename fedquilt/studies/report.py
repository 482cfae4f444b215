"""Tables of a comparison over seeds, and the same numbers as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.milestones import check_target
from fedquilt.runs.summaries import (
    NOTHING,
    UNDER_ATTACK,
    domains_of,
    figure_text,
    labels_of,
    members_of,
    share_label,
    target_text,
)
from fedquilt.studies.frames import metric_names
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import (
    Cost,
    Spread,
    Verdict,
    best_entry,
    by_entry,
    check_alike,
    cost_to_percentages,
    cost_to_target,
    missing_seeds,
    run_notes,
    seeds_text,
    values_by_seed,
)
from fedquilt.studies.table import Cell, Table
from fedquilt.units import amount, size

Show = Callable[[float], str]  # Formats a number.


def comparison(
    results: Iterable[Result],
    *,
    seeds: Iterable[int] = (),
    metric: str = "",
    target: float | None = None,
    baseline: str = "",
) -> list[Table]:
    """Return the tables that compare the rows of a study.

    The first table has a row for each entry: a metric at every share as mean ± sample deviation
    over seeds, and what it cost. Then come the cost to a target, the widest share's metric by
    domain where there are domains, the cost to percentages of a baseline's best figure, and the
    sizes of devices.

    Args:
        results: Runs of all rows.
        seeds: Seeds that were planned. Notes name those that a row lacks. Empty: all seeds that
            any row has.
        metric: Name of the metric. Empty: the main one.
        target: Value of the metric for which rounds and bytes are shown. None: no such table.
        baseline: Row whose best main figure the cost tables refer to. Empty: no cost tables.

    Raises:
        ConfigError: There are no runs, they cannot be compared, no run recorded the metric, or no
            row has the baseline's name.
    """
    compared = _Comparison.of(results, seeds, metric, target, baseline)
    return [
        compared.main_table(),
        *compared.target_tables(),
        *compared.domain_tables(),
        *compared.cost_tables(),
        *compared.size_tables(),
    ]


def to_json(
    results: Iterable[Result],
    *,
    seeds: Iterable[int] = (),
    metric: str = "",
    target: float | None = None,
    baseline: str = "",
) -> dict[str, Any]:
    """Return the numbers of a comparison as plain values.

    `entries` has for each row the metric by share (mean, deviation, count and values by seed), the
    costs, and seeds that are missing or diverged. `verdicts` has for each share the marked row, or
    null, and the reason.

    Args:
        results: Runs of all rows.
        seeds: Seeds that were planned. Empty: all seeds that any row has.
        metric: Name of the metric. Empty: the main one.
        target: Value of the metric for which costs are included. None: no such costs.
        baseline: Row whose best main figure the costs refer to. Empty: no such costs.
    """
    return _Comparison.of(results, seeds, metric, target, baseline).plain()


# --- a comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """Rows that can be compared, and the request. Arguments are those of `comparison`."""

    rows: Mapping[str, Sequence[Result]]
    seeds: tuple[int, ...]
    metric: str  # Name of the metric, never empty.
    target: float | None
    baseline: str

    @staticmethod
    def of(
        results: Iterable[Result],
        seeds: Iterable[int],
        metric: str,
        target: float | None,
        baseline: str,
    ) -> _Comparison:
        """Check the runs and the request, and return the comparison.

        Args:
            results: Runs of all rows.
            seeds: Seeds that were planned. Empty: all seeds that any row has.
            metric: Name of the metric. Empty: the main one.
            target: Value of the metric for which costs are shown. None: none are.
            baseline: Row whose best main figure the cost tables refer to. Empty: no cost tables.
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
        return _Comparison(rows, tuple(sorted(planned)), name, target, baseline)

    @cached_property
    def runs(self) -> list[Result]:
        return [result for runs in self.rows.values() for result in runs]

    @cached_property
    def percent(self) -> bool:
        return self.runs[0].is_in_percent(self.metric)

    @cached_property
    def shares(self) -> list[str]:
        """Return all shares that have the metric, in the order of the first row."""
        return list(dict.fromkeys(s for result in self.runs for s in result.metric(self.metric)))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return the name of each share in tables."""
        named = {
            share: label
            for result in self.runs
            for share, label in labels_of(result.summary).items()
        }
        return {share: share_label(share, named) for share in self.shares}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Return the row that is marked at each share, or why none is."""
        higher = self.runs[0].prefers_higher(self.metric)
        show = _points if self.percent else "{:.4g}".format
        verdicts: dict[str, Verdict] = {}
        for share in self.shares:
            values = {
                name: values_by_seed(runs, share, self.metric) for name, runs in self.rows.items()
            }
            verdicts[share] = best_entry(values, higher, show)
        return verdicts

    @cached_property
    def target_costs(self) -> dict[str, dict[str, Cost]]:
        """Return the cost to the target by row and then by share; empty without a target."""
        if self.target is None:
            return {}
        return {
            name: cost_to_target(runs, self.target, self.metric) for name, runs in self.rows.items()
        }

    @cached_property
    def baseline_costs(self) -> dict[str, dict[float, Cost]]:
        """Return the cost by row and then by percentage.

        Empty: there is no baseline, or it was never evaluated.
        """
        return cost_to_percentages(self.runs, self.baseline) if self._has_baseline else {}

    @cached_property
    def _has_baseline(self) -> bool:
        """Return True if a run of the baseline was evaluated. One that diverges at once is not."""
        return any(result.best_figure is not None for result in self.rows.get(self.baseline, ()))

    def spread(self, name: str, share: str, metric: str) -> Spread | None:
        """Return mean and deviation of a metric of a row. None: no run has the figure.

        Args:
            name: Name of the row.
            share: Share of the model, as a summary names it.
            metric: Name of the metric.
        """
        return _spread(values_by_seed(self.rows[name], share, metric).values())

    # --- tables ----------------------------------------------------------------------------------

    def main_table(self) -> Table:
        """Return the metric at every share, and the costs."""
        rows: list[list[Cell | str]] = []
        for name, runs in self.rows.items():
            figures = [
                Cell(
                    _spread_text(self.spread(name, share, self.metric), self.percent),
                    self.verdicts[share].entry == name,
                )
                for share in self.shares
            ]
            totals = [_mean_text(runs, total, show) for total, show in self._totals.values()]
            rows.append([name, *figures, *totals, *self._widest_costs(name)])
        head = ["method", *self.labels.values(), *self._totals]
        if self.target is not None:
            reached = target_text(self.target, self.metric, self.percent)
            head += [f"rounds to {reached}", f"bytes to {reached}"]
        return Table(self._title(), head, rows, self._notes())

    def _widest_costs(self, name: str) -> list[str]:
        """Return the rounds and bytes until the widest share had the target, if there is one.

        The other shares are in `target_tables`, because all of them would make this table too wide.
        """
        if self.target is None:
            return []
        widest = max(self.shares, key=float)
        cost = self.target_costs[name].get(widest, Cost({}))
        columns = [self._target_columns[title] for title in ("rounds", "bytes")]
        return [cost.shown(mean(cost), show) for mean, show in columns]

    @property
    def _has_clock(self) -> bool:
        return any("link_seconds" in result.summary for result in self.runs)

    @cached_property
    def _totals(self) -> dict[str, tuple[Callable[[Result], float | None], Show]]:
        """Return the columns of costs: a function for the number of a run, and its format."""
        totals: dict[str, tuple[Callable[[Result], float | None], Show]] = {
            "to clients": (lambda result: result.summary.get("bytes_down"), size),
            "back": (lambda result: result.summary.get("bytes_up"), size),
            "client MACs": (lambda result: result.macs, amount),
            "seconds": (lambda result: result.summary.get("seconds"), "{:.1f}".format),
        }
        if self._has_clock:
            totals["over the link"] = (
                lambda result: result.summary.get("link_seconds"),
                "{:,.1f} s".format,
            )
        if any("late" in result.summary for result in self.runs):
            totals["late"] = (lambda result: result.summary.get("late"), _count)
        return totals

    def _title(self) -> str:
        better = "" if self.runs[0].prefers_higher(self.metric) else " (lower is better)"
        if len(self.seeds) == 1:
            return f"{self.metric}{better}, seed {self.seeds[0]}"
        return f"{self.metric}{better}, mean ± sample deviation over {len(self.seeds)} seeds"

    @cached_property
    def _target_columns(self) -> dict[str, tuple[Callable[[Cost], float | None], Show]]:
        """Return the costs to a target: the number, and how it is shown.

        Where the link has a clock, there is also the time that the rounds would take over it.
        """
        columns: dict[str, tuple[Callable[[Cost], float | None], Show]] = {
            "rounds": (lambda cost: cost.rounds, _count),
            "bytes": (lambda cost: cost.bytes, size),
        }
        if self._has_clock:
            columns["over the link"] = (lambda cost: cost.link_seconds, "{:,.1f} s".format)
        return columns

    def target_tables(self) -> list[Table]:
        """Return the cost of reaching the target for each row and share, if there is a target.

        It is a table of its own, because columns for every share would make the first one too wide.
        """
        if self.target is None:
            return []
        rows: list[list[str]] = []
        for name in self.rows:
            for share, label in self.labels.items():
                cost = self.target_costs[name].get(share, Cost({}))
                cells = [
                    cost.shown(mean(cost), show) for mean, show in self._target_columns.values()
                ]
                rows.append([name, label, *cells])
        reached = target_text(self.target, self.metric, self.percent)
        title = f"cost until a share first had {reached}"
        return [
            Table(
                title,
                ["method", "share", *self._target_columns],
                rows,
                ["Means over the seeds that had it."],
            )
        ]

    def _notes(self) -> list[str]:
        notes = self._verdict_notes()
        if self.baseline and not self._has_baseline:
            notes.append(
                f"The baseline {self.baseline} has no evaluated round, so that nothing can be "
                "compared with its best."
            )
        for name, runs in self.rows.items():
            notes += run_notes(name, runs, self.seeds)
        for name, runs in self.rows.items():
            texts = dict.fromkeys(result.summary.get("note") for result in runs)
            notes += [f"{name}: {text}" for text in texts if text]
        return notes

    def _verdict_notes(self) -> list[str]:
        """Return notes on the rows that are marked at each share, one note for each reason."""
        by_reason: dict[str, list[str]] = {}
        for share, verdict in self.verdicts.items():
            outcome = "nothing is marked"
            if verdict.entry is not None:
                outcome = f"{verdict.entry} is marked as best"
            reason = f"{outcome} because {verdict.reason}."
            by_reason.setdefault(reason, []).append(self.labels[share])
        if len(by_reason) == 1:
            (reason,) = by_reason
            return [reason.replace("nothing is marked", "Nothing is marked", 1)]
        return [
            f"Share{'s'[: len(labels) != 1]} {', '.join(labels)}: {reason}"
            for reason, labels in by_reason.items()
        ]

    def domain_tables(self) -> list[Table]:
        """Return the widest share's metric by domain, if there are domains."""
        if self.metric in UNDER_ATTACK:  # The part behind a slash is a robustness there.
            return []
        domains = dict.fromkeys(
            domain for result in self.runs for domain in domains_of(result.summary, self.metric)
        )
        if not domains:
            return []
        widest = max(self.shares, key=float)
        rows = [
            [
                name,
                *(
                    _spread_text(self.spread(name, widest, f"{self.metric}/{domain}"), self.percent)
                    for domain in domains
                ),
            ]
            for name in self.rows
        ]
        title = f"{self.metric} by domain, share {self.labels[widest]}"
        return [Table(title, ["method", *domains], rows)]

    def cost_tables(self) -> list[Table]:
        """Return rounds, bytes and multiply-adds to percentages of the baseline's best figure."""
        if not self._has_baseline:
            return []
        main = self.runs[0].main
        notes = [
            f"First evaluated round in which the widest model has this part of the best {main} of "
            f"{self.baseline}'s run with the same seed; means over the seeds that have it."
        ]
        missing = missing_seeds(self.rows[self.baseline], [result.seed for result in self.runs])
        if missing:
            notes.append(
                f"{self.baseline} has no run of {seeds_text(missing)}; its mean best is used there."
            )
        costs: dict[str, tuple[Callable[[Cost], float | None], Show]] = {
            "rounds": (lambda cost: cost.rounds, _count),
            "bytes": (lambda cost: cost.bytes, size),
            "client MACs": (lambda cost: cost.macs, amount),
        }
        percentages = next(iter(self.baseline_costs.values()))
        head = ["method", *(f"{percentage:g}%" for percentage in percentages)]
        tables: list[Table] = []
        for title, (mean, show) in costs.items():
            rows = [
                [name, *(cost.shown(mean(cost), show) for cost in by_percentage.values())]
                for name, by_percentage in self.baseline_costs.items()
            ]
            long_title = f"{title} to a percentage of the best {main} of {self.baseline}"
            tables.append(Table(long_title, head, rows))
        tables[-1] = replace(tables[-1], notes=notes)
        return tables

    def size_tables(self) -> list[Table]:
        """Return the sizes of devices, with one table for all rows that have the same sizes."""
        rows_by_members: dict[str, list[str]] = {}  # Names of rows by their members.
        for name, runs in self.rows.items():
            if members_of(runs[0].summary):
                rows_by_members.setdefault(json.dumps(members_of(runs[0].summary)), []).append(name)
        tables: list[Table] = []
        for names in rows_by_members.values():
            members = members_of(self.rows[names[0]][0].summary)
            columns = list(next(iter(members.values())))
            rows = [
                [share, *(f"{member[column]:,}" for column in columns)]
                for share, member in members.items()
            ]
            title = "sizes" if len(rows_by_members) == 1 else f"sizes ({', '.join(names)})"
            tables.append(Table(title, ["share", *columns], rows))
        return tables

    # --- plain values ----------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return all numbers as values that JSON has."""
        request: dict[str, Any] = {}
        if self.target is not None:
            request["target"] = self.target
        if self.baseline:
            request["baseline"] = self.baseline
        return {
            "metric": self.metric,
            "higher_is_better": self.runs[0].prefers_higher(self.metric),
            "percent": self.percent,
            "seeds": list(self.seeds),
            **request,
            "entries": {name: self._plain_entry(name) for name in self.rows},
            "verdicts": {
                share: {
                    "entry": verdict.entry,
                    "reason": verdict.reason,
                    "difference": verdict.difference and verdict.difference.mean,
                    "error": verdict.difference and verdict.difference.error,
                }
                for share, verdict in self.verdicts.items()
            },
        }

    def _plain_entry(self, name: str) -> dict[str, Any]:
        runs = self.rows[name]
        domains = dict.fromkeys(
            domain for result in runs for domain in domains_of(result.summary, self.metric)
        )
        has_deadline = any("late" in result.summary for result in runs)
        entry = {
            "figures": self._plain_figures(runs, self.metric),
            "domains": {d: self._plain_figures(runs, f"{self.metric}/{d}") for d in domains},
            "bytes_down": _plain_spread({r.seed: r.summary.get("bytes_down") for r in runs}),
            "bytes_up": _plain_spread({r.seed: r.summary.get("bytes_up") for r in runs}),
            "macs": _plain_spread({r.seed: r.macs for r in runs}),
            "seconds": _plain_spread({r.seed: r.summary.get("seconds") for r in runs}),
            **(
                {"late": _plain_spread({r.seed: r.summary.get("late") for r in runs})}
                if has_deadline
                else {}
            ),
            "members": dict(runs[0].summary.get("members", {})),
            "missing_seeds": missing_seeds(runs, self.seeds),
            "diverged": {str(r.seed): r.diverged for r in runs if r.diverged is not None},
        }
        if self.target is not None:
            costs = self.target_costs[name]
            entry["to_target"] = {share: _plain_cost(cost) for share, cost in costs.items()}
        if self._has_baseline:
            entry["to_baseline"] = {
                f"{percentage:g}": _plain_cost(cost)
                for percentage, cost in self.baseline_costs[name].items()
            }
        return entry

    def _plain_figures(self, runs: Sequence[Result], metric: str) -> dict[str, Any]:
        figures = {share: values_by_seed(runs, share, metric) for share in self.shares}
        return {share: _plain_spread(by_seed) for share, by_seed in figures.items() if by_seed}


def _check_comparable(runs: Sequence[Result]) -> None:
    """Refuse an empty list, and runs of different data or tasks."""
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


# --- numbers as text ----------------------------------------------------------------------------


def _spread(values: Iterable[float]) -> Spread | None:
    numbers = list(values)
    return Spread.of(numbers) if numbers else None


def _spread_text(spread: Spread | None, percent: bool) -> str:
    """Return `61.2 ± 0.8%`, or with four significant digits where it is not a rate."""
    if spread is None:
        return NOTHING
    if spread.deviation is None:
        return figure_text(spread.mean, percent)
    if percent:
        return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}%"
    return f"{spread.mean:.4g} ± {spread.deviation:.2g}"


def _mean_text(runs: Iterable[Result], number: Callable[[Result], float | None], show: Show) -> str:
    """Return the mean over the runs that have a number."""
    numbers = [number(result) for result in runs]
    spread = _spread(value for value in numbers if value is not None)
    return NOTHING if spread is None else show(spread.mean)


def _points(difference: float) -> str:
    return f"{100 * difference:.2f} points"


def _count(mean: float) -> str:
    return f"{mean:,.1f}".removesuffix(".0")


def _plain_spread(by_seed: Mapping[int, float | None]) -> dict[str, Any] | None:
    values = {seed: value for seed, value in by_seed.items() if value is not None}
    if not values:
        return None
    by_name = {str(seed): value for seed, value in values.items()}
    return {**asdict(Spread.of(values.values())), "by_seed": by_name}


def _plain_cost(cost: Cost) -> dict[str, Any]:
    return {
        "rounds": cost.rounds,
        "bytes": cost.bytes,
        "macs": cost.macs,
        "link_seconds": cost.link_seconds,
        "reached": len(cost.reached),
        "count": len(cost.by_seed),
        "by_seed": {
            str(seed): milestone and asdict(milestone) for seed, milestone in cost.by_seed.items()
        },
    }
