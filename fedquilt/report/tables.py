"""Rows of numbers for charts, from the records of runs. Rows are dictionaries of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedquilt.display.thinning import Row, bins, number
from fedquilt.report.collect import RunFolder
from fedquilt.round import Record
from fedquilt.runs.summaries import labels_of, share_label
from fedquilt.studies.frames import metric_names
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import Spread, by_entry

MAX_BINS = 200  # Bars of a chart by round
# Columns that curves can have on their horizontal axis, and their titles.
AXES = {
    "round": "round",
    "bytes": "bytes sent, both ways",
    "macs": "multiply-adds of all clients",
    "link_seconds": "simulated seconds over the link",
    "seconds": "seconds of computation",
}


def labels_of_shares(results: Iterable[Result]) -> dict[str, str]:
    """Return the names that methods gave shares, by share as text, over several runs."""
    return {
        share: label for result in results for share, label in labels_of(result.summary).items()
    }


def curve_rows(run: RunFolder, metric: str, labels: Mapping[str, str]) -> list[Row]:
    """Return one row for each evaluated round and share of a run.

    Columns are `entry`, `seed`, `share`, `value` and those of `AXES`, which count from the first
    round on. Figures that are no finite numbers are None.

    Args:
        run: The run.
        metric: Name of the metric.
        labels: Names of shares, by share as text.
    """
    totals: dict[str, float] = dict.fromkeys(AXES, 0)
    has_clock = any(record.link_seconds is not None for record in run.records)
    rows: list[Row] = []
    for record in run.records:
        totals["round"] = record.round
        totals["bytes"] += record.bytes_down + record.bytes_up
        totals["macs"] += record.macs
        totals["link_seconds"] += record.link_seconds or 0
        totals["seconds"] += record.seconds
        for share, value in record.grades.metrics.get(metric, {}).items():
            costs = {name: number(total) for name, total in totals.items()}
            costs["round"] = record.round
            rows.append(
                {
                    "entry": run.result.entry,
                    "seed": run.result.seed,
                    "share": share_label(share, labels),
                    "value": number(value),
                    **(costs if has_clock else {**costs, "link_seconds": None}),
                }
            )
    return rows


def usable_axes(rows: Sequence[Row]) -> dict[str, str]:
    """Return those of `AXES` that all rows have, with their titles."""
    return {
        name: title
        for name, title in AXES.items()
        if rows and all(row[name] is not None for row in rows)
    }


def spread_rows(rows: Iterable[Row]) -> list[Row]:
    """Return mean and sample deviation over seeds of curves, for each entry, share and round.

    Columns are `entry`, `share`, `value` (the mean), `low` and `high` (the mean minus and plus the
    deviation), `seeds` (their number), and the means of `AXES`. Rows without a value are left out.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["value"] is not None:
            groups.setdefault((row["entry"], row["share"], row["round"]), []).append(row)
    spreads: list[Row] = []
    for (entry, share, _), group in groups.items():
        spread = Spread.of(row["value"] for row in group)
        deviation = spread.deviation or 0.0
        spreads.append(
            {
                "entry": entry,
                "share": share,
                "value": spread.mean,
                "low": spread.mean - deviation,
                "high": spread.mean + deviation,
                "seeds": spread.count,
                **{name: _mean(row[name] for row in group) for name in AXES},
                "round": group[0]["round"],
            }
        )
    return sorted(spreads, key=lambda row: row["round"])


def _mean(values: Iterable[float | None], count: int = 0) -> float | None:
    """Return the mean of some numbers. None: there are none, or one of them is None.

    Args:
        values: The numbers.
        count: Number by which their sum is divided. 0: as many as there are.
    """
    numbers = list(values)
    if not numbers or None in numbers:
        return None
    return number(sum(value for value in numbers if value is not None) / (count or len(numbers)))


def participation_rows(records: Sequence[Record]) -> list[Row]:
    """Return the mean number of clients a round by what became of them.

    Columns are `first` and `last` round of a bin, `fate` and `clients`. Fates are trained, missing,
    failed, refused and late. Those that no record has are left out.
    """
    counts = [_fates(record) for record in records]
    fates = [fate for fate in FATES if any(count.get(fate) for count in counts)]
    rows: list[Row] = []
    for start, stop in bins(len(records), MAX_BINS):
        for fate in fates:
            total = sum(count.get(fate, 0) for count in counts[start:stop])
            rows.append(
                {
                    "first": records[start].round,
                    "last": records[stop - 1].round,
                    "fate": fate,
                    "clients": _mean([number(total)], stop - start),
                }
            )
    return rows


FATES = ("trained", "late", "missing", "failed", "refused")


def _fates(record: Record) -> dict[str, int]:
    """Return the number of clients by what became of them in a round."""
    attendance = record.attendance
    if attendance is None:
        late = len(record.late or ())
        trained = record.clients - late - record.missing
        return {"trained": max(trained, 0), "late": late, "missing": record.missing}
    lists = {name: getattr(attendance, name) for name in FATES if name != "trained"}
    counts = {name: len(clients) for name, clients in lists.items()}
    return {"trained": len(attendance.replied), **counts}


