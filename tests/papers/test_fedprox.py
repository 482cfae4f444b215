"""FedProx (Li et al., MLSys 2020): a proximal term keeps clients near what they received."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fedquilt as fq
from fedquilt.methods import FedAvg, FedProx
from fedquilt.terms import Job
from tests.conftest import with_local


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_local_objective_is_the_papers(engine, perceptron, play, make_data):
    """h(w) = F(w) + mu/2 · ‖w − w_received‖², minimised in plain torch on the same batches."""
    method = FedProx(
        mu=0.7,
        local=fq.LocalTraining(
            batch_size=4, epochs=2, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9)
        ),
    )
    run = play(method, perceptron, make_data(perceptron, (7,)), engine=engine)
    data, world = run.data, run.world
    model = perceptron.module(
        perceptron.whole, {n: v.double() for n, v in perceptron.init(0).items()}
    )
    client = run.fleet.client(0, 0, 0, 7)
    for round in range(2):
        received = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        job = Job(client, method.plan(run.server, client, world)[0], round)
        for rows in run.engine.batches(job, method.learner(job, world)):
            optimizer.zero_grad()
            drift = sum(
                (p - old).square().sum()
                for p, old in zip(model.parameters(), received, strict=True)
            )
            (
                F.cross_entropy(model(data.inputs[rows]), data.targets[rows]) + 0.35 * drift
            ).backward()
            optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(run.server.weights[name], weight.detach(), rtol=0, atol=1e-12)


def test_a_larger_mu_stays_nearer(residual, play, make_data):
    data, distances = make_data(residual, (12, 12)), []
    for mu in (0.0, 0.5, 5.0):
        method = with_local(
            FedProx(mu=mu), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.05, momentum=0.0)
        )
        run = play(method, residual, data, rounds=1)
        fresh = method.init(run.world).weights
        distances.append(
            sum(float((w - fresh[n]).square().sum()) for n, w in run.server.weights.items())
        )
    assert distances[0] > distances[1] > distances[2] > 0


def test_the_rest_is_fedavg():
    assert (FedProx().weighting, FedProx().local, FedProx().share) == (
        FedAvg().weighting,
        FedAvg().local,
        1.0,
    )
