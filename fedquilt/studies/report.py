"""Tables of a comparison over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from fedquilt.runs.summaries import (
    UNDER_ATTACK,
    domains_of,
    members_of,
    target_text,
)
from fedquilt.studies.comparison import Comparison
from fedquilt.studies.number_text import (
    Show,
    count_text,
    mean_text,
    spread_text,
)
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import (
    CostToTarget,
    missing_seeds,
    run_notes,
    seeds_text,
)
from fedquilt.studies.table import Cell, Table
from fedquilt.units import amount, size


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
    compared = Comparison.of(results, seeds, metric, target, baseline)
    return [
        _main_table(compared),
        *_target_tables(compared),
        *_domain_tables(compared),
        *_cost_tables(compared),
        *_size_tables(compared),
    ]


def _main_table(comparison: Comparison) -> Table:
    """Return the table with one line per row of the study.

    Its columns are the metric at every share, mean costs, and the cost of the widest share to the
    target if there is one. The marked row of each share is set as best.
    """
    rows: list[list[Cell | str]] = []
    for name, runs in comparison.rows.items():
        figures = [
            Cell(
                spread_text(comparison.spread(name, share, comparison.metric), comparison.percent),
                comparison.verdicts[share].entry == name,
            )
            for share in comparison.shares
        ]
        totals = [mean_text(runs, total, show) for total, show in _totals(comparison).values()]
        rows.append([name, *figures, *totals, *_widest_costs(comparison, name)])
    head = ["method", *comparison.labels.values(), *_totals(comparison)]
    if comparison.target is not None:
        reached = target_text(comparison.target, comparison.metric, comparison.percent)
        head += [f"rounds to {reached}", f"bytes to {reached}"]
    return Table(_title(comparison), head, rows, _notes(comparison))


def _widest_costs(comparison: Comparison, name: str) -> list[str]:
    """Return two cells: the mean rounds and bytes until the widest share reached the target.

    Without a target the list is empty. The other shares are in `_target_tables`, because all of
    them would make this table too wide.

    Args:
        comparison: Rows and target.
        name: Name of the row.
    """
    if comparison.target is None:
        return []
    widest = max(comparison.shares, key=float)
    cost = comparison.target_costs[name].get(widest, CostToTarget({}))
    columns = [_target_columns(comparison)[title] for title in ("rounds", "bytes")]
    return [cost.shown(mean(cost), show) for mean, show in columns]


def _has_clock(comparison: Comparison) -> bool:
    return any("link_seconds" in result.summary for result in comparison.runs)


def _totals(comparison: Comparison) -> dict[str, tuple[Callable[[Result], float | None], Show]]:
    """Return the columns of costs by title: a function for the number of a run, and its format.

    Times over the link and late uploads have columns only if a run recorded them.
    """
    totals: dict[str, tuple[Callable[[Result], float | None], Show]] = {
        "to clients": (lambda result: result.summary.get("bytes_down"), size),
        "back": (lambda result: result.summary.get("bytes_up"), size),
        "client MACs": (lambda result: result.macs, amount),
        "seconds": (lambda result: result.summary.get("seconds"), "{:.1f}".format),
    }
    if _has_clock(comparison):
        totals["over the link"] = (
            lambda result: result.summary.get("link_seconds"),
            "{:,.1f} s".format,
        )
    if any("late" in result.summary for result in comparison.runs):
        totals["late"] = (lambda result: result.summary.get("late"), count_text)
    return totals


def _title(comparison: Comparison) -> str:
    better = "" if comparison.runs[0].prefers_higher(comparison.metric) else " (lower is better)"
    if len(comparison.seeds) == 1:
        return f"{comparison.metric}{better}, seed {comparison.seeds[0]}"
    return (
        f"{comparison.metric}{better}, mean ± sample deviation over {len(comparison.seeds)} seeds"
    )


def _target_columns(
    comparison: Comparison,
) -> dict[str, tuple[Callable[[CostToTarget], float | None], Show]]:
    """Return the columns of costs to a target by title: a function for the number, and its format.

    Where the link has a clock, there is also the time that the rounds would take over it.
    """
    columns: dict[str, tuple[Callable[[CostToTarget], float | None], Show]] = {
        "rounds": (lambda cost: cost.rounds, count_text),
        "bytes": (lambda cost: cost.bytes, size),
        "client MACs": (lambda cost: cost.macs, amount),
    }
    if _has_clock(comparison):
        columns["over the link"] = (lambda cost: cost.link_seconds, "{:,.1f} s".format)
    return columns


def _target_tables(comparison: Comparison) -> list[Table]:
    """Return one table of the cost to reach the target, by row and share. Empty: no target.

    It is a table of its own, because columns for every share would make the first one too wide.
    """
    if comparison.target is None:
        return []
    rows: list[list[str]] = []
    for name in comparison.rows:
        for share, label in comparison.labels.items():
            cost = comparison.target_costs[name].get(share, CostToTarget({}))
            cells = [
                cost.shown(mean(cost), show) for mean, show in _target_columns(comparison).values()
            ]
            rows.append([name, label, *cells])
    reached = target_text(comparison.target, comparison.metric, comparison.percent)
    title = f"cost until a share first had {reached}"
    return [
        Table(
            title,
            ["method", "share", *_target_columns(comparison)],
            rows,
            ["Means over the seeds that had it."],
        )
    ]


def _notes(comparison: Comparison) -> list[str]:
    notes = _verdict_notes(comparison)
    if comparison.baseline and not comparison.has_baseline:
        notes.append(
            f"The baseline {comparison.baseline} has no evaluated round, so that nothing can be "
            "compared with its best."
        )
    for name, runs in comparison.rows.items():
        notes += run_notes(name, runs, comparison.seeds)
    for name, runs in comparison.rows.items():
        texts = dict.fromkeys(result.summary.get("note") for result in runs)
        notes += [f"{name}: {text}" for text in texts if text]
    return notes


def _verdict_notes(comparison: Comparison) -> list[str]:
    """Return notes on the row that is marked at each share, or on the reason why none is.

    Shares with the same reason have a common note.
    """
    by_reason: dict[str, list[str]] = {}
    for share, verdict in comparison.verdicts.items():
        outcome = "nothing is marked"
        if verdict.entry is not None:
            outcome = f"{verdict.entry} is marked as best"
        reason = f"{outcome} because {verdict.reason}."
        by_reason.setdefault(reason, []).append(comparison.labels[share])
    if len(by_reason) == 1:
        (reason,) = by_reason
        return [reason.replace("nothing is marked", "Nothing is marked", 1)]
    return [
        f"Share{'s'[: len(labels) != 1]} {', '.join(labels)}: {reason}"
        for reason, labels in by_reason.items()
    ]


def _domain_tables(comparison: Comparison) -> list[Table]:
    """Return one table of the widest share's metric, by row and domain. Empty: no domains.

    Metrics of an evaluation under attack have no such table.
    """
    if comparison.metric in UNDER_ATTACK:  # The part behind a slash is a robustness there.
        return []
    domains = dict.fromkeys(
        domain
        for result in comparison.runs
        for domain in domains_of(result.summary, comparison.metric)
    )
    if not domains:
        return []
    widest = max(comparison.shares, key=float)
    rows = [
        [
            name,
            *(
                spread_text(
                    comparison.spread(name, widest, f"{comparison.metric}/{domain}"),
                    comparison.percent,
                )
                for domain in domains
            ),
        ]
        for name in comparison.rows
    ]
    title = f"{comparison.metric} by domain, share {comparison.labels[widest]}"
    return [Table(title, ["method", *domains], rows)]


def _cost_tables(comparison: Comparison) -> list[Table]:
    """Return three tables of the cost to reach percentages of the baseline's best main figure.

    They have rounds, bytes and client multiply-adds, with a column for each percentage. The list is
    empty without a baseline, or if no run of the baseline was evaluated.
    """
    if not comparison.has_baseline:
        return []
    main = comparison.runs[0].main
    notes = [
        f"First evaluated round in which the widest model has this part of the best {main} of "
        f"{comparison.baseline}'s run with the same seed; means over the seeds that have it."
    ]
    missing = missing_seeds(
        comparison.rows[comparison.baseline], [result.seed for result in comparison.runs]
    )
    if missing:
        notes.append(
            f"{comparison.baseline} has no run of {seeds_text(missing)}; its mean best is used "
            "there."
        )
    costs: dict[str, tuple[Callable[[CostToTarget], float | None], Show]] = {
        "rounds": (lambda cost: cost.rounds, count_text),
        "bytes": (lambda cost: cost.bytes, size),
        "client MACs": (lambda cost: cost.macs, amount),
    }
    percentages = next(iter(comparison.baseline_costs.values()))
    head = ["method", *(f"{percentage:g}%" for percentage in percentages)]
    tables: list[Table] = []
    for title, (mean, show) in costs.items():
        rows = [
            [name, *(cost.shown(mean(cost), show) for cost in by_percentage.values())]
            for name, by_percentage in comparison.baseline_costs.items()
        ]
        long_title = f"{title} to a percentage of the best {main} of {comparison.baseline}"
        tables.append(Table(long_title, head, rows))
    tables[-1] = replace(tables[-1], notes=notes)
    return tables


def _size_tables(comparison: Comparison) -> list[Table]:
    """Return the sizes of the members of each share, with a common table for rows of equal sizes.

    Only the first run of a row is read. Rows whose summary has no members are left out.
    """
    rows_by_members: dict[str, list[str]] = {}  # Names of rows by their members.
    for name, runs in comparison.rows.items():
        if members_of(runs[0].summary):
            rows_by_members.setdefault(json.dumps(members_of(runs[0].summary)), []).append(name)
    tables: list[Table] = []
    for names in rows_by_members.values():
        members = members_of(comparison.rows[names[0]][0].summary)
        columns = list(next(iter(members.values())))
        rows = [
            [share, *(f"{member[column]:,}" for column in columns)]
            for share, member in members.items()
        ]
        title = "sizes" if len(rows_by_members) == 1 else f"sizes ({', '.join(names)})"
        tables.append(Table(title, ["share", *columns], rows))
    return tables
