"""Statistics over seeds: mean and deviation, paired comparison of rows, and cost to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.milestones import Milestone, milestones
from fedquilt.runs.summaries import NOTHING
from fedquilt.studies.result import Result

# Percentages of a baseline's best figure for which tables have the cost.
PERCENTAGES = (50.0, 60.0, 70.0, 80.0, 90.0, 98.0, 99.0, 99.5, 99.95, 100.0)
MIN_SEEDS = 3  # Smallest number of common seeds for a paired comparison.
# Relative error allowed in a percentage of a figure: 0.8 · 0.9 is a little above 0.72 in floats.
_ROUNDING = 1e-12
_TIE = 1e-9  # Relative difference of two means below which they are a tie.
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation of several values.

    Attributes:
        mean: Mean of the values.
        deviation: Square root of the sum of squared differences to the mean, divided by n - 1.
            None: there is one value.
        count: Number of values.
    """

    mean: float
    deviation: float | None
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Return mean and sample deviation of at least one value. No values are a `ValueError`."""
        numbers = list(values)
        if not numbers:
            raise ValueError("the mean of no values was asked for; at least one is needed.")
        mean = _mean(numbers)
        if len(numbers) == 1:
            return Spread(mean, None, 1)

        squares = [(number - mean) ** 2 for number in numbers]
        deviation = math.sqrt(sum(squares) / (len(numbers) - 1))
        return Spread(mean, deviation, len(numbers))

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean; None: there is one value."""
        if self.deviation is None:
            return None
        return self.deviation / math.sqrt(self.count)


def _mean(numbers: Sequence[float]) -> float:
    if not all(map(math.isfinite, numbers)):
        return sum(numbers) / len(numbers)  # fsum raises an error for inf - inf
    return math.fsum(numbers) / len(numbers)


def _mean_or_none(numbers: Sequence[float]) -> float | None:
    return _mean(numbers) if numbers else None


# --- paired comparison --------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The row that is marked as best, or none, and the reason in plain words.

    Attributes:
        entry: Name of the row. None: nothing is marked.
        reason: Why it is marked, or why nothing is.
        difference: Mean paired difference of the best row to the next, positive if it is better,
            with the number of seeds. None: they were not compared.
    """

    entry: str | None
    reason: str
    difference: Spread | None = None


def paired_difference(first: BySeed, second: BySeed) -> Spread | None:
    """Return mean and deviation of the differences first - second over common seeds.

    `Spread.error` is the standard error of the mean difference. None: there is no common seed.

    Args:
        first: Figures of one row by seed.
        second: Figures of the other row by seed.
    """
    differences = [value - second[seed] for seed, value in first.items() if seed in second]
    return Spread.of(differences) if differences else None


def best_entry(
    values: Mapping[str, BySeed],
    higher_is_better: bool = True,
    show: Callable[[float], str] = "{:.4g}".format,
) -> Verdict:
    """Return the best row if it is clearly better than the next, and else why none is marked.

    Rows are ordered by their means over the seeds that they have. The two best rows are compared on
    the seeds that both have, of which at least three are needed. The best row is marked if its mean
    paired difference to the next is more than twice the standard error of that difference.

    Args:
        values: Figures by row and then by seed.
        higher_is_better: False: the lowest mean is the best.
        show: Function that formats a difference in the reason.
    """
    rows = {name: by_seed for name, by_seed in values.items() if by_seed}
    if not rows:
        return Verdict(None, "no row has a figure")
    if len(rows) == 1:
        return Verdict(None, "only one row has figures")
    if len({seed for by_seed in rows.values() for seed in by_seed}) < MIN_SEEDS:
        return Verdict(None, "there are fewer than three seeds")

    sign = 1.0 if higher_is_better else -1.0
    signed = {
        name: {seed: sign * value for seed, value in by_seed.items()}
        for name, by_seed in rows.items()
    }
    best, runner_up = sorted(signed, key=lambda name: _rank(signed[name]), reverse=True)[:2]
    return _compare(best, runner_up, signed, show)


def _rank(by_seed: BySeed) -> float:
    """Return the mean over the seeds of a row, or minus infinity if the mean is NaN."""
    mean = _mean(list(by_seed.values()))
    return -math.inf if math.isnan(mean) else mean


def _compare(
    best: str, runner_up: str, signed: Mapping[str, BySeed], show: Callable[[float], str]
) -> Verdict:
    """Return a verdict that marks `best` only if it is clearly better than `runner_up`.

    The rules are those of `best_entry`. A tie, too few common seeds, or a figure that is not finite
    mark nothing.

    Args:
        best: Name of the row with the best mean.
        runner_up: Name of the row with the second best mean.
        signed: Figures by row and seed. Higher is better, so that errors have been negated.
        show: Function that formats a difference in the reason.
    """
    difference = paired_difference(signed[best], signed[runner_up])
    count = difference.count if difference else 0
    if difference is None or difference.error is None or count < MIN_SEEDS:
        seeds = f"{count or 'no'} common seed{'s'[: count != 1]}"
        reason = f"missing runs leave {best} and {runner_up} {seeds}, fewer than three"
        return Verdict(None, reason, difference)
    if not math.isfinite(difference.mean):
        reason = f"a figure of {best} or {runner_up} is not a finite number"
        return Verdict(None, reason, difference)

    size = max(abs(value) for value in (*signed[best].values(), *signed[runner_up].values()))
    if abs(difference.mean) <= _TIE * size:
        return Verdict(None, f"{best} and {runner_up} are a tie", difference)
    if difference.mean < 0:
        reason = f"{best} has the best mean, but {runner_up} is better on their common seeds"
        return Verdict(None, reason, difference)

    shown = show(difference.mean)
    error = show(difference.error)
    if difference.mean > 2 * difference.error:
        reason = (
            f"the mean paired difference of {best} to {runner_up}, {shown}, is more than twice "
            f"its standard error, {error}"
        )
        return Verdict(best, reason, difference)
    reason = (
        f"the mean paired difference of {best} to {runner_up}, {shown}, is within twice its "
        f"standard error, {error}"
    )
    return Verdict(None, reason, difference)


# --- rows of a study ----------------------------------------------------------------------------


def by_entry(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the runs of each row, sorted by seed. Rows are in the order of their first run.

    Raises:
        ConfigError: A row has two runs with the same seed.
    """
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(result.entry, []).append(result)
    for name, runs in rows.items():
        runs.sort(key=lambda result: result.seed)
        seeds = [result.seed for result in runs]
        repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if repeated:
            raise ConfigError(
                f"runs of {name} were to be compared; there are several with the seed "
                f"{repeated[0]}. Give one run for each row and seed."
            )
    return rows


