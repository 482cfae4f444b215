"""Scores worked out by hand, and static norms against torch's cumulative ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partialmethod

import pytest
import torch

import fedquilt as fq
from fedquilt.data import Parts
from fedquilt.engines import Sequential, Vectorized
from fedquilt.engines.samples import EvalSamples
from fedquilt.errors import ConfigError, DataError
from fedquilt.family import Pass
from fedquilt.family.norms import NORM_POLICIES
from fedquilt.methods import FedAvg, FedDropout, FedRolex, HeteroFL, Method
from fedquilt.round.evaluate import _tested_clients
from fedquilt.round.federation import World
from fedquilt.round.labels import share_label
from fedquilt.round.norm_statistics import mean_statistics
from fedquilt.round.scores import Score, main_by_label, means_by_label
from fedquilt.tasks import Classification, MultiLabel, Regression
from tests.conftest import LOCAL, assert_same_grades, with_local

TASK = Classification()


def right(outputs, targets, held=None, absent=-math.inf):
    """Return right predictions and the targets that count, as an evaluation sums them up."""
    return TASK.sums(outputs, targets, held, absent)["accuracy"]


def counts(hits, count):
    return {"accuracy": torch.tensor([hits, count])}


def test_right_counts_hits_and_skips_padding():
    logits = torch.tensor([[1.0, 2, 0], [5, 4, 3], [0, 0, 9], [1, 0, 0]])
    assert right(logits, torch.tensor([1, 1, 2, -100]), None).tolist() == [2, 3]


def test_right_hides_classes_a_client_does_not_hold():
    logits = torch.tensor([[1.0, 2, 0], [5, 4, 3]])
    held = torch.tensor([True, False, True])
    assert right(logits, torch.tensor([0, 2]), held).tolist() == [1, 2]


def test_right_of_sequences_counts_tokens():
    logits = torch.zeros(2, 3, 4)  # (batch, class, length)
    logits[:, 1] = 1
    assert right(logits, torch.tensor([[1, 1, 0, -100], [1, 2, 1, 1]]), None).tolist() == [5, 7]
    held = torch.tensor([True, False, True])
    logits[:, 2] = 0.5
    assert right(logits, torch.tensor([[2, 1, 2, 2], [0, 0, 0, 0]]), held).tolist() == [3, 8]


def test_means_count_every_client_once_and_skip_empty_tests():
    given = [("1.0", 1, 2), ("1.0", 9, 10), ("0.5", 1, 4), ("0.5", 0, 0)]
    scores = [Score(label, counts(hits, count)) for label, hits, count in given]
    assert main_by_label(scores, TASK) == {"1.0": pytest.approx(0.7), "0.5": 0.25}
    assert math.isnan(Score("x", counts(0, 0)).main(TASK))
    assert math.isnan(Score("x").main(TASK))


def test_scores_of_parts_add_up_to_that_of_the_whole():
    """Sums add, and outputs that were kept for other metrics are put together and thinned to the
    limit.
    """
    outputs, targets = torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([1.0, 2.0, 3.0])
    task = Regression()
    parts = [
        Score("a", task.sums(outputs[rows], targets[rows])) for rows in (slice(0, 1), slice(1, 3))
    ]
    figures = (parts[0] + parts[1]).figures(task)
    assert list(figures) == ["rmse", "mae", "r2", "loss"]
    assert figures["rmse"] == pytest.approx(math.sqrt(5 / 3))
    assert figures["mae"] == pytest.approx(1.0)
    assert means_by_label([*parts, Score("b")], task)["mae"] == {"a": pytest.approx((1 + 1) / 2)}

    labels, scores = torch.tensor([True, False, True]), torch.tensor([[0.5], [0.1], [-3.0]])
    task = MultiLabel(metrics=("auroc",), max_samples=2)
    kept = [Score("a", {}, scores[rows], labels[rows]) for rows in (slice(0, 2), slice(2, 3))]
    assert (kept[0] + kept[1]).figures(task) == {"auroc": 1.0}  # of the first two samples
    assert replace(kept[0] + kept[1]).figures(replace(task, max_samples=3)) == {"auroc": 0.5}


def test_when_an_evaluation_is_due():
    assert [r for r in range(1, 8) if fq.Evaluation(every=3).due(r, 7)] == [3, 6, 7]
    assert [r for r in range(1, 8) if fq.Evaluation(every=0).due(r, 7)] == [7]
    assert [r for r in range(1, 4) if fq.Evaluation().due(r, 3)] == [1, 2, 3]


def test_nets_are_tested_on_the_statistics_the_policy_stores():
    passes = {name: kind().evaluation_pass for name, kind in NORM_POLICIES.items()}
    assert passes.pop("batch") == Pass(train=False, statistics="batch")
    assert set(passes.values()) == {Pass(train=False, statistics="stored")}


def test_mean_statistics():
    measured = [{"m": torch.tensor([1.0, 2.0])}, {"m": torch.tensor([3.0, 6.0])}]
    assert mean_statistics(measured, 2)["m"].tolist() == [2, 4]
    assert mean_statistics(measured, 4)["m"].tolist() == [1, 2]  # where they are sums over batches


def test_shares_are_tested_beside_those_of_the_fleet(perceptron, make_data, play):
    """The whole model is tested too. Personal methods have nothing to test at other shares."""
    how, data = fq.Evaluation(every=0, shares=(0.75, 0.5)), make_data(perceptron, (5, 5))
    found = play(fq.methods.HeteroFL(), perceptron, data, (0.5, 0.25), rounds=1, evaluation=how)
    assert list(found.accuracy) == ["1.0", "0.75", "0.5", "0.25"]
    own = play(fq.methods.LocalOnly(), perceptron, data, (0.5, 0.25), rounds=1, evaluation=how)
    assert set(own.accuracy) == {"0.5", "0.25"}


def test_labels_are_the_share_of_every_axis_a_budget_allows(perceptron):
    world = World(perceptron)
    assert share_label(Method(), fq.Budget(share=0.5), world) == "0.5"
    assert share_label(Method(), fq.Budget(share=1), world) == "1.0"
    # 51 parameters at six hidden units, 27 at three
    assert share_label(Method(), fq.Budget(params=30), world) == "0.5"
    assert share_label(Method(), fq.Budget(share=0.2, params=30), world) == "0.1667"  # one of six


@pytest.mark.parametrize("engine", LOCAL)
def test_calibration_is_torchs_cumulative_average(engine, residual, make_data):
    """The papers' static norms: one pass over the pooled data in train mode with momentum=None."""
    data = make_data(residual, (9, 8, 5))
    world = World(residual, precision="fp64")
    state = {name: value.double() for name, value in residual.init(1).items()}
    (submodel,) = HeteroFL().deploy(None, fq.Budget(share=0.5), world)
    ours = LOCAL[engine](data, precision="fp64")
    cut = residual.cutter.gather(state, submodel, residual.trainable)
    [found] = ours.calibrate(
        fq.methods.api.Federation(world, HeteroFL()), [(submodel, cut)], batch_size=5
    )
    theirs = residual.module(submodel, state).train()
    for layer in theirs.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None
            layer.reset_running_stats()
    with torch.no_grad():
        for rows in ours.pooled.split(5):  # 22 samples: four batches of five and a tail of two
            theirs(ours.data.inputs[rows])
    expected = dict(theirs.named_buffers())
    assert found.keys() == set(residual.statistics)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", LOCAL)
