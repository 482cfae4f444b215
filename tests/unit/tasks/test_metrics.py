"""Metrics: numbers by hand or by scikit-learn, sums that add up, and equal sums under vmap."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics as reference
from torch.func import vmap

from fedquilt.errors import ConfigError
from fedquilt.tasks import (
    METRICS,
    Classification,
    MultiLabel,
    NextToken,
    Regression,
    Segmentation,
    SumMetric,
    hide_absent,
)
from fedquilt.tasks.metrics.classes import Accuracy, Perplexity, TopK
from fedquilt.tasks.metrics.labels import F1, MicroF1
from fedquilt.tasks.metrics.numbers import R2
from fedquilt.tasks.metrics.ranking import AUROC, AveragePrecision

GENERATOR = torch.Generator().manual_seed(1)
LOGITS = torch.randn(40, 4, generator=GENERATOR)
CLASSES = torch.randint(3, (40,), generator=GENERATOR)  # class 3 is only predicted
TEXT = torch.randn(6, 4, 5, generator=GENERATOR)
TOKENS = torch.randint(4, (6, 5), generator=GENERATOR)
TOKENS[1:3, 2:] = -100
LABELS = torch.randint(2, (40, 4), generator=GENERATOR)
NUMBERS = torch.randn(40, 4, generator=GENERATOR) + 3
IMAGES = torch.randn(20, 4, 2, 3, generator=GENERATOR)
MASKS = torch.randint(3, (20, 2, 3), generator=GENERATOR)
MASKS[1:3, 1] = -100
MASKS[4] = -100

SUM_NAMES = [name for name, kind in METRICS.items() if issubclass(kind, SumMetric)]
EXAMPLES = [
    (
        Classification(metrics=("accuracy", "top3", "loss", "perplexity", "f1", "micro_f1")),
        LOGITS,
        CLASSES,
    ),
    (Classification(label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0, 4.0)), LOGITS, CLASSES),
    (NextToken(metrics=("accuracy", "top2", "loss", "perplexity", "f1")), TEXT, TOKENS),
    (MultiLabel(metrics=("label_accuracy", "f1", "micro_f1", "loss")), LOGITS, LABELS),
    (MultiLabel(metrics=("label_accuracy", "f1")), LOGITS[:, :1], LABELS[:, 0]),
    (Regression(), LOGITS, NUMBERS),
    (Regression("huber"), LOGITS[:, :1], NUMBERS[:, 0]),
    (Segmentation().settled(IMAGES.shape), IMAGES, MASKS),
    (
        Segmentation(background=True, metrics=("iou_2", "pooled_iou", "pooled_dice_0", "dice")),
        IMAGES,
        MASKS,
    ),
    (Classification(metrics=("dice", "pooled_iou", "accuracy")), IMAGES, MASKS),
]


def values(task, outputs, targets):
    return task.values(task.sums(outputs, targets))


@pytest.mark.parametrize(("task", "outputs", "targets"), EXAMPLES)
def test_sums_of_batches_add_up(task, outputs, targets):
    whole = task.sums(outputs, targets)
    totals = {name: torch.zeros_like(sums) for name, sums in whole.items()}
    for rows in torch.arange(len(targets)).split(7):
        for name, sums in task.sums(outputs[rows], targets[rows]).items():
            totals[name] = totals[name] + sums
    assert list(totals) == [metric.name for metric in task.measured]
    for name, sums in whole.items():
        if sums.dtype == torch.int64:
            assert torch.equal(totals[name], sums)
        torch.testing.assert_close(totals[name], sums, rtol=1e-6, atol=0)
    assert task.values(totals) == pytest.approx(task.values(whole), rel=1e-6)


@pytest.mark.parametrize(("task", "outputs", "targets"), EXAMPLES)
def test_sums_are_the_same_under_vmap(task, outputs, targets):
    outputs = outputs.double()
    stacked = torch.stack([outputs, outputs.flip(0)]), torch.stack([targets, targets])
    mapped = vmap(task.sums)(*stacked)
    for place in range(2):
        alone = task.sums(stacked[0][place], targets)
        for name, sums in alone.items():
            torch.testing.assert_close(mapped[name][place], sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("task", "outputs", "targets"), EXAMPLES)
def test_without_samples_a_metric_is_not_a_number(task, outputs, targets):
    found = values(task, outputs[:0], targets[:0])
    assert all(math.isnan(value) for value in found.values())


# --- classes ------------------------------------------------------------------------------------


def test_accuracy_counts_in_whole_numbers():
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    sums = Accuracy().sums(outputs, torch.tensor([0, 0, -100]))
    assert (sums.dtype, sums.tolist()) == (torch.int64, [1, 2])
    assert Accuracy().value(sums) == 0.5
    assert Accuracy(ignore=0).sums(outputs, torch.tensor([0, 0, 1])).tolist() == [1, 1]


def test_absent_classes_are_hidden_from_predictions_and_not_from_the_loss():
    outputs, targets = torch.tensor([[3.0, -1.0, -2.0]]), torch.tensor([1])
    present = torch.tensor([False, True, True])
    task = Classification()
    assert task.sums(outputs, targets)["accuracy"].tolist() == [0, 1]
    hidden = task.sums(outputs, targets, present)
    assert hidden["accuracy"].tolist() == [1, 1]
    assert torch.equal(hidden["loss"], task.sums(outputs, targets)["loss"])
    # A logit of 0 is larger than all that are negative.
    assert task.sums(outputs, targets, present, absent=0.0)["accuracy"].tolist() == [0, 1]
    dense = hide_absent(outputs[:, :, None], present)
    assert dense.flatten().tolist() == [-math.inf, -1.0, -2.0]


def test_the_target_may_be_among_the_largest_outputs():
    outputs = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    targets = torch.tensor([1, 2, -100])
    assert TopK(k=2).sums(outputs, targets).tolist() == [1, 2]
    assert torch.equal(TopK(k=1).sums(LOGITS, CLASSES), Accuracy().sums(LOGITS, CLASSES))
    assert TopK(k=3).name == "top3"
    found = values(Classification(metrics=("top2",)), LOGITS, CLASSES)["top2"]
    assert found == pytest.approx(
        reference.top_k_accuracy_score(CLASSES, LOGITS, k=2, labels=range(4))
    )


def test_perplexity_of_a_net_that_knows_nothing_is_the_number_of_classes():
    sums = Perplexity().sums(torch.zeros(3, 7), torch.tensor([0, 5, -100]))
    assert Perplexity().value(sums) == pytest.approx(7)
    assert Perplexity().value(torch.tensor([1e6, 1.0])) == math.inf
    smoothed = NextToken(label_smoothing=0.3)
    assert (
        values(smoothed, TEXT, TOKENS)["perplexity"]
        == values(NextToken(), TEXT, TOKENS)["perplexity"]
    )
    assert values(NextToken(), TEXT, TOKENS)["perplexity"] == pytest.approx(
        math.exp(values(NextToken(), TEXT, TOKENS)["loss"])
    )


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_f1_is_scikit_learns(average):
    metric = F1(average)
    predicted = LOGITS.argmax(1)
    of_classes = metric.value(metric.sums(LOGITS, CLASSES))
    assert of_classes == pytest.approx(reference.f1_score(CLASSES, predicted, average=average))
    of_labels = metric.value(metric.sums(LOGITS, LABELS))
    assert of_labels == pytest.approx(reference.f1_score(LABELS, LOGITS > 0, average=average))
    counted = TOKENS != -100
    of_tokens = metric.value(metric.sums(TEXT, TOKENS))
    assert of_tokens == pytest.approx(
        reference.f1_score(TOKENS[counted], TEXT.argmax(1)[counted], average=average)
    )
    assert MicroF1().name == F1("micro").name == "micro_f1"


def test_f1_by_hand():
    outputs, targets = (
        torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, -1.0]]),
        torch.tensor([[1, 0], [0, 0], [1, 1]]),
    )
    sums = F1().sums(outputs, targets)
    assert sums.tolist() == [[1, 0], [1, 0], [1, 1]]
    assert F1().value(sums) == pytest.approx((2 / 4 + 0) / 2)
    assert F1("micro").value(sums) == pytest.approx(2 / 5)


# --- labels and real numbers --------------------------------------------------------------------


def test_label_accuracy_is_over_samples_and_labels():
    found = values(MultiLabel(metrics=("label_accuracy",)), LOGITS, LABELS)["label_accuracy"]
    assert found == float(((LOGITS > 0) == LABELS.bool()).double().mean())


def test_metrics_of_real_numbers():
    outputs, targets = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([1.0, 2.0, 6.0])
    found = values(Regression(), outputs, targets)
    assert found["rmse"] == pytest.approx(math.sqrt(2 / 3))
    assert found["mae"] == pytest.approx(2 / 3)
    assert found["r2"] == pytest.approx(1 - 2 / 14)  # around the mean of 3: 4 + 1 + 9
    assert found["loss"] == pytest.approx(2 / 3)
    columns = values(Regression(), LOGITS, NUMBERS)
    assert columns["r2"] == pytest.approx(reference.r2_score(NUMBERS.double(), LOGITS.double()))
    assert columns["rmse"] == pytest.approx(
        math.sqrt(reference.mean_squared_error(NUMBERS, LOGITS))
    )


def test_r2_of_targets_that_are_all_equal_is_not_a_number():
    assert math.isnan(R2().value(R2().sums(torch.zeros(3, 1), torch.full((3,), 0.1))))


# --- collected ----------------------------------------------------------------------------------


def test_ranked_scores_by_hand():
    scores = torch.tensor([[0.9], [0.8], [0.7], [0.6]])
    true = torch.tensor([[1], [0], [1], [0]])
    assert AveragePrecision().value(scores, true) == pytest.approx((1 + 2 / 3) / 2)
    assert AUROC().value(scores, true) == 0.75
    # All scores equal: precision is the share of positives, and every pair is a tie.
    assert AveragePrecision().value(torch.zeros(4, 1), true) == 0.5
    assert AUROC().value(torch.zeros(4, 1), true) == 0.5
    assert AUROC().value(scores, true[:, 0]) == 0.75


@pytest.mark.parametrize("digits", [0, 1, 7])
def test_ranked_scores_are_scikit_learns_ties_included(digits):
    scores = LOGITS.double().round(decimals=digits)
    assert AUROC().value(scores, LABELS) == pytest.approx(reference.roc_auc_score(LABELS, scores))
    precision = reference.average_precision_score(LABELS, scores)
    assert AveragePrecision().value(scores, LABELS) == pytest.approx(precision)


def test_ranked_scores_of_classes_are_each_class_against_all_others():
    logits = LOGITS[:, :3].double()
    padded = torch.cat([CLASSES, torch.tensor([-100])])
    wanted = reference.roc_auc_score(CLASSES, logits.softmax(1), multi_class="ovr")
    assert AUROC().value(torch.cat([logits, torch.zeros(1, 3)]), padded) == pytest.approx(wanted)
    # Nobody is of class 3: its figure is not defined and left out.
    known = LOGITS.double().softmax(1)
    single = [
        reference.average_precision_score(label == CLASSES, known[:, label]) for label in range(3)
    ]
    assert AveragePrecision().value(LOGITS.double(), CLASSES) == pytest.approx(sum(single) / 3)
    assert math.isnan(AUROC().value(LOGITS[:3], torch.zeros(3, dtype=torch.int64)))


def test_outputs_are_kept_for_a_stated_number_of_samples():
    task = MultiLabel(max_samples=4)
    assert task.kept_positions(3).tolist() == [0, 1, 2]
    assert task.kept_positions(10).tolist() == [0, 2, 5, 7]
    assert task.kept_positions(0).tolist() == []
    assert list(task.collected_values(LOGITS, LABELS)) == ["average_precision"]


def test_metrics_that_need_outputs_are_refused_where_these_stay_on_devices():
    with pytest.raises(
        ConfigError, match=r"average_precision, which needs.*the engine 'remote'.*'f1', 'label_acc"
    ):
        MultiLabel().refuse_collected("the engine 'remote'")
    Classification().refuse_collected("the engine 'remote'")


def test_the_main_figure_is_the_first_and_has_a_direction():
    found = {
        task.main.name: task.main.higher_is_better
        for task in (Classification(), NextToken(), MultiLabel())
    }
    assert found == {"accuracy": True, "f1": True}
    assert (Regression().main.name, Regression().main.higher_is_better) == ("rmse", False)
    assert Regression(metrics=("r2", "rmse")).main.higher_is_better
    lower = {name for name, kind in METRICS.items() if not kind.higher_is_better}
    assert lower == {"loss", "perplexity", "rmse", "mae"}


def test_names_in_the_registry_are_those_in_records():
    tasks = {"classes": Classification, "labels": MultiLabel, "numbers": Regression}
    for name, kind in METRICS.items():
        (metric,) = tasks[kind.kinds[0]](metrics=(name,)).measured
        assert metric.name == name
    assert set(SUM_NAMES) == set(METRICS) - {"average_precision", "auroc"}


def test_perplexity_and_loss_of_plain_cross_entropy_are_summed_once():
    outputs, targets = (
        torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)),
        torch.arange(15).view(3, 5) % 4,
    )
    plain = NextToken().sums(outputs, targets)
    assert plain["perplexity"] is plain["loss"]
    smooth = NextToken(label_smoothing=0.2).sums(outputs, targets)
    assert smooth["perplexity"] is not smooth["loss"]
    torch.testing.assert_close(smooth["perplexity"], plain["loss"])
    assert (
        NextToken(metrics=("perplexity",)).sums(outputs, targets)["perplexity"].tolist()
        == plain["loss"].tolist()
    )


@pytest.mark.parametrize(
    "task", [NextToken(), NextToken(label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0, 0.5))]
)
def test_losses_do_not_depend_on_where_classes_are_in_memory(task):
    """Tokens have their classes last, and a convolution has them first."""
    first = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = first.movedim(1, -1).contiguous().movedim(-1, 1)
    targets = torch.arange(15).view(3, 5) % 4
    targets[0, 0] = -100
    assert (first.stride(1), last.stride(1)) == (5, 1)
    torch.testing.assert_close(
        task.losses(first, targets), task.losses(last, targets), rtol=0, atol=1e-12
    )
    mapped = vmap(task.losses)(last[None], targets[None])[0]
    torch.testing.assert_close(mapped, task.losses(last, targets), rtol=0, atol=1e-12)
