"""Tasks other than classification, with every method on every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines import Sequential, Vectorized
from fedquilt.errors import ConfigError, DataError
from fedquilt.methods import METHODS, FedAvg, FedResCuE, HeteroFL, LocalOnly, SplitMix
from fedquilt.round.eval_jobs import EvalJob, joined
from fedquilt.tasks import Classification, MultiLabel, NextToken, Regression, SumMetric, Task
from tests.conftest import CUTTING, LOCAL, assert_same, with_local

SIZES = (5, 7, 6)
SHARES = (1.0, 0.5)


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


@cache
def family(outputs: int) -> fq.Family:
    return fq.trace(
        lambda: perceptron(outputs), torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    )


def partitioned(targets: Tensor, tests: int = 9) -> fq.FederatedData:
    """Partition samples whose targets are given: those of clients first, then those for testing."""
    generator, count = torch.Generator().manual_seed(2), sum(SIZES)
    x = torch.randn(count + tests, 4, generator=generator, dtype=torch.float64)
    parts = torch.arange(count).split(SIZES)
    test_parts = torch.arange(tests).split(tests // 3)
    pool = fq.data.Pool.of(
        (x[:count], targets[:count]), (x[count:], targets[count:]), public=x[count:]
    )
    return pool.with_parts(parts, test_parts)


def numbers(columns: int) -> Tensor:
    shape = (27, columns) if columns > 1 else (27,)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


TASKS = {
    "regression": (Regression(), partitioned(numbers(1)), 1),
    "two columns": (Regression("huber"), partitioned(numbers(2)), 2),
    "labels": (MultiLabel(max_samples=5), partitioned(numbers(3) > 0), 3),
    "weighted": (
        Classification(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.1),
        partitioned(numbers(1).gt(0).long()),
        3,
    ),
}
METHOD = {"splitmix": SplitMix(base=0.5, sort=True)}
NEEDS_CLASSES = ("dsfl", "fedet")  # They exchange probabilities of classes.


def play(name: str, method: fq.Method, engine: str, **options: object) -> fq.Run:
    task, data, outputs = TASKS[name]
    quick = with_local(method, batch_size=3, optimizer=replace(method.local.optimizer, lr=0.01))
    fleet = fq.Fleet.of(SHARES, 3)
    return fq.run(
        quick,
        family(outputs),
        data,
        fleet,
        engine,
        rounds=2,
        precision="fp64",
        task=task,
        **options,
    )


@pytest.mark.parametrize("task", ["regression", "labels"])
@pytest.mark.parametrize("method", [name for name in CUTTING if name not in NEEDS_CLASSES])
def test_every_method_gives_the_same_numbers_on_both_engines(method, task):
    """Methods whose defaults mask absent classes run too, without a mask."""
    chosen = METHOD.get(method) or METHODS[method]()
    runs = [play(task, chosen, engine, evaluation=fq.Evaluation(batch_size=4)) for engine in LOCAL]
    assert_same(*runs)
    main = TASKS[task][0].main.name
    assert runs[0].records[-1].to_dict()["main"] == main
    assert runs[0].accuracy == {}
    assert set(runs[0].metrics[main]) == {"1.0", "0.5"}


@pytest.mark.parametrize("method", NEEDS_CLASSES)
def test_methods_that_exchange_probabilities_refuse_other_targets(method):
    with pytest.raises(
        ConfigError, match=r"which exchanges probabilities of classes; Regression has no classes"
    ):
        play("regression", METHODS[method](), "sequential")


@pytest.mark.parametrize("task", ["two columns", "weighted"])
def test_other_losses_give_the_same_numbers_on_both_engines(task):
    runs = [
        play(task, FedResCuE(samples=2, smallest=0.5, granularity=0.5), engine) for engine in LOCAL
    ]
    assert_same(*runs)
    assert_same(*(play(task, HeteroFL(), engine) for engine in LOCAL))


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
def test_captured_steps_and_passes_have_the_loss_of_the_task(layout):
    """Captured evaluations sum up all metrics, not only counts."""
    _, data, outputs = TASKS["regression"]
    how = fq.Evaluation(batch_size=2)
    engine = Vectorized(data, precision="fp64", layout=layout, record=True)
    fleet = fq.Fleet.of(SHARES, 3)
    method = with_local(HeteroFL(), batch_size=3)
    runs = [
        fq.run(
            method, family(outputs), data, fleet, one, rounds=2, precision="fp64", evaluation=how
        )
        for one in (engine, "sequential")
    ]
    assert_same(*runs)


@pytest.mark.parametrize("engine", LOCAL)
def test_metrics_are_those_of_the_modules_outputs(engine):
    run = play("regression", FedAvg(), engine, evaluation=fq.Evaluation(every=0, batch_size=4))
    module = run.deploy(fq.Budget(share=1.0))
    errors = module(run.data.test_inputs).detach().flatten() - run.data.test_targets
    assert run.metrics["rmse"]["1.0"] == pytest.approx(
        float(errors.square().mean().sqrt()), abs=1e-12
    )
    assert run.metrics["mae"]["1.0"] == pytest.approx(float(errors.abs().mean()), abs=1e-12)
    by_client = [float(part.square().mean().sqrt()) for part in errors.split(3)]
    assert run.metrics["local_rmse"]["1.0"] == pytest.approx(sum(by_client) / 3, abs=1e-12)
    spread = run.per_client()
    assert spread.main == "rmse"
    assert [device.main_whole_model for device in spread.devices] == pytest.approx(
        by_client, abs=1e-12
    )
    assert all(device.accuracy_own_size is None for device in spread.devices)


@pytest.mark.parametrize("engine", LOCAL)
def test_metrics_of_ranked_scores_get_at_most_the_allowed_outputs(engine):
    run = play("labels", FedAvg(), engine, evaluation=fq.Evaluation(every=0, batch_size=4))
    rows = run.world.task.kept_positions(9)
    assert len(rows) == 5
    outputs = run.deploy(fq.Budget(share=1.0))(run.data.test_inputs).detach()[rows]
    expected = run.world.task.collected_values(outputs, run.data.test_targets[rows])
    assert run.metrics["average_precision"]["1.0"] == pytest.approx(
        expected["average_precision"], abs=1e-12
    )


def test_results_of_clients_are_means_over_clients():
    run = play("regression", LocalOnly(), "sequential", evaluation=fq.Evaluation(every=0))
    own = [device.main_own_size for device in run.per_client().devices]
    whole, half = (own[0] + own[2]) / 2, own[1]
    shares = [device.share for device in run.per_client().devices]
    assert shares == ["1.0", "0.5", "1.0"]
    assert run.metrics["rmse"] == pytest.approx({"1.0": whole, "0.5": half}, abs=1e-12)


def test_domains_have_the_main_metric():
    _, data, outputs = TASKS["regression"]
    data = replace(data, test_domains=torch.arange(9) % 2, domain_names=("north", "south"))
    run = fq.run(
        FedAvg(), family(outputs), data, fq.Fleet.of((1.0,), 3), rounds=1, precision="fp64"
    )
    assert {"rmse/north", "rmse/south"} <= run.metrics.keys()
    assert "mae/north" not in run.metrics


def test_base_nets_are_sorted_by_the_direction_of_the_main_metric(monkeypatch):
    """The net with the smallest error comes first, as the one with the highest accuracy does."""
    seen = []
    ranked = SplitMix.ranked

    def watched(self, server, scores, world):
        seen.append(list(scores))
        return ranked(self, server, scores, world)

    monkeypatch.setattr(SplitMix, "ranked", watched)
    run = play("regression", METHOD["splitmix"], "sequential")
    assert all(score < 0 for scores in seen for score in scores)
    nets = run.method.candidates(run.server, run.world)
    cuts = {
        net: family(1).cutter.gather(run.server.weights, net, list(family(1).layout.dims))
        for net in nets
    }
    eval_jobs = [EvalJob("", (net,), joined((net,), cuts), on="training", limit=18) for net in nets]
    errors = [
        score.main(run.world.task) for score in run.engine.evaluate(run.federation, eval_jobs, 18)
    ]
    assert [-error for error in errors] == pytest.approx(seen[-1], abs=1e-9)


def test_a_target_is_an_upper_bound_where_lower_is_better():
    run = play("regression", FedAvg(), "sequential")
    best = min(record.grades.figures["1.0"] for record in run.records)
    found = run.reached(best)
    assert run.records[found.round - 1].grades.figures["1.0"] == best
    assert run.reached(best - 0.01) is None
    assert run.reached(-50.0, metric="r2").round == 1


def test_attacks_raise_the_loss_of_the_task():
    """Samples with real-valued targets are attacked too, in training and in evaluation."""
    attack = fq.attacks.PGD(eps=0.1, step_size=0.05, steps=2, low=-10, high=10)
    method = with_local(FedAvg(), adversarial=fq.attacks.AdversarialTraining(attack=attack))
    how = fq.Evaluation(robustness=(0.0,), attack=attack, every=0)
    runs = [play("regression", method, engine, evaluation=how) for engine in LOCAL]
    assert_same(*runs)
    metrics = runs[0].metrics
    assert metrics["robust"]["1.0"] > metrics["standard"]["1.0"]
    module = runs[0].deploy(fq.Budget(share=1.0))
    inputs, targets = runs[0].data.test_inputs, runs[0].data.test_targets
    attacked = attack.on(module, inputs, targets, task=Regression())

    def error(samples: Tensor) -> float:
        return float((module(samples).detach().flatten() - targets).square().mean())

    assert error(attacked) > error(inputs)


# --- finding and checking a task ----------------------------------------------------------------


def prepared(
    targets: Tensor, outputs: int = 1, method: fq.Method = FedAvg(), **options: object
) -> fq.Run:
    return fq.prepare(
        method,
        family(outputs),
        partitioned(targets),
        fq.Fleet.of((1.0,), 3),
        precision="fp64",
        **options,
    )


@pytest.mark.parametrize(
    ("targets", "outputs", "task"),
    [
        (numbers(1), 1, Regression()),
        (numbers(2), 2, Regression()),
        (numbers(3) > 0, 3, MultiLabel()),
        (numbers(1).gt(0).long(), 2, Classification()),
        (numbers(1).gt(0).long(), 1, MultiLabel()),
    ],
)
def test_a_task_is_found_from_targets_and_outputs(targets, outputs, task):
    assert prepared(targets, outputs).world.task == task


def test_the_task_of_a_text_is_next_tokens(language, make_data):
    run = fq.prepare(FedAvg(), language, make_data(language, (4, 4)), fq.Fleet.of((1.0,), 2))
    assert run.world.task == NextToken()


@pytest.mark.parametrize(
    ("targets", "outputs", "options", "error", "said"),
    [
        (numbers(1).gt(0).double(), 1, {}, ConfigError, "MultiLabel and Regression both fit"),
        (numbers(1), 2, {}, DataError, "no task fits both"),
        (
            numbers(1),
            1,
            {"task": "classification"},
            DataError,
            "Classification was asked for on data; targets are",
        ),
        (numbers(1), 1, {"task": "regresion"}, ConfigError, "Did you mean 'regression'"),
        (
            numbers(1),
            1,
            {"task": Regression},
            ConfigError,
            "the class Regression where a Task belongs",
        ),
        (numbers(1), 1, {"task": 3}, ConfigError, "int '3' where a Task belongs"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(targets, outputs, options, error, said):
    with pytest.raises(error, match=said):
        prepared(targets, outputs, **options)


def test_test_targets_are_checked_too():
    targets = numbers(1).gt(0).long()
    targets[-1] = 7
    data = replace(partitioned(targets), num_classes=0)
    with pytest.raises(
        DataError, match="the test set of data; a target is 7; the output has 3 classes"
    ):
        fq.prepare(FedAvg(), family(3), data, fq.Fleet.of((1.0,), 3))


def test_a_mask_is_refused_without_classes_unless_it_is_the_methods_default():
    assert prepared(numbers(1), method=HeteroFL()).method.local.masked == "client"
    for method in (with_local(FedAvg(), masked="client"), with_local(HeteroFL(), masked="batch")):
        with pytest.raises(
            ConfigError, match=r"asked for with local.masked = .*; Regression has no classes"
        ):
            prepared(numbers(1), method=method)


def test_engines_that_keep_outputs_on_devices_refuse_ranked_scores(monkeypatch):
    monkeypatch.setattr(Sequential, "outputs_may_leave", False)
    with pytest.raises(
        ConfigError, match="the engine Sequential does not let outputs leave a device"
    ):
        prepared(numbers(3) > 0, 3, engine="sequential")
    prepared(numbers(3) > 0, 3, engine="sequential", task=MultiLabel(metrics=("f1",)))


@dataclass(frozen=True)
class Flipped(Regression):
    """A user's task whose targets are flipped with the inputs."""

    def augment_targets(self, targets, augment):
        return augment(targets)