def test_a_score_is_that_of_the_module(engine, residual, make_data):
    data = make_data(residual, (6, 6))
    ours = LOCAL[engine](data, precision="fp64")
    ours.begin(
        fq.methods.api.Federation(
            World(residual, precision="fp64"), with_local(FedAvg(), norm="tracked")
        )
    )
    state = {name: value.double() for name, value in residual.init(1).items()}
    (submodel,) = HeteroFL().deploy(None, fq.Budget(share=0.5), ours.world)
    model = residual.module(submodel, state).eval()
    cut = residual.cutter.gather(state, submodel, tuple(state))
    samples, held = torch.tensor([3, 1, 20, 7, 8]), torch.tensor([True, True, False, True])
    evaluations = [
        EvalSamples("all", (submodel,), cut, torch.arange(24)),
        EvalSamples("few", (submodel,), cut, samples),
        EvalSamples("masked", (submodel,), cut, samples, held),
        EvalSamples("released", (submodel,), cut, samples, held, absent=0.0),
        EvalSamples("released", (submodel,), cut, samples.flip(0), held, absent=0.0),
        EvalSamples("none", (submodel,), cut, samples[:0]),
    ]
    scores = ours._evaluate(evaluations, batch_size=10)
    logits = model(ours.data.test_inputs).detach()
    hits = logits.argmax(1) == data.test_targets
    seen = logits[samples].masked_fill(~held, -torch.inf).argmax(1) == data.test_targets[samples]
    zero = (logits[samples] * held).argmax(1) == data.test_targets[samples]
    found = [
        (score.label, score.sums["accuracy"].tolist() if score.sums else None)
        for score in scores[:-1]
    ]
    assert found == [
        ("all", [int(hits.sum()), 24]),
        ("few", [int(hits[samples].sum()), 5]),
        ("masked", [int(seen.sum()), 5]),
        ("released", [int(zero.sum()), 5]),
        ("released", [int(zero.sum()), 5]),
    ]
    assert math.isnan(scores[-1].main(TASK))
    # Absent classes are hidden from predictions, not from the loss.
    losses = torch.nn.functional.cross_entropy(logits, data.test_targets, reduction="none")
    assert scores[0].figures(TASK)["loss"] == pytest.approx(float(losses.mean()), abs=1e-12)
    assert scores[2].figures(TASK)["loss"] == pytest.approx(
        float(losses[samples].mean()), abs=1e-12
    )


