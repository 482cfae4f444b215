"""SCAFFOLD: control variates correct the drift of clients (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.merge import Mean, RunningSum, Stateful, as_weights
from fedquilt.round.method import Method
from fedquilt.round.server_optimizers import Plain, ServerStep
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Wrapping
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.passes import GradientPass
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.round.training.view import View
from fedquilt.terms import Job, Server

Option = Literal["I", "II"]  # Update of the client's variate (algorithm 1, line 12).
CONTROL = "control"  # Slot of the server's variate c. In uploads it has the change c_i⁺ − c_i.
CLIENT_CONTROL = "client_control"  # Slot of a client's variate c_i.


@dataclass(frozen=True)
class Corrected(Wrapping):
    """Another objective plus the linear term ⟨c − c_i, w⟩.

    The gradient of the term is the correction of every step. A constant shifts the term so that its
    value is 0 at the current weights. Reported losses are thus those of the other objective.
    """

    @override
    def __call__(self, view: View) -> Tensor:
        loss = self.objective(view)
        control = view.slots[CONTROL]
        client_control = view.slots[CLIENT_CONTROL]
        for name in control:
            weight = view.weights[name]
            loss = (
                loss + ((control[name] - client_control[name]) * (weight - weight.detach())).sum()
            )
        return loss


@dataclass(frozen=True)
class ControlVariates(MethodState):
    """State of the control variates c and c_i, with the update of c_i (algorithm 1, line 12)."""

    slots_down: tuple[str, ...] = (CONTROL,)
    slots_kept: tuple[str, ...] = (CLIENT_CONTROL,)
    slots_up: tuple[str, ...] = (CONTROL,)
    option: Option = "II"  # Update of c_i, as in `Scaffold`.

    @override
    def finish(self, trained: Trained) -> Left:
        """Return c_i⁺, which the client keeps, and c_i⁺ − c_i, which it sends."""
        control = trained.slots[CONTROL]
        client_control = trained.slots[CLIENT_CONTROL]
        new = {name: self._updated(trained, name) for name in control}
        return Left(
            {CLIENT_CONTROL: new},
            {CONTROL: {name: new[name] - client_control[name] for name in new}},
        )

    def _updated(self, trained: Trained, name: str) -> Tensor:
        if self.option == "I":  # The gradient at the received weights.
            return trained.passes["gradient"][name]
        drift = trained.received[name] - trained.weights[name]
        control = trained.slots[CONTROL][name]
        client_control = trained.slots[CLIENT_CONTROL][name]
        return client_control - control + drift / (trained.steps * trained.lr)


@dataclass(frozen=True)
class Scaffold(Method):
    """Each local step is corrected by c − c_i, the server's variate minus the client's.

    A variate estimates a gradient: c_i that of the client's loss, c the mean over the fleet. If all
    variates stay zero, this is FedAvg with uniform weights. A client with a sub-model has both
    variates at its positions only. The values at other positions do not change. The server adds
    (c_i⁺ − c_i)/N at the received positions, where N is the number of clients in the fleet.
    """

    local: LocalTraining = LocalTraining(optimizer=SGD(momentum=0.0))
    weighting: Weighting = "uniform"  # Weights of the clients in the mean. The paper's are uniform.
    # Update of c_i. I: gradient at the received weights. II: mean gradient of the local steps.
    option: Option = "II"
    server_lr: float = 1.0  # Learning rate of the server. 1 takes the mean of the clients.
    paper = "Karimireddy et al. 2020"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, option=Option)
        within(self, server_lr="(0, inf)")
        optimizer = self.local.optimizer
        problems = {}
        if not isinstance(optimizer, SGD) or optimizer.momentum or optimizer.clip:
            problems["local.optimizer"] = (
                f"{optimizer} was asked for; (x − y)/(K·η) is the mean gradient of a client's "
                "steps for plain SGD alone. SGD(momentum=0, clip=0) works, with any learning rate, "
                "schedule and weight decay."
            )
        if self.server_lr != 1 and not isinstance(self.server_optimizer, Plain):
            problems["server_lr"] = (
                f"{self.server_lr} was asked for beside server_optimizer = "
                f"{self.server_optimizer}, which has a step size of its own; server_lr = 1 works."
            )
        refuse(self, problems)

    @override
    def init(self, world: World) -> Server:
        """Return the state before the first round, with c = 0."""
        server = super().init(world)
        names = set(world.family.trainable)
        zeros = {
            name: torch.zeros_like(value) for name, value in server.weights.items() if name in names
        }
        return replace(server, slots={CONTROL: zeros})

    @override
    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        (phase,) = base.phases
        passes = (GradientPass(objective=phase.objective),) if self.option == "I" else ()
        corrected = Phase(Corrected(phase.objective))
        return replace(
            base, phases=(corrected,), state=ControlVariates(option=self.option), before=passes
        )

    @override
    def fold(self, server: Server, world: World) -> Fold:
        """Return a fold that averages the weights, and adds (c_i⁺ − c_i)/N to c.

        The mean is applied with the server's learning rate. If clients join in this round, c is
        multiplied by the earlier N over the new one, because it is the mean of all c_i, and those
        of new clients are zero.

        Args:
            server: State before the round.
            world: World, which has the number N of clients in the fleet.

        Raises:
            ConfigError: The number of clients is not known.
        """
        if not world.num_clients:
            raise ConfigError(
                f"{type(self).__name__} was asked for in a world of unknown size; it divides by "
                "the number of clients of the fleet. World(…, num_clients=100) works."
            )
        cutter = world.family.cutter
        plain = frozenset(world.family.statistics)
        optimizer = self.server_optimizer if self.server_lr == 1 else ServerStep(self.server_lr)
        mean = Mean(cutter, self.weighting, optimizer, plain=plain).begin(server)
        count = world.clients_in(server.round)
        earlier = world.clients_in(server.round - 1)
        change = RunningSum(cutter, scale=1 / count, old_scale=earlier / count)
        change = change.begin(as_weights(server, CONTROL))
        return Stateful(mean, {CONTROL: change})
