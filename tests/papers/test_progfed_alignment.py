"""ProgFed's theorem 1: alignment and norm discrepancy (equation 11), against plain autograd."""

from __future__ import annotations

import doctest
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines import ENGINES
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg, HeteroFL, ProgFed, SplitMix
from fedquilt.methods.alignment import Alignment, align
from fedquilt.runs.alignment import measure_alignment

SIZES = (7, 4, 9, 5)
SMALL = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1))


class TwoBlocks(nn.Module):
    """E_1 and E_2 of a linear layer and tanh, and the head G_2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class Normed(TwoBlocks):
    """The same net with batch norm and dropout in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first.append(nn.BatchNorm1d(5))
        self.second.append(nn.Dropout(0.5))


@pytest.fixture(scope="module")
def blocks() -> fq.Family:
    return fq.trace(fq.with_stages(TwoBlocks, ["first", "second"]), torch.zeros(2, 4))


@pytest.fixture(scope="module")
def normed() -> fq.Family:
    return fq.trace(fq.with_stages(Normed, ["first", "second"]), torch.zeros(2, 4))


def begin(family, data, method=None, engine="sequential", **options) -> fq.Run:
    """Prepare four rounds: the first one trains stage 1, and the others the whole model."""
    method = method or ProgFed(FedAvg(local=SMALL, weighting="uniform"), rounds=4)
    fleet = fq.Fleet.of((1.0,), data.num_clients, data.num_clients)
    return fq.prepare(method, family, data, fleet, engine, precision="fp64", **options)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def by_hand(run: fq.Run) -> tuple[float, float]:
    """Return alpha and q of stage 1, from the definitions: losses over all samples, and
    torch.autograd.
    """
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in run.server.weights.items()
    }
    x = run.data.inputs.double()
    y = run.data.targets
    first = torch.tanh(linear(x, weights, "first.0"))
    second = torch.tanh(linear(first, weights, "second.0"))
    whole = F.cross_entropy(linear(second, weights, "last"), y)
    (head,) = {name.rpartition(".")[0] for name in run.world.family.parts["head1"]}
    stage = F.cross_entropy(linear(first, weights, head), y)

    own_weights = ["first.0.weight", "first.0.bias"]
    all_weights = [*own_weights, "second.0.weight", "second.0.bias", "last.weight", "last.bias"]
    grads = torch.autograd.grad(whole, [weights[name] for name in all_weights], retain_graph=True)
    own = torch.autograd.grad(stage, [weights[name] for name in own_weights])
    of_stage = torch.cat([value.flatten() for value in own])
    of_whole = torch.cat([value.flatten() for value in grads])
    projected = of_whole[: len(of_stage)]
    alpha = min(1.0, float(projected @ of_stage / (of_stage @ of_stage)))
    return alpha, float(of_whole.norm() / (alpha * of_stage.norm()))


# --- equation 11 --------------------------------------------------------------------------------


def test_equation_11_on_two_gradients_by_hand():
    """The temporary head of the stage and the later block are left out of the projection."""
    own = {"block1": torch.tensor([2.0, 0.0]), "head1": torch.tensor([9.0])}
    whole = {
        "block1": torch.tensor([1.0, 2.0]),
        "block2": torch.tensor([2.0]),
        "head2": torch.tensor([4.0]),
    }
    assert align(1, own, whole) == Alignment(1, alpha=2 / 4, q=5 / (0.5 * 2))


def test_alpha_is_at_most_1():
    own = {"block1": torch.tensor([1.0])}
    whole = {"block1": torch.tensor([3.0]), "head2": torch.tensor([4.0])}
    assert align(1, own, whole) == Alignment(1, alpha=1.0, q=5.0)


def test_a_stage_against_the_whole_model_has_no_finite_discrepancy():
    own = {"block1": torch.tensor([1.0])}
    assert align(1, own, {"block1": torch.tensor([-1.0])}) == Alignment(1, -1.0, math.inf)
    stage, alpha, q = align(1, {"block1": torch.zeros(1)}, own)
    assert stage == 1
    assert math.isnan(alpha)
    assert math.isnan(q)


# --- in a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1])
def test_alpha_and_q_equal_those_of_autograd_on_a_two_block_net(rounds, blocks, make_data):
    """Before and after the rounds of stage 1. The ungrown block has its initial weights."""
    run = begin(blocks, make_data(blocks, SIZES)).train(rounds)
    alpha, q = by_hand(run)
    found = measure_alignment(run)
    assert found.stage == 1
    assert found.alpha == pytest.approx(alpha, abs=1e-12)
    assert found.q == pytest.approx(q, rel=1e-12)
    assert found.q > 1


