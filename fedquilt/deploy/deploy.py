"""Deployment of a trained federation: nets within a device's budget, with norm statistics."""

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
from fedquilt.round.deployed import client_nets, deployed_nets, trained_within
from fedquilt.round.eval_jobs import compared_passes
from fedquilt.round.norm_statistics import measured
from fedquilt.round.own_tests import is_on_device
from fedquilt.round.ranking import ranked
from fedquilt.terms import Budget, Client, Job, Server, Submodel, Submodels, Weights

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun

_ROUNDING = 1e-9  # Rounding error of a sum of shares
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Deployed:
    """Nets of a run whose logits are averaged, usually one, with final weights and norms."""

    family: Family  # Family that the nets were cut from.
    nets: Submodels  # Sub-models whose logits are averaged.
    states: tuple[Weights, ...]  # Weights of each net, with norm statistics if the policy has any.
    norms: NormPolicy  # Policy that decides what the norms normalize by.

    @property
    def cost(self) -> Cost:
        """Return the cost of all nets together: parameters, multiply-adds and memory."""
        return total_cost(self.family, self.nets)

    @property
    def share(self) -> float:
        """Return the largest share of channels that an axis keeps, added up over the nets."""
        return total_share(self.family, self.nets)

    def module(self, robustness: float | None = None) -> nn.Module:
        """Return a plain nn.Module that owns its weights, in evaluation mode.

        Several nets become one module that averages their logits.

        Args:
            robustness: Robustness of dual norms, from 0 (clean) to 1. None changes nothing.
        """
        return assembled(self.family, self.nets, self.states, robustness)


@dataclass(frozen=True)
class WeightSource:
    """Weights of a run that are deployed: those of the server, or those of one client."""

    run: TrainedRun
    client: int | None = None  # Client whose own result is deployed. None: the server's.

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
        """Return the server's state, with channels ranked for deployment if there is data."""
        run = self.run
        return run.server if run.absent else ranked(run.federation, run.server, run.evaluator)

    def nets(self, budget: Budget) -> Submodels:
        """Return the nets for a device of this budget, after checking their cost.

        A client's nets are also within the budget that the client trained with. A warning is logged
        if that makes them narrower.

        Raises:
            BudgetError: The nets exceed the budget.
        """
        run, world = self.run, self.run.world
        if self.client is None:
            nets = deployed_nets(run.method, self.server, budget, world)
        else:
            client_budget = self._own_budget
            requested = (
                run.method.without_memory(budget, world, trains=False) if budget.memory else budget
            )
            trained_budget = trained_within(run.method, client_budget, world)
            nets = client_nets(
                run.method, run.server, self._asked(requested.both(trained_budget)), world
            )
            is_narrower = (
                budget.share is not None
                and total_share(world.family, nets) < budget.share - _ROUNDING
            )
            if (
                is_narrower
                and client_budget.share is not None
                and client_budget.share < (budget.share or 0)
            ):
                message = "a %s was asked for; client %d holds a %s, and has no more to give."
                _log.warning(message, budget, self.client, client_budget)
        check_within(run, nets, budget)
        return nets

    def weights(self, net: Submodel) -> dict[str, Tensor]:
        """Return the weights of a sub-model by name, without its scope.

        The server's weights are views where possible, so copy them before writing. Weights that its
        state does not have, such as norm statistics that were not stored, are left out. A client's
        weights are those it would start training from: received without loss, kept by the client,
        or initial.
        """
        run, world = self.run, self.run.world
        if self.client is None:
            member_names = world.family.member(net).names
            names = [name for name in member_names if net.scope + name in self.server.weights]
            return world.family.cutter.gather(self.server.weights, net, names)
        job = Job(self._asked(Budget(share=1.0)), net, run.server.round)
        if is_on_device(run.federation, run.server, job):
            raise ConfigError(
                f"the net of client {self.client} was asked for; its weights are on its device. "
                "`fedquilt export STATE --out FILE` on the device writes it, where STATE is the "
                "state folder of `fedquilt join`."
            )
        return own_state(run.federation, run.server, job, run.engine.device)

    @property
    def _own_budget(self) -> Budget:
        """Return the client's budget in the round in which it trained last.

        Without a memory of that round, it is the budget in the last finished round. The client has
        trained no weights of wider nets.
        """
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
        """Return the weights of several nets, with the norm statistics that a policy asks for.

        A policy either uses statistics of training, or measures new ones, or has none. In the last
        case they are left out, and norms use the batch.

        Args:
            nets: Sub-models, each of which gets statistics of its own.
            norms: Norm policy.
            samples: Inputs on which statistics are measured. None: the samples that the policy
                names.

        Raises:
            ConfigError: The policy needs statistics that training did not store.
        """
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
                f"norms={norms.name!r} was asked for; {type(self.run.method).__name__} trained "
                f"with norm = {self.run.method.local.norm.name!r}, which stores no statistics "
                "with the weights. 'post' measures them over training data, and 'batch' does "
                "without."
            )
        states = [
            {name: value for name, value in state.items() if name not in statistics}
            for state in states
        ]
        if not norms.measures:
            return states
        measured_statistics = self._measured(nets, states, norms, samples)
        return [
            {**state, **net_statistics}
            for state, net_statistics in zip(states, measured_statistics, strict=True)
        ]

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
                f"norms={norms.name!r} measures the norms' statistics over the training data, "
                "which cannot be had: "
                f"{run.absent}\n  Give samples (samples=…), or ask for norms='batch' (--norms "
                "batch), which normalizes "
                "by the batch; norms='tracked' is for runs that sent statistics with their weights."
            )
        pairs = list(zip(nets, states, strict=True))
        statistics = run.evaluator.calibrate(
            run.federation, pairs, run.evaluation.batch_size, self.client
        )
        members = [run.world.family.member(net) for net in nets]
        if not all(map(has_statistics, members, statistics)):
            raise ConfigError(
                f"norms={norms.name!r} was asked for; the server has no training samples, and no "
                "device could measure the norm statistics of the net. A device that is online and "
                "can hold it would work, or samples=… in Python."
            )
        return statistics


