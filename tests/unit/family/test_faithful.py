"""Clients train the network that the user wrote and that `deploy` returns."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import TraceError, TrainingError
from fedquilt.family import Pass
from fedquilt.family.grouped import GroupingError
from fedquilt.methods import FedAvg, FjORD, HeteroFL, SHeteroFL, SplitMix
from tests.conftest import assert_same, with_local

BOTH = (Pass(train=True), Pass())
POLICIES = ("batch", "tracked", "post", "per_client")


class NormReLU(nn.BatchNorm2d):
    """A norm and an activation in one layer, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Pool(nn.AdaptiveAvgPool2d):
    """A mean that flattens too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1)


def small_net() -> nn.Module:
    """Two convolutions, each followed by a norm of the user's own."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        NormReLU(8),
        nn.Conv2d(8, 8, 3, padding=1),
        NormReLU(8),
        Pool(1),
        nn.Linear(8, 4),
    )


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(small_net, torch.zeros(2, 1, 4, 4))


def right(model: nn.Module, run: fq.Run) -> float:
    """The accuracy of a module over all test samples at once."""
    data = run.data
    logits = model(data.test_samples(torch.arange(len(data.test_targets))))
    return float((logits.argmax(1) == data.test_targets).double().mean())


# --- norms of the user's own in a run -----------------------------------------------------------


@pytest.mark.parametrize("norm", POLICIES)
def test_a_run_reports_the_accuracy_of_the_modules_it_hands_out(norm, family, play, make_data):
    method = with_local(FedAvg() if norm == "per_client" else HeteroFL(), norm=norm, epochs=2)
    evaluation = fq.Evaluation(every=2, batch_size=24)
    data = make_data(family, (12, 13))
    run, other = (
        play(method, family, data, (1.0, 0.5), engine, evaluation=evaluation)
        for engine in ("sequential", "vectorized")
    )
    assert_same(run, other)
    if norm == "per_client":
        return
    for share, accuracy in run.accuracy.items():
        model = run.deploy(fq.Budget(share=float(share)), norms=norm)
        assert accuracy == right(model, run)


@pytest.mark.slow
def test_digits_with_a_norm_that_is_an_activation_too():
    data = fq.data.digits().partition(8)
    family = fq.trace(small_net_of_digits, data.example)
    method = with_local(HeteroFL(), epochs=2, optimizer=fq.optimizers.SGD(0.1, momentum=0.9))
    run = fq.run(method, family, data, fq.Fleet.of([1, 1 / 2], 8, 4), rounds=2)
    for share, accuracy in run.accuracy.items():
        model = run.deploy(fq.Budget(share=float(share)))
        assert accuracy == pytest.approx(right(model, run), abs=2 / 359)


def small_net_of_digits() -> nn.Module:
    net = small_net()
    net[-1] = nn.Linear(8, 10)
    return net


def test_a_custom_norm_is_not_grouped(family):
    with pytest.raises(GroupingError, match="NormReLU may compute more"):
        family.member(family.whole).grouped(2)


def test_dual_norms_of_a_custom_norm(make_data, play):
    family = fq.trace(fq.dual(small_net), torch.zeros(2, 1, 4, 4))
    for mode in (*BOTH, Pass(statistics="stored")):
        family.member(family.fit(fq.Budget(share=0.5))).check_net((mode,))
    run = play(HeteroFL(), family, make_data(family, (6, 6)), rounds=1)
    assert (
        run.deploy(fq.Budget(share=1.0), robustness=1.0)(torch.zeros(2, 1, 4, 4).double())
        .isfinite()
        .all()
    )


# --- the check ----------------------------------------------------------------------------------


class Detector(nn.Module):
    """A module that doubles its outputs if it is narrow and fedquilt's code replaces its norm.

    It simulates a mistake in a net. The module itself never takes that branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        if "forward" in vars(self.norm) and self.norm.weight.numel() < 6:
            x = 2 * x
        return self.last(x)


@pytest.fixture
def detector() -> fq.Family:
    return fq.trace(Detector, torch.zeros(2, 4))


REFUSED = r"Detector, with 33 of 63 parameters, in training.*is another network.*differ by"


def test_a_net_that_differs_is_refused_before_a_run(detector, play, make_data):
    data = make_data(detector, (6, 6))
    with pytest.raises(TraceError, match=REFUSED):
        play(HeteroFL(), detector, data, (1.0, 0.5))
    assert play(HeteroFL(), detector, data, (1.0,), rounds=1).records


@pytest.mark.parametrize(
    ("method", "how"),
    [
        (SHeteroFL(widths=(1.0, 0.5)), fq.Evaluation()),
        (FjORD(smallest=0.5, granularity=0.5), fq.Evaluation()),
        (HeteroFL(), fq.Evaluation(shares=(0.5,))),
    ],
    ids=["nested", "drawn", "evaluated"],
)
def test_nets_within_a_step_and_in_tests_are_compared_too(method, how, detector, make_data):
    data = make_data(detector, (6, 6))
    with pytest.raises(TraceError, match=REFUSED):
        fq.prepare(method, detector, data, fq.Fleet.of((1.0,), 2, 2), evaluation=how)


def test_a_net_that_differs_is_refused_in_deployment(detector, play, make_data, tmp_path):
    run = play(HeteroFL(), detector, make_data(detector, (6, 6)), rounds=1)
    half = fq.Budget(share=0.5)
    for ask in (
        lambda: run.deploy(half),
        lambda: run.export(tmp_path / "half.safetensors", half),
        lambda: run.customizable((1.0, 0.5)),
    ):
        with pytest.raises(TraceError, match=REFUSED):
            ask()
    assert not list(tmp_path.iterdir())
    assert run.deploy(fq.Budget(share=1.0)) is not None


def test_the_refusal_says_where_the_difference_begins(detector):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.tail = Detector(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(self.body(x))

    family = fq.trace(Inner, torch.zeros(2, 4))
    with pytest.raises(TraceError, match=r"the first layer that differs is 'body.last', a Linear"):
        family.member(family.fit(fq.Budget(share=0.5))).check_net(BOTH)


def test_members_are_compared_once(family, monkeypatch):
    checked = []
    monkeypatch.setattr(
        "fedquilt.family.member.check_net", lambda member, modes: checked.append(modes)
    )
    member = family.fit(fq.Budget(share=0.75))
    family.member(member).check_net(BOTH)
    family.member(member).check_net((*BOTH, Pass(statistics="stored")))
    assert checked == [list(BOTH), [Pass(statistics="stored")]]


class Odd(nn.Module):
    """Two linear layers with something of the test's own in between."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(4, 6), between, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Drops(nn.Module):
    """Draws of all kinds in training, by torch and by Python."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        x = nn.functional.dropout(x, 0.4) + torch.randn_like(x)
        return x * x.new_empty(len(x), 1).bernoulli_(0.5)


class InFloat32(nn.Module):
    """A module that does not run in float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return torch.relu(x)


class FailsInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("no training today")
        return torch.relu(x)


@pytest.mark.parametrize(
    "between",
    [
        Drops(),
        InFloat32(),
        nn.Dropout(0.5),
        nn.BatchNorm1d(6, momentum=None),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.GroupNorm(2, 6),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_modules_that_are_hard_to_compare_are_compared(between, caplog):
    family = fq.trace(Odd(between), torch.zeros(2, 4))
    for share in (1.0, 0.5):
        family.member(family.fit(fq.Budget(share=share))).check_net(
            (*BOTH, Pass(statistics="stored"))
        )
    assert not caplog.records


class HandMade(nn.BatchNorm1d):
    """A norm that applies stored statistics by hand in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return (x - self.running_mean) / (
            self.running_var + self.eps
        ).sqrt() * self.weight + self.bias


def test_a_norm_that_evaluates_by_hand_needs_stored_statistics(play, make_data):
    family = fq.trace(Odd(HandMade(6)), torch.zeros(2, 4))
    data = make_data(family, (6, 6))
    with pytest.raises(
        TrainingError, match="norm layer 'between' is a HandMade, whose forward normalizes by hand"
    ):
        fq.prepare(with_local(FedAvg(), norm="batch"), family, data, fq.Fleet.of((1.0,), 2, 2))
    with pytest.raises(
        TrainingError, match="'between' is a HandMade, whose forward normalizes by hand"
    ):
        play(with_local(FedAvg(), norm="post"), family, data)
    play(with_local(FedAvg(), norm="tracked"), family, data)


class Pairs(nn.Module):
    """A table for each column, of users and of items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.last = nn.Embedding(3, 4), nn.Embedding(90, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1))


def test_columns_keep_their_ranges_in_the_samples_to_compare_on(caplog):
    family = fq.trace(Pairs(), torch.tensor([[2, 89], [1, 30]]))
    family.member(family.fit(fq.Budget(share=0.5))).check_net(BOTH)
    assert not caplog.records


def test_modules_that_cannot_be_compared_are_reported(caplog):
    family = fq.trace(Odd(FailsInTraining()), torch.zeros(2, 4))
    with caplog.at_level(logging.WARNING):
        family.member(family.whole).check_net(BOTH)
    assert [record.getMessage() for record in caplog.records] == [
        "Odd, whole, in training, was not compared with what clients train in its place, since it "
        "fails: "
        "no training today"
    ]


def test_members_that_fail_in_the_same_way_are_reported_once(caplog):
    family = fq.trace(Odd(FailsInTraining()), torch.zeros(2, 4))
    for share in (1.0, 0.5, 0.25):
        family.member(family.fit(fq.Budget(share=share))).check_net(BOTH)
    assert len(caplog.records) == 1


class NativeNorm(nn.Module):
    """A norm by a function that fedquilt does not replace, on a layer's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        bn, statistics = self.bn, (self.bn.running_mean, self.bn.running_var)
        return torch.native_batch_norm(
            x, bn.weight, bn.bias, *statistics, self.training, 0.1, bn.eps
        )[0]


def test_a_net_that_fails_where_its_module_runs_is_refused(play, make_data):
    family = fq.trace(Odd(NativeNorm()), torch.zeros(2, 4))
    with pytest.raises(TraceError, match=r"Odd, whole, in .* runs, but the net .* does not"):
        play(HeteroFL(), family, make_data(family, (6, 6)))


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


def test_a_frozen_norm_trains_where_statistics_are_stored(play, make_data):
    family = fq.trace(Odd(FrozenNorm(6)), torch.zeros(2, 4))
    data = make_data(family, (6, 6))
    runs = [
        play(with_local(HeteroFL(), norm="tracked"), family, data, engine=e)
        for e in ("sequential", "vectorized")
    ]
    assert_same(*runs)
    assert torch.equal(
        runs[0].server.weights["between.running_mean"], torch.zeros(6, dtype=torch.float64)
    )
    with pytest.raises(TrainingError, match="'between' is frozen"):
        play(HeteroFL(), family, data)


def test_all_nets_of_an_ensemble_are_compared(detector, play, make_data):
    with pytest.raises(TraceError, match="Detector, with"):
        play(SplitMix(), detector, make_data(detector, (6, 6)))