def test_batches_of_unequal_sizes_give_the_mean_over_all_samples(blocks, make_data):
    run = begin(blocks, make_data(blocks, SIZES), evaluation=fq.Evaluation(batch_size=3))
    assert measure_alignment(run).alpha == pytest.approx(by_hand(run)[0], abs=1e-12)


def test_samples_limit_what_is_measured_on(blocks, make_data):
    run = begin(blocks, make_data(blocks, SIZES)).train(1)
    assert measure_alignment(run, samples=5) != measure_alignment(run)
    assert measure_alignment(run, samples=5) == measure_alignment(run, samples=5)


@pytest.mark.parametrize("name", ["blocks", "normed"])
def test_alpha_and_q_are_1_in_the_last_phase(name, make_data, request):
    family = request.getfixturevalue(name)
    run = begin(family, make_data(family, SIZES)).train(2)
    assert measure_alignment(run) == Alignment(2, 1.0, 1.0)


def test_batch_norm_uses_the_statistics_of_the_batch(normed, make_data):
    """In the training pass statistics are those of the batch, so that other batches give other
    gradients.
    """
    data = make_data(normed, SIZES)
    small, large = (
        measure_alignment(begin(normed, data, evaluation=fq.Evaluation(batch_size=b)))
        for b in (5, 25)
    )
    assert small.alpha != pytest.approx(large.alpha, abs=1e-9)


def test_the_whole_width_is_measured_for_every_width_of_clients(blocks, make_data):
    data = make_data(blocks, SIZES)
    method = ProgFed(HeteroFL(local=SMALL), rounds=4)
    run = fq.prepare(method, blocks, data, fq.Fleet.of((0.5, 0.25), 4, 4), precision="fp64").train(
        1
    )
    alpha, q = by_hand(run)
    found = measure_alignment(run)
    assert found.alpha == pytest.approx(alpha, abs=1e-12)
    assert found.q == pytest.approx(q, rel=1e-12)


# --- in records ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"ray"}))
def test_records_have_both_figures_on_request(engine, blocks, make_data):
    data = make_data(blocks, SIZES)
    asked = ProgFed(FedAvg(local=SMALL, weighting="uniform"), rounds=4, alignment=10)
    run = begin(blocks, data, asked, engine).train(1)
    found = measure_alignment(run, samples=10)
    assert run.metrics["alignment"] == {"1.0": pytest.approx(found.alpha, abs=1e-12)}
    assert run.metrics["norm_discrepancy"] == {"1.0": pytest.approx(found.q, rel=1e-12)}
    assert run.train(2).metrics["alignment"] == run.metrics["norm_discrepancy"] == {"1.0": 1.0}

    plain = begin(blocks, data, engine=engine).train(2)
    assert "alignment" not in plain.metrics
    for name, value in plain.server.weights.items():
        assert torch.equal(run.server.weights[name], value), "measuring must not change training"


def test_a_figure_that_is_not_finite_is_left_out_of_records(blocks, make_data):
    class Figured(FedAvg):
        def figures(self, server, world, gradients):
            return {"one": 1.5, "none": math.nan, "endless": math.inf}

    metrics = begin(blocks, make_data(blocks, SIZES), Figured(local=SMALL)).train(1).metrics
    assert metrics["one"] == {"1.0": 1.5}
    assert not {"none", "endless"} & set(metrics)


# --- what is refused ----------------------------------------------------------------------------


def test_a_state_of_several_nets_is_refused(blocks, make_data):
    data = make_data(blocks, SIZES)
    method = ProgFed(SplitMix(base=0.5, local=SMALL), rounds=4, alignment=10)
    with pytest.raises(
        ConfigError, match=r"no single whole model, because it has no 'first\.0\.weight'"
    ):
        begin(blocks, data, method)


def test_other_strategies_and_methods_are_refused(blocks, make_data):
    with pytest.raises(
        ConfigError,
        match="ProgFed: alignment = 10 was asked for with strategy = 'mixed'; theorem 1",
    ):
        ProgFed(strategy="mixed", alignment=10)
    data = make_data(blocks, SIZES)
    with pytest.raises(ConfigError, match="a run of FedAvg; one of ProgFed would work"):
        measure_alignment(begin(blocks, data, FedAvg(local=SMALL)))
    with pytest.raises(ConfigError, match="alignment was asked for with strategy = 'partial'"):
        measure_alignment(begin(blocks, data, ProgFed(strategy="partial", rounds=4)))


def test_the_example_of_measure_alignment_runs():
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(
        measure_alignment,
        "measure_alignment",
        module=inspect.getmodule(measure_alignment),
        globs={},
    )
    assert doctest.DocTestRunner().run(example).failed == 0
