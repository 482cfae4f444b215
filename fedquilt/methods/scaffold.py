"""SCAFFOLD: control variates correct the drift of clients (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.methods.method import Method
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Mean, Plain, ServerStep, Stateful, Sum, Weighting, as_weights
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import Local
from fedquilt.round.training.objectives import View, Wrapping
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.passes import GradientPass
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.terms import Job, Server

Option = Literal["I", "II"]
CONTROL = "control"  # The server's variate c, and a client's change of its own on the way up.
CLIENT_CONTROL = "client_control"  # A client's variate c_i.


@dataclass(frozen=True)
class Corrected(Wrapping):
    """Another objective plus the linear term ⟨c − c_i, w⟩, whose gradient is the correction of every step.

    The term is shifted by a constant so that its value is 0 at the current weights. The losses that are reported are
    then those of the other objective.
    """

    def __call__(self, view: View) -> Tensor:
        loss = self.objective(view)
        control, own = view.slots[CONTROL], view.slots[CLIENT_CONTROL]
        for name in control:
            weight = view.weights[name]
            loss = loss + ((control[name] - own[name]) * (weight - weight.detach())).sum()
        return loss


@dataclass(frozen=True)
class ControlVariates(MethodState):
    """The variates c and c_i, and line 12 of algorithm 1, which updates c_i."""

    slots_down: tuple[str, ...] = (CONTROL,)
    slots_kept: tuple[str, ...] = (CLIENT_CONTROL,)
    slots_up: tuple[str, ...] = (CONTROL,)
    option: Option = "II"

    def finish(self, trained: Trained) -> Left:
        """Return c_i⁺, which is kept, and c_i⁺ − c_i, which is sent."""
        control, own = trained.slots[CONTROL], trained.slots[CLIENT_CONTROL]
        new = {name: self._updated(trained, name) for name in control}
        return Left({CLIENT_CONTROL: new}, {CONTROL: {name: new[name] - own[name] for name in new}})

    def _updated(self, trained: Trained, name: str) -> Tensor:
        if self.option == "I":  # The gradient at the received weights
            return trained.passes["gradient"][name]
        drift = trained.received[name] - trained.weights[name]
        control, own = trained.slots[CONTROL][name], trained.slots[CLIENT_CONTROL][name]
        return own - control + drift / (trained.steps * trained.lr)


@dataclass(frozen=True)
class Scaffold(Method):
    """Each step of a client is corrected by c − c_i, the difference of the server's variate and its own.

    A variate estimates a gradient: c_i that of the client's loss, c their mean over the fleet. Variates that stay zero
    give FedAvg with uniform weights. A client that holds a sub-model has both variates at its positions alone; others
    keep their values. The server adds (c_i⁺ − c_i)/N at the positions that arrived, N being the clients of the fleet.
    """

    local: Local = Local(optimiser=SGD(momentum=0.0))
    weighting: Weighting = "uniform"  # What a client counts by in the mean; the paper's is uniform
    option: Option = "II"  # How c_i is updated. I: gradient at the received weights; II: mean gradient of the steps
    server_lr: float = 1.0  # Step size of the server; 1 takes the mean as it is
    paper = "Karimireddy et al. 2020"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, option=Option)
        within(self, server_lr="(0, inf)")
        optimiser = self.local.optimiser
        wrong = {}
        if not isinstance(optimiser, SGD) or optimiser.momentum or optimiser.clip:
            wrong["local.optimiser"] = (
                f"{optimiser} was asked for; (x − y)/(K·η) is the mean gradient of a client's steps for plain SGD "
                "alone. SGD(momentum=0, clip=0) works, with any learning rate, schedule and weight decay."
            )
        if self.server_lr != 1 and not isinstance(self.server, Plain):
            wrong["server_lr"] = (
                f"{self.server_lr} was asked for beside server = {self.server}, which has a step size of its own; "
                "server_lr = 1 works."
            )
        refuse(self, wrong)

    def init(self, world: World) -> Server:
        """Return the state before the first round, with c = 0."""
        server = super().init(world)
        names = set(world.family.trainable)
        zeros = {
            name: torch.zeros_like(value) for name, value in server.weights.items() if name in names
        }
        return replace(server, slots={CONTROL: zeros})

    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        (phase,) = base.phases
        passes = (GradientPass(objective=phase.objective),) if self.option == "I" else ()
        corrected = Phase(Corrected(phase.objective))
        return replace(
            base, phases=(corrected,), state=ControlVariates(option=self.option), before=passes
        )

    def fold(self, server: Server, world: World) -> Fold:
        """Fold the weights as a mean with the server's step size, and add (c_i⁺ − c_i)/N to c."""
        if not world.num_clients:
            raise ConfigError(
                f"{type(self).__name__} was asked for in a world of unknown size; it divides by the number of clients "
                "of the fleet. World(…, num_clients=100) works."
            )
        cutter, plain = world.family.cutter, frozenset(world.family.statistics)
        optimiser = self.server if self.server_lr == 1 else ServerStep(self.server_lr)
        mean = Mean(cutter, self.weighting, optimiser, plain=plain).begin(server)
        change = Sum(cutter, scale=1 / world.num_clients).begin(as_weights(server, CONTROL))
        return Stateful(mean, {CONTROL: change})
