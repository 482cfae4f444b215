"""Segmentation: soft Dice and its gradient, Dice and IoU, absent classes and empty masks."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor
from torch.func import grad

from fedquilt.errors import ConfigError, DataError
from fedquilt.tasks import Classification, Segmentation, check_task

# One image of two pixels and two classes. Class 1 has the probabilities 3/4 and 1/2.
OUTPUTS = torch.tensor([[[[0.0, 0.0]], [[math.log(3.0), 0.0]]]], dtype=torch.float64)
MASK = torch.tensor([[[1, 0]]])
ENTROPY = -(math.log(3 / 4) + math.log(1 / 2)) / 2


def logits(predicted: Tensor, classes: int = 3) -> Tensor:
    """Return outputs whose largest class is the predicted one: (sample, class, …)."""
    return torch.nn.functional.one_hot(predicted, classes).movedim(-1, 1).double()


def loss(task: Segmentation, outputs: Tensor = OUTPUTS, mask: Tensor = MASK) -> float:
    return float(task.mean_loss(outputs, mask))


# --- loss ---------------------------------------------------------------------------------------


def test_soft_dice_worked_out_by_hand():
    # Class 1: overlap 3/4, probabilities 5/4 in all, one true pixel: (2 · 3/4 + 1) / (5/4 + 1 + 1)
    # = 10/13.
    assert loss(Segmentation(loss="dice", smooth=1.0)) == pytest.approx(3 / 13, abs=1e-15)
    # Class 0: overlap 1/2, probabilities 3/4 in all, one true pixel: (2 · 1/2 + 1) / (3/4 + 1 + 1)
    # = 8/11.
    both_classes = Segmentation(loss="dice", smooth=1.0, background=True)
    assert loss(both_classes) == pytest.approx(1 - (10 / 13 + 8 / 11) / 2, abs=1e-15)
    assert loss(Segmentation(loss="dice", smooth=1e-12)) == pytest.approx(1 - 1.5 / 2.25, abs=1e-11)


def test_the_usual_loss_is_cross_entropy_plus_soft_dice():
    assert loss(Segmentation(loss="cross-entropy")) == pytest.approx(ENTROPY, abs=1e-15)
    dice = loss(Segmentation(loss="dice"))
    assert dice == pytest.approx(1 - (1.5 + 1e-5) / (2.25 + 1e-5), abs=1e-15)
    assert loss(Segmentation()) == pytest.approx(ENTROPY + dice, abs=1e-15)


def test_the_gradient_of_soft_dice_worked_out_by_hand():
    """∂D/∂p_v = (2 g_v (S + s) − (2 O + s)) / (S + s)² with S + s = 13/4 and 2 O + s = 5/2; ∂p/∂z =
    p (1 − p).
    """
    task = Segmentation(loss="dice", smooth=1.0)
    found = grad(task.mean_loss)(OUTPUTS, MASK)
    first = -(2 * 13 / 4 - 5 / 2) / (13 / 4) ** 2 * 3 / 16
    second = (5 / 2) / (13 / 4) ** 2 * 1 / 4
    wanted = torch.tensor([[[[-first, -second]], [[first, second]]]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["cross-entropy", "dice", "both"])
def test_gradients_are_those_of_finite_differences(kind, background):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(
        2, 3, 2, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True
    )
    masks = torch.randint(3, (2, 2, 2, 2), generator=generator)
    masks[0, 0] = -100
    task = Segmentation(loss=kind, background=background)
    assert torch.autograd.gradcheck(lambda values: task.losses(values, masks), outputs)
    assert torch.autograd.gradcheck(lambda values: task.mean_loss(values, masks), outputs)


def test_ignored_voxels_do_not_change_the_loss():
    padded = torch.cat([OUTPUTS, torch.full((1, 2, 1, 1), 7.0, dtype=torch.float64)], 3)
    mask = torch.tensor([[[1, 0, -100]]])
    for kind in ("cross-entropy", "dice", "both"):
        assert loss(Segmentation(loss=kind), padded, mask) == pytest.approx(
            loss(Segmentation(loss=kind)), abs=1e-15
        )
        other = mask.where(mask >= 0, 9)
        found = loss(Segmentation(loss=kind, ignore=9), padded, other)
        assert found == pytest.approx(loss(Segmentation(loss=kind)), abs=1e-15)
    assert not bool(grad(Segmentation().mean_loss)(padded, mask)[..., 2].any())


def test_a_class_that_a_sample_lacks_is_pushed_down():
    """Without class 1 in the mask its soft Dice is s / (Σ p + s), here 1 / (5/4 + 1)."""
    task = Segmentation(loss="dice", smooth=1.0)
    empty = torch.zeros_like(MASK)
    assert loss(task, mask=empty) == pytest.approx(1 - 4 / 9, abs=1e-15)
    assert bool((grad(task.mean_loss)(OUTPUTS, empty)[:, 1] > 0).all())


@pytest.mark.parametrize("kind", ["cross-entropy", "dice", "both"])
def test_a_mask_in_which_nothing_counts_has_no_loss(kind):
    task = Segmentation(loss=kind)
    nothing = torch.full_like(MASK, -100)
    assert task.losses(OUTPUTS, nothing).tolist() == [0.0]
    assert loss(task, mask=nothing) == 0
    assert not bool(grad(task.mean_loss)(OUTPUTS, nothing).any())
    # Beside another sample it is not part of the mean.
    together = task.mean_loss(OUTPUTS.repeat(2, 1, 1, 1), torch.cat([MASK, nothing]))
    assert float(together) == pytest.approx(loss(task), abs=1e-15)


def test_every_sample_has_the_same_weight_for_any_size():
    """With a pixel ignored the first image has one that counts, and weighs as much as the second
    with two.
    """
    masks = torch.cat([torch.tensor([[[1, -100]]]), MASK])
    found = Segmentation(loss="cross-entropy").mean_loss(OUTPUTS.repeat(2, 1, 1, 1), masks)
    assert float(found) == pytest.approx((-math.log(3 / 4) + ENTROPY) / 2, abs=1e-15)
    pooled = Classification().mean_loss(OUTPUTS.repeat(2, 1, 1, 1), masks)
    assert float(pooled) == pytest.approx((-2 * math.log(3 / 4) - math.log(1 / 2)) / 3, abs=1e-15)


@pytest.mark.parametrize("options", [{}, {"class_weights": (1.0, 3.0)}, {"label_smoothing": 0.2}])
def test_cross_entropy_of_one_image_is_that_of_classification(options):
    mask = torch.tensor([[[1, 0]]])
    found = Segmentation(loss="cross-entropy", **options).mean_loss(OUTPUTS, mask)
    torch.testing.assert_close(
        found, Classification(**options).mean_loss(OUTPUTS, mask), rtol=0, atol=1e-15
    )


def test_divergences_are_means_over_the_voxels_of_a_sample():
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of (1/4, 3/4) from (1/2, 1/2)
    even = torch.zeros_like(OUTPUTS)
    assert Segmentation().divergences(even, OUTPUTS, MASK).tolist() == pytest.approx(
        [divergence / 2]
    )
    one = torch.tensor([[[1, -100]]])
    assert Segmentation().divergences(even, OUTPUTS, one).tolist() == pytest.approx([divergence])
    nothing = torch.full_like(MASK, -100)
    assert Segmentation().divergences(even, OUTPUTS, nothing).tolist() == [0.0]


def test_half_precision_outputs_have_a_loss_in_single_precision():
    """In bfloat16 the sum of 4,000 probabilities of 1/2 would end at 256."""
    outputs = torch.zeros(1, 2, 4000, dtype=torch.bfloat16)
    masks = torch.ones(1, 4000, dtype=torch.int64)
    found = Segmentation(loss="dice").losses(outputs, masks)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(1 - 2 * 2000 / 6000, rel=1e-5)


# --- metrics ------------------------------------------------------------------------------------

TRUE = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).reshape(4, 2, 2)
PREDICTED = torch.tensor([[0, 1, 2, 2], [1, 1, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]]).reshape(4, 2, 2)
NAMES = tuple(
    f"{stem}{end}"
    for stem in ("dice", "iou", "pooled_dice", "pooled_iou")
    for end in ("", "_1", "_2")
)
# Volume 1 has 2/3 in both classes. Volume 2 has 1 in class 1 and no class 2. Volume 3 has a
# predicted class 2 that is not there, which scores 0. Volume 4 has no foreground at all and is left
# out.
BY_HAND = {
    "dice": (2 / 3 + 1 + 0) / 3,
    "dice_1": (2 / 3 + 1) / 2,
    "dice_2": (2 / 3 + 0) / 2,
    "iou": (1 / 2 + 1 + 0) / 3,
    "iou_1": (1 / 2 + 1) / 2,
    "iou_2": (1 / 2 + 0) / 2,
    # Pooled, class 1 has 4 voxels in common among 4 + 5, and class 2 has 1 among 3 + 1.
    "pooled_dice": (8 / 9 + 2 / 4) / 2,
    "pooled_dice_1": 8 / 9,
    "pooled_dice_2": 2 / 4,
    "pooled_iou": (4 / 5 + 1 / 3) / 2,
    "pooled_iou_1": 4 / 5,
    "pooled_iou_2": 1 / 3,
}


def figures(
    task: Segmentation, predicted: Tensor, true: Tensor, classes: int = 3
) -> dict[str, float]:
    return task.values(task.sums(logits(predicted, classes), true))


def test_dice_and_iou_worked_out_by_hand():
    assert figures(Segmentation(metrics=NAMES), PREDICTED, TRUE) == pytest.approx(
        BY_HAND, abs=1e-15
    )


def test_metrics_do_not_depend_on_their_order_or_on_each_other():
    for names in (NAMES[::-1], ("iou_2", "dice_1"), ("pooled_iou_1",), ("iou",)):
        found = figures(Segmentation(metrics=names), PREDICTED, TRUE)
        assert found == pytest.approx({name: BY_HAND[name] for name in names}, abs=1e-15)


def test_the_background_counts_if_asked_for():
    task = Segmentation(metrics=("dice", "dice_0", "pooled_dice"), background=True)
    found = figures(task, PREDICTED, TRUE)
    # Class 0 has 1, 1, 6/7 and 1 in the four volumes, and 9 voxels in common among 9 + 10.
    assert found["dice_0"] == pytest.approx((1 + 1 + 6 / 7 + 1) / 4, abs=1e-15)
    assert found["dice"] == pytest.approx((7 / 9 + 1 + 3 / 7 + 1) / 4, abs=1e-15)
    assert found["pooled_dice"] == pytest.approx((18 / 19 + 8 / 9 + 1 / 2) / 3, abs=1e-15)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dice_of_volumes_does_not_depend_on_batches(size):
    task = Segmentation(metrics=NAMES)
    totals: dict[str, Tensor] = {}
    for rows in torch.arange(4).flip(0).split(size):
        for name, sums in task.sums(logits(PREDICTED[rows]), TRUE[rows]).items():
            totals[name] = totals[name] + sums if name in totals else sums
    assert task.values(totals) == pytest.approx(BY_HAND, abs=1e-15)
    assert totals["pooled_dice"].dtype == torch.int64


def test_ignored_voxels_are_neither_predicted_nor_true():
    true = torch.cat([TRUE, torch.full((4, 2, 1), -100)], 2)
    predicted = torch.cat([PREDICTED, torch.full((4, 2, 1), 2)], 2)
    assert figures(Segmentation(metrics=NAMES), predicted, true) == pytest.approx(
        BY_HAND, abs=1e-15
    )


def test_without_foreground_there_is_no_figure():
    nothing = torch.zeros(2, 2, 2, dtype=torch.int64)
    assert all(
        math.isnan(value)
        for value in figures(Segmentation(metrics=NAMES), nothing, nothing).values()
    )


def test_pooled_figures_are_those_of_scikit_learn():
    generator = torch.Generator().manual_seed(3)
    true, predicted = torch.randint(4, (2, 6, 3, 3, 3), generator=generator)
    found = figures(Segmentation(metrics=("pooled_dice", "pooled_iou")), predicted, true, classes=4)
    flat = true.flatten().numpy(), predicted.flatten().numpy()
    options = {"labels": [1, 2, 3], "average": "macro"}
    assert found["pooled_dice"] == pytest.approx(reference.f1_score(*flat, **options), abs=1e-12)
    assert found["pooled_iou"] == pytest.approx(
        reference.jaccard_score(*flat, **options), abs=1e-12
    )


def test_dice_of_every_foreground_class_is_reported_unless_others_are_asked_for():
    settled = Segmentation().settled((2, 3, 8, 8))
    assert settled.metrics == (
        "dice",
        "dice_1",
        "dice_2",
        "iou",
        "pooled_dice",
        "pooled_iou",
        "loss",
    )
    assert settled.settled((2, 3, 8, 8)) == settled
    assert Segmentation(background=True).settled((2, 2, 8)).metrics[:3] == (
        "dice",
        "dice_0",
        "dice_1",
    )
    chosen = Segmentation(metrics=("pooled_dice",))
    assert chosen.settled((2, 3, 8, 8)) is chosen
    assert (settled.main.name, settled.main.higher_is_better, settled.main.is_rate) == (
        "dice",
        True,
        True,
    )
    assert settled.metric_of("local_dice").name == "dice"


# --- what fits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masks", "shape", "message"),
    [
        (TRUE.float(), (2, 3, 2, 2), "targets are torch.float32; classes are whole numbers"),
        (
            TRUE,
            (2, 3, 4, 4),
            r"targets have shape \(2, 2\) a sample; .* targets of shape \(4, 4\) would fit",
        ),
        (TRUE, (2, 2, 2, 2), "a target is 2; the output has 2 classes, so that 0 to 1 fit"),
        (TRUE - 1, (2, 3, 2, 2), "a target is -1; .* -100 for targets that do not count"),
        (TRUE, (2, 3), r"the output has shape \(3,\) a sample; \(class, \*size\) is needed"),
        (
            TRUE,
            (2, 1, 2, 2),
            "the output has 1 class; background and at least one more class are needed",
        ),
        (
            0 * TRUE,
            (2, 1, 2, 2),
            "the output has 1 class, and the masks have no foreground; background and",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, shape, message):
    with pytest.raises(DataError, match=f"Segmentation was asked for on mine; {message}"):
        Segmentation().check(masks, shape, "mine")


def test_masks_without_foreground_are_refused():
    Segmentation().check_whole(TRUE, "mine")
    empty = torch.tensor([[[0, -100]], [[0, 0]]])
    message = (
        "on mine; its 2 masks have no foreground: all values are from -100 to "
        "0.*task.background = true"
    )
    with pytest.raises(DataError, match=message):
        Segmentation().check_whole(empty, "mine")
    Segmentation(background=True).check_whole(empty, "mine")
    with pytest.raises(DataError, match="no foreground"):
        Segmentation(ignore=255).check_whole(torch.tensor([[[0, 255]]]), "mine")


def test_255_far_above_all_classes_is_refused():
    masks = torch.tensor([[[0, 1, 255]], [[2, 0, 255]]])
    with pytest.raises(
        DataError,
        match=r"on mine; its masks have the value 255 and no other above 2.* task.ignore = 255",
    ):
        Segmentation().check_whole(masks, "mine")
    with pytest.raises(DataError, match="its masks have the value 255 alone"):
        Segmentation().check_whole(torch.full((2, 1, 1), 255), "mine")
    Segmentation(ignore=255).check_whole(masks, "mine")
    Segmentation().check_whole(torch.arange(256).reshape(1, 16, 16), "mine")


def test_metrics_of_masks_need_positions_and_classes():
    with pytest.raises(
        ConfigError, match=r"dice was asked for; the output has shape \(3,\) a sample"
    ):
        Classification(metrics=("dice",)).check(torch.tensor([0, 1]), (2, 3))
    with pytest.raises(
        ConfigError,
        match="dice_3 was asked for; the output has 3 classes, so that dice_0 to dice_2",
    ):
        Segmentation(metrics=("dice_3",)).check(TRUE, (2, 3, 2, 2))


def test_an_ignored_label_above_all_classes_is_no_class():
    masks = torch.tensor([[[0, 1, 255]], [[2, 0, 255]]])
    assert Segmentation(ignore=255).num_outputs(masks, 256) == 3
    assert Segmentation().num_outputs(masks, 256) == 256
    Segmentation(ignore=255).check(masks, (2, 3, 1, 3))


def test_a_derived_task_is_tested_on_samples_without_foreground():
    check_task(Segmentation(metrics=("dice", "iou", "loss")), logits(PREDICTED[2:]), TRUE[2:])
