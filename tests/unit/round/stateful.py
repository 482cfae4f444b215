"""A method with a slot and an extra of every kind, and the engines that run it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.methods import HeteroFL
from fedquilt.round.fold import Fold
from fedquilt.round.merge import ExtrasMean, Mean, RunningSum, Stateful, as_weights
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.passes import (
    LogitsPass,
    LossPass,
)
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.terms import Job, Server

CPU = torch.device("cpu")


RAGGED = (7, 4, 9, 5, 8, 4)


SHARES = (1.0, 0.5, 0.25)


LOCAL = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1))


@dataclass(frozen=True)
class Everything(MethodState):
    """One slot and one extra of each kind, with values that depend on all arguments of `finish`."""

    slots_down: tuple[str, ...] = ("sum",)
    slots_kept: tuple[str, ...] = ("own",)
    slots_up: tuple[str, ...] = ("sum",)
    extras_down: tuple[str, ...] = ("table",)
    extras_kept: tuple[str, ...] = ("rounds",)
    extras_up: tuple[str, ...] = ("table",)

    def finish(self, trained: Trained) -> Left:
        own = {
            name: 0.5 * value
            + trained.slots["sum"][name]
            + trained.weights[name]
            - trained.received[name]
            for name, value in trained.slots["own"].items()
        }
        rounds = trained.extras.get("rounds", torch.zeros(2, dtype=trained.steps.dtype)) + 1
        loss = trained.passes["loss"]["loss"] + trained.passes["later"]["loss"]
        table = (
            trained.extras.get("table", torch.ones_like(trained.steps)) * 0.5
            + trained.passes["logits"]["logits"][:3].detach()
        )
        sent = {name: value / trained.steps for name, value in own.items()}
        return Left(
            {"own": own}, {"sum": sent}, {"rounds": rounds * loss}, {"table": table + rounds.sum()}
        )


@dataclass(frozen=True)
class Stating(HeteroFL):
    """HeteroFL with state of all kinds."""

    local: LocalTraining = LOCAL
    state: MethodState = field(default=Everything(), metadata={"setting": False})

    def init(self, world: fq.methods.api.World) -> Server:
        server = super().init(world)
        zeros = {name: torch.zeros_like(value) for name, value in server.weights.items()}
        return replace(
            server, slots={"sum": zeros}, extras={"table": torch.zeros(3, 3, dtype=world.dtype)}
        )

    def learner(self, job: Job, world: fq.methods.api.World) -> Learner:
        before = (LossPass(), LogitsPass())
        return replace(
            super().learner(job, world),
            state=self.state,
            before=before,
            after=(LossPass(name="later"),),
        )

    def fold(self, server: Server, world: fq.methods.api.World) -> Fold:
        cutter = world.family.cutter
        mean = Mean(cutter, self.weighting, self.server_optimizer).begin(server)
        slot = RunningSum(cutter, scale=0.1).begin(as_weights(server, "sum"))
        return Stateful(mean, {"sum": slot}, ExtrasMean(cutter, "data"))


ENGINES = {
    "vectorized": lambda data: "vectorized",
    **{
        f"recorded-{layout}": lambda data, layout=layout: Vectorized(
            data, precision="fp64", record=True, layout=layout
        )
        for layout in ("alone", "grouped", "stack")
    },
    "ray": lambda data: "ray",
}
