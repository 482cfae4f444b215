"""Local: every client for itself."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import FedAvg, LocalOnly
from tests.conftest import LOCAL, with_local


@pytest.mark.parametrize("engine", LOCAL)
def test_nothing_is_shared(engine, residual, play, make_data):
    method = with_local(LocalOnly(), batch_size=4)
    run = play(method, residual, make_data(residual, (6, 5, 4)), (1.0, 0.5), engine=engine)
    fresh = method.init(run.world).weights
    assert all(torch.equal(run.server.weights[name], fresh[name]) for name in fresh)
    assert [(record.bytes_down, record.bytes_up) for record in run.records] == [(0, 0)] * 2
    one, other = run.server.memory[0, ""], run.server.memory[2, ""]
    assert not torch.equal(one.weights["head.linear.weight"], other.weights["head.linear.weight"])


@pytest.mark.parametrize("engine", LOCAL)
def test_a_client_continues_from_its_own_net(engine, residual, play, make_data):
    """Alone in a federation, nobody can tell FedAvg from Local."""
    data = make_data(residual, (7,))
    alone, shared = (
        play(with_local(method, batch_size=4), residual, data, engine=engine, rounds=3)
        for method in (LocalOnly(), FedAvg())
    )
    for name, weight in shared.server.weights.items():
        torch.testing.assert_close(
            alone.server.memory[0, ""].weights[name], weight, rtol=0, atol=1e-12
        )


def test_clients_train_the_largest_net_they_can_hold(residual, play, make_data):
    run = play(LocalOnly(), residual, make_data(residual, (4, 4)), (1.0, 0.5))
    assert [len(run.server.memory[id, ""].submodel.index["stages.0.0"]) for id in (0, 1)] == [4, 2]
    assert set(run.accuracy) == {"1.0", "0.5"}


def test_a_client_that_never_took_part_has_its_initial_net(residual, play, make_data):
    fleet = fq.Fleet.of((1.0,), 3, cohort=1)
    run = play(LocalOnly(), residual, make_data(residual, (4, 4, 4)), fleet=fleet, rounds=1)
    ((trained, _),) = run.server.memory
    idle = next(id for id in range(3) if id != trained)
    model = run.deploy(fq.Budget(share=1.0), client=idle)
    torch.testing.assert_close(
        model.head.linear.weight.detach(), residual.init(0)["head.linear.weight"].double()
    )
