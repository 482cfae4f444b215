"""Distillation between nets of several architectures, and their initial weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, FedDF, FedET
from fedquilt.round.teachers import OUTPUTS
from fedquilt.terms import Client, Job, Payload, Update
from tests.conftest import Perceptron
from tests.papers.distilling import (
    LOCAL,
    MACS,
    NUM_PUBLIC,
    ONE_STEP,
    SILENT,
    SIZES,
    folded,
    in_scope,
    plain_outputs,
    start,
)


def test_every_prototype_is_drawn_by_itself_and_the_first_with_the_seed_of_the_run(perceptron):
    world = fq.methods.api.World(perceptron, seed=3, precision="fp64")
    server = FedET(prototypes=(1.0, 0.5)).init(world)
    whole = perceptron.init(3, dtype=torch.float64)
    assert set(server.weights) == {
        scope + name for scope in ("share1/", "share0.5/", "server/") for name in whole
    }
    for name, value in whole.items():
        assert torch.equal(server.weights["share1/" + name], value)
        assert not torch.equal(server.weights["server/" + name], value)
    cut = perceptron.cutter.gather(whole, prefix(perceptron.fit(fq.Budget(share=0.5))), list(whole))
    small = in_scope(server.weights, "share0.5/")
    for name, value in cut.items():
        assert small[name].shape == value.shape
        assert not torch.allclose(small[name], value)
    # The last layer has 3 inputs instead of 6, so that its range is √2 times as wide.
    assert 6**-0.5 < float(small["last.weight"].abs().max()) <= 3**-0.5


class Deep(nn.Module):
    """Three linear layers: 4 inputs, 5 and 7 hidden, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def union(perceptron: fq.Family) -> fq.Family:
    """Return a union of two architectures with 76 and 42 multiply-adds, the larger first."""
    return fq.union({"deep": fq.trace(Deep, torch.zeros(2, 4)), "flat": perceptron})


BY_NET = (fq.Budget(macs=76), fq.Budget(macs=42))


def of_nets(run: fq.Run, places=(0, 1, 1), sizes=(8, 4, 12)) -> list[Update]:
    """Return updates of clients whose nets differ from the server's by noise, each of one
    architecture.
    """
    generator = torch.Generator().manual_seed(11)
    updates = []
    for client, (place, size) in enumerate(zip(places, sizes, strict=True)):
        net = run.method.nets(run.world)[place]
        server = {
            name: run.server.weights[net.scope + name]
            for name in run.world.family.member(net).trainable
        }
        noisy = {
            n: v + torch.randn(v.shape, generator=generator, dtype=v.dtype)
            for n, v in server.items()
        }
        job = Job(Client(client, BY_NET[place], size), net, 0)
        updates.append(Update(job, (Payload(net, noisy),), steps=1))
    return updates


