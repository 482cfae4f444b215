"""Prototypes: nets of several sizes without shared weights, which learn from one another.

Each prototype has its own scope in the server's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import refuse
from fedquilt.errors import BudgetError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.family import Family, Rounding
from fedquilt.methods.initial import own_range
from fedquilt.round.federation import World
from fedquilt.round.method import Method
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Arch, Budget, Client, Job, Server, Submodel, Submodels


@dataclass(frozen=True)
class Prototypes(Method):
    """Base class of methods with a few net sizes and a server that trains on public samples.

    A prototype is a net with a share of every axis of the family. Prototypes share no weights: each
    has its own scope in the server's state. A client trains the largest prototype that its budget
    holds, and a device gets the largest that it can run.

    On a union of several architectures (`fedquilt.union`) the prototypes are its nets at full
    width, and the largest is the one with the most multiply-adds. Nets of different architectures
    have no common share, so that budgets there are bounds on multiply-adds, parameters or memory.
    """

    # Shares of the whole model that clients train, one net for each. On a union of architectures
    # the nets of the union are used instead.
    prototypes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    server_training: ServerTraining = ServerTraining()  # Server training on public samples.
    demo: ClassVar[Mapping[str, Any]] = {
        "prototypes": [1.0, 0.5, 0.25],
        "server_training": {"steps": 40},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = tuple(sorted(map(float, self.prototypes), reverse=True))
        problems = {}
        if (
            not shares
            or len(set(shares)) < len(shares)
            or not all(0 < share <= 1 for share in shares)
        ):
            problems["prototypes"] = (
                f"{list(self.prototypes)} was asked for; different shares in (0, 1] would work, "
                "such as [1.0, 0.5]."
            )
        if self.local.norm.personal:
            problems["local.norm"] = (
                f"{self.local.norm.name!r} was asked for, under which norms stay on clients. The "
                "server runs its nets on public samples, and needs all of their weights: 'batch', "
                "'tracked' or 'post' would work."
            )
        refuse(self, problems)
        object.__setattr__(self, "prototypes", shares)

    @override
    def shortened(self) -> Self:
        """Return the method with little training on clients and on the server, for tests."""
        return replace(super().shortened(), server_training=self.server_training.shortened())

    @property
    @override
    def needs_public(self) -> bool:
        return self.server_training.steps > 0

    @property
    def statistics(self) -> Literal["stored", "batch"]:
        """Return the statistics that norms use on public samples.

        They are tracked ones ("stored") if the norm policy tracks them, else those of the batch.
        """
        return "stored" if self.local.norm.tracks else "batch"

    @override
    def initial(self, world: World) -> dict[str, Tensor]:
        """Draw every prototype independently, in the range of its own fan-in.

        The first prototype uses the random seed of the run. Nets of a union have the union's
        initial weights.

        Returns:
            Weights by name. A name begins with the scope of its prototype.
        """
        weights: dict[str, Tensor] = {}
        if world.family.layout.nets:
            drawn_weights = world.family.init(world.seed, dtype=world.dtype)
            for net in self.nets(world):
                names = (name for name in world.family.member(net).names if name in drawn_weights)
                weights |= {net.scope + name: drawn_weights[name] for name in names}
            return weights
        for index, net in enumerate(self.nets(world)):
            seed = world.seed
            if index:
                seed = noise.key(noise.Stream.PROTOTYPE_INITIAL, world.seed, index)
            weights |= {
                net.scope + name: value for name, value in drawn(net.arch, seed, world).items()
            }
        return weights

    def nets(self, world: World) -> tuple[Submodel, ...]:
        """Return the prototypes of the family in `world`, the largest first."""
        if world.family.layout.nets:
            return architectures(world.family)
        return tuple(self.prototype(share, world) for share in self.prototypes)

    def prototype(self, share: float, world: World) -> Submodel:
        """Return the prototype of a share of the family in `world`.

        It has a scope of its own, such as `share0.5/`.
        """
        return Submodel(world.family.fit(Budget(share=share)), Index(), f"share{share:g}/")

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return a plan with one sub-model, the largest prototype that the client can train."""
        if world.family.layout.nets:
            return [self.trained_net(client.budget, world)]
        return [
            self.prototype(
                self.fitting(self.trainable_share(client.budget, world), client.budget), world
            )
        ]

    @override
    def divisor(self, job: Job, world: World) -> float:
        """Return the share of the client's prototype, by which `local.scaler` divides outputs.

        It is 1 for nets of a union.

        Args:
            job: Job of the client, which has its budget.
            world: Family, task and random seed.
        """
        if world.family.layout.nets:
            return 1.0
        return self.fitting(self.trainable_share(job.client.budget, world), job.client.budget)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the largest prototype that the device can run, as the only net."""
        if world.family.layout.nets:
            return (self.net_for(budget, world),)
        return (self.prototype(self.fitting(self.runnable_share(budget, world), budget), world),)

    # --- prototypes that are the nets of a union -------------------------------------------------

    @override
    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        """Return the net that a client trains.

        On a union it is the largest prototype that fits. Else it is the largest member that fits.

        Args:
            budget: Budget of the client.
            world: Family, task and random seed.
            rounding: Rounding of a share to whole channels. It has no effect on a union.
        """
        if world.family.layout.nets:
            return self.trained_net(budget, world).arch
        return super().fit(budget, world, rounding)

    def trained_net(self, budget: Budget, world: World) -> Submodel:
        """Return the largest net of a union in `world` that a client with `budget` can train."""
        return largest(self.nets(world), budget, world, self._step_within(budget, world))

    def net_for(self, budget: Budget, world: World, step: TrainingStep | None = None) -> Submodel:
        """Return the largest net of a union that a device can hold.

        Args:
            budget: Budget of the device.
            world: World with a union.
            step: Training step whose memory is bounded. None: memory bounds inference.
        """
        return largest(self.nets(world), budget, world, step)

    @override
    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the share that a client can train.

        On a union it is the multiply-adds of the client's net divided by those of the largest net.
        Records use it as the key of the net's results.

        Args:
            budget: Budget of the client.
            world: Family, task and random seed.
            rounding: Rounding of a share to whole channels. It has no effect on a union.
        """
        if not world.family.layout.nets:
            return super().trainable_share(budget, world, rounding)
        return _relative(self.net_for(budget, world, self._step_within(budget, world)), world)

    @override
    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the share that a device can run. A union is counted as in `trainable_share`."""
        if not world.family.layout.nets:
            return super().runnable_share(budget, world)
        return _relative(self.net_for(budget, world), world)

    @override
    def without_memory(self, budget: Budget, world: World, trains: bool) -> Budget:
        """Return a budget without a bound on memory that allows the same net.

        On a union it has the multiply-adds of the net that fits.

        Args:
            budget: Budget of a device.
            world: Family, task and random seed.
            trains: True if memory bounds the training step. False: it bounds inference.
        """
        if not world.family.layout.nets:
            return super().without_memory(budget, world, trains)
        net = self.net_for(budget, world, self._step_within(budget, world) if trains else None)
        return replace(budget, memory=None, macs=world.family.member(net).macs)

    @override
    def label(self, budget: Budget, world: World) -> str:
        """Return the label of a budget's results in tables and logs.

        On a union it is the name of the net that a client with the budget trains.
        """
        if not world.family.layout.nets:
            return super().label(budget, world)
        net = self.net_for(budget, world, self._step_within(budget, world))
        return world.family.layout.net_names(net.arch.variant)[0]

    def fitting(self, share: float, budget: Budget) -> float:
        """Return the share of the largest prototype that fits into a share.

        Args:
            share: Share of every axis that a device can hold.
            budget: Budget of the device, for the error message.

        Raises:
            BudgetError: All prototypes are larger.
        """
        fits = next((prototype for prototype in self.prototypes if prototype <= share + 1e-9), None)
        if fits is None:
            raise BudgetError(
                f"the budget {budget} was given, which holds a share of {share:g}; the smallest "
                f"prototype of {type(self).__name__} has {self.prototypes[-1]:g}. A smaller one "
                f"would work: method.prototypes = {[*self.prototypes, round(share, 4)]}; or larger "
                "budgets."
            )
        return fits


def architectures(family: Family) -> tuple[Submodel, ...]:
    """Return the nets of a union at full width, each in its own scope.

    They are in descending order of multiply-adds.
    """
    wholes = {net: family.at(net).whole for net in family.layout.nets}
    order = sorted(wholes, key=lambda net: -family.member(wholes[net]).macs)
    return tuple(Submodel(wholes[net], Index(), f"{net}/") for net in order)


def largest(
    nets: Sequence[Submodel], budget: Budget, world: World, step: TrainingStep | None = None
) -> Submodel:
    """Return the first net that a budget holds.

    Args:
        nets: Nets of a union, the largest first.
        budget: Budget of a device. A share of 1 has no effect.
        world: World with a union.
        step: Training step whose memory is bounded. None: memory bounds inference.

    Raises:
        BudgetError: The budget has a share below 1, or holds none of the nets.
    """
    family = world.family
    names = ", ".join(family.layout.nets)
    if budget.share is not None and budget.share < 1:
        raise BudgetError(
            f"a share of {budget.share:g} was given as a budget; the nets {names} are of different "
            "architectures, which have no common share. Bounds on macs, params or memory would "
            "work, such as those of a fleet by_net."
        )
    fits = next((net for net in nets if not family.excess([net], budget, step)), None)
    if fits is None:
        excess = "; ".join(family.excess([nets[-1]], budget, step))
        smallest = family.layout.net_names(nets[-1].arch.variant)[0]
        raise BudgetError(
            f"the budget {budget} was given, which holds none of the nets {names}. The smallest is "
            f"{smallest!r}: {excess}. A smaller net in the union would work, or larger budgets."
        )
    return fits


def _relative(net: Submodel, world: World) -> float:
    """Return a net's multiply-adds divided by those of the largest net of a union.

    Args:
        net: A net of the union.
        world: World with the union.
    """
    family = world.family
    max_macs = max(family.member(family.at(variant).whole).macs for variant in family.variants)
    return family.member(net).macs / max(1, max_macs)


def drawn(arch: Arch, seed: int, world: World) -> dict[str, Tensor]:
    """Return initial weights of a member, drawn as if the member were a model of its own.

    Args:
        arch: Architecture of the member.
        seed: Random seed of the weights.
        world: Family and dtype.
    """
    family = world.family
    full_weights = family.init(seed, dtype=world.dtype)
    cut = family.cutter.gather(full_weights, prefix(arch), list(full_weights))
    gains = own_range(cut, full_weights, family)
    return {
        name: value * gains[name] if gains.get(name, 1.0) != 1 else value.clone()
        for name, value in cut.items()
    }