@pytest.mark.parametrize("engine", LOCAL)
def test_local_accuracy_is_the_servers_model_on_each_clients_own_data(
    engine, residual, play, make_data
):
    """Among the client's classes, or as the released codes have it, with a logit of 0 for the
    others.
    """
    # as good as untrained
    method = with_local(
        HeteroFL(), batch_size=4, norm="tracked", optimizer=fq.optimizers.SGD(lr=1e-6)
    )
    data, found = make_data(residual, (5, 6, 7), labels=2, tests=96), {}
    for absent, logit in (("hidden", -torch.inf), ("zero", 0.0)):
        how = fq.Evaluation(per_client=True, absent=absent)
        run = play(method, residual, data, (1.0, 0.5), engine, evaluation=how, seed=3)
        model = run.deploy(fq.Budget(share=1.0))
        own = []
        for id, part in enumerate(data.test_parts):
            logits = model(run.data.test_inputs[part]).detach()
            logits = logits.masked_fill(~run.engine.classes_present(id), logit)
            own.append(float((logits.argmax(1) == data.test_targets[part]).double().mean()))
        found[absent] = run.records[-1].grades.metrics["local_accuracy"]
        assert found[absent] == {"1.0": pytest.approx(sum(own) / 3, abs=1e-12)}
    assert found["hidden"] != found["zero"]


def test_a_class_that_a_client_lacks_wins_by_a_logit_of_zero():
    logits = torch.tensor([[-1.0, -2.0, 5.0], [0.5, -2.0, 5.0], [-0.1, -0.2, -0.3]])
    held, targets = torch.tensor([True, True, False]), torch.tensor([0, 0, 0])
    assert right(logits, targets, held).tolist() == [3, 3]
    assert right(logits, targets, held, absent=0.0).tolist() == [1, 3]


def test_another_way_with_absent_classes_is_refused():
    with pytest.raises(
        ConfigError, match="absent = 'inf' was asked for; it may be 'hidden', 'zero'"
    ):
        fq.Evaluation(absent="inf")


def test_a_large_fleets_own_accuracy_is_a_fixed_draw_of_clients(residual, play, make_data):
    data, how = make_data(residual, (4,) * 6), fq.Evaluation(clients=2)
    run, again = (
        play(fq.methods.LocalOnly(), residual, data, evaluation=how, rounds=1) for _ in range(2)
    )
    assert run.accuracy == again.accuracy
    # two clients of four tests each
    assert round(run.accuracy["1.0"] * 8) == pytest.approx(run.accuracy["1.0"] * 8)


# --- by domain ----------------------------------------------------------------------------------

HOMES = torch.tensor([2, 0, 0, 1] * 6)  # of the 24 test samples, not sorted


def with_domains(data, names=("mnist", "svhn", "usps")):
    return replace(data, test_domains=HOMES, domain_names=names)