def check_alike(properties: Mapping[str, Mapping[str, Collection[str]]]) -> None:
    """Refuse rows that differ in a property, because their figures cannot be compared.

    Args:
        properties: For each property, such as "data", the names of the rows that have each of its
            values. The outer key is the property, and the inner key is the value.

    Raises:
        ConfigError: A property has several values. All of them are listed.
    """
    lines = [
        f"{name} {value}: {', '.join(rows)}"
        for name, by_value in properties.items()
        if len(by_value) > 1
        for value, rows in by_value.items()
    ]
    if lines:
        listed = "\n  ".join(lines)
        raise ConfigError(
            f"a comparison was asked for; these rows differ:\n  {listed}\n"
            "Compare runs on the same data with the same task."
        )


def values_by_seed(runs: Iterable[Result], share: str, metric: str = "") -> dict[int, float]:
    """Return a metric of a row at one share by seed, in the last evaluated round.

    Seeds whose run does not have the metric at this share are left out.

    Args:
        runs: Runs of one row.
        share: Share of the model, as a summary names it: "0.5".
        metric: Name of a metric. Empty: the main one.
    """
    figures = {result.seed: result.metric(metric) for result in runs}
    return {seed: by_share[share] for seed, by_share in figures.items() if share in by_share}


def missing_seeds(runs: Iterable[Result], planned: Iterable[int]) -> list[int]:
    """Return the planned seeds of which a row has no run, in ascending order.

    Args:
        runs: Runs of one row.
        planned: Seeds that the row should have.
    """
    seeds = {result.seed for result in runs}
    return sorted(set(planned) - seeds)


def run_notes(name: str, runs: Sequence[Result], planned: Iterable[int]) -> list[str]:
    """Return sentences on runs of a row that are missing or diverged. Empty: neither exists.

    Args:
        name: Name of the row.
        runs: Runs of the row.
        planned: Seeds that every row should have.
    """
    missing = missing_seeds(runs, planned)
    notes: list[str] = []
    if not runs:
        notes.append(f"{name}: it was not run.")
    elif missing:
        notes.append(f"{name}: no run of {seeds_text(missing)}; the means are over the others.")
    diverged = [result for result in runs if result.diverged is not None]
    notes += [
        f"{name}: the run of seed {result.seed} diverged in round {result.diverged}; its last "
        "figures count."
        for result in diverged
    ]
    return notes


def seeds_text(seeds: Sequence[int]) -> str:
    """Return `seed 3`, or `seeds 3, 5` if there are several."""
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {', '.join(map(str, seeds))}"


