"""The released code that benchmarks compare with is HeteroFL: it has the numbers of fedquilt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt as fq
from bench import published
from fedquilt.models import PreResNet
from fedquilt.round.deployed import ready
from fedquilt.round.training.optimizers import SGD
from fedquilt.terms import Job

SHARES = (1.0, 0.5, 0.25)
BATCH = 5


def _net(share: float) -> nn.Module:
    return PreResNet((1, 1), 4, 1, widths=[int(share * width) for width in (4, 8)]).double()


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_published_round_is_a_round(
    residual: fq.Family, make_data: Any, play: Any, engine: str
) -> None:
    data = make_data(residual, [12, 10, 15, 10, 7], labels=2)
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=5e-4, clip=published.CLIP)
    method = replace(
        fq.methods.HeteroFL(),
        local=replace(fq.methods.HeteroFL().local, optimizer=optimizer, batch_size=BATCH),
    )
    run = play(
        method, residual, data, SHARES, engine, rounds=1, evaluation=fq.Evaluation(batch_size=BATCH)
    )
    weights = {name: value.clone() for name, value in method.init(run.world).weights.items()}
    states, indices = [], []
    held = [run.engine.classes_present(id) for id in range(data.num_clients)]
    for id, own in enumerate(held):
        client = run.fleet.client(id, 0, 0, data.size(id))
        job = Job(client, method.plan(run.server, client, run.world)[0], 0)
        net = published.build(_net, SHARES[id % len(SHARES)])
        indices.append(published.split(net))
        start = published.distribute(weights, indices[-1])
        batches = run.engine.batches(job, method.learner(job, run.world))
        settings = {
            "lr": optimizer.lr,
            "momentum": optimizer.momentum,
            "weight_decay": optimizer.weight_decay,
        }
        states.append(
            published.train(net, start, batches, data.inputs, data.targets, own, **settings)
        )
    published.combine(weights, states, indices, held)
    torch.testing.assert_close(dict(run.server.weights), weights, rtol=0, atol=1e-9)

    (whole,) = method.deploy(run.server, fq.Budget(share=1.0), run.world)
    served = ready(run.federation, run.server, [whole], run.engine, BATCH)[whole]
    net = published.calibrate(_net, weights, data.inputs[run.engine.pooled], BATCH)
    measured = net.state_dict()
    for name in residual.statistics:
        torch.testing.assert_close(served[name], measured[name], rtol=0, atol=1e-9)
    right = published.evaluate(net, data.test_inputs, data.test_targets, BATCH)
    assert run.accuracy["1.0"] == right / len(data.test_targets)
