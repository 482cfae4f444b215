"""A service that gives every device a member within its limits, from a few distinct members."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from fedquilt.checks import within
from fedquilt.errors import BudgetError
from fedquilt.supernet.limits import DeviceCounts, Limits, choose_limits, limits_of, utilization
from fedquilt.supernet.search import Found, Search
from fedquilt.supernet.space import Config
from fedquilt.terms import Budget

SERVICE_FLOOR = 0.95  # Least share of a limit's multiply-adds that a member has: `SearchService`.
# is called with the number of searches that are done and of all searches
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Utilization:
    """The share of the devices' limits that their members use."""

    share: float  # Mean multiply-adds of the devices' members divided by the mean limit.
    common: float  # The same share if all devices used the member of the weakest device.
    num_members: int  # Number of distinct members in use.

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} with {self.num_members} members, {self.common:.1%} with one "
            "common member"
        )


class SearchService:
    """A service that gives devices members of a space, at most `num_members` distinct ones.

    Few members matter because clients with the same architecture are trained as one stack.
    `prepare` chooses the limits for which members are searched such that a fleet uses as many
    multiply-adds as possible. Each device gets the largest member within all of its limits.

    A device that comes later is served while a run is in progress. It gets a member that exists if
    that uses enough of its limit or if there are `num_members` already. Else a member is searched
    for it.

    Two losses add up in the utilisation: a device's limit is rounded down to one of a few, and a
    member is below its limit. So the service's searches use a floor of `SERVICE_FLOOR`, which is
    higher than that of a single search.

    All methods may be called by several threads. A search in one thread does not delay results for
    members that exist. Every member is built once.
    """

    def __init__(
        self,
        search: Search,
        num_members: int = 8,
        build: Callable[[Config], nn.Module] | None = None,
    ) -> None:
        """Start a service without members.

        Args:
            search: Search in a space. Its floor is raised to `SERVICE_FLOOR`.
            num_members: Number of distinct members, at most.
            build: Function that makes the module of a configuration, such as `Supernet.member`.
                None: the space's, with fresh weights.
        """
        self.num_members = num_members
        within(self, num_members="[1, inf)")
        options = replace(search.options, floor=max(SERVICE_FLOOR, search.options.floor))
        self.search = search.with_options(options)
        self.num_searches = 0
        self.num_builds = 0
        self._build = build or self.search.space.member
        self._members: tuple[Found, ...] = ()  # replaced as a whole, so that readers need no lock
        # Limits that were searched, so that no search is repeated.
        self._searched: set[Limits] = set()
        self._modules: dict[Config, nn.Module] = {}
        self._searching = threading.Lock()
        self._building = threading.Lock()

    @property
    def members(self) -> tuple[Found, ...]:
        """Return the members that exist, in ascending order of multiply-adds."""
        return self._members

    def prepare(self, fleet: DeviceCounts, watch: Watch | None = None) -> tuple[Found, ...]:
        """Choose the members for a fleet and search them.

        Args:
            fleet: Number of devices with each budget or limits, such as `Fleet.counts`.
            watch: Function that is called after each search. None: no calls.

        Returns:
            The members, in ascending order of multiply-adds.

        Raises:
            BudgetError: No member is within the limits of some device. The message names the
                smallest member.
        """
        counts = limits_of(fleet)
        for limits in counts:
            self.search.check(limits)
        with self._searching:
            free = self.num_members - len(self._members)
            chosen_limits = choose_limits(counts, self.search.capacity, free) if free > 0 else ()
            for done, limits in enumerate(chosen_limits, start=1):
                self._add(limits)
                if watch:
                    watch(done, len(chosen_limits))
        return self._members

    def query(self, budget: Budget | Limits) -> Found:
        """Return the member for a device: the largest within all of its limits.

        A new member is searched and added if those that exist use too little of the limits, and
        there are fewer than `num_members`.

        Args:
            budget: Limits of the device.

        Raises:
            BudgetError: No member is within the limits. The message names the smallest that the
                service has, or that of the space if the service may still search.
        """
        limits = Limits.of(budget)
        member = self._largest_within(limits)
        if member and not self._needs_search(member, limits):
            return member
        with self._searching:
            member = self._largest_within(limits)  # another thread may have added one meanwhile
            if self._needs_search(member, limits):
                self._add(limits)
                member = self._largest_within(limits)
        if member is None:
            smallest = self._members[0]
            raise BudgetError(
                f"a member within {limits} was asked for; the service has its {self.num_members} "
                f"members already, and the smallest, {smallest.name}, has {smallest.costs}. A "
                "larger num_members or limits that allow this member would work."
            )
        return member

    def module(self, config: Config) -> nn.Module:
        """Return the module of a member's configuration. It is built on the first call.

        Later calls with the same configuration return the same module.
        """
        with self._building:
            if config not in self._modules:
                self._modules[config] = self._build(config)
                self.num_builds += 1
            return self._modules[config]

    def utilization(self, fleet: DeviceCounts, spent: float = 0.0) -> Utilization:
        """Return the share of a fleet's limits that its members use, and that of a common member.

        The limit of a device without a limit on multiply-adds is the most that a member within its
        other limits has. Members are taken from `query`, which may search new ones.

        Args:
            fleet: Number of devices with each budget or limits.
            spent: Multiply-adds that every device uses besides its member, and that its limits here
                do not include. 0 if it uses the member alone.
        """
        used: list[float] = []
        bounds: list[float] = []
        members: set[Config] = set()
        weakest: Limits | None = None
        for limits, count in limits_of(fleet).items():
            member = self.query(limits)
            members.add(member.config)
            used += [member.costs.macs + spent] * count
            bounds += [(limits.macs or self.search.capacity(limits)) + spent] * count
            weakest = limits if weakest is None else weakest.tightest(limits)
        assert weakest is not None
        common = self.query(weakest).costs.macs + spent
        return Utilization(utilization(used, bounds), utilization([common], bounds), len(members))

    def _add(self, limits: Limits) -> None:
        new_member = self.search.best(limits)
        self.num_searches += 1
        self._searched.add(limits)
        other_members = [member for member in self._members if member.config != new_member.config]
        self._members = tuple(
            sorted(
                [*other_members, new_member],
                key=lambda member: (member.costs.macs, str(member.config)),
            )
        )

    def _largest_within(self, limits: Limits) -> Found | None:
        meter = self.search.meter
        return next(
            (
                member
                for member in reversed(self._members)
                if not meter.exceeded(member.config, limits)
            ),
            None,
        )

    def _needs_search(self, member: Found | None, limits: Limits) -> bool:
        """Return True if a new member is allowed, and `member` uses too little of the limits.

        A new member is allowed if there are fewer than `num_members` and the limits were not
        searched yet.

        Args:
            member: The largest member within the limits. None: there is none, which is too little.
            limits: Limits of the device.
        """
        if len(self._members) >= self.num_members or limits in self._searched:
            return False
        return (
            member is None
            or member.costs.macs < self.search.options.floor * self.search.capacity(limits)
        )
