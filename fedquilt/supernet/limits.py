"""Limits of devices, and the choice of a few limits for which members are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from fedquilt.checks import refuse
from fedquilt.errors import BudgetError
from fedquilt.terms import Budget

MAX_LEVELS = (
    1024  # distinct limits that the choice looks at; a fleet with more is thinned to quantiles
)


@dataclass(frozen=True)
class Limits:
    """The limits of a device. A member is within them if it exceeds none of those that are given.

    Args:
        macs: Multiply-adds of one sample's forward pass.
        params: Number of parameters.
        memory: Bytes of a training step.
        milliseconds: Inference time of one sample, as a table of measured blocks predicts it.
    """

    macs: float | None = None
    params: float | None = None
    memory: float | None = None
    milliseconds: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given:
            raise BudgetError(
                "a search needs at least one of macs=, params=, memory=, milliseconds=; none was given."
            )
        refuse(
            self,
            {
                name: f"{value} was asked for; it must be above 0."
                for name, value in given.items()
                if not value > 0
            },
        )

    @staticmethod
    def of(budget: Budget | Limits, milliseconds: float | None = None) -> Limits:
        """Return a client's budget as limits.

        Args:
            budget: Bounds on multiply-adds, parameters or training memory. Limits are returned as they are.
            milliseconds: Bound on the inference time. None: there is none.

        Raises:
            BudgetError: The budget has a share, which means nothing among nets that have no common axes.
        """
        if isinstance(budget, Limits):
            return budget
        if budget.share is not None:
            raise BudgetError(
                f"a member of a supernet was asked for with the budget {budget}; members have no common axes of which "
                "they could keep a share. Give macs, params or memory, for instance by the fleet `flop_limited`."
            )
        return Limits(budget.macs, budget.params, budget.memory, milliseconds)

    @property
    def given(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.given.items())

    def is_within(self, other: Limits) -> bool:
        """Return True if every member within these limits is within the others too."""
        return all(self.given.get(name, np.inf) <= value for name, value in other.given.items())

    def tightest(self, other: Limits) -> Limits:
        """Return the limits that a member within both keeps."""
        names = [field.name for field in fields(self)]
        values = {
            name: [one.given[name] for one in (self, other) if name in one.given] for name in names
        }
        return Limits(**{name: min(found) for name, found in values.items() if found})


DeviceCounts = (
    Mapping[Budget, int] | Mapping[Limits, int]
)  # number of devices with each limits, as `Fleet.counts`


def limits_of(fleet: DeviceCounts) -> dict[Limits, int]:
    """Return the number of devices with each limits.

    Args:
        fleet: Number of devices with each budget or limits, such as `Fleet.counts`.
    """
    counts: dict[Limits, int] = {}
    for budget, count in fleet.items():
        limits = Limits.of(budget)
        counts[limits] = counts.get(limits, 0) + count
    return counts


def utilization(used: Sequence[float], limits: Sequence[float]) -> float:
    """Return the mean capacity divided by the mean limit (RaFL, Table 3).

    Args:
        used: Multiply-adds of each device's member.
        limits: Limit of each device, in multiply-adds.
    """
    return float(np.mean(used) / np.mean(limits))


def choose_limits(
    counts: Mapping[Limits, int], capacity: Callable[[Limits], float], num_members: int
) -> tuple[Limits, ...]:
    """Choose the limits for which members are searched, so that a fleet uses as much of its capacity as possible.

    A device can use the members that were searched for limits within its own. The limits that all devices keep
    are always chosen, so that nobody is left without a member.

    If the limits can be ordered from weak to strong, as limits on multiply-adds alone can, the choice is optimal.
    Else limits are added one by one, each time those that add most.

    Args:
        counts: Number of devices with each limits.
        capacity: Function that returns the multiply-adds that a member within limits can have.
        num_members: Number of limits to choose, at most.
    """
    weakest = _weakest(tuple(counts))
    ordered = sorted({weakest, *counts}, key=lambda limits: (capacity(limits), str(limits)))
    is_chain = all(low.is_within(high) for low, high in pairwise(ordered))
    sizes = [counts.get(limits, 0) for limits in ordered]
    values = [capacity(limits) for limits in ordered]
    if is_chain:
        return tuple(ordered[place] for place in choose_levels(values, sizes, num_members))
    return _choose_greedily(ordered, sizes, values, num_members, ordered.index(weakest))


def choose_levels(values: Sequence[float], counts: Sequence[int], num_levels: int) -> list[int]:
    """Choose levels such that the sum over devices of the highest level within a device's own is maximal.

    Let V(k, i) be the best sum for the devices from level i on if k levels may be chosen and the first is i. Then
    V(k, i) is the maximum over j > i of value_i · (number of devices in i … j − 1) + V(k − 1, j). The lowest
    level is always chosen.

    Args:
        values: Ascending levels.
        counts: Number of devices at each level.
        num_levels: Number of levels to choose, at most.

    Returns:
        Places of the chosen levels, in ascending order.
    """
    places = _thinned(counts)
    level = np.asarray([values[place] for place in places], dtype=np.float64)
    before = np.concatenate([[0], np.cumsum(counts)])[
        [*places, len(counts)]
    ]  # devices below each level, then all
    count = len(places)
    best = np.full(count + 1, -np.inf)
    best[count] = 0.0  # no device is left
    follows: list[np.ndarray] = []
    for _ in range(min(num_levels, count)):
        sums = level[:, None] * (before[None, :] - before[:count, None]) + best[None, :]
        sums[np.tril_indices(count, 0, count + 1)] = -np.inf  # the next level is a higher one
        follows.append(np.argmax(sums, axis=1))
        best = np.concatenate([np.max(sums, axis=1), [0.0]])
    chosen, place = [], 0
    for follow in reversed(follows):
        if place == count:
            break
        chosen.append(places[place])
        place = int(follow[place])
    return chosen


def _thinned(counts: Sequence[int]) -> list[int]:
    """Return the places of at most `MAX_LEVELS` levels, spread evenly over the devices, the lowest included."""
    if len(counts) <= MAX_LEVELS:
        return list(range(len(counts)))
    devices = np.cumsum(counts)
    quantiles = np.linspace(0, devices[-1], MAX_LEVELS, endpoint=False)
    return sorted({0, *np.searchsorted(devices, quantiles, side="right").tolist()})


def _weakest(limits: tuple[Limits, ...]) -> Limits:
    weakest = limits[0]
    for other in limits[1:]:
        weakest = weakest.tightest(other)
    return weakest


def _choose_greedily(
    limits: Sequence[Limits],
    counts: Sequence[int],
    values: Sequence[float],
    num_members: int,
    first: int,
) -> tuple[Limits, ...]:
    fits = np.array(
        [[low.is_within(high) for high in limits] for low in limits]
    )  # (chosen, device)
    gains = fits * np.asarray(values)[:, None]
    chosen = [first]
    used = gains[first]
    while len(chosen) < min(num_members, len(limits)):
        sums = (np.maximum(gains, used) * np.asarray(counts)).sum(axis=1)
        best = int(np.argmax(sums))
        if sums[best] <= (used * np.asarray(counts)).sum():
            break
        chosen.append(best)
        used = np.maximum(used, gains[best])
    return tuple(limits[place] for place in sorted(chosen))