@pytest.fixture
def asked(monkeypatch):
    """Collect the number of samples and of tests of every evaluation."""
    calls = []

    def counted(engine, evaluations, batch_size, own):
        calls.append((sum(len(evaluation.samples) for evaluation in evaluations), len(evaluations)))
        return own(engine, evaluations, batch_size)

    for kind in (Sequential, Vectorized):
        monkeypatch.setattr(kind, "_evaluate", partialmethod(counted, own=kind._evaluate))
    return calls


@pytest.mark.parametrize("engine", LOCAL)
def test_accuracy_by_domain_is_what_the_module_scores_there(
    engine, residual, play, make_data, asked
):
    """Domains are tested at every share. Without mixing of samples, they cost no further runs."""
    method = with_local(HeteroFL(), batch_size=4, norm="tracked")
    data, how = make_data(residual, (5, 6, 7)), fq.Evaluation(every=0, per_client=False)
    run = play(method, residual, with_domains(data), (1.0, 0.5), engine=engine, evaluation=how)
    assert asked == [(2 * 24, 2 * 3)]
    metrics = run.records[-1].grades.metrics
    assert list(metrics) == ["accuracy", "loss", "accuracy/mnist", "accuracy/svhn", "accuracy/usps"]
    for share in ("1.0", "0.5"):
        model = run.deploy(fq.Budget(share=float(share)))
        hits = (model(run.data.test_inputs).argmax(1) == data.test_targets).double()
        assert run.accuracy[share] == pytest.approx(float(hits.mean()), abs=1e-12)
        for code, name in enumerate(("mnist", "svhn", "usps")):
            there = float(hits[HOMES.eq(code)].mean())
            assert metrics[f"accuracy/{name}"][share] == pytest.approx(there, abs=1e-12)
    assert run.summary["metrics"] == metrics


@pytest.mark.parametrize("engine", LOCAL)
def test_norms_on_the_batch_leave_the_accuracy_over_all_as_it_is(
    engine, residual, play, make_data, asked
):
    """There a sample's prediction depends on its batch: domains are tested by themselves, and
    besides.
    """
    method = with_local(HeteroFL(), batch_size=4, norm="batch")
    data, how = (
        make_data(residual, (5, 6, 7)),
        fq.Evaluation(every=0, batch_size=5, per_client=False),
    )
    without = play(method, residual, data, (1.0, 0.5), engine=engine, evaluation=how)
    run = play(method, residual, with_domains(data), (1.0, 0.5), engine=engine, evaluation=how)
    assert asked == [(2 * 24, 2), (2 * 2 * 24, 2 * 4)]
    assert run.accuracy == without.accuracy
    (submodel,) = method.deploy(run.server, fq.Budget(share=0.5), run.world)
    cut = residual.cutter.gather(run.server.weights, submodel, residual.trainable)
    samples = HOMES.eq(0).nonzero().flatten()
    [score] = run.engine._evaluate([EvalSamples("", (submodel,), cut, samples)], 5)
    assert run.records[-1].grades.metrics["accuracy/mnist"]["0.5"] == score.main(TASK)


@pytest.mark.parametrize(
    ("sizes", "apart"),
    [((10, 14), True), ((20, 4), True), ((9, 15), False), ((20, 3, 1), False), ((10, 5, 9), True)],
)
def test_batches_of_one_domain_each_are_tested_once(sizes, apart, residual, play, make_data, asked):
    """Whole batches of five, domain after domain: the sum is the score of the whole, batch by
    batch.
    """
    method = with_local(HeteroFL(), batch_size=4, norm="batch")
    data, how = (
        make_data(residual, (5, 6, 7)),
        fq.Evaluation(every=0, batch_size=5, per_client=False),
    )
    homes = torch.tensor([2, 0, 1][: len(sizes)]).repeat_interleave(torch.tensor(sizes))
    runs = [
        play(method, residual, replace(data, test_domains=own), evaluation=how)
        for own in (None, homes)
    ]
    assert runs[0].accuracy == runs[1].accuracy
    assert asked[1] == (
        (24, len(sizes)) if apart else (48 - (1 in sizes), len(sizes) + 1 - (1 in sizes))
    )


