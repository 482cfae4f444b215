"""Passes of a client over samples before and after its training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fedquilt as fq
from fedquilt.family.cut import prefix
from fedquilt.family.net import Pass
from fedquilt.methods import FedAvg
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import TaskLoss
from fedquilt.round.training.passes import (
    ClientPass,
    GradientPass,
    LogitsPass,
    LossPass,
    StatisticsPass,
)
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.terms import Client, ClientState, Job
from tests.unit.round.stateful import LOCAL


@dataclass(frozen=True)
class Keep(MethodState):
    """Keep the results of all passes."""

    extras_kept: tuple[str, ...] = ()

    def finish(self, trained: Trained) -> Left:
        found = {
            f"{one}/{name}": value
            for one, values in trained.passes.items()
            for name, value in values.items()
        }
        return Left(kept_extras=found)


@dataclass(frozen=True)
class Passing(FedAvg):
    """FedAvg that runs passes before and after its steps."""

    local: LocalTraining = LOCAL
    before: tuple[ClientPass, ...] = field(default=(), metadata={"setting": False})
    after: tuple[ClientPass, ...] = field(default=(), metadata={"setting": False})

    def learner(self, job: Job, world: fq.methods.api.World) -> Learner:
        member = world.family.member(job.submodel)
        names = {"gradient": member.trainable, "statistics": member.statistics}
        kept = [
            f"{one.name}/{name}"
            for one in self._passes
            for name in names.get(one.name, (one.name,))
        ]
        state = Keep(extras_kept=tuple(kept))
        return replace(
            super().learner(job, world), state=state, before=self.before, after=self.after
        )

    @property
    def _passes(self) -> tuple[ClientPass, ...]:
        return (*self.before, *self.after)


def results(run: fq.Run, client: int) -> dict[str, torch.Tensor]:
    return dict(run.server.memory[client, ""].extras)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradient_loss_and_logits_are_those_of_torch(engine, perceptron, public_data, play):
    method = Passing(before=(GradientPass(), LossPass(), LogitsPass()))
    run = play(method, perceptron, public_data, engine=engine, rounds=1)
    weights = {name: value.requires_grad_() for name, value in method.initial(run.world).items()}
    net = perceptron.module(perceptron.whole).double()
    for client, part in enumerate(public_data.parts):
        outputs = functional_call(net, weights, public_data.inputs[part])
        loss = nn.functional.cross_entropy(outputs, public_data.targets[part])
        grads = torch.autograd.grad(loss, list(weights.values()))
        found = results(run, client)
        torch.testing.assert_close(found["loss/loss"], loss.detach(), rtol=0, atol=1e-12)
        for name, grad in zip(weights, grads, strict=True):
            torch.testing.assert_close(found[f"gradient/{name}"], grad, rtol=0, atol=1e-12)
        logits = functional_call(net, weights, public_data.public).detach()
        torch.testing.assert_close(found["logits/logits"], logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_pass_after_training_has_the_trained_weights(engine, perceptron, public_data, play):
    run = play(
        Passing(after=(LogitsPass(),)),
        perceptron,
        public_data,
        engine=engine,
        rounds=1,
        shares=(1.0,),
    )
    alone = play(
        Passing(after=(LogitsPass(),)), perceptron, public_data.among(1), engine=engine, rounds=1
    )
    net = perceptron.module(perceptron.whole).double()
    logits = functional_call(net, dict(alone.server.weights), public_data.public)
    torch.testing.assert_close(results(alone, 0)["logits/logits"], logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(results(run, 0)["logits/logits"], logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_norm_statistics_are_the_mean_over_batches(engine, residual, play, make_data):
    data = make_data(residual, (8, 8, 5))
    method = Passing(before=(StatisticsPass(),))
    run = play(method, residual, data, engine=engine, rounds=1)
    member = residual.member(residual.whole)
    weights = method.initial(run.world)
    job = Job(Client(0, fq.Budget(share=1.0), 8), member.prefix, 0)
    learner = method.learner(job, run.world)
    batches = run.engine.pass_batches(job, learner, learner.before[0])
    assert sorted(torch.cat(batches).tolist()) == list(range(8))
    seen = [
        member.net(weights, data.inputs[rows], Pass(statistics="measure"))[1] for rows in batches
    ]
    assert len(seen) == 2
    for name in member.statistics:
        expected = (seen[0][name] + seen[1][name]) / 2
        torch.testing.assert_close(
            results(run, 0)[f"statistics/{name}"], expected, rtol=0, atol=1e-12
        )


def test_macs_of_passes_count_forward_and_backward(perceptron):
    member = perceptron.member(perceptron.whole)
    passes = (GradientPass(), LossPass(), LogitsPass(), StatisticsPass())
    assert [one.macs(member) for one in passes] == [
        3 * member.macs,
        member.macs,
        member.macs,
        member.macs,
    ]
    learner = Learner((Phase(),), LOCAL, 0.1, before=passes)
    assert learner.pass_macs(member, num_own=10, num_public=100) == (5 * 10 + 100) * member.macs


def test_learners_without_state_have_nothing_more_to_do(perceptron):
    learner = Learner((Phase(TaskLoss()),), LOCAL, 0.1)
    assert not learner.state
    assert learner.slotted(perceptron.member(perceptron.whole)) == ()
    assert learner.num_slots == 1
    assert ClientState(prefix(perceptron.whole), {}).extras == {}
