"""One sentence below each chart, computed from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from fedquilt.display.thinning import Row
from fedquilt.runs.summaries import figure_text
from fedquilt.studies.number_text import points_text
from fedquilt.units import amount, size

NO_FIGURES = "No round has been evaluated yet."


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 round" or "3 rounds"."""
    return f"{count:,} {noun}{'s'[: count != 1]}"


def difference_text(difference: float, percent: bool) -> str:
    """Return the size of a difference, in percentage points for rates."""
    return points_text(abs(difference)) if percent else f"{abs(difference):.4g}"


def of_curves(rows: Sequence[Row], metric: str, percent: bool, higher_is_better: bool) -> str:
    """Describe curves of one run: the share that changed most for the better, and the least.

    Args:
        rows: Points of `tables.curve_rows`.
        metric: Name of the metric.
        percent: True if it is a rate.
        higher_is_better: True if more of it is better.
    """
    changes: dict[str, tuple[float, float]] = {}  # First and last figure by share
    for share in dict.fromkeys(row["share"] for row in rows):
        values = [
            row["value"] for row in rows if row["share"] == share and row["value"] is not None
        ]
        if values:
            changes[share] = values[0], values[-1]
    if not changes:
        return NO_FIGURES
    rounds = [row["round"] for row in rows]
    sign = 1.0 if higher_is_better else -1.0
    gains = {share: sign * (last - first) for share, (first, last) in changes.items()}
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    texts = [_change(share, changes[share], gains[share], percent) for share in (best, worst)]
    period = f"Between rounds {min(rounds)} and {max(rounds)}, {metric} of share "
    if best == worst:
        return f"{period}{texts[0]}."
    return f"{period}{texts[0]}, the best change of {len(gains)} shares; share {texts[1]}."


def _change(share: str, ends: tuple[float, float], gain: float, percent: bool) -> str:
    verb = "stays the same" if gain == 0 else "improves" if gain > 0 else "becomes worse"
    size = "" if gain == 0 else f" by {difference_text(gain, percent)}"
    return f"{share} {verb}{size}, to {figure_text(ends[1], percent)}"


def of_comparison(rows: Sequence[Row], share: str, percent: bool, higher_is_better: bool) -> str:
    """Compare the best row with the next one at a share, by their means over seeds.

    Args:
        rows: Rows of `tables.final_rows`.
        share: Share as text, as the rows have it.
        percent: True if the metric is a rate.
        higher_is_better: True if more of it is better.
    """
    ranked = sorted(
        (row for row in rows if row["share"] == share),
        key=lambda row: row["value"],
        reverse=higher_is_better,
    )
    if not ranked:
        return NO_FIGURES
    best = ranked[0]
    over = f"over {plural(best['seeds'], 'seed')}"
    figure = figure_text(best["value"], percent)
    if len(ranked) == 1:
        return f"{best['entry']} has {figure} at share {share}, {over}."
    second = ranked[1]
    seeds = over
    if best["seeds"] != second["seeds"]:
        seeds = f"{over} against {plural(second['seeds'], 'seed')}"
    if best["value"] == second["value"]:
        return (
            f"{best['entry']} and {second['entry']} both have {figure} at share {share}, {seeds}."
        )
    gap = difference_text(best["value"] - second["value"], percent)
    return (
        f"{best['entry']} has the best mean at share {share}, {figure}, which is {gap} better than "
        f"{second['entry']}, {seeds}."
    )


def of_pareto(rows: Sequence[Row], metric: str) -> str:
    """Name the rows on a Pareto front, from the cheapest on.

    Args:
        rows: Points of `tables.pareto_rows`.
        metric: Name of the metric.
    """
    if not rows:
        return NO_FIGURES
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["cost"])
    names = ", ".join(f"{row['entry']} at share {row['share']}" for row in front)
    beaten = len(rows) - len(front)
    return (
        f"{plural(len(front), 'point')} of {len(rows)} {'is' if len(front) == 1 else 'are'} on the "
        f"front ({names}); each of the other {beaten} is beaten in {metric} by one that costs no "
        "more."
        if beaten
        else f"No point is beaten in {metric} by one that costs no more: {names}."
    )


def of_participation(rows: Sequence[Row], rounds: int) -> str:
    """Say which part of the asked clients was trained, and what became of the others.

    Args:
        rows: Rows of `tables.participation_rows`.
        rounds: Number of rounds.
    """
    totals: dict[str, float] = {}
    for row in rows:
        weight = row["last"] - row["first"] + 1
        totals[row["fate"]] = totals.get(row["fate"], 0.0) + weight * (row["clients"] or 0.0)
    num_requests = sum(totals.values())
    if not num_requests:
        return "No client was asked in any round."
    trained = totals.pop("trained", 0.0)
    lost = [f"{round(count):,} {fate}" for fate, count in totals.items() if count]
    rest_text = f"; the others were {', '.join(lost)}" if lost else ""
    return (
        f"{trained / num_requests:.1%} of {round(num_requests):,} requests in "
        f"{plural(rounds, 'round')} gave an update that counts{rest_text}."
    )


def of_lost(rows: Sequence[Row]) -> str:
    """Say which part of the trained positions the link lost, over all rounds and at most."""
    planned = sum(row["planned"] for row in rows)
    if not planned:
        return "No client trained anything."
    lost = sum(row["planned"] - row["arrived"] for row in rows)
    if not lost:
        return "The link lost no position."
    worst = max(rows, key=lambda row: row["lost"])
    return (
        f"The link lost {lost / planned:.1%} of all positions that clients trained, and at most "
        f"{worst['lost']:.1%}, in {_rounds(worst)}."
    )


