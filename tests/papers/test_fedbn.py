"""FedBN (Li et al., ICLR 2021): norm layers never leave the client."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import FedAvg, FedBN
from fedquilt.round.link import Link
from tests.conftest import LOCAL, with_local

SIZES = (6, 5, 7)


@dataclass(frozen=True)
class Recorded(Link):
    """A perfect link that remembers the names of what went over it."""

    names: set[str] = field(default_factory=set)

    def down(self, payload, *trip):
        self.names.update(payload.weights)
        return super().down(payload, *trip)

    def up(self, payload, *trip):
        self.names.update(payload.weights)
        return super().up(payload, *trip)


@pytest.mark.parametrize("engine", LOCAL)
def test_norms_never_travel(engine, residual, make_data):
    data, method = make_data(residual, SIZES), with_local(FedBN(), batch_size=4)
    link = Recorded()
    run = fq.prepare(
        method, residual, data, fq.Fleet.of((1.0,), 3, 3), engine, precision="fp64", link=link
    )
    run.train(2)
    norms = set(residual.parts["norm"])
    assert len(norms) == 5 * 4  # weight, bias, mean, variance
    assert link.names == set(residual.trainable) - norms
    fresh = method.init(run.world).weights
    assert all(
        torch.equal(run.server.weights[name], fresh[name])
        for name in norms & set(residual.trainable)
    )
    assert not set(residual.statistics) & set(run.server.weights)


@pytest.mark.parametrize("engine", LOCAL)
def test_each_client_continues_with_its_own_norms(engine, residual, play, make_data):
    """Over three rounds of one client, the kept norms and the shared rest are one net: FedAvg with
    tracked norms.
    """
    data = make_data(residual, (9,))
    alone = play(with_local(FedBN(), batch_size=4), residual, data, engine=engine, rounds=3)
    tracked = play(
        with_local(FedAvg(), batch_size=4, norm="tracked"), residual, data, engine=engine, rounds=3
    )
    memory = alone.server.memory[0, ""]
    assert set(memory.weights) == set(residual.parts["norm"])
    for name, weight in tracked.server.weights.items():
        own = memory.weights[name] if name in memory.weights else alone.server.weights[name]
        torch.testing.assert_close(own, weight, rtol=0, atol=1e-12)


def test_norms_of_clients_differ_and_the_rest_is_common(residual, play, make_data):
    run = play(with_local(FedBN(), batch_size=4), residual, make_data(residual, SIZES))
    models = [run.deploy(fq.Budget(share=1.0), client=id) for id in range(3)]
    one, other = (dict(model.named_parameters()) for model in models[:2])
    for name in residual.trainable:
        assert torch.equal(one[name], other[name]) == (name not in residual.parts["norm"])
    means = [model.get_buffer("head.norm.running_mean") for model in models]
    assert not torch.equal(means[0], means[1])


def test_what_is_reported_is_the_mean_of_the_clients(residual, play, make_data):
    run = play(with_local(FedBN(), batch_size=4), residual, make_data(residual, SIZES))
    data, accuracies = run.data, []
    assert run.method.personal
    for id, part in enumerate(data.test_parts):
        model = run.deploy(fq.Budget(share=1.0), client=id)
        accuracies.append(
            float(
                (model(data.test_inputs[part]).argmax(1) == data.test_targets[part]).double().mean()
            )
        )
    assert run.accuracy == {"1.0": pytest.approx(sum(accuracies) / 3, abs=1e-12)}


def test_layer_norms_stay_too(language, play, make_data):
    run = play(with_local(FedBN(), batch_size=4), language, make_data(language, (5, 4)))
    assert set(run.server.memory[0, ""].weights) == {
        f"blocks.0.norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
