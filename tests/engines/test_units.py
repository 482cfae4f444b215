"""Units, step by step on the CPU where nothing can be recorded: in place, side by side or stacked,
the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines.vectorized.captured import CapturedPass, by_turns
from fedquilt.engines.vectorized.cuda_graph import CaptureError
from fedquilt.engines.vectorized.group_store import GroupStore
from fedquilt.engines.vectorized.stack import build_stack
from fedquilt.engines.vectorized.stacked_step import train_step
from fedquilt.family.cut import prefix
from fedquilt.methods import METHODS, HeteroFL
from fedquilt.models import PreResNet
from fedquilt.round.federation import World
from fedquilt.round.training.optimizers import Adam
from fedquilt.terms import Client, Job
from tests.conftest import QUICK_METHODS, assert_same, assert_same_grades, with_local
from tests.engines.test_parity import RAGGED, SHARES

LAYOUTS = ("alone", "laid", "stack")


def played(
    method,
    family,
    data,
    layout,
    rounds=2,
    shares=SHARES,
    how=fq.Evaluation(every=0),
    precision="fp64",
    **settings,
):
    fleet = fq.Fleet.of(shares, data.num_clients, data.num_clients)
    method = method.settled(rounds)
    run = fq.prepare(method, family, data, fleet, "vectorized", precision=precision, evaluation=how)
    run.engine.record, run.engine.layout = True, layout
    for name, value in settings.items():
        setattr(run.engine, name, value)
    return run.train(rounds)


@pytest.fixture(scope="module")
def truths():
    """The last method that ran on `sequential`, and its run, which all layouts are compared with."""
    return {}


def truth_of(truths, play, method, family, data):
    """Return the run of a method on `sequential`. Tests of one method follow each other, so that
    only one is kept.
    """
    if method not in truths:
        truths.clear()
        truths[method] = play(method, family, data, shares=SHARES)
    return truths[method]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", QUICK_METHODS)
def test_every_method_gives_the_same_numbers_in_every_layout(
    name, layout, residual, make_data, play, truths
):
    method, data = with_local(METHODS[name](), batch_size=4, epochs=2), make_data(residual, RAGGED)
    assert_same(
        truth_of(truths, play, method, residual, data), played(method, residual, data, layout)
    )


# None: on a CPU those without a batch do not take part
@pytest.mark.parametrize("record", [True, None])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {
            "optimizer": fq.optimizers.SGD(
                lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, clip=0.5
            )
        },
        {"optimizer": fq.optimizers.SGD(lr=0.1, momentum=0.0)},
        {"optimizer": Adam(lr=0.01, weight_decay=1e-3), "norm": "tracked"},
        {"optimizer": Adam(lr=0.01), "epochs": 2},  # steps are counted through tails, too
        {"crop": 1, "flip": True, "scaler": True},
    ],
)
def test_every_setting(changes, layout, record, residual, make_data, play, truths):
    method, data = with_local(HeteroFL(), batch_size=3, **changes), make_data(residual, RAGGED)
    truth = truth_of(truths, play, method, residual, data)
    assert_same(truth, played(method, residual, data, layout, record=record))


@pytest.mark.parametrize("name", ["fedrescue", "heterofl"])
@pytest.mark.parametrize(
    ("sizes", "apart"),
    [([10, 10, 10, 10], 0), ([9, 9, 9, 9], 0), ([10, 8, 10, 10], 2), ([8, 6, 8, 8], 2)],
)
def test_a_tail_that_everyone_has_is_played_like_a_whole_batch(
    name, sizes, apart, residual, make_data, monkeypatch
):
    """Batches of 4: tails of 2, and of 5 where one sample is joined to the batch before. Unequal
    ones come apart.
    """
    steps = []

    def step(engine, stack, step, clients):
        steps.append((step, clients))
        train_step(engine, stack, step, clients)

    monkeypatch.setattr("fedquilt.engines.vectorized.groups.train_step", step)
    method, data = with_local(METHODS[name](), batch_size=4), make_data(residual, sizes)
    played(method, residual, data, "stack", shares=[1.0])
    assert len(steps) == apart


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rough_products_train_in_every_layout(layout, residual, make_data, caplog):
    """bfloat16 products, float32 weights: near the exact run, in the layout asked for."""
    data, method = make_data(residual, RAGGED), with_local(HeteroFL(), batch_size=4)
    exact, rough = (
        played(
            method,
            residual,
            data,
            layout,
            how=fq.Evaluation(every=1, batch_size=4),
            dtype=torch.float32,
            precision=precision,
        )
        for precision in ("fp32", "bf16")
    )
    assert not caplog.records
    for name, weight in exact.server.weights.items():
        assert rough.server.weights[name].dtype == weight.dtype
        assert (
            float((rough.server.weights[name] - weight).norm())
            <= 0.05 * float(weight.norm()) + 0.05
        ), name
    assert any(
        not torch.equal(rough.server.weights[name], weight)
        for name, weight in exact.server.weights.items()
    )


def test_units_that_nobody_uses_are_kept_within_the_memory(residual, make_data, monkeypatch):
    """Cohorts of ever other sizes leave no more behind than one of them may take."""
    data, method = make_data(residual, [4] * 12), with_local(HeteroFL(), batch_size=4)
    fleet = fq.Fleet.of(SHARES, 12, 7)
    run = fq.prepare(
        method, residual, data, fleet, precision="fp64", evaluation=fq.Evaluation(every=0)
    ).train(12)
    many = len(run.engine.groups.idle)
    less = fq.prepare(
        method, residual, data, fleet, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    monkeypatch.setattr("fedquilt.engines.vectorized.group_store.IDLE_STACKS", 1)
    less.engine.memory = most = 3 * max(
        run.engine.groups.idle_bytes(shape) for shape in run.engine.groups.idle
    )
    less.train(12)
    assert 1 < len(less.engine.groups.idle) < many
    assert sum(less.engine.groups.idle_bytes(shape) for shape in less.engine.groups.idle) <= most
    assert_same(run, less)


@pytest.mark.parametrize("name", ["heterofl", "fedrescue"])
def test_steps_are_put_onto_the_device_in_chunks(name, residual, make_data, play, monkeypatch):
    """Batches, noise and losses of more steps than are there at once."""
    monkeypatch.setattr("fedquilt.engines.vectorized.group_tensors.CHUNK_STEPS", 2)
    method, data = (
        with_local(METHODS[name](), batch_size=3, epochs=2, crop=1, flip=True),
        make_data(residual, RAGGED),
    )
    assert_same(
        play(method, residual, data, shares=SHARES), played(method, residual, data, "stack")
    )


def test_a_tail_is_recorded_once_it_is_usual(residual, make_data):
    run = played(
        with_local(HeteroFL(), batch_size=4),
        residual,
        make_data(residual, (6,)),
        "alone",
        shares=(1.0,),
    )
    ((unit,),) = run.engine.groups.idle.values()
    assert unit._is_usual(2)  # nothing is recorded on a CPU, and so nothing is rare
    unit.stream = "some stream"
    assert [unit._is_usual(2) for _ in range(34)] == [False] * 32 + [True] * 2
    assert not unit._is_usual(3)


# --- sweeps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 5, 100])
def test_swept_evaluation_and_calibration_give_the_same_numbers(
    residual, make_data, play, batch_size, monkeypatch
):
    """Whole batches in sweeps, tails beside them, and one sweep serving one round after the other."""
    begun = []
    monkeypatch.setattr(
        CapturedPass, "begin", lambda *args, own=CapturedPass.begin: (begun.append(1), own(*args))
    )
    method, data = (
        HeteroFL(),
        replace(make_data(residual, RAGGED), test_domains=torch.arange(24) % 2),
    )
    how = fq.Evaluation(every=1, batch_size=batch_size)
    truth = play(method, residual, data, shares=SHARES, evaluation=how)
    swept = played(method, residual, data, "stack", how=how)
    assert_same(truth, swept)
    for mine, theirs in zip(swept.records, truth.records, strict=True):
        assert_same_grades(mine, theirs)
    assert bool(begun) == (batch_size < 100)
    assert all(len(own) == 1 for own in swept.engine.evaluator.idle_passes.values())
    submodel = prefix(residual.whole)
    cut = residual.cutter.gather(truth.server.weights, submodel, residual.trainable)
    ours, theirs = (
        run.engine.calibrate(run.federation, [(submodel, cut)], batch_size)[0]
        for run in (swept, truth)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_sweeps_are_played_by_turns():
    """One after another the first would keep its caller waiting while the second has not begun."""
    played = []

    class Few:
        def __init__(self, name, count):
            self.name, self.left = name, count

        def replay(self):
            self.left -= 1
            played.extend([self.name] if self.left >= 0 else [])
            return self.left >= 0

    by_turns([Few("a", 3), Few("b", 1)])
    assert played == ["a", "b", "a", "a"]


def test_a_sweep_names_its_samples_in_chunks(residual, make_data, play, monkeypatch):
    monkeypatch.setattr("fedquilt.engines.vectorized.captured.CHUNK_BATCHES", 2)
    how, data = fq.Evaluation(every=1, batch_size=4), make_data(residual, RAGGED, tests=30)
    truth = play(HeteroFL(), residual, data, shares=SHARES, evaluation=how)
    swept = played(HeteroFL(), residual, data, "stack", how=how)
    for mine, theirs in zip(swept.records, truth.records, strict=True):
        assert_same_grades(mine, theirs)


def test_an_engine_that_goes_on_with_another_seed_attacks_by_that_seed(make_data):
    """Where an attack begins is drawn by the seed, and a recorded test has it in it."""
    family = fq.trace(
        fq.dual(lambda: PreResNet((1, 1), 4, 1, widths=(4, 8))), torch.zeros(2, 1, 6, 6)
    )
    data = make_data(family, (6, 6), tests=48)
    data = replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())
    attack = fq.attacks.PGD(eps=0.3, steps=0)
    method = with_local(
        HeteroFL(), batch_size=4, adversarial=fq.attacks.AdversarialTraining(attack=attack)
    )
    how = fq.Evaluation(every=0, batch_size=4, robustness=(0, 1), attack=attack)
    fleet = fq.Fleet.of((1.0,), 2, 2)

    def prepared(engine, seed):
        run = fq.prepare(
            method, family, data, fleet, engine, seed, precision="fp64", evaluation=how
        )
        run.engine.record = True
        return run

    def seen(run):
        """The statistics that a recorded pass measures of attacked samples."""
        nets = [(prefix(family.whole), run.server.weights)]
        return run.engine.calibrate(run.federation, nets, 2)[0]

    first = prepared("vectorized", 1)
    seen(first)
    again, fresh = prepared(first.engine, 2), prepared("vectorized", 2)
    torch.testing.assert_close(seen(again), seen(fresh), rtol=0, atol=1e-12)


def test_nets_whose_evaluation_cannot_be_recorded_are_told_once(
    residual, make_data, play, monkeypatch, caplog
):
    def refused(*_args):
        raise CaptureError("it looks at its numbers")

    monkeypatch.setattr("fedquilt.engines.vectorized.evaluator.CapturedPass", refused)
    method, data, how = (
        HeteroFL(),
        make_data(residual, RAGGED),
        fq.Evaluation(every=1, batch_size=4),
    )
    swept = played(method, residual, data, "stack", how=how)
    truth = play(method, residual, data, shares=SHARES, evaluation=how)
    for mine, theirs in zip(swept.records, truth.records, strict=True):
        assert_same_grades(mine, theirs)
    told = [line.message for line in caplog.records if "cannot be captured" in line.message]
    assert len(told) == 1  # for all members, which are tested and measured


def test_few_clients_are_alone_where_many_are_faster_alone(residual):
    """Layouts are timed for the largest stack first: what did not pay there is not recorded for
    smaller ones.
    """
    timed = []

    def fastest(shape):
        timed.append(shape.count)
        return "laid" if shape.count == 8 else "alone"

    engine = SimpleNamespace(layout="auto", device=torch.device("cuda"), captures_steps=True)
    store = GroupStore(engine)
    store._fastest = fastest
    learner = HeteroFL().learner(
        Job(Client(0, fq.Budget(share=1.0), 1), prefix(residual.whole), 0), World(residual)
    )
    found = [store.layout_for(residual.whole, learner, count) for count in (4, 2, 8, 2, 1)]
    assert found == ["alone", "alone", "laid", "alone", "alone"]
    assert timed == [4, 8]


@pytest.mark.parametrize(
    ("sizes", "stacks"),
    [
        ((6, 9, 6, 9, 6, 9, 6, 9), [[6, 6, 6, 6], [9, 9, 9, 9]]),  # tails of 2 and of 1
        # by their samples, stacks would be too small
        (
            (6, 9, 7, 10, 6, 9, 7, 10),
            [[6, 9, 7, 10, 6, 9, 7, 10]],
        ),
        # nobody waits for the largest but those next to it
        (
            (30, 5, 6, 4, 22, 7),
            [[4, 5, 6, 7], [22, 30]],
        ),
    ],
)
def test_recorded_stacks_are_of_clients_with_equal_tails_or_alike_in_length(
    sizes, stacks, residual, make_data, play, monkeypatch
):
    method, data = with_local(HeteroFL(), batch_size=4), make_data(residual, sizes)
    fleet = fq.Fleet.of((1.0,), len(sizes), len(sizes))
    run = fq.prepare(
        method, residual, data, fleet, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    run.engine.record, run.engine.layout = True, "laid"
    seen = []

    def build(engine, server, learner, jobs, shares):
        seen.append([job.client.size for job in jobs])
        return build_stack(engine, server, learner, jobs, shares)

    monkeypatch.setattr("fedquilt.engines.vectorized.engine.build_stack", build)
    run = run.train(1)
    assert sorted(map(sorted, seen)) == sorted(map(sorted, stacks))
    assert_same(play(method, residual, data, fleet=fleet, rounds=1), run)


class Flattening(nn.Module):
    """A net as many are written: `view` wants its images one after another in memory, channel by
    channel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.head(x.view(len(x), -1))


