"""The search for the largest member within a limit, with few members counted.

Counting a member takes a run of its module (`cost.py`), and each device of a fleet may have its own
limit. Counts are cached with the members, so that all limits share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fedquilt.family.member import Member

K = TypeVar("K")
V = TypeVar("V")
# Budgets whose result a family caches. Searching again needs no run of the module.
MAX_CACHED_FITS = 16_384


@dataclass(frozen=True, eq=False)
class Need:
    """The amounts of one limit that members need. Members are numbered by size, smallest first.

    Args:
        member: Returns a member by its number.
        needed: Returns how much a member needs. This may take a run of the module.
        exact: Returns the part of `needed` that follows from the weights and takes no run.
        gauge: Returns a number with which the rest of `needed` grows about linearly.
    """

    member: Callable[[int], Member]
    needed: Callable[[Member], int]
    exact: Callable[[Member], int]
    gauge: Callable[[Member], int]

    def at(self, place: int) -> int:
        """Return how much the member of a number needs."""
        return self.needed(self.member(place))

    def line(self, first: int, second: int) -> Callable[[int], float]:
        """Return an estimate of what members need by number, from what two of them need."""
        small, large = self.member(first), self.member(second)
        base = self.needed(small) - self.exact(small)
        rise = self.needed(large) - self.exact(large) - base
        run = self.gauge(large) - self.gauge(small)

        def estimate(place: int) -> float:
            member = self.member(place)
            part = (self.gauge(member) - self.gauge(small)) / run if run else 0.0
            return self.exact(member) + base + rise * part

        return estimate


def last_within(need: Need, most: float, count: int) -> int:
    """Return the number of the last member that needs at most `most`, or -1.

    The largest and the smallest member are counted first. A line between them says where to begin.
    From there the search moves in steps that double, until the result is between two members that
    were counted. Bisection counts log2(count) members. This search counts four if the line is
    right, whatever the count, and about twice log2(count) at most.

    The members that are counted depend on `most` and not on earlier searches. The result therefore
    does not depend on them either.

    Args:
        need: Amounts that members need, which grow with their number.
        most: The limit.
        count: Number of members.
    """
    if count == 0 or need.at(count - 1) <= most:
        return count - 1
    if need.at(0) > most:
        return -1
    low, high = 0, count - 1
    number = _bisected(need.line(low, high), most, low, high)
    number = min(max(number, low + 1), high - 1)
    step = 1
    while high - low > 1:
        fits = need.at(number) <= most
        low, high = (number, high) if fits else (low, number)
        reach = max(1, min(step, (high - low) // 2))
        number = low + reach if fits else high - reach
        step *= 2
    return low


def remember(cache: dict[K, V], key: K, value: V) -> V:
    """Add a result to a cache for budgets, and return it. A full cache drops its oldest entry.

    Args:
        cache: The cache, which is changed.
        key: Key of the result.
        value: The result.
    """
    if len(cache) >= MAX_CACHED_FITS:
        cache.pop(next(iter(cache)))
    cache[key] = value
    return value


def _bisected(estimate: Callable[[int], float], most: float, low: int, high: int) -> int:
    """Return the last number at which an estimate is within a limit.

    Numbers from `low` to one less than `high` are searched.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle) <= most else (low, middle)
    return low
