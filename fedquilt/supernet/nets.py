"""Nets for RaFL: a knowledge net, and a few searched private nets for a fleet's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from torch import Tensor, nn

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family import Family, trace
from fedquilt.family.union import union
from fedquilt.supernet.elastic import Supernet
from fedquilt.supernet.limits import DeviceCounts, Limits, limits_of
from fedquilt.supernet.meter import Costs, Meter
from fedquilt.supernet.search import Found, Measure, Options, Score, Search
from fedquilt.supernet.service import SearchService, Utilization, Watch
from fedquilt.supernet.space import Config, Space

KNOWLEDGE = "knowledge"  # name of the knowledge net
KNOWLEDGE_SHARE = 1 / 2  # of the weakest device's limit, if nothing is asked for

Account = Literal["pair", "private"]
Net = nn.Module | Callable[[], nn.Module]  # what `fedquilt.trace` takes


@dataclass(frozen=True)
class SearchedNets:
    """The nets of a federation: a knowledge net that all devices train, and private nets of which each has one."""

    nets: dict[str, Net]  # by name, the knowledge net first, then private nets by multiply-adds
    knowledge: Found
    private: dict[str, Found]  # by name
    utilization: Utilization  # of the devices' limits, by the nets that these bound

    def family(self, example: Tensor) -> Family:
        """Trace every net on an example, and return their union, whose first net is the knowledge net."""
        return union({name: trace(net, example) for name, net in self.nets.items()})


def searched_nets(
    space: Space,
    fleet: DeviceCounts,
    *,
    knowledge_macs: float | None = None,
    num_members: int = 8,
    account: Account = "pair",
    supernet: Supernet | None = None,
    private_weights: bool = True,
    score: Score | None = None,
    measure: Measure | None = None,
    meter: Meter | None = None,
    options: Options = Options(),
    watch: Watch | None = None,
) -> SearchedNets:
    """Search the nets of a federation for `fedquilt.union`.

    Args:
        space: Space with the images and classes of the federation.
        fleet: Number of devices with each budget or limits, such as `Fleet.counts`.
        knowledge_macs: Multiply-adds of the knowledge net, at most. None: half of the weakest device's limit, or what
            the smallest member has if that is more.
        num_members: Number of private nets, at most.
        account: `pair` limits a device's private net and the knowledge net together, because it trains both.
            `private` limits the private net alone, as the paper does.
        supernet: Supernet whose weights the nets start from. None: fresh weights for every seed.
        private_weights: False lets private nets start from fresh weights, and the knowledge net alone from the
            supernet's, as the released code does. It has no effect without a supernet.
        score: Score of configurations. None: multiply-adds, then parameters.
        measure: Function that returns the accuracy of a member, by which each net is chosen among those with the
            highest scores. None: by the score alone.
        meter: Counts costs. None: with a training step of 32 samples and no table of blocks.
        options: Options of the search.
        watch: Is called after each search.

    Raises:
        BudgetError: No member, or no pair, is within the limits of a device.
        ConfigError: The supernet has another space.
    """
    if supernet is not None and supernet.space.with_classes(space.num_classes) != space:
        raise ConfigError(
            f"nets of {space} were asked for with the weights of a supernet of {supernet.space}. A supernet of the "
            "same space would work."
        )
    meter = meter or Meter(space)
    search = Search(meter, score, options, measure)
    counts = limits_of(fleet)
    knowledge = _knowledge(search, counts, knowledge_macs)
    spent = knowledge.costs if account == "pair" else None
    left = {_remaining(limits, spent, search): count for limits, count in counts.items()}

    service = SearchService(search, num_members)
    service.prepare(left, watch)
    private = named(service.members)
    nets = {KNOWLEDGE: _net(space, supernet, knowledge.config)}
    source = supernet if private_weights else None
    nets |= {name: _net(space, source, found.config) for name, found in private.items()}
    used = service.utilization(left, spent.macs if spent else 0.0)
    return SearchedNets(nets, knowledge, private, used)


def _knowledge(search: Search, counts: Mapping[Limits, int], macs: float | None) -> Found:
    if macs is None:
        smallest = search.meter.cost(search.space.smallest).macs
        weakest = min(search.capacity(limits) for limits in counts)
        macs = max(smallest, KNOWLEDGE_SHARE * weakest)
    return search.best(Limits(macs=macs))


def _remaining(limits: Limits, spent: Costs | None, search: Search) -> Limits:
    """Return what the knowledge net leaves of a device's limits."""
    if spent is None:
        return limits
    left = {field.name: getattr(limits, field.name) for field in fields(limits)}
    for name, limit in limits.given.items():
        left[name] = limit - getattr(spent, name)
        if left[name] <= 0:
            raise BudgetError(
                f"a pair of nets within {limits} was asked for; the knowledge net alone has {spent}. A smaller "
                'knowledge_macs, or account="private", would work.'
            )
    try:
        remaining = Limits(**left)
        search.check(remaining)
    except BudgetError as error:
        raise BudgetError(
            f"a pair of nets within {limits} was asked for; the knowledge net has {spent}, and then {error}"
        ) from error
    return remaining


def named(members: tuple[Found, ...]) -> dict[str, Found]:
    """Return members by names with their multiply-adds. Members that would share a name are numbered."""
    names: dict[str, Found] = {}
    for found in members:
        name, number = found.name, 2
        while name in names:
            name, number = f"{found.name}_{number}", number + 1
        names[name] = found
    return names


def _net(space: Space, supernet: Supernet | None, config: Config) -> Net:
    if supernet is None:
        return partial(space.member, config)
    return supernet.member(config, space.num_classes)