def _rounds(row: Row) -> str:
    first, last = row["first"], row["last"]
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def of_costs(bytes_down: int, bytes_up: int, macs: int, rounds: int) -> str:
    """Say what a run cost in bytes and multiply-adds.

    Args:
        bytes_down: Bytes that arrived at clients.
        bytes_up: Bytes that arrived at the server.
        macs: Multiply-adds of all clients.
        rounds: Number of rounds.
    """
    return (
        f"{plural(rounds, 'round')} took {size(bytes_down)} to clients, {size(bytes_up)} back and "
        f"{amount(macs)} multiply-adds of clients."
    )


def of_quilt(times: Sequence[float], axis: str, rounds: int) -> str:
    """Say how evenly the positions of an axis were trained.

    Args:
        times: Number of trained updates of each position, over all rounds.
        axis: Name of the axis.
        rounds: Number of rounds.
    """
    if not any(times):
        return f"No position of axis {axis} was trained in {plural(rounds, 'round')}."
    least, most, never = min(times), max(times), sum(1 for count in times if not count)
    text = (
        f"In {plural(rounds, 'round')} each of the {len(times)} positions of axis {axis} was "
        f"trained {least:g} times"
        if least == most
        else f"In {plural(rounds, 'round')} the positions of axis {axis} were trained between "
        f"{least:g} and {most:g} times"
    )
    if never:
        text += f"; {never} of {len(times)} were never trained"
    return f"{text}."


def of_fleet(rows: Sequence[Row]) -> str:
    """Say which budget most clients have.

    Args:
        rows: Rows with `budget` and `clients`, from the smallest budget on.
    """
    total = sum(row["clients"] for row in rows)
    if not total:
        return "The fleet has no clients."
    most = max(row["clients"] for row in rows)
    names = [row["budget"] for row in rows if row["clients"] == most]
    if len(names) > 1:
        return f"{plural(total, 'client')}: {most:,} each have {' and '.join(names)}, the most."
    return f"{most:,} of {plural(total, 'client')} ({most / total:.0%}) have {names[0]}, the most."


def of_samples(counts: Sequence[int], classes: Sequence[int]) -> str:
    """Say how many samples and classes clients have.

    Args:
        counts: Samples of each client.
        classes: Number of classes of which each client has samples.
    """
    if not counts:
        return "No client has samples."
    return f"A client has {_range(counts, 'sample')} of {_range(classes, 'class')}."


def _range(counts: Sequence[int], noun: str) -> str:
    """Return the smallest and the largest of some counts, such as "3 to 5 samples"."""
    least, most = min(counts), max(counts)
    plural_noun = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    if least == most:
        return f"{least:,} {noun if least == 1 else plural_noun}"
    return f"{least:,} to {most:,} {plural_noun}"


def of_robustness(rows: Sequence[Row], percent: bool) -> str:
    """Say how much each attack costs, at most and at least.

    Args:
        rows: Rows of `tables.robust_rows`.
        percent: True if figures are rates.
    """
    drops = {(row["entry"], row["share"]): row["standard"] - row["robust"] for row in rows}
    if not drops:
        return "No evaluation was under attack."
    least, most = min(drops, key=drops.__getitem__), max(drops, key=drops.__getitem__)
    if least == most:
        return (
            f"Under attack {least[0]} at share {least[1]} loses "
            f"{difference_text(drops[least], percent)}."
        )
    return (
        f"Under attack {least[0]} at share {least[1]} loses least, "
        f"{difference_text(drops[least], percent)}, and {most[0]} at share {most[1]} most, "
        f"{difference_text(drops[most], percent)}."
    )


def of_growth(rows: Iterable[Row]) -> str:
    """Say how often and how much the whole model grows.

    Args:
        rows: Rows with `first` round and `params`, in order.
    """
    sizes = [row["params"] for row in rows if row["params"]]
    if not sizes:
        return "No net was trained."
    steps = sum(1 for old, new in pairwise(sizes) if old != new)
    if not steps:
        return f"The whole model has {amount(sizes[0])} parameters in all rounds."
    return (
        f"The whole model changes its size {plural(steps, 'time')}, from "
        f"{amount(sizes[0])} to {amount(sizes[-1])} parameters."
    )


def of_utilization(rows: Sequence[Row]) -> str:
    """Say which part of the limits the clients' own nets use.

    Args:
        rows: Rows of `tables.utilization_rows`.
    """
    own = [row for row in rows if row["nets"] == "own nets"]
    if not own:
        return "No run has recorded how much of their limits devices use."
    best = max(own, key=lambda row: row["value"])
    common = [row for row in rows if row["entry"] == best["entry"] and row is not best]
    comparison = ""
    if common:
        comparison = f", and one net that fits every device would use {common[0]['value']:.1%}"
    return (
        f"The clients' own nets of {best['entry']} use {best['value']:.1%} of the limits of their "
        f"devices{comparison}."
    )


def of_masks(agreement: Mapping[str, float]) -> str:
    """Say which part of the foreground pixels the nets of the best and the worst budget have right.

    Args:
        agreement: Mean part over the drawn samples, by the name of the budget.
    """
    if not agreement:
        return "No net was deployed."
    best, worst = (
        max(agreement, key=agreement.__getitem__),
        min(agreement, key=agreement.__getitem__),
    )
    text = f"The net of {best} has the right class in {agreement[best]:.1%} of the foreground"
    if best != worst:
        text += f", and that of {worst} in {agreement[worst]:.1%}"
    return f"{text}, as a mean over the samples that are drawn."