def deployed(
    run: TrainedRun,
    budget: Budget,
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
) -> Deployed:
    """Return the nets for a device of a budget, with their weights and norm statistics.

    Args:
        run: A run, or what is left of it for deployment.
        budget: Budget of the device.
        client: Client whose own result is deployed. None: the server's.
        norms: Norm policy or its name, as in `Run.deploy`. None: the policy of training, or `post`.
        samples: Inputs on which norm statistics are measured instead of training samples.
    """
    source, policy = WeightSource(run, client), norms_of(run, norms, client)
    nets = source.nets(budget)
    check_nets(run, nets, policy)
    states = source.settled(nets, policy, samples)
    return Deployed(*alone(run.world.family, nets, states), policy)


def assembled(
    family: Family, nets: Submodels, states: Sequence[Weights], robustness: float | None
) -> nn.Module:
    """Return one module of several nets whose logits are averaged, in evaluation mode.

    Args:
        family: Family that the nets were cut from.
        nets: Sub-models, usually one.
        states: Their weights. Norms without statistics among them normalize by the batch.
        robustness: Robustness of dual norms, from 0 (clean) to 1. None changes nothing.
    """
    modules = [family.assemble(net, state) for net, state in zip(nets, states, strict=True)]
    for module, net, state in zip(modules, nets, states, strict=True):
        if not has_statistics(family.member(net), state):
            forget_statistics(module)
    module = (modules[0] if len(modules) == 1 else Ensemble(modules)).eval()
    return module if robustness is None else set_robustness(module, robustness)


def has_statistics(member: Member, state: Weights) -> bool:
    """Return True if `state` has the statistics of all norms of a member. No norms give True."""
    return set(member.statistics) <= set(state)