def test_targets_that_are_images_are_flipped_with_their_inputs():
    """If targets equal inputs, the identity has no error, whichever samples are flipped."""
    net = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    x = torch.randn(12, 1, 5, 5, generator=torch.Generator().manual_seed(4))
    data = fq.data.Pool.of((x, x), (x, x)).with_parts([range(6), range(6, 12)])
    method = with_local(FedAvg(), crop=2, flip=True, batch_size=3)
    for engine in LOCAL:
        options = {"rounds": 1, "precision": "fp64", "engine": engine}
        fleet, traced = fq.Fleet.of((1.0,), 2), fq.trace(net, x[:2])
        assert (
            fq.run(method, traced, data, fleet, task=Flipped(metrics=("mae",)), **options)
            .records[0]
            .loss
            < 1e-20
        )
        assert (
            fq.run(method, traced, data, fleet, task=Regression(metrics=("mae",)), **options)
            .records[0]
            .loss
            > 0.1
        )


class Worst(SumMetric):
    """A user's metric whose sums do not add up."""

    def sums(self, outputs, targets):
        return (outputs.flatten() - targets).abs().max()

    def value(self, total):
        return float(total)


@dataclass(frozen=True)
class Wrong(Regression):
    """A user's loss that returns one number for the whole batch."""

    def losses(self, outputs, targets):
        return (outputs.flatten() - targets).square().mean()


