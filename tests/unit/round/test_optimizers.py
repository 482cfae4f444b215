"""Optimizers of clients against those of torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg
from fedquilt.round.federation import World
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import TaskLoss
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.schedules import Constant, Cosine, Steps
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import clipped, gradient
from fedquilt.terms import Job
from tests.unit.round.one_client import (
    batch_of,
    doubles,
    learner_of,
    take_steps,
)

TORCH = {
    "sgd": (SGD(lr=0.1, momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        SGD(lr=0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    "decay": (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.05),
    ),
    "all": (
        SGD(lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.2, momentum=0.9, nesterov=True, weight_decay=0.05),
    ),
    "adam": (Adam(lr=0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam-decay": (
        Adam(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (AdamW(lr=0.05), lambda p: torch.optim.AdamW(p, 0.05)),
    "adamw-decay": (
        AdamW(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.5),
    ),
}


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("name", TORCH)
def test_five_steps_are_those_of_torch_optim(name, clip, perceptron):
    ours, make = TORCH[name]
    state = doubles(perceptron)
    model = perceptron.module(perceptron.whole, state)
    theirs = make(model.parameters())
    batches = [batch_of(6, seed) for seed in range(5)]
    found, _ = take_steps(
        perceptron, learner_of(optimizer=replace(ours, clip=clip)), state, batches
    )
    for batch in batches:
        theirs.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        if clip:
            # it does something
            assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > clip
        theirs.step()
    for weight, value in model.named_parameters():
        torch.testing.assert_close(found[weight], value.detach(), rtol=0, atol=1e-12)


def test_a_gradient_within_the_bound_is_not_clipped(perceptron):
    state, batch = doubles(perceptron), batch_of(4)
    plain, _ = gradient(
        learner_of(), perceptron.member(perceptron.whole), TaskLoss(), state, Received(state), batch
    )
    assert all(torch.equal(plain[name], value) for name, value in clipped(plain, 1e6).items())


def test_one_step_by_hand():
    sgd = SGD(momentum=0.5, nesterov=True, weight_decay=0.1)
    weights, slots = {"w": torch.tensor([2.0])}, {"momentum": {"w": torch.tensor([4.0])}}
    moved, after = sgd.update(weights, slots, {"w": torch.tensor([1.0])}, lr=0.1, step=3)
    # the decayed gradient is 1.2
    assert float(after["momentum"]["w"]) == pytest.approx(0.5 * 4 + 1.2)
    assert float(moved["w"]) == pytest.approx(2 - 0.1 * (1.2 + 0.5 * 3.2))
    assert float(weights["w"]) == 2
    assert float(slots["momentum"]["w"]) == 4


@pytest.mark.parametrize(
    "optimizer", [Adam(weight_decay=0.1), AdamW(weight_decay=0.5)], ids=["adam", "adamw"]
)
def test_adams_step_in_place_is_its_step(optimizer):
    seeded = torch.Generator().manual_seed(1)
    weight, grad, mean = (torch.randn(3, dtype=torch.float64, generator=seeded) for _ in range(3))
    square = mean.square()
    slots = {"mean": {"w": mean}, "square": {"w": square}}
    moved, after = optimizer.update({"w": weight}, slots, {"w": grad}, lr=0.1, step=4)

    in_place = [tensor.clone() for tensor in (weight, mean, square)]
    stacked = {"mean": [in_place[1]], "square": [in_place[2]]}
    optimizer.update_(
        [in_place[0]], stacked, [grad], torch.tensor(0.1, dtype=torch.float64), torch.tensor(5.0)
    )
    expected = [moved["w"], after["mean"]["w"], after["square"]["w"]]
    torch.testing.assert_close(in_place, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [Adam(), AdamW()], ids=["Adam", "AdamW"])
def test_fednovas_step_count_is_refused_for_adam(optimizer):
    with pytest.raises(
        ConfigError, match=f"FedNova was asked to normalize steps of {type(optimizer).__name__};"
    ):
        optimizer.effective_steps([1.0] * 3, 0.1, 0.0)


def test_schedules():
    assert [Constant()(r) for r in (0, 100)] == [1, 1]
    steps = Steps((3, 5), 0.1)
    assert [steps(r) for r in (0, 2, 3, 4, 5, 9)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    cosine = Cosine(10)
    assert [cosine(r) for r in (0, 5, 10, 12)] == pytest.approx([1, 0.5, 0, 0], abs=1e-15)
    assert cosine(2) == pytest.approx((1 + math.cos(math.pi * 0.2)) / 2)


def test_a_methods_rate_follows_its_schedule(perceptron):
    method = FedAvg(local=LocalTraining(optimizer=SGD(lr=0.4), schedule=Steps((1,), 0.5)))
    client = fq.methods.api.Client(0, fq.Budget(share=1.0), 4)
    jobs = [Job(client, method.plan(None, client, World(perceptron))[0], round) for round in (0, 1)]
    assert [method.learner(job, World(perceptron)).lr for job in jobs] == [0.4, 0.2]