# --- cost to a target ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CostToTarget:
    """Cost of a row's runs until they reached a target, by seed. None: the run never reached it."""

    by_seed: Mapping[int, Milestone | None]  # Cost of each run. None: it never reached the target.

    @property
    def reached(self) -> list[Milestone]:
        """Return the milestones of the runs that reached the target, without their seeds."""
        return [milestone for milestone in self.by_seed.values() if milestone is not None]

    @property
    def rounds(self) -> float | None:
        """Return the mean number of rounds of the runs that reached the target; None: none did."""
        return _mean_or_none([milestone.round for milestone in self.reached])

    @property
    def bytes(self) -> float | None:
        """Return the mean bytes, both ways, until the target was reached; None: no run reached it.

        Runs that did not reach it are left out.
        """
        return _mean_or_none([milestone.bytes for milestone in self.reached])

    @property
    def macs(self) -> float | None:
        """Return the mean client multiply-adds of runs that reached the target; None: none did."""
        return _mean_or_none([milestone.macs for milestone in self.reached])

    @property
    def link_seconds(self) -> float | None:
        """Return the mean simulated seconds over the link of the runs that reached the target.

        None: the link has no clock, or no run reached the target.
        """
        seconds = [milestone.link_seconds for milestone in self.reached]
        return _mean_or_none([value for value in seconds if value is not None])

    def shown(self, mean: float | None, show: Callable[[float], str]) -> str:
        """Return a mean as text, such as `120`, or `120 (2 of 3)` if only two of three runs count.

        A dash is returned if no run reached the target.

        Args:
            mean: `rounds`, `bytes`, `macs` or `link_seconds` of this cost.
            show: Function that formats the mean.
        """
        if mean is None:
            return NOTHING
        if len(self.reached) == len(self.by_seed):
            return show(mean)
        return f"{show(mean)} ({len(self.reached)} of {len(self.by_seed)})"


def cost_to_target(
    runs: Sequence[Result], target: float, metric: str = ""
) -> dict[str, CostToTarget]:
    """Return the cost of a row's runs until each share reached a target, by share.

    The result is empty if no run recorded the metric. A seed that did not reach the target has
    None.

    Args:
        runs: Runs of one row.
        target: Value of the metric that is to be reached.
        metric: Name of a metric. Empty: the main one.
    """
    reached = {result.seed: _milestones(result, target, metric) for result in runs}
    shares = dict.fromkeys(share for by_share in reached.values() for share in by_share)
    return {
        share: CostToTarget({seed: by_share.get(share) for seed, by_share in reached.items()})
        for share in shares
    }


def _milestones(result: Result, target: float, metric: str) -> dict[str, Milestone | None]:
    evaluated = (record.grades.metrics for record in result.records)
    name = metric or result.main
    if not any(name in metrics for metrics in evaluated):
        return {}
    return milestones(result.records, target, name, result.prefers_higher(metric))


def part_of_best(best: float, percentage: float, higher_is_better: bool = True) -> float:
    """Return the figure that counts as a percentage of a baseline's best figure.

    It is best · p / 100 where higher is better, and best · 100 / p where lower is better: an error
    of at most twice the baseline's is 50 % of its best. Figures of the other sign, such as a
    negative R2, are treated the other way round, so that the result is never better than `best`
    and 100 % is `best` itself.

    Args:
        best: Best figure of the baseline.
        percentage: Percentage in (0, 100].
        higher_is_better: Direction of the metric.
    """
    part = percentage / 100
    return best * part if (best >= 0) == higher_is_better else best / part


def cost_to_percentages(
    results: Iterable[Result], baseline: str, percentages: Sequence[float] = PERCENTAGES
) -> dict[str, dict[float, CostToTarget]]:
    """Return the cost of each row until it reached percentages of a baseline's best main figure.

    The baseline's best figure is that of its widest model in its best evaluated round. A run is
    compared with the baseline's run of the same seed, or with the mean over the baseline's runs if
    that one is missing. Of each row the widest model counts.

    Args:
        results: Runs of all rows, the baseline's included.
        baseline: Name of the baseline's row.
        percentages: Percentages of the best figure, in (0, 100].

    Returns:
        Costs by row and then by percentage.

    Raises:
        ConfigError: No row has the baseline's name, or its runs were never evaluated.
    """
    rows = by_entry(results)
    if baseline not in rows:
        raise ConfigError(f"the baseline {baseline!r} was asked for.{nearest(baseline, rows)}")
    figures = {result.seed: result.best_figure for result in rows[baseline]}
    bests = {seed: figure for seed, figure in figures.items() if figure is not None}
    if not bests:
        raise ConfigError(
            f"the baseline {baseline!r} was asked for; none of its runs has records with an "
            "evaluated round. Name a row that has them."
        )
    mean_best = _mean(list(bests.values()))

    return {
        name: {
            percentage: CostToTarget(
                {
                    result.seed: _part_reached(
                        result, bests.get(result.seed, mean_best), percentage
                    )
                    for result in runs
                }
            )
            for percentage in percentages
        }
        for name, runs in rows.items()
    }


def _part_reached(result: Result, best: float, percentage: float) -> Milestone | None:
    target = part_of_best(best, percentage, result.higher_is_better)
    slack = _ROUNDING * abs(target)
    target += -slack if result.higher_is_better else slack
    by_share = _milestones(result, target, "")
    return by_share[max(by_share, key=float)] if by_share else None
