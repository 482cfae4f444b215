"""Helpers of the tests of RaFL: runs, batches and gradients of a pair of nets."""

from __future__ import annotations

import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, RaFL
from fedquilt.round.federation import World
from fedquilt.round.training.mutual import Mutual
from fedquilt.round.training.server import ServerTraining
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.terms import WHOLE, Client, Job
from tests.conftest import Perceptron
from tests.pairs import (
    SIZES,
    limits,
    pair,
    plain_pairs,
)

SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-2)


LOCAL = fq.LocalTraining(batch_size=4, epochs=2, optimizer=SHARP)


ONE_STEP = ServerTraining(
    fq.optimizers.SGD(lr=0.1, momentum=0.0), batch_size=16, steps=1, held_back=0.3
)


NUM_PUBLIC = 10


PAIR = ("big", WHOLE)


def start(
    method: fq.Method, family: fq.Family, data: fq.FederatedData, budgets=None, **options
) -> fq.Run:
    """Return a run of all clients in float64 on the sequential engine that has not begun."""
    fleet = fq.Fleet.of(budgets or limits(family), data.num_clients, data.num_clients)
    options = {"precision": "fp64", "evaluation": fq.Evaluation(every=0), **options}
    return fq.prepare(method, family, data, fleet, "sequential", **options)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean over samples of Σ p·log(p / q), for logits (equation 3)."""
    p, q = first.softmax(1), second.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


def modules(family: fq.Family, state: dict[str, Tensor], *names: str) -> list[Perceptron]:
    """Return nets of a union as plain modules."""
    return [family.module(prefix(family.at(name).whole), state).double() for name in names]


def a_batch(count: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 4, generator=generator).double(), torch.randint(
        3, (count,), generator=generator
    )


def gradients_of(
    objective: Mutual, family: fq.Family, state: dict[str, Tensor], taught: Tensor | None = None
):
    """Return the loss and the gradient of one batch for the pair of the knowledge net and `big`."""
    member = family.member(pair(family, "big"))
    method = RaFL(local=LOCAL)
    world = fq.prepare(
        FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4), precision="fp64"
    ).world
    learner = method.learner(Job(Client(0, fq.Budget(share=1.0)), prefix(member.arch), 0), world)
    inputs, targets = a_batch()
    batch = Batch(inputs, targets, torch.ones(3, dtype=torch.bool), torch.tensor(0), taught=taught)
    grads, (loss, _) = gradient(learner, member, objective, state, Received(state), batch)
    return loss, grads


def some_data(family: fq.Family) -> fq.FederatedData:
    from tests.conftest import _make_data

    return _make_data(family, SIZES, public=NUM_PUBLIC)


def pair_state(family: fq.Family) -> dict[str, Tensor]:
    """Return the initial weights of the pair, moved so that no two nets agree."""
    names = family.member(pair(family, "big")).names
    return {
        name: 2 * value
        for name, value in family.init(1, dtype=torch.float64).items()
        if name in names
    }


def pair_world() -> World:
    """Return the world of a fleet without limits, with one knowledge net and two private nets."""
    family = plain_pairs()
    fleet = fq.Fleet.of([1.0], 4, 4)
    return fq.prepare(FedAvg(), family, some_data(family), fleet, precision="fp64").world
