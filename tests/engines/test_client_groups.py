"""Client groups on the CPU, where nothing is captured: the same numbers in every layout."""

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
from fedquilt.engines.vectorized.groups import ClientGroup
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

LAYOUTS = ("alone", "grouped", "stack")


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
    """Cache of the last method that ran on `sequential`, with its run."""
    return {}


def truth_of(truths, play, method, family, data):
    """Return the run of a method on `sequential`. Only the last run is cached, because tests of one
    method follow each other.
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
def test_every_setting_gives_the_same_numbers_in_every_layout(
    changes, layout, record, residual, make_data, play, truths
):
    method, data = with_local(HeteroFL(), batch_size=3, **changes), make_data(residual, RAGGED)
    truth = truth_of(truths, play, method, residual, data)
    assert_same(truth, played(method, residual, data, layout, record=record))


@pytest.mark.parametrize("name", ["fedrescue", "heterofl"])
@pytest.mark.parametrize(
    ("sizes", "apart"),
    [([10, 10, 10, 10], 0), ([9, 9, 9, 9], 0), ([10, 8, 10, 10], 2), ([8, 6, 8, 8], 2)],
)
def test_a_last_batch_of_equal_size_runs_like_a_full_batch(
    name, sizes, apart, residual, make_data, monkeypatch
):
    """Batches have 4 samples. Last batches have 2, or 5 if one sample joins the batch before.

    Last batches of unequal sizes are trained without capture.
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
def test_bf16_products_train_in_every_layout(layout, residual, make_data, caplog):
    """With bfloat16 products and float32 weights, results are near those of the exact run."""
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


def test_idle_groups_are_kept_within_the_memory_limit(residual, make_data, monkeypatch):
    """Cohorts of changing sizes leave idle groups, whose memory is limited."""
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
def test_steps_are_copied_to_the_device_in_chunks(name, residual, make_data, play, monkeypatch):
    """A client has more steps than the device has batches, keys and losses for."""
    monkeypatch.setattr("fedquilt.engines.vectorized.group_tensors.CHUNK_STEPS", 2)
    method, data = (
        with_local(METHODS[name](), batch_size=3, epochs=2, crop=1, flip=True),
        make_data(residual, RAGGED),
    )
    assert_same(
        play(method, residual, data, shares=SHARES), played(method, residual, data, "stack")
    )


def test_an_unusual_batch_size_is_captured_once_it_is_frequent(residual, make_data):
    run = played(
        with_local(HeteroFL(), batch_size=4),
        residual,
        make_data(residual, (6,)),
        "alone",
        shares=(1.0,),
    )
    ((group,),) = run.engine.groups.idle.values()
    assert group._is_usual(2)  # nothing is captured on a CPU, so that no size is unusual
    group.stream = "a stream"
    assert [group._is_usual(2) for _ in range(6)] == [False] * 4 + [True] * 2
    assert not group._is_usual(3)


def test_a_group_that_knows_the_batch_sizes_is_preferred(residual, make_data):
    data = make_data(residual, (6,))
    run = played(with_local(HeteroFL(), batch_size=4), residual, data, "alone", shares=(1.0,))
    store = run.engine.groups
    ((shape, idle),) = store.idle.items()
    knowing = ClientGroup(run.engine, shape)
    knowing._unusual[2] = 1
    idle[:] = [idle[0], knowing, ClientGroup(run.engine, shape)]
    assert store._ready(shape, {2, 4}) is knowing
    assert knowing not in idle
    assert len(idle) == 2


# --- captured passes ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 5, 100])
def test_captured_evaluation_and_calibration_give_the_same_numbers(
    residual, make_data, play, batch_size, monkeypatch
):
    """Full batches run in captured passes, others beside them. A pass serves several rounds."""
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


def test_captured_passes_are_replayed_in_turns():
    """One after another, the first pass would block its caller before the second begins."""
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


def test_a_captured_pass_gets_its_samples_in_chunks(residual, make_data, play, monkeypatch):
    monkeypatch.setattr("fedquilt.engines.vectorized.captured.CHUNK_BATCHES", 2)
    how, data = fq.Evaluation(every=1, batch_size=4), make_data(residual, RAGGED, tests=30)
    truth = play(HeteroFL(), residual, data, shares=SHARES, evaluation=how)
    swept = played(HeteroFL(), residual, data, "stack", how=how)
    for mine, theirs in zip(swept.records, truth.records, strict=True):
        assert_same_grades(mine, theirs)


def test_an_engine_used_with_another_seed_attacks_by_that_seed(make_data):
    """The start of an attack is drawn by the seed, which is a constant in a captured pass."""
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
        """Return the statistics that a captured pass measures on attacked samples."""
        nets = [(prefix(family.whole), run.server.weights)]
        return run.engine.calibrate(run.federation, nets, 2)[0]

    first = prepared("vectorized", 1)
    seen(first)
    again, fresh = prepared(first.engine, 2), prepared("vectorized", 2)
    torch.testing.assert_close(seen(again), seen(fresh), rtol=0, atol=1e-12)