def test_a_net_that_cannot_have_its_channels_last_is_trained(make_data, play):
    family = fq.trace(Flattening, torch.zeros(2, 3, 8, 8))
    method, data = with_local(HeteroFL(), batch_size=4), make_data(family, RAGGED)
    how = fq.Evaluation(every=1)
    for layout in LAYOUTS:
        ours = played(method, family, data, layout, 1, how=how, precision="fp32", record=None)
        assert_same(
            play(method, family, data, rounds=1, shares=SHARES, precision="fp32", evaluation=how),
            ours,
            1e-4,
        )


class Rewriting(nn.Module):
    """Begins in place, on images of one channel: laid side by side they are the samples themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        x -= 0.5
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


# one net a batch, and several of one batch
@pytest.mark.parametrize("name", ["heterofl", "fedrescue"])
@pytest.mark.parametrize(
    "attack", [None, fq.attacks.AdversarialTraining(0.5, fq.attacks.PGD(steps=2, low=-9, high=9))]
)
def test_a_net_that_begins_in_place_is_trained_alike_in_every_layout(name, attack, make_data, play):
    family = fq.trace(Rewriting, torch.zeros(2, 1, 6, 6))
    method, data = (
        with_local(METHODS[name](), batch_size=4, adversarial=attack),
        make_data(family, RAGGED),
    )
    truth = play(method, family, data, shares=SHARES)
    for layout in LAYOUTS if attack is None else ("alone", "stack"):
        ours = played(method, family, data, layout)
        assert_same(truth, ours)
        assert not ours.engine.groups.refused


class Neighbourly(nn.Module):
    """Channels are normalized by those beside them, by next to nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(3, 8, 3),
            nn.LocalResponseNorm(5),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        return self.head(self.norm(torch.relu(self.conv(x))).mean((2, 3)))


def test_nets_that_depend_on_each_other_are_not_trained_side_by_side(make_data, play):
    family = fq.trace(Neighbourly, torch.zeros(2, 3, 8, 8))
    method, data = with_local(HeteroFL(), batch_size=4), make_data(family, RAGGED)
    ours = played(method, family, data, "laid", 2)
    assert any("see each other" in why for why in ours.engine.groups.refused.values())
    assert_same(play(method, family, data, shares=SHARES), ours)


class Rounding(nn.Module):
    """A forward without a slope in its samples, which nobody can ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x.detach().round())).mean((2, 3)))


def test_nets_without_a_slope_in_their_samples_are_trained(make_data, play):
    family = fq.trace(Rounding, torch.zeros(2, 3, 8, 8))
    method, data = with_local(HeteroFL(), batch_size=4), make_data(family, RAGGED)
    assert_same(play(method, family, data, shares=SHARES), played(method, family, data, "laid", 2))
