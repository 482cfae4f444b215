"""What a device gets once a federation is trained: nets within its budget, and what their norms normalise by."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedquilt.checks import whole
from fedquilt.data.parts import Array
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family import Family
from fedquilt.family.cost import Cost
from fedquilt.family.dual import set_robustness
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.faithful import forget_statistics
from fedquilt.family.member import Member
from fedquilt.family.norms import NormPolicy, norm_policy
from fedquilt.family.union import alone
from fedquilt.round.client import own_state
from fedquilt.round.serve import arranged, compared_passes, given, measured, owned, trained_within
from fedquilt.terms import Budget, Client, Job, Mix, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.experiment import Run

_ROUNDING = 1e-9  # of shares that are added up
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Deployed:
    """Nets of a run whose logits are averaged, usually one, with weights cut and norms settled."""

    family: Family
    nets: Mix
    states: tuple[Weights, ...]
    norms: NormPolicy

    @property
    def cost(self) -> Cost:
        """Of all nets together."""
        return total_cost(self.family, self.nets)

    @property
    def share(self) -> float:
        """Of the channels of an axis, at most; nets whose logits are averaged add up."""
        return total_share(self.family, self.nets)

    def module(self, robustness: float | None = None) -> nn.Module:
        """A plain nn.Module that owns its weights, in evaluation."""
        return assembled(self.family, self.nets, self.states, robustness)


@dataclass(frozen=True)
class Shelf:
    """A run's weights for whoever is to get them: the server's, or those one client ended with."""

    run: Run
    client: int | None = None

    def __post_init__(self) -> None:
        run = self.run
        if self.client is not None:
            check_client(run, self.client)
        if self.client is None and run.method.personal:
            raise ConfigError(
                f"{type(run.method).__name__} leaves its result on the clients, each its own. "
                "Say whose: client=0 in Python, --client 0 on the command line."
            )

    @cached_property
    def server(self) -> Server:
        """The state in the order in which it is handed out; without data, as it was trained."""
        run = self.run
        return run.server if run.absent else arranged(run.federation, run.server, run.engine)

    def nets(self, budget: Budget) -> Mix:
        """The nets a device of this budget gets, checked by what they cost."""
        run, world = self.run, self.run.world
        if self.client is None:
            nets = given(run.method, self.server, budget, world)
        else:
            own = self._own_budget
            asked = (
                run.method.without_memory(budget, world, trains=False) if budget.memory else budget
            )
            held = trained_within(run.method, own, world)
            nets = owned(run.method, run.server, self._asked(asked.both(held)), world)
            less = (
                budget.share is not None
                and total_share(world.family, nets) < budget.share - _ROUNDING
            )
            if less and own.share is not None and own.share < (budget.share or 0):
                told = "a %s was asked for; client %d holds a %s, and has no more to give."
                _log.warning(told, budget, self.client, own)
        check_within(run, nets, budget)
        return nets

    def weights(self, net: Submodel) -> dict[str, Tensor]:
        """A net's weights, with norm statistics where the run has some. Views where possible."""
        run, world = self.run, self.run.world
        if self.client is None:
            own = world.family.member(net).names
            names = [name for name in own if net.scope + name in self.server.weights]
            return world.family.cutter.gather(self.server.weights, net, names)
        job = Job(self._asked(Budget(share=1.0)), net, run.server.round)
        return own_state(run.federation, run.server, job, run.engine.device)

    @property
    def _own_budget(self) -> Budget:
        """What the client could hold last: of a wider net it has trained nothing."""
        assert self.client is not None
        return self.run.fleet.budget(
            self.client, self.run.server.last(self.client), self.run.world.seed
        )

    def _asked(self, budget: Budget) -> Client:
        assert self.client is not None
        return Client(self.client, budget, len(self.run.data.parts[self.client]))

    def settled(
        self, nets: Sequence[Submodel], norms: NormPolicy, samples: Array | None
    ) -> list[dict[str, Tensor]]:
        """Weights of several nets with the norm statistics a policy gives them, each net's its own."""
        states, statistics = [self.weights(net) for net in nets], self.run.world.family.statistics
        if not statistics:
            return states
        if norms.tracks:
            family = self.run.world.family
            if all(
                has_statistics(family.member(net), state)
                for net, state in zip(nets, states, strict=True)
            ):
                return states
            raise ConfigError(
                f"norms={norms.name!r} was asked for; {type(self.run.method).__name__} trained with norm = "
                f"{self.run.method.local.norm.name!r}, which stores no statistics with the weights. 'post' measures "
                "them over training data, and 'batch' does without."
            )
        states = [
            {name: value for name, value in one.items() if name not in statistics} for one in states
        ]
        if not norms.measures:
            return states
        found = self._measured(nets, states, norms, samples)
        return [{**state, **own} for state, own in zip(states, found, strict=True)]

    def _measured(
        self,
        nets: Sequence[Submodel],
        states: Sequence[Weights],
        norms: NormPolicy,
        samples: Array | None,
    ) -> list[dict[str, Tensor]]:
        run, engine = self.run, self.run.engine
        if samples is None and norms.needs_public and not run.absent:
            norms.check_public(run.world.num_public)
            samples = run.world.public
        if samples is not None:
            with engine.computing():
                return [
                    measured(run.world.family, net, state, samples, run.evaluation.batch_size)
                    for net, state in zip(nets, states, strict=True)
                ]
        if run.absent:
            raise ConfigError(
                f"norms={norms.name!r} measures the norms' statistics over the training data, which cannot be had: "
                f"{run.absent}\n  Give samples (samples=…), or ask for norms='batch' (--norms batch), which normalises "
                "by the batch; norms='tracked' is for runs that sent statistics with their weights."
            )
        pairs = list(zip(nets, states, strict=True))
        return engine.calibrate(run.federation, pairs, run.evaluation.batch_size, self.client)


