"""Helpers of tests that train a single client: weights, batches, views and steps."""

from __future__ import annotations

import torch
from torch import Tensor

import fedquilt as fq
from fedquilt import noise
from fedquilt.family import Pass
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, StepSettings, clipped, gradient, move
from fedquilt.round.training.view import View
from fedquilt.terms import Arch

CPU = torch.device("cpu")


HELD = torch.ones(3, dtype=torch.bool)


def doubles(family: fq.Family, seed: int = 0) -> State:
    return {name: value.double() for name, value in family.init(seed).items()}


def batch_of(count: int, seed: int = 0, held: Tensor = HELD) -> Batch:
    """A batch for the perceptron: 4 inputs, 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (count,), generator=generator)
    return Batch(inputs, targets, held, torch.tensor(noise.key(seed)))


def learner_of(*phases: Phase, lr: float | None = None, **local) -> Learner:
    settings = LocalTraining(**local)
    return Learner(phases or (Phase(),), settings, settings.optimizer.lr if lr is None else lr)


def view_of(
    family: fq.Family, weights: State, batch: Batch, received: State | None = None, **mode
) -> View:
    start = weights if received is None else received
    return View(
        family.member(family.whole),
        weights,
        batch.inputs,
        batch.targets,
        batch.classes_present,
        start,
        Pass(**mode),
        batch.key,
    )


def take_steps(
    family: fq.Family,
    learner: Learner,
    state: State,
    batches: list[Batch],
    arch: Arch | None = None,
):
    """Train one client as an engine does."""
    member = family.member(arch or family.whole)
    received, slots, count = state, learner.start_slots(state, member), 0
    for batch in batches:
        for phase in learner.phases:
            grads, _ = gradient(learner, member, phase.objective, state, Received(received), batch)
            grads = clipped(grads, learner.local.optimizer.clip)
            masks = learner.masks(member, phase, CPU)
            state, slots = move(learner, phase, state, slots, grads, masks, StepSettings(count))
            count += 1
    return state, slots
