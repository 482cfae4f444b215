"""Overlap of predicted and true masks: Dice and intersection over union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.tasks.metrics.base import (
    ratio,
)
from fedquilt.tasks.metrics.classes import ClassMetric

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


@dataclass(frozen=True)
class MaskMetric(ClassMetric):
    """Overlap of predicted and true masks, of one class or as the mean over foreground classes.

    Voxels whose target is ignored count neither as predicted nor as true.
    """

    label: int | None = None  # Class that is measured. None: the mean over foreground classes.
    background: bool = False  # True if the mean includes class 0.
    same_sums_as: str = ""  # Metric with equal sums, so that they are computed once. Empty: none.

    stem: ClassVar[str]  # Name of the mean. The metric of class 1 is called STEM_1.
    sums_of: ClassVar[str]  # Name of the metric with the same sums.

    @property
    @override
    def name(self) -> str:
        return self.stem if self.label is None else f"{self.stem}_{self.label}"

    @classmethod
    @override
    def for_task(cls, task: Task, label: int | None = None) -> Self:
        shared = "" if label is None and cls.stem == cls.sums_of else cls.sums_of
        return cls(task.ignored, label, task.counts_background, shared)

    @override
    def unfit(self, output_shape: tuple[int, ...]) -> str:
        classes = output_shape[1]
        if len(output_shape) < 3:
            shape = tuple(output_shape[1:])
            return (
                f"{self.name} was asked for; the output has shape {shape} a sample. It measures "
                "masks, so that outputs (class, *size) would fit."
            )
        if self.label is not None and self.label >= classes:
            return (
                f"{self.name} was asked for; the output has {classes} classes, so that "
                f"{self.stem}_0 to {self.stem}_{classes - 1} would fit."
            )
        return ""

    @property
    def _first(self) -> int:
        """Return the first class of the mean: 0 if the background counts, else 1."""
        return 0 if self.background else 1

    def _sizes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Count voxels of each sample and class. Voxels with the ignored target are left out.

        Args:
            outputs: (sample, class, *size) Outputs, of which the largest is the prediction.
            targets: (sample, *size) Masks.

        Returns:
            (sample, class) Number of voxels that are predicted and true, and the number of
            predicted ones plus the number of true ones. Both are int64.
        """
        classes = torch.arange(outputs.shape[1], device=outputs.device).unsqueeze(1)
        flat = targets.flatten(1).unsqueeze(1)  # (sample, 1, voxel)
        counted = flat != self.ignore
        predicted = (outputs.argmax(1).flatten(1).unsqueeze(1) == classes) & counted
        true = (flat == classes) & counted
        return (predicted & true).sum(2), predicted.sum(2) + true.sum(2)


@dataclass(frozen=True)
class Dice(MaskMetric):
    """Dice of the foreground, 2 |P ∩ G| / (|P| + |G|), as the mean over volumes.

    `dice_1` is the Dice of class 1, over the volumes in which class 1 is true or predicted.

    A class that is neither in a volume's mask nor predicted there is left out of the volume's mean
    over foreground classes. A class that is predicted but not in the mask scores 0. A volume
    without any foreground in mask and prediction is left out.

    Sums, (3, class + 1), float64: Dice and IoU of each class and of the mean over foreground
    classes, summed over volumes, and the number of volumes that have them.
    """

    stem: ClassVar[str] = "dice"
    sums_of: ClassVar[str] = "dice"
    row: ClassVar[int] = 0  # Row of the sums that the metric reads.

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        overlap, sizes = self._sizes(outputs, targets)
        present = sizes > 0
        number = present[:, self._first :].sum(1)

        rows = []
        for scores in (_dice(overlap, sizes), _iou(overlap, sizes)):
            mean = scores[:, self._first :].sum(1) / number.clamp(min=1)
            rows.append(torch.cat([scores.sum(0), mean.sum(0, keepdim=True)]))
        volumes = torch.cat([present.sum(0), (number > 0).sum(0, keepdim=True)])
        return torch.stack([*rows, volumes.double()])

    @override
    def value(self, total: Tensor) -> float:
        column = -1 if self.label is None else self.label
        return ratio(total[self.row, column], total[2, column])


@dataclass(frozen=True)
class IoU(Dice):
    """Intersection over union of the foreground, |P ∩ G| / |P ∪ G|, as the mean over volumes.

    `iou_1` is that of class 1. Classes and volumes are left out as for Dice.
    """

    stem: ClassVar[str] = "iou"
    row: ClassVar[int] = 1


@dataclass(frozen=True)
class PooledDice(MaskMetric):
    """Dice of all test voxels together, as the mean over foreground classes.

    `pooled_dice_1` is that of class 1. A class that is neither in a mask nor predicted anywhere is
    left out.

    Sums, (2, class), int64: number of voxels that are predicted and true, and the number of
    predicted ones plus the number of true ones.
    """

    stem: ClassVar[str] = "pooled_dice"
    sums_of: ClassVar[str] = "pooled_dice"

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        overlap, sizes = self._sizes(outputs, targets)
        return torch.stack([overlap.sum(0), sizes.sum(0)])

    @override
    def value(self, total: Tensor) -> float:
        overlap, sizes = total
        present = sizes > 0
        if self.label is None:
            present[: self._first] = False
        else:
            present &= torch.arange(len(sizes)) == self.label
        return float(self._scores(overlap[present], sizes[present]).mean())

    def _scores(self, overlap: Tensor, sizes: Tensor) -> Tensor:
        return _dice(overlap, sizes)


@dataclass(frozen=True)
class PooledIoU(PooledDice):
    """Intersection over union of all test voxels together, as the mean over foreground classes.

    `pooled_iou_1` is that of class 1. A class that is neither in a mask nor predicted anywhere is
    left out.
    """

    stem: ClassVar[str] = "pooled_iou"

    def _scores(self, overlap: Tensor, sizes: Tensor) -> Tensor:
        return _iou(overlap, sizes)


def _dice(overlap: Tensor, sizes: Tensor) -> Tensor:
    """Return Dice from counts of voxels, 0 if a class is neither predicted nor true.

    Args:
        overlap: Number of voxels that are predicted and true.
        sizes: Number of predicted voxels plus number of true ones, in the same shape.
    """
    return 2 * overlap / sizes.clamp(min=1).double()


def _iou(overlap: Tensor, sizes: Tensor) -> Tensor:
    """Return intersection over union from counts, 0 if a class is neither predicted nor true.

    Args:
        overlap: Number of voxels that are predicted and true.
        sizes: Number of predicted voxels plus number of true ones, in the same shape.
    """
    return overlap / (sizes - overlap).clamp(min=1).double()