def deployed(
    run: Run,
    budget: Budget,
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
) -> Deployed:
    """What a device of a budget gets: of the server's, or what a client ended with."""
    shelf, policy = Shelf(run, client), norms_of(run, norms, client)
    nets = shelf.nets(budget)
    check_nets(run, nets, policy)
    states = shelf.settled(nets, policy, samples)
    return Deployed(*alone(run.world.family, nets, states), policy)


def assembled(
    family: Family, nets: Mix, states: Sequence[Weights], robustness: float | None
) -> nn.Module:
    """Return one module of several nets whose logits are averaged, in evaluation mode.

    Args:
        family: What the nets were cut from.
        nets: Sub-models, usually one.
        states: Their weights. Norms without statistics among them normalize by the batch.
        robustness: Of dual norms, from 0 (clean) to 1. None changes nothing.
    """
    modules = [family.assemble(net, state) for net, state in zip(nets, states, strict=True)]
    for module, net, state in zip(modules, nets, states, strict=True):
        if not has_statistics(family.member(net), state):
            forget_statistics(module)
    module = (modules[0] if len(modules) == 1 else Ensemble(modules)).eval()
    return module if robustness is None else set_robustness(module, robustness)


def has_statistics(member: Member, state: Weights) -> bool:
    """Return True if the statistics of all norms of a member are among the weights."""
    return set(member.statistics) <= set(state)


def check_nets(run: Run, nets: Iterable[Submodel], norms: NormPolicy) -> None:
    """Refuse nets whose modules compute something else than clients trained (`Family.check_net`)."""
    for net in nets:
        run.world.family.member(net).check_net(compared_passes(run.method.local, norms))


def check_client(run: Run, client: int) -> None:
    """Refuse a client that is none of the fleet's; from the end nobody is counted."""
    if not whole(client) or client >= run.fleet.num_clients:
        raise ConfigError(
            f"client {client} was asked for; the fleet has {run.fleet.num_clients}, from 0 on."
        )


def norms_of(run: Run, asked: NormPolicy | str | None, client: int | None) -> NormPolicy:
    """The norm policy that was asked for, or what the method's own implies.

    Statistics that training stored are used. Where it stored none they are measured, so that a model answers sample by
    sample; also where training was tested on the batch's.
    """
    own = run.method.local.norm
    if asked is None:
        return own.deployed()
    try:
        policy = norm_policy(asked)
    except ConfigError as error:
        raise ConfigError(f"norms={error}") from error
    if policy.keeps_statistics and (client is None or not own.keeps_statistics):
        raise ConfigError(
            f"norms={policy.name!r} was asked for, the statistics that a client keeps; that is for client=… of a run "
            f"whose norms are local, and this one's are {own.name!r}. 'post' measures them over a client's data."
        )
    if policy.owner == "client" and client is None:
        raise ConfigError(
            f"norms={policy.name!r} was asked for, which measures the norms' statistics over the samples of one "
            "client. Say whose: client=0 in Python, --client 0 on the command line. 'post' measures over all."
        )
    return policy


def total_cost(family: Family, nets: Mix) -> Cost:
    """Return what nets cost together on a device that holds all of them."""
    return reduce(add, (family.cost(net) for net in nets))


def total_share(family: Family, nets: Mix) -> float:
    """Return the share of its channels that the widest dimension keeps, of all nets together."""
    return sum(family.width(net) for net in nets)


def check_within(run: Run, nets: Mix, budget: Budget) -> None:
    """Refuse nets that cost more than their device has: a method's `deploy` is not taken at its word.

    A share has no net of its own where it is less than a channel, or where a method rounds up; then a warning says so.
    """
    family = run.world.family
    if over := family.excess(nets, budget):
        count = sum(family.count(net) for net in nets)
        kind = (
            f"{len(nets)} nets"
            if len(nets) > 1
            else "one common net"
            if run.method.personal
            else "a net"
        )
        raise BudgetError(
            f"{type(run.method).__name__} trains {kind}, of {count:,} parameters; the budget {budget} allows less: "
            f"{'; '.join(over)}."
        )
    if budget.share is not None and (share := total_share(family, nets)) > budget.share + _ROUNDING:
        _log.warning(
            "a share of %g was asked for; what is deployed has %.4g: every axis keeps at least one channel, and some "
            "methods round up. A budget of params, macs or memory is never exceeded.",
            budget.share,
            share,
        )
