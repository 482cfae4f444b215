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
from fedquilt.supernet.search import Found, Measure, Score, Search, SearchOptions
from fedquilt.supernet.service import SearchService, Utilization, Watch
from fedquilt.supernet.space import Config, Space

KNOWLEDGE = "knowledge"  # Name of the knowledge net.
KNOWLEDGE_SHARE = 1 / 2  # Default size of the knowledge net, as a share of the weakest limit.
Account = Literal["pair", "private"]
Net = nn.Module | Callable[[], nn.Module]  # Models that `fedquilt.trace` takes.


@dataclass(frozen=True)
class SearchedNets:
    """The nets of a federation: one knowledge net for all devices, and several private nets.

    Every device trains the knowledge net and one of the private nets.
    """

    nets: dict[str, Net]  # Nets by name: the knowledge net, then private nets by multiply-adds.
    knowledge: Found  # The knowledge net with its costs.
    private: dict[str, Found]  # Private nets with their costs, by name.
    utilization: Utilization  # Share of the devices' limits that their nets use.

    def family(self, example: Tensor) -> Family:
        """Trace every net, and return the union of their families. The knowledge net is first.

        Args:
            example: Batch of samples, on which the nets are traced.
        """
        return union({name: trace(net, example) for name, net in self.nets.items()})


def searched_nets(  # noqa: PLR0913  # The keywords are the user's interface.
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
    options: SearchOptions = SearchOptions(),
    watch: Watch | None = None,
) -> SearchedNets:
    """Search the nets of a federation for `fedquilt.union`.

    Args:
        space: Space with the images and classes of the federation.
        fleet: Number of devices with each budget or limits, such as `Fleet.counts`.
        knowledge_macs: Multiply-adds of the knowledge net, at most. None: half of the weakest
            device's limit, or what the smallest member has if that is more.
        num_members: Number of private nets, at most.
        account: `pair` limits a device's private net and the knowledge net together, because it
            trains both. `private` limits the private net alone, as the paper does.
        supernet: Supernet whose weights the nets start from. None: fresh weights for every seed.
        private_weights: False lets private nets start from fresh weights, and the knowledge net
            alone from the supernet's, as the released code does. It has no effect without a
            supernet.
        score: Score of configurations. None: multiply-adds, then parameters.
        measure: Function that returns the accuracy of a member, by which each net is chosen among
            those with the highest scores. None: by the score alone.
        meter: Counter of costs. None: a training step of 32 samples, and no table of blocks.
        options: Options of the search.
        watch: Function that is called after each search. None: no calls.

    Raises:
        BudgetError: No member, or no pair, is within the limits of a device.
        ConfigError: The supernet has another space.
    """
    if supernet is not None and supernet.space.with_classes(space.num_classes) != space:
        raise ConfigError(
            f"nets of {space} were asked for with the weights of a supernet of {supernet.space}. "
            "A supernet of the same space would work."
        )
    meter = meter or Meter(space)
    search = Search(meter, score, options, measure)
    counts = limits_of(fleet)
    knowledge = _knowledge(search, counts, knowledge_macs)
    spent = knowledge.costs if account == "pair" else None
    remaining = {_remaining(limits, spent, search): count for limits, count in counts.items()}

    service = SearchService(search, num_members)
    service.prepare(remaining, watch)
    private = named(service.members)
    nets = {KNOWLEDGE: _net(space, supernet, knowledge.config)}
    source = supernet if private_weights else None
    nets |= {name: _net(space, source, member.config) for name, member in private.items()}
    used = service.utilization(remaining, spent.macs if spent else 0.0)
    return SearchedNets(nets, knowledge, private, used)


def _knowledge(search: Search, counts: Mapping[Limits, int], macs: float | None) -> Found:
    if macs is None:
        smallest = search.meter.cost(search.space.smallest).macs
        weakest = min(search.capacity(limits) for limits in counts)
        macs = max(smallest, KNOWLEDGE_SHARE * weakest)
    return search.best(Limits(macs=macs))


def _remaining(limits: Limits, spent: Costs | None, search: Search) -> Limits:
    """Return a device's limits minus the costs of the knowledge net.

    Limits that are not set stay unset.

    Args:
        limits: Limits of the pair of nets.
        spent: Costs of the knowledge net. None: they are not subtracted, and nothing is checked.
        search: Search for the private net, which checks that some net fits.

    Raises:
        BudgetError: No private net fits within what remains.
    """
    if spent is None:
        return limits
    bounds = {field.name: getattr(limits, field.name) for field in fields(limits)}
    for name, limit in limits.given.items():
        bounds[name] = limit - getattr(spent, name)
        if bounds[name] <= 0:
            raise BudgetError(
                f"a pair of nets within {limits} was asked for; the knowledge net alone has "
                f"{spent}. {_smaller_pair(limit, name, search)}"
            )
    try:
        remaining = Limits(**bounds)
        search.check(remaining)
    except BudgetError as error:
        raise BudgetError(
            f"a pair of nets within {limits} was asked for; the knowledge net has {spent}, and "
            f"then {error}"
        ) from error
    return remaining


def _smaller_pair(limit: float, name: str, search: Search) -> str:
    """Return a sentence on what works where the knowledge net alone exceeds a limit.

    Args:
        limit: Limit of the pair.
        name: Name of the limit, a field of `Limits`.
        search: Search in the space of both nets.
    """
    smallest = search.space.smallest
    least = search.meter.value(smallest, name)
    costs = search.meter.costs(smallest)
    if limit >= 2 * least:
        return (
            f"A smaller knowledge_macs would work, down to the smallest member, which has {costs}; "
            'or limits of the private net alone, account="private" (method.limit = "private").'
        )
    return (
        f"The smallest member has {costs}, and a pair at least twice as much. Larger limits or a "
        "smaller space would work."
    )


def named(members: tuple[Found, ...]) -> dict[str, Found]:
    """Return members by name, in the given order.

    A name contains the multiply-adds. The second of two equal names gets the suffix `_2`.
    """
    names: dict[str, Found] = {}
    for member in members:
        name, number = member.name, 2
        while name in names:
            name, number = f"{member.name}_{number}", number + 1
        names[name] = member
    return names


def _net(space: Space, supernet: Supernet | None, config: Config) -> Net:
    if supernet is None:
        return partial(space.member, config)
    return supernet.member(config, space.num_classes)
