"""Several architectures in one federation: groups, engines, links, checkpoints, deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.family.variants import joined
from fedquilt.fleets.presets import net_budgets
from fedquilt.methods import FedAvg, FedBN, FedDF, FedET, HeteroFL, Method
from fedquilt.methods.prototypes import Prototypes
from fedquilt.round.training.learner import Phase
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.view import View
from tests.conftest import LOCAL, assert_same, few_server_steps
from tests.engines.test_links import LINKS

SIZES = (7, 4, 9, 5, 8, 4, 6, 5)
OTHERS = sorted(set(LOCAL) - {"sequential"})
SMALL_STEPS = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9))
EXAMPLE = torch.zeros(2, 1, 6, 6)


class Convolution(nn.Module):
    """A convolution with a norm and a linear layer; 4 classes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.last = nn.Linear(16 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).flatten(1))


@dataclass(frozen=True)
class Assigned(Method):
    """Client k trains net k of the union, and all are averaged by architecture."""

    ignores_budgets = True

    def plan(self, server, client, world):
        variants = world.family.variants
        return [prefix(world.family.at(variants[client.id % len(variants)]).whole)]


class Both(Objective):
    """The loss of the first net, and that of the second, which also learns from the first."""

    def nets(self, member):
        return (member.at("whole"), member.at("small"))

    def __call__(self, view: View) -> Tensor:
        first, second = map(view.logits, self.nets(view.member))
        distance = (second - first.detach()).square().mean()
        return view.loss(first) + view.loss(second) + distance


@dataclass(frozen=True)
class Paired(Method):
    """Every client trains a pair of nets."""

    def adapt(self, family):
        return family.at(joined("whole", "small"))

    def learner(self, job, world):
        return replace(super().learner(job, world), phases=(Phase(Both()),))


@pytest.fixture
def union(residual: fq.Family) -> fq.Family:
    """Return a union of a residual net and a small convolution."""
    return fq.union({"residual": residual, "small": fq.trace(Convolution, EXAMPLE)})


@pytest.fixture
def played(play, make_data, union):
    def played(
        method: Method, engine: str = "sequential", family: fq.Family = union, **options: Any
    ) -> fq.Run:
        is_distilled = isinstance(method, Prototypes)
        options = {
            "fleet": fq.Fleet.of(net_budgets(union) if is_distilled else [1.0], 8, 8),
            **options,
        }
        return play(method, family, make_data(family, SIZES, labels=2), engine=engine, **options)

    return played


# --- groups and engines -------------------------------------------------------------------------


def test_eight_architectures_make_eight_groups(play, make_data):
    nets = {f"net{width}": fq.trace(Convolution(width), EXAMPLE) for width in range(1, 9)}
    family = fq.union(nets)
    data = make_data(family, (6,) * 16)
    run = play(Assigned(local=SMALL_STEPS), family, data, engine="vectorized", rounds=1)
    assert [record.stacks for record in run.records] == [8]
    before = family.init(0, dtype=torch.float64)
    assert all(
        not torch.equal(run.server.weights[f"{net}.conv.weight"], before[f"{net}.conv.weight"])
        for net in nets
    )


