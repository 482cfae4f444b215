"""FedNova (Wang et al., NeurIPS 2020): changes normalized by effective step counts a_i."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import FedAvg, FedNova
from fedquilt.round.federation import Federation
from fedquilt.terms import Job
from tests.conftest import with_local

STEPS = (1, 2, 3, 10)


@pytest.mark.parametrize("tau", STEPS)
def test_the_effective_step_count_of_plain_sgd_is_the_number_of_steps(tau):
    assert fq.optimizers.SGD(lr=0.3, momentum=0.0).effective_steps([1.0] * tau, 0.3, 0.0) == tau


@pytest.mark.parametrize("rho", [0.1, 0.9])
@pytest.mark.parametrize("tau", STEPS)
def test_the_effective_step_count_with_momentum(tau, rho):
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert fq.optimizers.SGD(momentum=rho).effective_steps([1.0] * tau, 0.1, 0.0) == pytest.approx(
        closed, rel=1e-12
    )


@pytest.mark.parametrize("mu", [0.1, 1.0])
@pytest.mark.parametrize("tau", STEPS)
def test_the_effective_step_count_with_a_proximal_term(tau, mu):
    eta = 0.2
    closed = (1 - (1 - eta * mu) ** tau) / (eta * mu)
    assert fq.optimizers.SGD(momentum=0.0).effective_steps([1.0] * tau, eta, mu) == pytest.approx(
        closed, rel=1e-12
    )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize(
    "within_round",
    [fq.schedules.WithinRound(), fq.schedules.WithinRound(2, shape="cosine", final=0.1)],
    ids=str,
)
def test_the_effective_step_count_is_the_distance_of_torchs_sgd_on_unit_gradients(
    within_round, nesterov, mu
):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=nesterov)
    factors = within_round.factors(7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*factors, 0.0].__getitem__)
    for _ in factors:
        optimizer.zero_grad()
        (weight + 0.5 * mu * weight.square()).sum().backward()
        optimizer.step()
        scheduler.step()
    effective_steps = fq.optimizers.SGD(momentum=0.9, nesterov=nesterov).effective_steps(
        factors, 0.1, mu
    )
    assert -float(weight.detach()) / 0.1 == pytest.approx(effective_steps, rel=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("within_round", "expected_paces"),
    [
        (fq.schedules.WithinRound(), [1, 1 + 1.9 + 2.71]),
        # Each client by its own number of steps
        (
            fq.schedules.WithinRound(shape="linear"),
            [1, 1 + 1.9 * 2 / 3 + 2.71 / 3],
        ),
    ],
    ids=["constant", "linear"],
)
def test_the_round_is_the_papers_update(
    within_round, expected_paces, engine, perceptron, play, make_data
):
    """w + τ_eff · Σ p_i (w_i − w)/a_i, with p_i by data and τ_eff = Σ p_i a_i."""
    local = fq.LocalTraining(
        batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9), within_round=within_round
    )
    method = FedNova(local=local)
    data = make_data(perceptron, (4, 12))  # one step and three
    run = play(method, perceptron, data, engine=engine, rounds=1)
    start = method.init(run.world)
    paces = [
        fq.optimizers.SGD(momentum=0.9).effective_steps(within_round.factors(steps), 0.1, 0.0)
        for steps in (1, 3)
    ]
    assert paces == pytest.approx(expected_paces)
    portions = [4 / 16, 12 / 16]
    expected = {name: weight.clone() for name, weight in start.weights.items()}
    effective = sum(p * a for p, a in zip(portions, paces, strict=True))
    for id, (portion, effective_steps) in enumerate(zip(portions, paces, strict=True)):
        client = run.fleet.client(id, 0, 0, data.size(id))
        plain = FedAvg(local=method.local)
        fold = plain.fold(start, run.world)
        run.engine.train(
            Federation(run.world, plain),
            start,
            [Job(client, plain.plan(start, client, run.world)[0], 0)],
            fold,
        )
        for name, trained in fold.finish(start)[0].items():
            expected[name] += (
                effective * portion * (trained - start.weights[name]) / effective_steps
            )
    for name, weight in expected.items():
        torch.testing.assert_close(run.server.weights[name], weight, rtol=0, atol=1e-12)


def test_fednova_is_charged_twice_the_bytes(perceptron, play, make_data):
    """RaFL, Table 1."""
    data = make_data(perceptron, (4, 4))
    nova, plain = (
        play(method, perceptron, data, rounds=1).records[0] for method in (FedNova(), FedAvg())
    )
    assert (nova.bytes_up, nova.bytes_down) == (2 * plain.bytes_up, 2 * plain.bytes_down)
    assert plain.bytes_up == 2 * 8 * (4 * 6 + 6 + 6 * 3 + 3)


def test_adam_is_refused_with_a_reason(perceptron, play, make_data):
    method = with_local(FedNova(), optimizer=fq.optimizers.Adam())
    with pytest.raises(fq.errors.ConfigError, match="Use SGD"):
        play(method, perceptron, make_data(perceptron, (4,)))