def check_nets(run: TrainedRun, nets: Iterable[Submodel], norms: NormPolicy) -> None:
    """Refuse nets whose modules compute something else than clients trained.

    Args:
        run: A run.
        nets: Sub-models, each of which is checked by `Member.check_net`.
        norms: Norm policy of the deployed nets.
    """
    for net in nets:
        run.world.family.member(net).check_net(compared_passes(run.method.local, norms))


def check_client(run: TrainedRun, client: int) -> None:
    """Raise a ConfigError unless `client` is a whole number from 0 to the number of clients − 1."""
    if not whole(client) or client >= run.fleet.num_clients:
        raise ConfigError(
            f"client {client} was asked for; the fleet has {run.fleet.num_clients}, from 0 on."
        )


def norms_of(run: TrainedRun, requested: NormPolicy | str | None, client: int | None) -> NormPolicy:
    """Return the norm policy that was asked for, or the one that the method's policy implies.

    Statistics that training stored are used. If it stored none they are measured, so that the
    output for a sample does not depend on the batch. This also holds if training was evaluated with
    the statistics of the batch.

    Args:
        run: A run.
        requested: Norm policy or its name. None: the one that the method's policy implies.
        client: Client whose own result is deployed. None: the server's.

    Raises:
        ConfigError: The policy is unknown, or needs a client.
    """
    training_policy = run.method.local.norm
    if requested is None:
        return training_policy.deployed()
    try:
        policy = norm_policy(requested)
    except ConfigError as error:
        raise ConfigError(f"norms={error}") from error
    if policy.keeps_statistics and (client is None or not training_policy.keeps_statistics):
        raise ConfigError(
            f"norms={policy.name!r} was asked for, the statistics that a client keeps; that is for "
            f"client=… of a run whose norms are local, and this one's are {training_policy.name!r}."
            " 'post' measures them over a client's data."
        )
    if policy.owner == "client" and client is None:
        raise ConfigError(
            f"norms={policy.name!r} was asked for, which measures the norms' statistics over the "
            "samples of one client. Say whose: client=0 in Python, --client 0 on the command "
            "line. 'post' measures over all."
        )
    return policy


def total_cost(family: Family, nets: Submodels) -> Cost:
    """Return the sum of the costs of several nets, for a device that holds all of them."""
    return reduce(add, (family.cost(net) for net in nets))


def total_share(family: Family, nets: Submodels) -> float:
    """Return the largest share of channels that an axis keeps, added up over the nets.

    It is above 1 if nets together are wider than the whole model.
    """
    return sum(family.width(net) for net in nets)


def check_within(run: TrainedRun, nets: Submodels, budget: Budget) -> None:
    """Refuse nets that exceed the budget of their device, whatever a method's `deploy` returns.

    A share may be exceeded with a warning. This happens if it is less than one channel, or if a
    method rounds up.

    Args:
        run: A run.
        nets: Sub-models that a device would hold together.
        budget: Budget of the device.

    Raises:
        BudgetError: The nets need more parameters, multiply-adds or memory than the budget allows.
    """
    family = run.world.family
    if excess := family.excess(nets, budget):
        count = sum(family.count(net) for net in nets)
        kind = (
            f"{len(nets)} nets"
            if len(nets) > 1
            else "one common net"
            if run.method.personal
            else "a net"
        )
        raise BudgetError(
            f"{type(run.method).__name__} trains {kind}, of {count:,} parameters; the budget "
            f"{budget} allows less: {'; '.join(excess)}."
        )
    if budget.share is not None and (share := total_share(family, nets)) > budget.share + _ROUNDING:
        _log.warning(
            "a share of %g was asked for; what is deployed has %.4g: every axis keeps at least "
            "one channel, and some methods round up. A budget of params, macs or memory is never "
            "exceeded.",
            budget.share,
            share,
        )