@dataclass(frozen=True)
class Worse(Regression):
    def make_metrics(self):
        return (Worst(),)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Wrong(), r"Wrong.losses returned shape \(\)"),
        (Worse(), "the sums of the metric 'worst' over one batch are .* they must add up"),
    ],
)
def test_a_loss_or_a_metric_of_the_wrong_kind_is_refused_before_the_first_round(task, said):
    with pytest.raises(ConfigError, match=said):
        prepared(numbers(1), task=task)


@dataclass(frozen=True)
class Plain(Task):
    """The smallest task that a user can write."""

    def losses(self, outputs, targets):
        return (outputs.flatten() - targets).abs()


def test_a_task_that_cannot_be_distilled_is_refused_with_methods_that_distil():
    fleet, data = fq.Fleet.of(SHARES, 3), partitioned(numbers(1))
    run = fq.run(HeteroFL(), family(1), data, fleet, rounds=1, precision="fp64", task=Plain())
    assert math.isfinite(run.metrics["loss"]["0.5"])
    with pytest.raises(ConfigError, match=r"Define Plain\.divergences"):
        prepared(numbers(1), method=FedResCuE(), task=Plain())


def test_a_learner_with_another_loss_is_refused():
    @dataclass(frozen=True)
    class Own(FedAvg):
        def learner(self, job, world):
            return replace(super().learner(job, world), task=Classification())

    with pytest.raises(ConfigError, match=r"Own\.learner returned a learner for Classification"):
        prepared(numbers(1), method=Own())


@pytest.mark.parametrize("engine", LOCAL)
def test_a_clients_gradient_pass_has_the_loss_of_the_task(engine):
    """SCAFFOLD's option I keeps the gradient at the received weights, here that of the mean squared
    error.
    """
    _, data, outputs = TASKS["regression"]
    method = with_local(METHODS["scaffold"](option="I"), batch_size=3)
    fleet, never = fq.Fleet.of((1.0,), 3, 3), fq.Evaluation(every=0)
    run = fq.run(
        method, family(outputs), data, fleet, engine, rounds=1, precision="fp64", evaluation=never
    )
    net = family(outputs).module(family(outputs).whole).double()
    for client, rows in enumerate(data.parts):
        net.zero_grad()
        nn.functional.mse_loss(net(data.inputs[rows])[:, 0], data.targets[rows]).backward()
        own = run.server.memory[client, ""].slots["client_control"]
        for name, weight in net.named_parameters():
            torch.testing.assert_close(own[name], weight.grad, rtol=0, atol=1e-9)
