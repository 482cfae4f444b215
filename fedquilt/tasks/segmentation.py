"""Segmentation: one class for each pixel or voxel, with cross-entropy, soft Dice, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import one_of, within
from fedquilt.errors import DataError
from fedquilt.tasks.classification import Classification, divergence

LossName = Literal["cross-entropy", "dice", "both"]
UNLABELED = 255  # Value that 8-bit masks usually have at pixels that do not count.


@dataclass(frozen=True)
class Segmentation(Classification):
    """One class for each pixel or voxel of an image.

    Targets are masks (sample, *size), and outputs are (sample, class, *size). Class 0 is the
    background. The loss of a sample is the mean cross-entropy over its voxels that count, or its
    soft Dice loss, or the sum of both. The loss of a batch is the mean over its samples, so that
    small and large volumes have the same weight, and losses add over batches.

    Soft Dice (Milletari et al. 2016) of class c in one sample, over the voxels v that count:

        D_c = (2 Σ_v p_vc g_vc + smooth) / (Σ_v p_vc + Σ_v g_vc + smooth)

    p is the softmax of the outputs. g is 1 where the mask has class c, else 0. The loss is 1 minus
    the mean of D_c over the classes. As in nnU-Net (Isensee et al. 2021):

    - The denominator sums p and g. Milletari et al. sum their squares.
    - Dice is computed for each sample separately.
    - The background is left out.
    - The loss is added to cross-entropy with equal weight.

    Classes that a sample does not have stay in its mean. Their D_c is largest if they are not
    predicted. `label_smoothing` and `class_weights` change the cross-entropy alone.
    """

    loss: LossName = "both"  # Loss of a sample: cross-entropy, dice (soft Dice), or both (the sum).
    background: bool = False  # Count class 0 in the Dice loss and in the means of Dice and IoU.
    smooth: float = 1e-5  # Constant in numerator and denominator of soft Dice that prevents 0 / 0.

    usual_metrics: ClassVar[tuple[str, ...]] = ("dice", "iou", "pooled_dice", "pooled_iou", "loss")

    def __post_init__(self) -> None:
        one_of(self, loss=LossName)
        within(self, smooth="(0, inf)")
        super().__post_init__()

    # --- targets ---------------------------------------------------------------------------------

    @property
    @override
    def counts_background(self) -> bool:
        return self.background

    def settled(self, output_shape: Sequence[int]) -> Self:
        """Return the task with Dice of every foreground class among its usual metrics.

        Metrics that the user chose stay as they are.

        Args:
            output_shape: Shape of a model's output with its classes in dimension 1.
        """
        if self.metrics or len(output_shape) < 2:
            return self
        main, *other_metrics = self.usual_metrics
        by_class = [f"dice_{label}" for label in range(self._first, output_shape[1])]
        return replace(self, metrics=(main, *by_class, *other_metrics))

    @property
    def _first(self) -> int:
        """Return the first class of the Dice loss and of means: 0 with `background`, else 1."""
        return 0 if self.background else 1

    @override
    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        classes, size = output_shape[1], tuple(output_shape[2:])
        if not size:
            return (
                f"the output has shape {tuple(output_shape[1:])} a sample; (class, *size) is "
                "needed, with a class for each pixel or voxel, as U-Nets have it"
            )
        if classes < 2:
            has_foreground = bool(((targets > 0) & (targets != self.ignore)).any())
            found = "" if has_foreground else ", and the masks have no foreground"
            return (
                f"the output has {classes} class{found}; background and at least one more "
                "class are needed"
            )
        return super().unfit(targets, output_shape)

    def check_whole(self, targets: Tensor, name: str) -> None:
        """Refuse masks without foreground, and the value 255 if it is far above all classes.

        Without foreground nothing can be learnt or measured. The value 255 usually marks pixels
        that do not count, or is the white of black and white masks. As a class it would give the
        model 256 classes, most of which never occur.
        """
        counted = targets[targets != self.ignore]
        labeled = counted[counted != UNLABELED]
        if len(labeled) < len(counted) and (
            not len(labeled) or int(labeled.max()) < UNLABELED // 2
        ):
            largest = f" and no other above {int(labeled.max())}" if len(labeled) else " alone"
            raise DataError(
                f"Segmentation was asked for on {name}; its masks have the value "
                f"{UNLABELED}{largest}. If it marks voxels that do not count, task.ignore = "
                f"{UNLABELED} would fit. If it is a class, number classes from 0 on without gaps."
            )
        if bool((counted >= self._first).any()):
            return
        hint = ", or task.background = true if class 0 is no background"
        raise DataError(
            f"Segmentation was asked for on {name}; its {len(targets)} masks have no foreground: "
            f"all values are from {int(targets.min())} to {int(targets.max())}, and {self.ignore} "
            f"does not count. Masks with classes from {self._first} on would fit"
            f"{'' if self.background else hint}."
        )

    # --- loss ------------------------------------------------------------------------------------

    @property
    @override
    def is_plain_entropy(self) -> bool:
        return False

    def counted(self, targets: Tensor) -> Tensor:
        """Return True for samples with at least one voxel that counts: (sample,)."""
        return self._voxels(targets).flatten(1).any(1)

    @override
    def total(self, targets: Tensor) -> Tensor:
        return self.counted(targets).sum()

    def _voxels(self, targets: Tensor) -> Tensor:
        return targets != self.ignore

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every sample, 0 for those without a voxel that counts: (sample,).

        It is cross-entropy, soft Dice, or their sum, as `loss` says.

        Args:
            outputs: (sample, class, *size) Outputs of a net.
            targets: (sample, *size) Masks.
        """
        if self.loss == "cross-entropy":
            return self._entropies(outputs, targets)
        if self.loss == "dice":
            return self._dice_losses(outputs, targets)
        return self._entropies(outputs, targets) + self._dice_losses(outputs, targets)

    @override
    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.mean(self.losses(outputs, targets), targets, weights)

    def mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Divide the sum of the losses of a batch by the number of samples that count.

        Weights multiply losses and do not change the divisor. If no sample counts, it is 1.

        Args:
            losses: (sample,) Losses, 0 for samples that do not count.
            targets: (sample, *size) Masks, which determine the samples that count.
            weights: (sample,) Factor of each sample's loss. None: 1 for each.
        """
        if weights is not None:
            losses = losses * weights
        return losses.sum() / self.total(targets).clamp(min=1).to(losses.dtype)

    def _entropies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's mean cross-entropy over the voxels that count: (sample,).

        As in `torch.nn.CrossEntropyLoss`, the divisor is the sum of the class weights of these
        voxels. Without class weights it is the number of these voxels. A sample without such voxels
        has 0.
        """
        entropies = super().losses(outputs, targets).flatten(1).sum(1)
        counted = self._voxels(targets)
        weights = self._class_weights(entropies.dtype, targets.device)
        if weights is None:
            divisor = counted.flatten(1).sum(1).to(entropies.dtype)
        else:
            each = torch.where(counted, weights[targets.where(counted, 0)], 0.0)
            divisor = each.flatten(1).sum(1)
        return entropies / divisor.where(divisor > 0, 1.0)

    def _dice_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's soft Dice loss as the mean over classes, (sample,).

        Class 0 is left out unless `background` is set. The loss is 0 if no voxel counts.
        """
        # Half precision is too inexact for sums over many voxels.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        counted = self._voxels(targets).flatten(1).unsqueeze(1)
        probabilities = outputs.to(dtype).softmax(1).flatten(2) * counted  # (sample, class, voxel)
        classes = torch.arange(outputs.shape[1], device=targets.device).unsqueeze(1)
        true = (targets.flatten(1).unsqueeze(1) == classes) & counted

        overlap = (probabilities * true).sum(2)
        sizes = probabilities.sum(2) + true.sum(2).to(dtype)
        dice = (2 * overlap + self.smooth) / (sizes + self.smooth)
        return 1 - dice[:, self._first :].mean(1)

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's mean of KL(teacher ‖ outputs) over the voxels that count.

        Args:
            outputs: (sample, class, *size) Logits of the net that learns.
            teacher: (sample, class, *size) Logits of the net that it learns from.
            targets: (sample, *size) Masks, which determine the voxels that count.

        Returns:
            (sample,) Divergences.
        """
        counted = self._voxels(targets)
        by_voxel = divergence(outputs, teacher) * counted
        divisor = counted.flatten(1).sum(1).clamp(min=1)
        return by_voxel.flatten(1).sum(1) / divisor.to(by_voxel.dtype)
