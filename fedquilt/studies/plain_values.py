"""Numbers of a comparison as plain values, which JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedquilt.runs.summaries import (
    domains_of,
)
from fedquilt.studies.comparison import Comparison
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import (
    CostToTarget,
    Spread,
    missing_seeds,
    values_by_seed,
)


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
    costs, and seeds that are missing or diverged. `verdicts` has for each share the row that is
    marked as best, or null, and the reason.

    Args:
        results: Runs of all rows.
        seeds: Seeds that were planned. Empty: all seeds that any row has.
        metric: Name of the metric. Empty: the main one.
        target: Value of the metric. Costs until a row reaches it are included. None: no such costs.
        baseline: Row whose best main figure is another such target. Empty: no such costs.
    """
    return _plain(Comparison.of(results, seeds, metric, target, baseline))


def _plain(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers of a comparison as nested dictionaries and lists that JSON can hold."""
    request: dict[str, Any] = {}
    if comparison.target is not None:
        request["target"] = comparison.target
    if comparison.baseline:
        request["baseline"] = comparison.baseline
    return {
        "metric": comparison.metric,
        "higher_is_better": comparison.runs[0].prefers_higher(comparison.metric),
        "percent": comparison.percent,
        "seeds": list(comparison.seeds),
        **request,
        "entries": {name: _plain_entry(comparison, name) for name in comparison.rows},
        "verdicts": {
            share: {
                "entry": verdict.entry,
                "reason": verdict.reason,
                "difference": verdict.difference and verdict.difference.mean,
                "error": verdict.difference and verdict.difference.error,
            }
            for share, verdict in comparison.verdicts.items()
        },
    }


def _plain_entry(comparison: Comparison, name: str) -> dict[str, Any]:
    runs = comparison.rows[name]
    domains = dict.fromkeys(
        domain for result in runs for domain in domains_of(result.summary, comparison.metric)
    )
    has_deadline = any("late" in result.summary for result in runs)
    entry = {
        "figures": _plain_figures(comparison, runs, comparison.metric),
        "domains": {
            d: _plain_figures(comparison, runs, f"{comparison.metric}/{d}") for d in domains
        },
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
        "missing_seeds": missing_seeds(runs, comparison.seeds),
        "diverged": {str(r.seed): r.diverged for r in runs if r.diverged is not None},
    }
    if comparison.target is not None:
        costs = comparison.target_costs[name]
        entry["to_target"] = {share: _plain_cost(cost) for share, cost in costs.items()}
    if comparison.has_baseline:
        entry["to_baseline"] = {
            f"{percentage:g}": _plain_cost(cost)
            for percentage, cost in comparison.baseline_costs[name].items()
        }
    return entry


def _plain_figures(comparison: Comparison, runs: Sequence[Result], metric: str) -> dict[str, Any]:
    figures = {share: values_by_seed(runs, share, metric) for share in comparison.shares}
    return {share: _plain_spread(by_seed) for share, by_seed in figures.items() if by_seed}


def _plain_spread(by_seed: Mapping[int, float | None]) -> dict[str, Any] | None:
    values = {seed: value for seed, value in by_seed.items() if value is not None}
    if not values:
        return None
    by_name = {str(seed): value for seed, value in values.items()}
    return {**asdict(Spread.of(values.values())), "by_seed": by_name}


def _plain_cost(cost: CostToTarget) -> dict[str, Any]:
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