def test_a_prediction_depends_on_the_batch_where_a_norm_has_nothing_else(residual, perceptron):
    assert residual.depends_on_batch(Pass(statistics="batch"))
    assert not residual.depends_on_batch(Pass(statistics="stored"))
    assert not perceptron.depends_on_batch(Pass(statistics="batch"))
    free = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6, track_running_stats=False)
    )
    assert fq.trace(free, torch.zeros(2, 4)).depends_on_batch(Pass(statistics="stored"))


def test_domains_have_names_or_numbers_and_can_be_left_out(perceptron, play, make_data, asked):
    data, how = make_data(perceptron, (5, 6)), fq.Evaluation(every=0, per_client=False)
    runs = [
        play(FedAvg(), perceptron, with_domains(data, names=("mnist",)), evaluation=how),
        play(FedAvg(), perceptron, with_domains(data), evaluation=replace(how, domains=False)),
        play(FedAvg(), perceptron, data, evaluation=how),
    ]
    assert [list(run.records[-1].grades.metrics) for run in runs] == [
        ["accuracy", "loss", "accuracy/mnist", "accuracy/1", "accuracy/2"],
        ["accuracy", "loss"],
        ["accuracy", "loss"],
    ]
    assert asked == [(24, 3), (24, 1), (24, 1)]
    assert runs[0].accuracy == runs[1].accuracy == runs[2].accuracy


def test_domains_of_another_test_set_are_refused(perceptron, play, make_data):
    data = replace(make_data(perceptron, (5, 6)), test_domains=torch.zeros(23, dtype=torch.int64))
    with pytest.raises(DataError, match="data has 24 test samples and the domains of 23"):
        play(FedAvg(), perceptron, data)


@pytest.mark.parametrize("norm", ["batch", "per_client"])
def test_clients_own_nets_count_in_the_domains_of_their_own_test_parts(
    norm, residual, play, make_data, asked
):
    """The mean over each domain's clients; one that has a single domain is tested once."""
    data = make_data(residual, (4, 4, 4))
    homes = torch.tensor([0] * 8 + [0] * 8 + [0, 0, 0, 1, 1, 1, 1, 1])  # eight tests a client
    data = replace(data, test_domains=homes, domain_names=("mnist", "syn"))
    method = with_local(fq.methods.LocalOnly(), batch_size=4, norm=norm)
    run = play(method, residual, data, evaluation=fq.Evaluation(every=0, batch_size=8))
    assert asked == [(32, 5) if norm == "batch" else (24, 4)]
    metrics, own = run.records[-1].grades.metrics, {}
    for client, part in enumerate(data.test_parts):
        memory = run.server.memory[client, ""]
        for domain in (0, 1):
            evaluation = EvalSamples(
                "", (memory.submodel,), memory.weights, part[homes[part] == domain]
            )
            [score] = run.engine._evaluate([evaluation], 8)
            own[client, domain] = score.main(TASK)
    assert metrics["accuracy/mnist"]["1.0"] == pytest.approx(
        (own[0, 0] + own[1, 0] + own[2, 0]) / 3, abs=1e-12
    )
    assert metrics["accuracy/syn"] == {"1.0": own[2, 1]}


@pytest.mark.parametrize("engine", LOCAL)
def test_a_client_without_test_samples_counts_in_no_domain(engine, residual, play, make_data):
    data = with_domains(make_data(residual, (4, 4, 4)))
    data = replace(
        data, test_parts=Parts.of([torch.arange(10), torch.arange(10, 24), torch.arange(0)])
    )
    method = with_local(fq.methods.LocalOnly(), batch_size=4, norm="batch")
    run = play(
        method, residual, data, engine=engine, evaluation=fq.Evaluation(every=0, batch_size=8)
    )
    *others, none = (device.accuracy_own_size for device in run.per_client().devices)
    assert none is None
    assert run.accuracy["1.0"] == pytest.approx(sum(others) / 2, abs=1e-12)
    names = ["accuracy", "loss", "accuracy/mnist", "accuracy/svhn", "accuracy/usps"]
    assert list(run.records[-1].grades.metrics) == names


def test_a_method_that_deploys_no_tuple_is_refused(residual, make_data, play):
    class Old(HeteroFL):
        def deploy(self, server, budget, world):
            return super().deploy(server, budget, world)[0]

    with pytest.raises(
        fq.errors.ConfigError, match=r"Old\.deploy returned a Submodel for the budget share 1"
    ):
        play(with_local(Old(), batch_size=4), residual, make_data(residual, (6, 6)), (1.0, 0.5))


