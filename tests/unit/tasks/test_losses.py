"""Losses of tasks: the numbers that training has, alone and under vmap and grad."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedquilt.errors import ConfigError
from fedquilt.tasks import Classification, MultiLabel, NextToken, Regression, Segmentation, Task
from fedquilt.tasks.classification import _constant

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def classes(*shape: int, count: int = 5) -> torch.Tensor:
    return torch.randint(count, shape, generator=GENERATOR)


TOKENS = classes(4, 6)
TOKENS[0, 3:] = -100
TOKENS[2, :5] = -100
MASKS = classes(4, 2, 3, count=4)
MASKS[1, 0] = -100
MASKS[3] = -100
SEGMENTED: dict[str, tuple[Task, torch.Tensor, torch.Tensor]] = {
    "segmentation": (Segmentation(), normal(4, 4, 2, 3), MASKS),
    "soft dice": (
        Segmentation(loss="dice", background=True, smooth=1.0),
        normal(4, 4, 2, 3),
        MASKS,
    ),
    "volumes": (Segmentation(ignore=0), normal(4, 3, 2, 3, 2), classes(4, 2, 3, 2, count=3)),
    "weighted masks": (
        Segmentation(loss="cross-entropy", class_weights=(1.0, 2.0, 0.5, 0.0), label_smoothing=0.1),
        normal(4, 4, 2, 3),
        MASKS,
    ),
}
EXAMPLES: dict[str, tuple[Task, torch.Tensor, torch.Tensor]] = {
    "classification": (Classification(), normal(4, 5), classes(4)),
    "smoothed": (Classification(label_smoothing=0.1), normal(4, 5), classes(4)),
    "weighted": (Classification(class_weights=(1.0, 2.0, 0.5, 0.0, 3.0)), normal(4, 5), classes(4)),
    "dense": (Classification(ignore=2), normal(4, 5, 3, 3), classes(4, 3, 3)),
    "tokens": (NextToken(), normal(4, 5, 6), TOKENS),
    "mse": (Regression(), normal(4, 3), normal(4, 3)),
    "mae": (Regression("mae"), normal(4, 3), normal(4, 3)),
    "huber": (Regression("huber", delta=0.3), normal(4, 3), normal(4, 3)),
    "one number": (Regression(), normal(4, 1), normal(4)),
    "labels": (MultiLabel(), normal(4, 3), classes(4, 3, count=2)),
    "real labels": (MultiLabel(), normal(4, 3), classes(4, 3, count=2).double()),
    **SEGMENTED,
}


def exactly(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# --- cross-entropy ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["classification", "tokens", "dense"])
def test_the_mean_cross_entropy_is_over_targets_that_count(name):
    task, outputs, targets = EXAMPLES[name]
    wanted = F.cross_entropy(outputs, targets, ignore_index=task.ignored)
    exactly(task.mean_loss(outputs, targets), wanted)
    exactly(task.losses(outputs, targets).sum() / (targets != task.ignored).sum(), wanted)
    assert int(task.total(targets)) == int((targets != task.ignored).sum())


@pytest.mark.parametrize("name", ["classification", "tokens", "dense"])
def test_sample_weights_multiply_losses_and_leave_the_count_alone(name):
    task, outputs, targets = EXAMPLES[name]
    losses = F.cross_entropy(outputs, targets, ignore_index=task.ignored, reduction="none")
    by_sample = WEIGHTS.reshape(-1, *[1] * (losses.dim() - 1))
    wanted = (losses * by_sample).sum() / (targets != task.ignored).sum()
    exactly(task.mean_loss(outputs, targets, WEIGHTS), wanted)


def test_cross_entropy_worked_out_by_hand():
    outputs = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([1, 0])
    entropies = [-math.log(3 / 4), -math.log(1 / 2)]
    assert Classification().losses(outputs, targets).tolist() == pytest.approx(entropies)
    assert float(Classification().mean_loss(outputs, targets)) == pytest.approx(sum(entropies) / 2)
    # With weights 1 and 3 the mean divides by 3 + 1.
    weighted = Classification(class_weights=(1.0, 3.0))
    assert float(weighted.mean_loss(outputs, targets)) == pytest.approx(
        (3 * entropies[0] + entropies[1]) / 4
    )
    assert float(weighted.total(targets)) == 4
    # Smoothing by a half gives each class a quarter more: targets of 3/4 and 1/4.
    smoothed = Classification(label_smoothing=0.5).losses(outputs, targets)
    assert float(smoothed[0]) == pytest.approx(-0.75 * math.log(3 / 4) - 0.25 * math.log(1 / 4))


def test_class_weights_and_smoothing_are_torchs():
    outputs, targets = normal(4, 5, 6), TOKENS
    weights = (1.0, 2.0, 0.5, 0.0, 3.0)
    task = Classification(label_smoothing=0.2, class_weights=weights)
    options = {"weight": torch.tensor(weights, dtype=torch.float64), "label_smoothing": 0.2}
    exactly(task.mean_loss(outputs, targets), F.cross_entropy(outputs, targets, **options))
    ones = torch.ones(4, dtype=torch.float64)
    exactly(task.mean_loss(outputs, targets, ones), F.cross_entropy(outputs, targets, **options))
    assert task.mean_loss(outputs.float(), targets, ones.float()).dtype == torch.float32


def test_class_weights_are_made_once():
    """A tensor made inside of grad or inference mode would be of no use outside of it."""
    _constant.cache_clear()
    task, outputs, targets = EXAMPLES["weighted"]
    with torch.inference_mode():
        task.mean_loss(outputs, targets)
    gradient = grad(task.mean_loss)(outputs, targets)
    own = outputs.clone().requires_grad_()
    task.mean_loss(own, targets).backward()
    exactly(gradient, own.grad)
    _constant.cache_clear()
    exactly(grad(task.mean_loss)(outputs, targets), gradient)
    exactly(grad(task.mean_loss)(outputs, targets), gradient)
    assert _constant.cache_info().misses == 1


# --- real numbers and labels --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "losses"),
    [
        (Regression(), [0.25, 4.0]),
        (Regression("mae"), [0.5, 2.0]),
        (Regression("huber"), [0.125, 1.5]),  # 0.5²/2, and 1 · (2 − 1/2)
        (Regression("huber", delta=4.0), [0.125, 2.0]),
    ],
)
def test_losses_of_real_numbers(task, losses):
    outputs = torch.tensor([[1.5], [1.0]])
    targets = torch.tensor([1.0, 3.0])
    assert task.losses(outputs, targets).tolist() == losses
    assert float(task.mean_loss(outputs, targets)) == sum(losses) / 2
    assert float(task.mean_loss(outputs, targets, torch.tensor([2.0, 0.0]))) == losses[0]
    assert torch.equal(
        task.losses(outputs, targets[:, None]), task.losses(outputs, targets)[:, None]
    )


def test_real_targets_stay_exact_beside_outputs_of_half_precision():
    losses = Regression().losses(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([1.001]))
    assert float(losses) == pytest.approx(1e-6, rel=1e-3)


def test_binary_cross_entropy_of_labels():
    outputs = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    for targets in (
        torch.tensor([[1, 0]]),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[True, False]]),
    ):
        losses = MultiLabel().losses(outputs, targets)
        assert losses.flatten().tolist() == pytest.approx([-math.log(3 / 4), -math.log(1 / 2)])
        assert float(MultiLabel().mean_loss(outputs, targets)) == pytest.approx(
            float(losses.mean())
        )


# --- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_losses_and_gradients_are_the_same_under_vmap(name, weights):
    task, outputs, targets = EXAMPLES[name]
    stacked = torch.stack([outputs, outputs.flip(0)]), torch.stack([targets, targets])

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return task.mean_loss(outputs, targets, weights)

    for function in (loss, grad(loss), task.losses):
        alone = torch.stack([function(*pair) for pair in zip(*stacked, strict=True)])
        exactly(vmap(function)(*stacked), alone)
    assert task.losses(outputs, targets).shape == task.counted(targets).shape
    own = outputs.clone().requires_grad_()
    loss(own, targets).backward()
    exactly(grad(loss)(outputs, targets), own.grad)


@pytest.mark.parametrize("name", EXAMPLES)
def test_divergences_are_least_where_outputs_agree_with_the_teacher(name):
    task, outputs, targets = EXAMPLES[name]
    same = task.divergences(outputs, outputs, targets)
    other = task.divergences(outputs.flip(0), outputs, targets)
    assert same.shape == task.counted(targets).shape
    exactly(same, torch.zeros_like(same))
    assert bool((other >= -1e-12).all())
    assert float(other.sum()) > 0
    assert not bool(other[~task.counted(targets)].any())
    stacked = [torch.stack([value, value]) for value in (outputs.flip(0), outputs, targets)]
    exactly(vmap(task.divergences)(*stacked)[1], other)


def test_divergences_by_hand():
    teacher = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    even = torch.zeros(1, 2, dtype=torch.float64)
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert float(Classification().divergences(even, teacher, torch.tensor([0]))) == pytest.approx(
        divergence
    )
    labels = MultiLabel().divergences(even, teacher, torch.tensor([[0, 0]]))
    assert labels.flatten().tolist() == pytest.approx([0.0, divergence])
    assert Regression().divergences(even, even + 2, torch.zeros(1, 2)).tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_masks_alone_change_with_crops_and_flips(name):
    task, _, targets = EXAMPLES[name]
    found = task.augment_targets(targets, lambda images, padding=0.0: images.flip(-1))
    if name in ("dense", *SEGMENTED):
        assert torch.equal(found, targets.flip(-1))
    else:
        assert found is targets


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Regression, {"loss": "hubber"}, r"Did you mean 'huber'\? Known: mse, mae, huber"),
        (Regression, {"delta": 0.0}, r"delta = 0.0 was asked for; it must lie in \(0, inf\)"),
        (
            Classification,
            {"label_smoothing": 1.0},
            r"label_smoothing = 1.0 was asked for; it must lie in \[0, 1\)",
        ),
        (Classification, {"class_weights": (1.0, -1.0)}, "class_weights = -1.0 was asked for"),
        (Classification, {"class_weights": (0.0, 0.0)}, "at least one must be above 0"),
        (Classification, {"max_samples": 0}, "max_samples = 0 was asked for"),
        (
            Classification,
            {"metrics": ("acuracy",)},
            "no metric named 'acuracy'. Did you mean 'accuracy'",
        ),
        (Classification, {"metrics": ("loss", "loss")}, "has the metric 'loss' more than once"),
        (
            Regression,
            {"metrics": ("accuracy",)},
            "it reads classes, and this task has numbers as targets.*rmse, mae, r2",
        ),
        (
            Segmentation,
            {"loss": "mse"},
            "loss = 'mse' was asked for; it may be 'cross-entropy', 'dice', 'both'",
        ),
        (Segmentation, {"smooth": 0.0}, r"smooth = 0.0 was asked for; it must lie in \(0, inf\)"),
        (Segmentation, {"metrics": ("dise",)}, "Did you mean 'dice'"),
        (
            Regression,
            {"metrics": ("dice_1",)},
            "it reads classes, and this task has numbers as targets",
        ),
        (
            MultiLabel,
            {"metrics": ("rmse",)},
            "Metrics for these: loss, f1, micro_f1, label_accuracy",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(**options)
