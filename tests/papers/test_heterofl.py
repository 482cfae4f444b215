"""HeteroFL (Diao et al., ICLR 2021): static prefixes, masked loss, static norms, the scaler."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import FedRolex, HeteroFL
from fedquilt.round.federation import World
from fedquilt.terms import Server
from tests.conftest import with_local


def widths(method, family, share):
    (submodel,) = method.plan(
        Server(0, {}), fq.methods.api.Client(0, fq.Budget(share=share), 1), World(family)
    )
    assert all(list(kept) == list(range(len(kept))) for kept in submodel.index.values())
    return submodel.arch.sizes


@pytest.mark.parametrize(
    ("share", "floor", "ceiling"),
    [(1.0, 6, 6), (0.5, 3, 3), (0.4, 2, 3), (0.25, 1, 2), (0.01, 1, 1), (1 / 3, 2, 2)],
)
def test_a_share_keeps_its_floor_and_at_least_one_or_in_the_released_code_its_ceiling(
    share, floor, ceiling, perceptron
):
    assert list(widths(HeteroFL(), perceptron, share).values()) == [floor]
    assert list(widths(HeteroFL.preset("released"), perceptron, share).values()) == [ceiling]


@pytest.mark.parametrize(
    "method", [HeteroFL.preset("released"), FedRolex.preset("released-settings")]
)
def test_a_device_gets_what_was_trained_in_the_released_rounding_too(method, perceptron):
    world, budget = World(perceptron), fq.Budget(share=0.4)
    trained = method.plan(Server(0, {}), fq.methods.api.Client(0, budget, 1), world)[0]
    assert method.deploy(Server(1, {}), budget, world)[0].arch == trained.arch


def test_inputs_and_classes_are_never_cut(residual):
    submodel = HeteroFL().plan(
        Server(0, {}), fq.methods.api.Client(0, fq.Budget(share=0.25), 1), World(residual)
    )[0]
    cut = residual.cutter.gather(residual.init(), submodel, residual.trainable)
    assert cut["stages.0.0.weight"].shape == (1, 1, 3, 3)
    assert cut["head.linear.weight"].shape == (4, 2)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_rows_of_classes_nobody_holds_keep_their_value(engine, perceptron, play, make_data):
    data = make_data(perceptron, (6, 6), labels=1)  # client 0 holds class 0, client 1 holds class 1
    assert [data.classes_present(client, 3).tolist() for client in (0, 1)] == [
        [True, False, False],
        [False, True, False],
    ]
    fresh = {name: value.double() for name, value in perceptron.init(0).items()}
    run = play(HeteroFL(), perceptron, data, engine=engine)
    for name in ("last.weight", "last.bias"):
        assert torch.equal(run.server.weights[name][2], fresh[name][2])
        assert not torch.equal(run.server.weights[name][0], fresh[name][0])


def test_a_row_is_averaged_over_the_clients_that_hold_its_class(perceptron, play, make_data):
    """Client 0 alone has class 0: the row is what it trained, not half of it."""
    method = with_local(HeteroFL(), batch_size=8)
    data = make_data(perceptron, (6, 6), labels=1)
    run = play(method, perceptron, data, rounds=1)
    client = run.fleet.client(0, 0, 0, 6)
    job = fq.methods.api.Job(client, method.plan(Server(0, {}), client, run.world)[0], 0)
    start = method.init(run.world)
    alone = method.fold(start, run.world)
    run.engine.train(run.federation, start, [job], alone)
    own = alone.finish(start)[0]
    torch.testing.assert_close(
        run.server.weights["last.bias"][0], own["last.bias"][0], rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        run.server.weights["last.weight"][0], own["last.weight"][0], rtol=0, atol=1e-14
    )
    assert not torch.allclose(run.server.weights["first.weight"], own["first.weight"])


def test_without_masking_every_row_is_trained(perceptron, play, make_data):
    data = make_data(perceptron, (6, 6), labels=1)
    fresh = {name: value.double() for name, value in perceptron.init(0).items()}
    run = play(with_local(HeteroFL(), masked=""), perceptron, data)
    assert not torch.equal(run.server.weights["last.bias"][2], fresh["last.bias"][2])


def test_uploads_are_smaller_by_the_masked_rows(perceptron, play, make_data):
    run = play(HeteroFL(), perceptron, make_data(perceptron, (6,), labels=1), (0.5,), rounds=1)
    down, row = (4 * 3 + 3) + (3 * 3 + 3), 3 + 1
    assert run.records[0].bytes_down == 8 * down
    assert run.records[0].bytes_up == 8 * (down - 2 * row)


def test_the_setting_of_the_paper_is_the_default():
    local = HeteroFL().local
    assert (local.norm.name, local.scaler, local.masked, HeteroFL().weighting) == (
        "post",
        True,
        "client",
        "uniform",
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_static_norms_are_measured_after_training_for_each_width(engine, residual, play, make_data):
    """No statistic is ever on the server; each width is tested with its own."""
    run = play(
        with_local(HeteroFL(), batch_size=4),
        residual,
        make_data(residual, (6, 6)),
        (1.0, 0.5),
        engine=engine,
    )
    assert not set(residual.statistics) & set(run.server.weights)
    whole, half = (run.deploy(fq.Budget(share=share)) for share in (1.0, 0.5))
    samples = run.data.inputs[run.engine.pooled]
    for model in (whole, half):
        stem = model.get_submodule("stages.0.0")(samples)
        norm = model.get_submodule("stages.0.1.open.0")
        torch.testing.assert_close(
            norm.running_mean, stem.mean((0, 2, 3)).detach(), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            norm.running_var, stem.var((0, 2, 3)).detach(), rtol=0, atol=1e-12
        )