class Centered(torch.nn.Module):
    """Takes the mean of the batch from every sample by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(torch.relu(hidden - hidden.mean(0, keepdim=True)))


def test_a_forward_that_mixes_samples_is_detected_and_tested_in_the_same_batches(make_data, play):
    family = fq.trace(Centered, torch.rand(2, 4))
    assert family.depends_on_batch(Pass(statistics="stored"))
    data, how = make_data(family, (5, 6, 7)), fq.Evaluation(every=1, batch_size=5)
    runs = [
        play(with_local(HeteroFL(), batch_size=4), family, data, engine=name, evaluation=how)
        for name in LOCAL
    ]
    for run in runs:
        assert_same_grades(run.records[-1], runs[0].records[-1])


def test_mixing_of_samples_is_detected_for_every_example():
    """The one other sample of an example may change nothing, where ReLU cuts off all that it
    changes.
    """
    for seed in range(20):
        example = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
        assert fq.trace(Centered, example).depends_on_batch(Pass(statistics="stored")), seed


def test_the_same_clients_are_sampled_over_every_link(residual, make_data):
    """Only where results live on clients are those asked who have one."""
    data, fleet, how = (
        make_data(residual, (4,) * 12),
        fq.Fleet.of((1.0,), 12, 6),
        fq.Evaluation(every=1, clients=3),
    )
    asked = []
    for link in (fq.Link(), fq.Link(codec=fq.links.Codec(bits=32, keep=0.9, feedback=True))):
        method = with_local(FedAvg(), batch_size=4)
        run = fq.run(method, residual, data, fleet, "sequential", 1, evaluation=how, link=link)
        asked.append(
            [
                client.id
                for client in _tested_clients(run.federation, fleet, run.server, run.engine, how)
            ]
        )
    assert asked[0] == asked[1]
    method = with_local(FedAvg(), batch_size=4, norm="per_client")
    run = fq.run(method, residual, data, fleet, "sequential", 1, evaluation=how)
    assert {
        client.id for client in _tested_clients(run.federation, fleet, run.server, run.engine, how)
    } <= set(fleet.draw_cohort(0, 0))


@pytest.mark.parametrize("method", [FedRolex(shift=4), FedDropout()])
def test_a_client_is_tested_on_what_it_trained_last(method, residual, make_data):
    """The next cut is not tested, because the client's norms have not seen it."""
    method, fleet = with_local(method, batch_size=4, norm="per_client"), fq.Fleet.of((0.5,), 3, 1)
    run = fq.run(method, residual, make_data(residual, (6, 6, 6)), fleet, "sequential", 4)
    for client in {fleet.draw_cohort(round, 0)[0] for round in range(4)}:
        last = max(round for round in range(4) if fleet.draw_cohort(round, 0)[0] == client)
        asked = fleet.client(client, 4, 0, 6)
        assert method.client_submodels(run.server, asked, run.world) == tuple(
            method.plan(replace(run.server, round=last), asked, run.world)
        )
        module = run.deploy(fq.Budget(share=0.5), client=client)
        assert all(
            value.any() for name, value in module.named_buffers() if name.endswith("running_mean")
        )


class Normed(torch.nn.Module):
    """Shifts of its samples do not reach the mean it takes from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = (
            torch.nn.LayerNorm(4),
            torch.nn.Linear(4, 6),
            torch.nn.Linear(6, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.norm(x))
        return self.last((hidden - hidden.mean(0)).relu())


class Whole(torch.nn.Module):
    """Takes real numbers for places in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(10, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x.long()).mean(1))


def test_mixing_of_samples_is_tested_with_samples_that_a_net_takes():
    assert fq.trace(Normed, torch.zeros(2, 4)).depends_on_batch(Pass(statistics="stored"))
    assert not fq.trace(Whole, torch.tensor([[9.0, 9.0], [3.0, 4.0]])).depends_on_batch(
        Pass(statistics="stored")
    )
    # it takes no other: who knows
    assert fq.trace(Whole, torch.full((2, 2), 9.5)).depends_on_batch(Pass(statistics="stored"))