def absence_rows(records: Sequence[Record]) -> list[Row]:
    """Return one row for each client of a round whose update did not count, with the reason."""
    rows: list[Row] = []
    for record in records:
        for client in record.late or ():
            rows.append(_absence(record.round, client, "late", "it came after the deadline"))
        if record.attendance is None:
            continue
        for fate in FATES[1:]:
            for client, reason in getattr(record.attendance, fate).items():
                rows.append(_absence(record.round, client, fate, reason))
    return rows


def _absence(round: int, client: int, fate: str, reason: str) -> Row:
    return {"round": round, "client": client, "fate": fate, "reason": reason}


COSTS = {
    "bytes_down": "bytes to clients",
    "bytes_up": "bytes back",
    "macs": "multiply-adds of clients",
    "server_macs": "multiply-adds of the server",
    "seconds": "seconds of computation",
    "link_seconds": "simulated seconds over the link",
}


def cost_rows(records: Sequence[Record]) -> list[Row]:
    """Return mean costs of a round. Columns are `first` and `last` round, `cost` and `amount`.

    Costs that are zero or unknown in all rounds are left out.
    """
    amounts = {name: [getattr(record, name) for record in records] for name in COSTS}
    used = {name: values for name, values in amounts.items() if any(values)}
    rows: list[Row] = []
    for start, stop in bins(len(records), MAX_BINS):
        for name, values in used.items():
            part = [value or 0 for value in values[start:stop]]
            rows.append(
                {
                    "first": records[start].round,
                    "last": records[stop - 1].round,
                    "cost": COSTS[name],
                    "amount": number(sum(part) / len(part)) if number(sum(part)) else 0.0,
                }
            )
    return rows


def final_rows(results: Sequence[Result], metric: str = "") -> list[Row]:
    """Return the figure of each row and share in the last evaluation, with what it cost.

    Columns are `entry`, `share`, `value`, `low`, `high`, `seeds`, `bytes` (of all clients, both
    ways) and `params` (of the net that a device of the share holds). Numbers are means over seeds.

    Args:
        results: Runs of all rows.
        metric: Name of the metric. Empty: the main one.
    """
    labels = labels_of_shares(results)
    rows: list[Row] = []
    for entry, runs in by_entry(results).items():
        for share in dict.fromkeys(share for run in runs for share in run.metric(metric)):
            having = [run for run in runs if number(run.metric(metric).get(share)) is not None]
            if not having:
                continue
            spread = Spread.of(run.metric(metric)[share] for run in having)
            deviation = spread.deviation or 0.0
            members = [run.summary.get("members", {}).get(share, {}) for run in having]
            rows.append(
                {
                    "entry": entry,
                    "share": share_label(share, labels),
                    "value": spread.mean,
                    "low": spread.mean - deviation,
                    "high": spread.mean + deviation,
                    "seeds": spread.count,
                    "bytes": _mean(_bytes(run) for run in having),
                    "params": _mean(number(member.get("params")) for member in members),
                }
            )
    return rows


def _bytes(run: Result) -> float | None:
    down, up = number(run.summary.get("bytes_down")), number(run.summary.get("bytes_up"))
    return None if down is None or up is None else down + up


def pareto_rows(rows: Iterable[Row], cost: str, higher_is_better: bool) -> list[Row]:
    """Return rows that have a cost, with a column `front`: True if no other row beats them.

    A row is beaten by one that costs no more and is no worse, and differs in one of the two.

    Args:
        rows: Rows with `value` and the cost.
        cost: Column of the cost, of which less is better.
        higher_is_better: True if more of `value` is better.
    """
    sign = 1.0 if higher_is_better else -1.0
    priced = [row for row in rows if row.get(cost) is not None and row["value"] is not None]
    points = [(row[cost], sign * row["value"]) for row in priced]
    return [
        {**row, "cost": row[cost], "front": not any(_beats(other, point) for other in points)}
        for row, point in zip(priced, points, strict=True)
    ]


def _beats(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first != second and first[0] <= second[0] and first[1] >= second[1]


def metric_rows(results: Sequence[Result]) -> list[Row]:
    """Return all metrics of the last evaluation, by row and share, as means over seeds.

    Columns are those of `final_rows` and `metric`.
    """
    names = dict.fromkeys(name for result in results for name in metric_names(result))
    return [{**row, "metric": name} for name in names for row in final_rows(results, name)]


def robust_rows(results: Sequence[Result]) -> list[Row]:
    """Return standard and robust figures by row and share. Empty: no run was attacked.

    Columns are `entry`, `share`, `standard` and `robust`, which are means over seeds.
    """
    robust = {(row["entry"], row["share"]): row["value"] for row in final_rows(results, "robust")}
    return [
        {
            "entry": row["entry"],
            "share": row["share"],
            "standard": row["value"],
            "robust": robust[row["entry"], row["share"]],
        }
        for row in final_rows(results, "standard")
        if (row["entry"], row["share"]) in robust
    ]


def utilization_rows(results: Sequence[Result]) -> list[Row]:
    """Return the part of the devices' limits that nets use. Empty: no run has recorded it.

    Columns are `entry`, `nets` and `value`, which is a mean over seeds.
    """
    kinds = {"utilisation": "own nets", "common_utilisation": "one net that fits every device"}
    rows: list[Row] = []
    for entry, runs in by_entry(results).items():
        for key, name in kinds.items():
            value = _mean(number(run.summary.get(key)) for run in runs)
            if value is not None:
                rows.append({"entry": entry, "nets": name, "value": value})
    return rows