def test_nets_whose_evaluation_cannot_be_captured_are_reported_once(
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
    warnings = [line.message for line in caplog.records if "cannot be captured" in line.message]
    assert len(warnings) == 1  # for all members, which are tested and measured


def store_on_gpu(family, method, fastest):
    """Return a store as on a GPU, where a function chooses the layout, and a client's learner."""
    world = World(family)
    engine = SimpleNamespace(
        layout="auto", device=torch.device("cuda"), captures_steps=True, world=world
    )
    store = GroupStore(engine)
    store._fastest = fastest
    job = Job(Client(0, fq.Budget(share=1.0), 1), prefix(family.whole), 0)
    return store, method.learner(job, world)


def test_few_clients_train_alone_if_many_are_faster_alone(residual):
    """Layouts are timed for the largest stack first. If "alone" is fastest there, smaller stacks
    are not timed.
    """
    timed = []

    def fastest(shape):
        timed.append(shape.count)
        return "grouped" if shape.count == 8 else "alone"

    store, learner = store_on_gpu(residual, HeteroFL(), fastest)
    found = [store.layout_for(residual.whole, learner, count) for count in (4, 2, 8, 2, 1)]
    assert found == ["alone", "alone", "grouped", "alone", "alone"]
    assert timed == [4, 8]


def test_clients_with_much_work_in_a_step_train_alone_and_nothing_is_timed(residual):
    """Small steps are timed, and equal clients with large batches are not."""
    timed = []

    def fastest(shape):
        timed.append(shape.learner.local.batch_size)
        return "grouped"

    for batch_size, layout in ((8, "grouped"), (1 << 20, "alone")):
        method = with_local(HeteroFL(), batch_size=batch_size)
        store, learner = store_on_gpu(residual, method, fastest)
        assert store.layout_for(residual.whole, learner, 4) == layout
    assert timed == [8]


@pytest.mark.parametrize(
    ("sizes", "stacks"),
    [
        ((6, 9, 6, 9, 6, 9, 6, 9), [[6, 6, 6, 6], [9, 9, 9, 9]]),  # last batches of 2 and of 1
        # grouped by their numbers of samples, stacks would be too small
        (
            (6, 9, 7, 10, 6, 9, 7, 10),
            [[6, 9, 7, 10, 6, 9, 7, 10]],
        ),
        # only clients with similar numbers of samples share a stack
        (
            (30, 5, 6, 4, 22, 7),
            [[4, 5, 6, 7], [22, 30]],
        ),
    ],
)
def test_captured_stacks_have_clients_with_similar_numbers_of_samples(
    sizes, stacks, residual, make_data, play, monkeypatch
):
    method, data = with_local(HeteroFL(), batch_size=4), make_data(residual, sizes)
    fleet = fq.Fleet.of((1.0,), len(sizes), len(sizes))
    run = fq.prepare(
        method, residual, data, fleet, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    run.engine.record, run.engine.layout = True, "grouped"
    seen = []

    def build(engine, server, learner, jobs, shares):
        seen.append([job.client.size for job in jobs])
        return build_stack(engine, server, learner, jobs, shares)

    monkeypatch.setattr("fedquilt.engines.vectorized.engine.build_stack", build)
    run = run.train(1)
    assert sorted(map(sorted, seen)) == sorted(map(sorted, stacks))
    assert_same(play(method, residual, data, fleet=fleet, rounds=1), run)


class Flattening(nn.Module):
    """A net with `view`, as many have. It needs images with contiguous channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.head(x.view(len(x), -1))


def test_a_net_that_cannot_use_channels_last_is_trained(make_data, play):
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
    """A net whose first operation is in-place, on images of one channel.

    Side by side, such images are views of the samples, which must not be changed.
    """

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
def test_a_net_that_changes_its_input_in_place_gives_the_same_numbers_in_every_layout(
    name, attack, make_data, play
):
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


class Neighborly(nn.Module):
    """A net that normalizes channels by their neighbours, with a tiny effect at first."""

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
    family = fq.trace(Neighborly, torch.zeros(2, 3, 8, 8))
    method, data = with_local(HeteroFL(), batch_size=4), make_data(family, RAGGED)
    ours = played(method, family, data, "grouped", 2)
    assert any("see each other" in why for why in ours.engine.groups.refused.values())
    assert_same(play(method, family, data, shares=SHARES), ours)


class Rounding(nn.Module):
    """A net whose outputs have no gradient with respect to its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x.detach().round())).mean((2, 3)))


def test_nets_without_a_gradient_in_their_samples_are_trained(make_data, play):
    family = fq.trace(Rounding, torch.zeros(2, 3, 8, 8))
    method, data = with_local(HeteroFL(), batch_size=4), make_data(family, RAGGED)
    assert_same(
        play(method, family, data, shares=SHARES), played(method, family, data, "grouped", 2)
    )
