"""Limits of devices, and the choice of a few limits for which members are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from fedquilt.checks import refuse
from fedquilt.errors import BudgetError
from fedquilt.terms import Budget

# Distinct limits among which the choice is made. A fleet with more is reduced to quantiles.
MAX_LEVELS = 1024


@dataclass(frozen=True)
class Limits:
    """Limits of a device. A member is within the limits if it exceeds none of those that are set.

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
        bounds = {name: value for name, value in vars(self).items() if value is not None}
        if not bounds:
            raise BudgetError(
                "a search needs at least one of macs=, params=, memory=, milliseconds=; none was "
                "given."
            )
        refuse(
            self,
            {
                name: f"{value} was asked for; it must be above 0."
                for name, value in bounds.items()
                if not value > 0
            },
        )

    @staticmethod
    def of(budget: Budget | Limits, milliseconds: float | None = None) -> Limits:
        """Return a client's budget as limits.

        Args:
            budget: Bounds on multiply-adds, parameters or training memory. Limits are returned as
                they are.
            milliseconds: Bound on the inference time. None: there is none.

        Raises:
            BudgetError: The budget has a share, which means nothing among nets that have no common
                axes.
        """
        if isinstance(budget, Limits):
            return budget
        if budget.share is not None:
            raise BudgetError(
                f"a member of a supernet was asked for with the budget {budget}; members have no "
                "common axes of which they could keep a share. Give macs, params or memory, for "
                "instance by the fleet `flop_limited`."
            )
        return Limits(budget.macs, budget.params, budget.memory, milliseconds)

    @property
    def given(self) -> dict[str, float]:
        """Return the limits that are not None, by their name, such as `macs`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.given.items())

    def is_within(self, other: Limits) -> bool:
        """Return True if every member within these limits is within the others too.

        Each limit that `other` sets must then be set here, to the same or a smaller value.
        """
        return all(self.given.get(name, np.inf) <= value for name, value in other.given.items())

    def tightest(self, other: Limits) -> Limits:
        """Return new limits with the smaller of two values for each cost.

        A limit that only one of the two sets is kept.
        """
        names = [field.name for field in fields(self)]
        values = {
            name: [limits.given[name] for limits in (self, other) if name in limits.given]
            for name in names
        }
        return Limits(**{name: min(bounds) for name, bounds in values.items() if bounds})


# Number of devices with each budget or limits, such as `Fleet.counts`.
DeviceCounts = Mapping[Budget, int] | Mapping[Limits, int]


def limits_of(fleet: DeviceCounts) -> dict[Limits, int]:
    """Convert budgets to limits, and return the number of devices with each limits.

    Budgets that give equal limits are counted together. A budget with a share is a `BudgetError`.

    Args:
        fleet: Number of devices with each budget or limits, such as `Fleet.counts`.
    """
    counts: dict[Limits, int] = {}
    for budget, count in fleet.items():
        limits = Limits.of(budget)
        counts[limits] = counts.get(limits, 0) + count
    return counts


def utilization(used: Sequence[float], limits: Sequence[float]) -> float:
    """Return the mean multiply-adds in use divided by the mean limit (RaFL, Table 3).

    Args:
        used: Multiply-adds of each device's member.
        limits: Limit of each device, in multiply-adds.
    """
    return float(np.mean(used) / np.mean(limits))


def choose_limits(
    counts: Mapping[Limits, int], capacity: Callable[[Limits], float], num_members: int
) -> tuple[Limits, ...]:
    """Choose limits to search members for, so that a fleet uses as much capacity as possible.

    A device can use the members that were searched for limits within its own. The weakest limits
    are always chosen, so that every device has a member. They have the smallest value of each
    limit.

    If the limits can be ordered from weak to strong, the choice is optimal. Limits on multiply-adds
    alone can be ordered. Else limits are added greedily, each time those with the largest gain.

    Args:
        counts: Number of devices with each limits.
        capacity: Function that returns the multiply-adds that a member within limits can have.
        num_members: Number of limits to choose, at most.

    Returns:
        The chosen limits, in ascending order of capacity.
    """
    weakest = _weakest(tuple(counts))
    ordered = sorted({weakest, *counts}, key=lambda limits: (capacity(limits), str(limits)))
    is_chain = all(low.is_within(high) for low, high in pairwise(ordered))
    sizes = [counts.get(limits, 0) for limits in ordered]
    values = [capacity(limits) for limits in ordered]
    if is_chain:
        return tuple(ordered[index] for index in choose_levels(values, sizes, num_members))
    return _choose_greedily(ordered, sizes, values, num_members, ordered.index(weakest))


def choose_levels(values: Sequence[float], counts: Sequence[int], num_levels: int) -> list[int]:
    """Choose levels with the largest total value.

    The value of a device is the highest chosen level that does not exceed its own level.

    Let V(k, i) be the best sum for the devices from level i on if k levels may be chosen and the
    first is i. Then V(k, i) is the maximum over j > i of value_i · (number of devices in i … j − 1)
    + V(k − 1, j). The lowest level is always chosen.

    Args:
        values: Ascending levels.
        counts: Number of devices at each level.
        num_levels: Number of levels to choose, at most.

    Returns:
        Indices of the chosen levels, in ascending order.
    """
    places = _thinned(counts)
    level = np.asarray([values[position] for position in places], dtype=np.float64)
    # Number of devices below each level, and of all devices.
    devices_below = np.concatenate([[0], np.cumsum(counts)])[[*places, len(counts)]]
    count = len(places)
    best = np.full(count + 1, -np.inf)
    best[count] = 0.0  # No device is left.
    follows: list[np.ndarray] = []
    for _ in range(min(num_levels, count)):
        sums = (
            level[:, None] * (devices_below[None, :] - devices_below[:count, None]) + best[None, :]
        )
        sums[np.tril_indices(count, 0, count + 1)] = -np.inf  # The next level must be higher.
        follows.append(np.argmax(sums, axis=1))
        best = np.concatenate([np.max(sums, axis=1), [0.0]])
    chosen_levels, position = [], 0
    for follow in reversed(follows):
        if position == count:
            break
        chosen_levels.append(places[position])
        position = int(follow[position])
    return chosen_levels


def _thinned(counts: Sequence[int]) -> list[int]:
    """Return the indices of at most `MAX_LEVELS` levels, spread evenly over the devices.

    The lowest level is always included, which may add one more. A few levels are all kept.

    Args:
        counts: Number of devices at each level, in ascending order of levels.
    """
    if len(counts) <= MAX_LEVELS:
        return list(range(len(counts)))
    devices = np.cumsum(counts)
    quantiles = np.linspace(0, devices[-1], MAX_LEVELS, endpoint=False)
    return sorted({0, *np.searchsorted(devices, quantiles, side="right").tolist()})


def _weakest(limits: tuple[Limits, ...]) -> Limits:
    weakest = limits[0]
    for device_limits in limits[1:]:
        weakest = weakest.tightest(device_limits)
    return weakest


def _choose_greedily(
    limits: Sequence[Limits],
    counts: Sequence[int],
    values: Sequence[float],
    num_members: int,
    first: int,
) -> tuple[Limits, ...]:
    # (chosen, device)
    fits = np.array([[low.is_within(high) for high in limits] for low in limits])
    gains = fits * np.asarray(values)[:, None]
    chosen_indices = [first]
    used = gains[first]
    while len(chosen_indices) < min(num_members, len(limits)):
        sums = (np.maximum(gains, used) * np.asarray(counts)).sum(axis=1)
        best = int(np.argmax(sums))
        if sums[best] <= (used * np.asarray(counts)).sum():
            break
        chosen_indices.append(best)
        used = np.maximum(used, gains[best])
    return tuple(limits[index] for index in sorted(chosen_indices))
