"""Helpers of the tests of distillation at the server."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.round.fold import Merged
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.server import ServerTraining
from fedquilt.round.training.view import View
from fedquilt.terms import Client, Job, Payload, Server, Submodel, Update

SIZES = (7, 4, 9, 5)


NUM_PUBLIC = 10


PLAIN = fq.optimizers.SGD(lr=0.1, momentum=0.0)


LOCAL = fq.LocalTraining(batch_size=4, optimizer=PLAIN)


SILENT = ServerTraining(steps=0)


ONE_STEP = ServerTraining(PLAIN, batch_size=16, steps=1, held_back=0.3)


MACS = {1.0: 4 * 6 + 6 * 3, 0.5: 4 * 3 + 3 * 3}  # Of the perceptron with 6 and 3 hidden channels


def start(
    method: fq.Method,
    family: fq.Family,
    data: fq.FederatedData,
    shares=(1.0, 0.5),
    engine: str = "sequential",
    **options,
) -> fq.Run:
    """Return a run of all clients in float64 that has not begun, by default on the sequential
    engine.
    """
    fleet = fq.Fleet.of(shares, data.num_clients, data.num_clients)
    options = {"precision": "fp64", "evaluation": fq.Evaluation(every=0), **options}
    return fq.prepare(method, family, data, fleet, engine, **options)


def received(run: fq.Run, shares=(1.0, 0.5, 0.5), sizes=(8, 4, 12)) -> list[Update]:
    """Return updates of clients whose nets differ from the server's by noise."""
    generator = torch.Generator().manual_seed(11)
    updates = []
    for client, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        net = run.method.prototype(share, run.world)
        names = run.world.family.member(net).trainable
        server = {name: run.server.weights[net.scope + name] for name in names}
        noisy = {
            n: v + torch.randn(v.shape, generator=generator, dtype=v.dtype)
            for n, v in server.items()
        }
        job = Job(Client(client, fq.Budget(share=share), size), net, 0)
        updates.append(Update(job, (Payload(net, noisy),), steps=1))
    return updates


def plain_outputs(family: fq.Family, update: Update, inputs: Tensor) -> Tensor:
    """Run a received net as a plain module."""
    (payload,) = update.sent
    with torch.no_grad():
        return family.assemble(payload.submodel, payload.weights)(inputs)


def folded(run: fq.Run, updates: list[Update]) -> Merged:
    fold = run.method.fold(run.server, run.world)
    for update in updates:
        fold.add(update)
    return fold.finish(run.server)


def merged_server(run: fq.Run, merged: Merged) -> Server:
    """Return the state after the merge, before the server learns."""
    return replace(run.server, round=run.server.round + 1, weights=merged.weights)


def in_scope(weights, scope: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(scope): value for name, value in weights.items() if name.startswith(scope)
    }


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the mean over samples of Σ p·(log p − log q), for logits."""
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum(1)


def value_of(
    objective: Objective, family: fq.Family, inputs: Tensor, rows: Tensor, logits: Tensor
) -> float:
    """Return the loss of a batch for logits that are given instead of computed."""
    member = family.member(family.whole)
    weights = family.init(0, dtype=torch.float64)
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    held, key = torch.ones(3, dtype=torch.bool), torch.tensor(0)
    mode = LOCAL.norm.training_pass(False)
    view = View(
        member,
        weights,
        inputs,
        targets,
        held,
        weights,
        mode,
        key,
        rows,
        logits_by_net={member: logits},
    )
    return float(objective(view))


def stepped(
    run: fq.Run, net: Submodel, weights, rows: Tensor, teacher: Tensor, lr: float
) -> dict[str, Tensor]:
    """Take one step of SGD on KL(teacher ‖ net) over some public samples, in plain torch."""
    module = run.world.family.assemble(net, in_scope(weights, net.scope))
    kl(teacher[rows], module(run.world.public[rows])).backward()
    return {name: value.detach() - lr * value.grad for name, value in module.named_parameters()}


def expected_in(net: Submodel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {net.scope + name: value for name, value in weights.items()}
