"""Prototypes: nets of several sizes, each a scope of the server's state, whose clients teach one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import refuse
from fedquilt.errors import BudgetError
from fedquilt.family.cut import prefix
from fedquilt.methods.initial import own_range
from fedquilt.methods.method import Method
from fedquilt.round.federation import World
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Arch, Budget, Client, Job, Mix, Server, Submodel

_INITIAL = 49  # Random stream of the prototypes' initial weights.


@dataclass(frozen=True)
class Prototypes(Method):
    """Clients train nets of a few sizes, which share no weights, and a server that trains on public samples.

    A prototype is a share of every axis of the family. Its weights are a scope of the server's state. A client trains
    the largest prototype that its budget holds, and a device gets the largest that it can run.
    """

    # Shares of the whole model that clients train, each a net of its own
    prototypes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    server_training: ServerTraining = ServerTraining()  # How the server trains on public samples
    demo: ClassVar[Mapping[str, Any]] = {"prototypes": [1.0, 0.5, 0.25], "server_training": {"steps": 40}}

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = tuple(sorted(map(float, self.prototypes), reverse=True))
        wrong = {}
        if not shares or len(set(shares)) < len(shares) or not all(0 < share <= 1 for share in shares):
            wrong["prototypes"] = (
                f"{list(self.prototypes)} was asked for; different shares in (0, 1] would work, such as [1.0, 0.5]."
            )
        if self.local.norm.personal:
            wrong["local.norm"] = (
                f"{self.local.norm.name!r} was asked for, under which norms stay on clients. The server runs its nets "
                "on public samples, and needs all of their weights: 'batch', 'tracked' or 'post' would work."
            )
        refuse(self, wrong)
        object.__setattr__(self, "prototypes", shares)

    def shortened(self) -> Self:
        """Return the method with little training. The server has SGD, because Adam amplifies rounding errors."""
        few = replace(self.server_training, optimiser=SGD(lr=0.05), batch_size=4, check_every=2)
        return replace(super().shortened(), server_training=replace(few, steps=min(4, few.steps)))

    @property
    def needs_public(self) -> bool:
        return self.server_training.steps > 0

    @property
    def statistics(self) -> Literal["stored", "batch"]:
        """Return what norms use on public samples: tracked statistics if the policy tracks them, else the batch's."""
        return "stored" if self.local.norm.tracks else "batch"

    def initial(self, world: World) -> dict[str, Tensor]:
        """Draw every prototype by itself, in the range of its own fan-in. The first has the seed of the run."""
        weights: dict[str, Tensor] = {}
        for place, net in enumerate(self.nets(world)):
            seed = noise.key(_INITIAL, world.seed, place) if place else world.seed
            weights |= {net.scope + name: value for name, value in drawn(net.arch, seed, world).items()}
        return weights

    def nets(self, world: World) -> tuple[Submodel, ...]:
        """Return all nets of the server's state, the prototypes in the order of their shares, the widest first."""
        return tuple(self.prototype(share, world) for share in self.prototypes)

    def prototype(self, share: float, world: World) -> Submodel:
        """Return the net of a share. It is all that its scope holds."""
        return Submodel(world.family.fit(Budget(share=share)), Index(), f"share{share:g}/")

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return the largest prototype that the client can train."""
        return [self.prototype(self.fitting(self.trainable_share(client.budget, world), client.budget), world)]

    def divisor(self, job: Job, world: World) -> float:
        """Return the share of the client's prototype."""
        return self.fitting(self.trainable_share(job.client.budget, world), job.client.budget)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """Return the largest prototype that the device can run."""
        return (self.prototype(self.fitting(self.runnable_share(budget, world), budget), world),)

    def fitting(self, share: float, budget: Budget) -> float:
        """Return the largest prototype within a share.

        Args:
            share: Share of every axis that a device can hold.
            budget: Budget of the device, for the message.

        Raises:
            BudgetError: All prototypes are larger.
        """
        fits = next((one for one in self.prototypes if one <= share + 1e-9), None)
        if fits is None:
            raise BudgetError(
                f"the budget {budget} was given, which holds a share of {share:g}; the smallest prototype of "
                f"{type(self).__name__} has {self.prototypes[-1]:g}. A smaller one would work: method.prototypes = "
                f"{[*self.prototypes, round(share, 4)]}; or larger budgets."
            )
        return fits


def drawn(arch: Arch, seed: int, world: World) -> dict[str, Tensor]:
    """Return the initial weights of a member, as if it were a whole net of its own."""
    family = world.family
    whole = family.init(seed, dtype=world.dtype)
    cut = family.cutter.gather(whole, prefix(arch), list(whole))
    gains = own_range(cut, whole, family)
    return {name: value * gains[name] if gains.get(name, 1.0) != 1 else value.clone() for name, value in cut.items()}
