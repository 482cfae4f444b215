"""Tasks by name, from a file or from the data, and mistakes that are found early."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedquilt.errors import ConfigError, DataError
from fedquilt.tasks import (
    TASKS,
    Classification,
    MultiLabel,
    NextToken,
    Regression,
    SumMetric,
    Task,
    check_task,
    classes_second,
    find_task,
    infer,
)

CLASSES = torch.tensor([0, 1, 2, 1])
TOKENS = torch.tensor([[0, 1, -100], [2, 2, 1]])
YES_OR_NO = torch.tensor([[0, 1], [1, 1], [0, 0]])
NUMBERS = torch.tensor([[0.5, 1.0], [2.0, -1.0]])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- from the data ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "shape", "class_dim", "task"),
    [
        (CLASSES, (2, 3), 1, Classification()),
        (TOKENS, (2, 3, 5), -1, NextToken()),
        (TOKENS, (2, 5, 3), 1, NextToken()),
        (torch.zeros(2, 4, 4, dtype=torch.int64), (2, 2, 4, 4), 1, Classification()),
        (NUMBERS, (2, 2), 1, Regression()),
        (NUMBERS[:, 0], (2, 1), 1, Regression()),
        (YES_OR_NO, (2, 2), 1, MultiLabel()),
        (YES_OR_NO[:, 0], (2, 1), 1, MultiLabel()),
        (YES_OR_NO[:, 0], (2, 2), 1, Classification()),
        (torch.zeros(3, dtype=torch.int64), (2, 1), 1, Classification()),
    ],
)
def test_a_task_is_found_from_targets_and_output(targets, shape, class_dim, task):
    assert infer(targets, shape, class_dim) == task


@pytest.mark.parametrize("targets", [YES_OR_NO.float(), YES_OR_NO[:, 0].float()])
def test_where_two_tasks_fit_the_user_has_to_choose(targets):
    outputs = 2 if targets.dim() == 2 else 1
    message = "mine: MultiLabel and Regression both fit.*task=MultiLabel.*--task regression"
    with pytest.raises(ConfigError, match=message):
        infer(targets, (2, outputs), name="mine")


@pytest.mark.parametrize(
    ("targets", "shape", "message"),
    [
        (
            CLASSES,
            (2, 2),
            "Classification: a target is 2; the output has 2 classes, so that 0 to 1 fit",
        ),
        (
            NUMBERS,
            (2, 3),
            r"Regression: the output of a sample has shape \(3,\).*they have shape \(2,\)",
        ),
        (
            NUMBERS[:, 0],
            (2, 2),
            "Classification: targets are torch.float32; classes are whole numbers",
        ),
        (TOKENS, (2, 3), r"targets are torch.int64 of shape \(3,\) a sample.*no task fits both"),
        (NUMBERS / 0, (2, 2), "Regression: 4 targets are not finite"),
        (CLASSES, (2,), r"the model's output has shape \(2,\); \(sample, outputs\) is needed"),
    ],
)
def test_where_no_task_fits_the_error_gives_the_reason(targets, shape, message):
    with pytest.raises(DataError, match=message):
        infer(targets, shape)


def test_the_classes_of_an_output_come_second():
    assert classes_second((2, 7, 5), -1) == classes_second((2, 7, 5), 2) == (2, 5, 7)
    assert classes_second((2, 5, 7), 1) == (2, 5, 7)


# --- what fits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "targets", "shape", "message"),
    [
        (
            Classification(),
            NUMBERS[:, 0],
            (2, 3),
            "Classification was asked for on mine; targets are torch.float32",
        ),
        (
            Classification(),
            TOKENS,
            (2, 5),
            r"targets have shape \(3,\) a sample.*targets of shape \(\) would fit",
        ),
        (
            Classification(),
            CLASSES[:, None],
            (2, 3),
            r"targets have shape \(4, 1\).*shape \(4,\) would fit: targets\.reshape\(-1\)",
        ),
        (
            Classification(),
            -CLASSES,
            (2, 3),
            "a target is -1; .* 0 to 2 fit, and -100 for targets that do not count",
        ),
        (
            Classification(class_weights=(1.0, 2.0)),
            CLASSES,
            (2, 3),
            "2 class weights; the output has 3 classes",
        ),
        (NextToken(), CLASSES, (2, 3), r"one token for each position, \(length,\), would fit"),
        (Regression(), CLASSES, (2, 1), "targets are torch.int64; real numbers fit, such"),
        (Regression(), NUMBERS, (2, 1), r"asks for as many targets; they have shape \(2,\)"),
        (MultiLabel(), CLASSES, (2, 1), "a target is 2; labels are 0 or 1"),
        (MultiLabel(), NUMBERS, (2, 2), "a target is 0.5; labels are 0 or 1"),
    ],
)
def test_targets_that_do_not_fit_are_refused(task, targets, shape, message):
    with pytest.raises(DataError, match=message):
        task.check(targets, shape, "mine")


def test_ignored_targets_may_have_any_value():
    Classification(ignore=7).check(torch.tensor([0, 7]), (2, 2))
    with pytest.raises(ConfigError, match="top5 was asked for; the output has 3 classes"):
        Classification(metrics=("accuracy", "top5")).check(CLASSES, (2, 3))


def test_the_number_of_outputs():
    assert Classification().num_outputs(CLASSES, 7) == 7
    assert Regression().num_outputs(NUMBERS, 0) == MultiLabel().num_outputs(YES_OR_NO, 2) == 2
    assert Regression().num_outputs(NUMBERS[:, 0], 0) == 1
    with pytest.raises(
        DataError, match=r"Classification was asked for; targets are torch\.float32"
    ):
        Classification().num_outputs(NUMBERS, 0)


# --- by name ------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
from fedquilt.tasks import Regression, SumMetric
import torch

class Bias(SumMetric):
    higher_is_better = False

    def sums(self, outputs, targets):
        errors = outputs.reshape(targets.shape) - targets
        return torch.stack([errors.sum(), torch.ones_like(errors).sum()])

    def value(self, total):
        return float(total[0] / total[1])

@dataclass(frozen=True)
class Tilted(Regression):
    tilt: float = 2.0

    def losses(self, outputs, targets):
        errors = outputs.reshape(targets.shape) - targets
        return torch.where(errors > 0, errors, -self.tilt * errors)

def three():
    return 3

def broken():
    raise ValueError("on purpose")
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return str(file)


def test_a_task_has_a_name():
    assert {name: type(find_task(name)) for name in TASKS} == TASKS
    task = Regression("mae")
    assert find_task(task) is task
    with pytest.raises(
        ConfigError, match=r"no task named 'regresion'. Did you mean 'regression'\?"
    ):
        find_task("regresion")


def test_a_task_and_a_metric_in_a_users_file(own):
    task = find_task(f"{own}:Tilted")
    outputs, targets = torch.tensor([[3.0], [1.0]]), torch.tensor([1.0, 2.0])
    assert task.mean_loss(outputs, targets) == 2.0
    assert task.main.name == "rmse"
    measured = Regression(metrics=("r2", f"{own}:Bias"))
    assert measured.values(measured.sums(outputs, targets))["bias"] == 0.5
    for found in (task, measured):
        check_task(found, outputs, targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three", "it is a int. A subclass of fedquilt.tasks.Task fits"),
        ("broken", "was called and failed: ValueError: on purpose"),
        ("Tilt", "Did you mean 'Tilted'"),
    ],
)
def test_other_objects_than_tasks_are_refused(own, name, message):
    with pytest.raises(ConfigError, match=message):
        find_task(f"{own}:{name}")
    if name != "Tilt":
        with pytest.raises(
            ConfigError, match=message.replace("tasks.Task", "tasks.SumMetric or CollectedMetric")
        ):
            Regression(metrics=(f"{own}:{name}",))


def test_tasks_are_values():
    assert Classification() == Classification() != Classification(label_smoothing=0.1)
    assert len({Regression(), Regression(), Regression("mae")}) == 2
    task = MultiLabel(metrics=("auroc", "loss"))
    assert pickle.loads(pickle.dumps(task)) == task


# --- mistakes -----------------------------------------------------------------------------------


class Rows(SumMetric):
    """Sums whose shape depends on the batch."""

    def sums(self, outputs, targets):
        return outputs[:, 0]

    def value(self, total):
        return 0.0


class Mean(Rows):
    """A mean, which does not add up."""

    def sums(self, outputs, targets):
        return outputs.mean()[None] + 1


class Text(Rows):
    """A value that is not a number."""

    def sums(self, outputs, targets):
        return outputs.sum()[None]

    def value(self, total):
        return "good"


class Branches(Text):
    """A branch on values, which vmap cannot take."""

    def sums(self, outputs, targets):
        return outputs.sum()[None] if outputs.sum() > 0 else outputs.abs().sum()[None]

    def value(self, total):
        return 0.0


@dataclass(frozen=True)
class Tried(Task):
    """A task with one metric or loss that is wrong."""

    wrong: type[SumMetric] | str = ""

    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)

    def make_metrics(self):
        return super().make_metrics() if isinstance(self.wrong, str) else (self.wrong(),)

    def losses(self, outputs, targets):
        squares = (outputs - targets).square()
        found = {
            "by class": squares.mean(0),
            "number": 3.0,
            "flat": torch.zeros_like(squares),
            "fails": squares,
        }
        if self.wrong == "fails":
            raise IndexError("on purpose")
        return found.get(self.wrong, squares) if isinstance(self.wrong, str) else squares


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Rows, r"sums of the metric 'rows' have shape \(4,\) for 4 samples and \(1,\) for one"),
        (Mean, r"sums of the metric 'mean' .* must add up"),
        (Text, "the value of the metric 'text' is a str; a float fits"),
        (Branches, "metric 'branches' under vmap was tried on a few samples and failed"),
        ("by class", r"Tried.losses returned shape \(2,\) and `counted` \(4, 2\)"),
        ("number", "Tried: losses returned a float; a tensor fits"),
        ("flat", "a gradient of 0 at all outputs"),
        ("fails", "Tried: losses was tried on a few samples and failed: IndexError: on purpose"),
    ],
)
def test_a_task_is_tried_on_a_few_samples(wrong, message):
    outputs = torch.arange(8.0).reshape(4, 2) + 1
    targets = torch.zeros(4, 2)
    check_task(Tried(), outputs, targets)
    with pytest.raises(ConfigError, match=message):
        check_task(Tried(wrong=wrong), outputs, targets)


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (Classification(metrics=("accuracy", "top2", "f1", "auroc")), normal(4, 3), CLASSES),
        (NextToken(), normal(2, 3, 3), TOKENS),
        (Regression("huber"), normal(2, 2), NUMBERS),
        (MultiLabel(), normal(3, 2), YES_OR_NO),
        (MultiLabel(), normal(3, 1), YES_OR_NO[:, 0].float()),
    ],
)
def test_the_built_in_tasks_pass(task, outputs, targets):
    check_task(task, outputs, targets)
    with pytest.raises(DataError, match=f"{type(task).__name__} was asked for on data"):
        check_task(task, outputs[:, :, None], targets)


def test_a_task_without_divergences_cannot_be_distilled():
    with pytest.raises(ConfigError, match=r"Define Tried.divergences"):
        Tried().divergences(NUMBERS, NUMBERS, NUMBERS)


def test_lists_in_python_are_read_as_tuples():
    task = Classification(metrics=["loss", "accuracy"], class_weights=[1, 2])
    assert hash(task) == hash(Classification(metrics=("loss", "accuracy"), class_weights=(1, 2)))
    with pytest.raises(
        ConfigError, match=r"metrics = 'loss' was asked for; a list of names would work: \['loss'\]"
    ):
        Classification(metrics="loss")


def test_a_task_without_metrics_is_refused():
    class Without(Tried):
        def make_metrics(self):
            return ()

    with pytest.raises(ConfigError, match="Without has no metrics; it needs at least one"):
        Without()