METHODS = {
    "fedavg": FedAvg(local=SMALL_STEPS),
    "heterofl": HeteroFL(local=SMALL_STEPS),
    "fedbn": FedBN(local=replace(SMALL_STEPS, norm="per_client")),
    "assigned": Assigned(local=SMALL_STEPS),
    "tracked": Assigned(local=replace(SMALL_STEPS, norm="tracked")),
    "paired": Paired(local=replace(SMALL_STEPS, norm="tracked")),
    "feddf": few_server_steps(FedDF(local=SMALL_STEPS)),
    "fedet": few_server_steps(FedET(local=SMALL_STEPS)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", OTHERS)
def test_two_rounds_are_the_same_on_every_engine(name, engine, played):
    truth, other = (played(METHODS[name], one) for one in ("sequential", engine))
    assert_same(truth, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["assigned", "paired", "feddf"])
def test_two_rounds_are_the_same_on_ray(name, played):
    assert_same(*(played(METHODS[name], engine) for engine in ("sequential", "ray")))


@pytest.mark.parametrize("link", ["everything"])
@pytest.mark.parametrize("name", [pytest.param("assigned", marks=pytest.mark.slow), "paired"])
def test_architectures_give_the_same_numbers_over_links_that_lose_and_code(name, link, played):
    options = {"link": LINKS[link]}
    assert_same(
        *(played(METHODS[name], engine, **options) for engine in ("sequential", "vectorized"))
    )


# --- what is trained, sent and averaged ---------------------------------------------------------


def test_fedavg_of_a_union_is_fedavg_of_its_first_net(played, residual, union):
    alone, run = (played(METHODS["fedavg"], family=family) for family in (residual, union))
    for name, weight in alone.server.weights.items():
        assert torch.equal(run.server.weights[f"residual.{name}"], weight)
    before = union.init(0, dtype=torch.float64)
    for name in run.server.weights:
        assert not name.startswith("small.") or torch.equal(run.server.weights[name], before[name])
    assert [record.bytes_up for record in run.records] == [
        record.bytes_up for record in alone.records
    ]
    assert run.accuracy == alone.accuracy


def test_each_architecture_is_averaged_over_its_own_clients(played, union):
    """Even clients train the residual net and odd clients the small one. Each group runs FedAvg."""
    one = fq.LocalTraining(batch_size=64, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
    run = played(Assigned(local=one), rounds=1)
    weights, data = union.init(0, dtype=torch.float64), run.data
    lead, steps, total = "small.", torch.zeros(4, 48, dtype=torch.float64), 0
    for client in range(1, 8, 2):
        module = union.module(union.at("small").whole, weights).double().train()
        rows = data.parts[client]
        nn.functional.cross_entropy(
            module(data.inputs[rows].double()), data.targets[rows]
        ).backward()
        steps += len(rows) * module.last.weight.grad
        total += len(rows)
    expected = weights[f"{lead}last.weight"] - 0.1 * steps / total
    torch.testing.assert_close(
        run.server.weights[f"{lead}last.weight"], expected, rtol=0, atol=1e-12
    )


def test_the_costs_of_a_round_are_those_of_the_nets_that_were_trained(played, union):
    run = played(Assigned(local=SMALL_STEPS), rounds=1)
    first, second = (union.member(union.at(variant).whole) for variant in union.variants)
    half = sum(SIZES[::2]), sum(SIZES[1::2])
    assert run.records[0].macs == 3 * (half[0] * first.macs + half[1] * second.macs)
    assert run.records[0].bytes_up == 4 * (4 * first.count + 4 * second.count) * 2  # float64


def test_a_pair_beyond_a_clients_budget_is_refused(played, union):
    pair = union.cost(union.at(joined("whole", "small")).whole).macs
    with pytest.raises(BudgetError, match=f"macs: {pair - 1:,} allowed, {pair:,} needed"):
        played(WholePairs(local=SMALL_STEPS), fleet=fq.Fleet.of([fq.Budget(macs=pair - 1)], 8, 8))


@dataclass(frozen=True)
class WholePairs(Paired):
    """Clients train whole pairs, whatever their budgets."""

    def plan(self, server, client, world):
        return [prefix(world.family.whole)]


def test_a_method_that_leaves_nets_untrained_is_reported(played, caplog):
    played(METHODS["fedavg"], rounds=1)
    assert (
        "FedAvg lets no client train 'small' of the union's nets 'residual', 'small'" in caplog.text
    )


# --- checkpoints and what is handed out ---------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["assigned", *(pytest.param(one, marks=pytest.mark.slow) for one in ("feddf", "fedbn"))]
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(name, played, tmp_path):
    options = {"engine": "vectorized", "evaluation": fq.Evaluation(every=1)}
    truth = played(METHODS[name], rounds=2, **options)
    played(METHODS[name], rounds=1, out=tmp_path, **options)
    resumed = played(METHODS[name], rounds=2, out=tmp_path, resume=True, **options)
    assert_same(truth, resumed, atol=0)


def test_a_run_is_not_resumed_with_other_nets(played, residual, tmp_path):
    played(METHODS["assigned"], rounds=1, out=tmp_path)
    other = fq.union({"residual": residual, "small": fq.trace(Convolution(4), EXAMPLE)})
    with pytest.raises(ConfigError, match=r"it is another one. These differ:\n  model"):
        played(METHODS["assigned"], family=other, rounds=2, out=tmp_path, resume=True)


def test_one_net_is_deployed_and_exported_as_the_users_module(played, union, tmp_path):
    run = played(METHODS["feddf"])
    small = run.deploy(fq.Budget(macs=union.cost(union.at("small").whole).macs))
    assert type(small) is Convolution
    assert small.state_dict().keys() == Convolution().state_dict().keys()
    torch.testing.assert_close(
        small.last.weight.data, run.server.weights["small/small.last.weight"], rtol=0, atol=0
    )
    assert type(run.deploy(fq.Budget(share=1.0))) is type(union.module(union.whole))

    file = tmp_path / "small.safetensors"
    run.export(file, fq.Budget(macs=union.cost(union.at("small").whole).macs))
    again = fq.load_model(file, Convolution)
    inputs = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(again(inputs), small.float()(inputs))


def test_the_first_net_is_deployed_at_every_share(played, residual):
    run = played(METHODS["heterofl"], fleet=fq.Fleet.of([1.0, 0.5], 8, 8))
    half = run.deploy(fq.Budget(share=0.5))
    assert type(half) is type(residual.module(residual.whole))
    model = run.customizable((1.0, 0.5)).set(share=0.5)
    inputs = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(model(inputs), half(inputs))