def test_feddfs_teacher_is_the_mean_over_nets_of_all_architectures(union, make_data):
    run = start(FedDF(), union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
    updates = of_nets(run)
    first, second, third = (plain_outputs(union, update, run.world.public) for update in updates)
    merged = folded(run, updates)
    torch.testing.assert_close(
        merged.outputs[OUTPUTS], (first + second + third) / 3, rtol=0, atol=1e-12
    )
    deep, flat, other = (dict(update.sent[0].weights) for update in updates)
    for name, value in deep.items():
        torch.testing.assert_close(merged.weights["deep/" + name], value, rtol=0, atol=1e-12)
    for name, value in flat.items():
        mean = (4 * value + 12 * other[name]) / 16
        torch.testing.assert_close(merged.weights["flat/" + name], mean, rtol=0, atol=1e-12)


def test_a_client_trains_the_largest_net_that_its_budget_holds(union, make_data):
    run = start(FedDF(), union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)

    def net_of(budget: fq.Budget) -> str:
        (net,) = run.method.plan(run.server, Client(0, budget, 4), run.world)
        return net.scope

    deep, flat = (
        union.cost(union.at(net).whole, run.method.training_step(run.world))
        for net in ("deep", "flat")
    )
    assert (deep.macs, flat.macs) == (76, 42)
    assert [net_of(fq.Budget(macs=macs)) for macs in (76, 75, 42)] == ["deep/", "flat/", "flat/"]
    assert [net_of(fq.Budget(params=count)) for count in (deep.params, deep.params - 1)] == [
        "deep/",
        "flat/",
    ]
    assert [net_of(fq.Budget(memory=size)) for size in (deep.memory, deep.memory - 1)] == [
        "deep/",
        "flat/",
    ]
    assert net_of(fq.Budget(share=1.0)) == "deep/"
    with pytest.raises(
        BudgetError,
        match=r"holds none of the nets deep, flat. The smallest is 'flat': macs: 41 allowed",
    ):
        net_of(fq.Budget(macs=41))
    with pytest.raises(
        BudgetError,
        match=r"a share of 0.5 was given .* no common share. Bounds on macs, params or memory",
    ):
        net_of(fq.Budget(share=0.5))


def test_feddf_on_a_union_of_one_net_without_a_step_is_fedavg(perceptron, make_data, play):
    """One prototype, whose mean is weighted by data, and no server that learns."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    averaged = play(FedAvg(local=LOCAL), perceptron, data)
    distilled = play(
        FedDF(local=LOCAL, server_training=SILENT), fq.union({"flat": perceptron}), data
    )
    for name, weight in averaged.server.weights.items():
        torch.testing.assert_close(
            distilled.server.weights[f"flat/flat.{name}"], weight, rtol=0, atol=1e-12
        )
    assert distilled.accuracy == averaged.accuracy


def test_feddf_on_a_union_of_two_widths_is_feddf_of_two_prototypes(perceptron, make_data):
    """The nets of a union may be widths of one model, which are its prototypes without a union."""
    narrow = fq.trace(lambda: Perceptron(3), torch.zeros(2, 4))
    union = fq.union({"wide": perceptron, "narrow": narrow})
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    runs = []
    for family, shares in (
        (perceptron, (1.0, 0.5)),
        (union, (fq.Budget(macs=MACS[1.0]), fq.Budget(macs=MACS[0.5]))),
    ):
        run = start(
            FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=ONE_STEP),
            family,
            data,
            shares,
        )
        runs.append(run)
    names = {"share1/": "wide/wide.", "share0.5/": "narrow/narrow."}
    same = {}
    for scope, other in names.items():
        same |= {
            other + name: value for name, value in in_scope(runs[0].server.weights, scope).items()
        }
    runs[1].server = replace(runs[1].server, weights=same)
    for run in runs:
        run.train(2)
    for scope, other in names.items():
        for name, value in in_scope(runs[0].server.weights, scope).items():
            torch.testing.assert_close(
                runs[1].server.weights[other + name], value, rtol=0, atol=1e-12
            )


def test_fed_ets_server_trains_the_first_net_and_clients_the_others(union, make_data):
    method = FedET(local=LOCAL, server_training=ONE_STEP)
    run = start(method, union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
    assert [net.scope for net in method.nets(run.world)] == ["flat/"]
    assert {name.split("/")[0] for name in run.server.weights} == {"server", "flat"}
    before = dict(run.server.weights)
    run.train(1)
    moved = {
        name.split("/")[0]
        for name, value in run.server.weights.items()
        if not torch.equal(value, before[name])
    }
    assert moved == {"server", "flat"}
    assert run.accuracy.keys() == {"1.0", str(round(42 / 76, 4))}
    assert type(run.deploy(BY_NET[0])) is Deep
    assert type(run.deploy(BY_NET[1])) is Perceptron


@pytest.mark.parametrize(
    ("order", "message"),
    [(("flat", "deep"), "'deep' has more multiply-adds"), (("flat",), "no other")],
)
def test_fed_et_refuses_a_union_whose_first_net_is_not_the_largest_of_several(
    order, message, union, make_data
):
    nets = {
        "deep": fq.trace(Deep, torch.zeros(2, 4)),
        "flat": fq.trace(Perceptron, torch.zeros(2, 4)),
    }
    other = fq.union({name: nets[name] for name in order})
    with pytest.raises(
        ConfigError, match=f"{message}.* A union of two or more nets, the largest first, would work"
    ):
        start(FedET(), other, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
