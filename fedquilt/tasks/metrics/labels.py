"""Metrics of classes or labels that are counted: F1, and the accuracy of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import one_of
from fedquilt.tasks.metrics.base import (
    HitMetric,
    SumMetric,
    TargetKind,
    are_columns,
    as_columns,
)

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


Average = Literal["macro", "micro"]


@dataclass(frozen=True)
class F1(SumMetric):
    """F1 of classes (the largest output) or of labels (outputs above 0), from counts.

    `macro` is the mean over the classes that occur among targets or predictions. `micro` adds up
    the counts of all classes first.

    Sums, (3, class), int64: true positives, false positives and false negatives of each class.
    """

    average: Average = "macro"  # Average over classes: macro or micro.
    ignore: int = -100  # Class targets with this value do not count.

    kinds: ClassVar[tuple[TargetKind, ...]] = ("classes", "labels")
    of_predictions: ClassVar[bool] = True
    is_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of(self, average=Average)

    @property
    @override
    def name(self) -> str:
        return "f1" if self.average == "macro" else "micro_f1"

    @classmethod
    @override
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored)

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, true = self._yes_or_no(outputs, targets)
        hits = (predicted & true).sum(0)
        return torch.stack([hits, (predicted & ~true).sum(0), (true & ~predicted).sum(0)])

    def _yes_or_no(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as booleans, both (position, class) or (position, label).

        The predicted class is the one with the largest output. Labels with outputs above 0 are
        predicted. Positions with the ignored class are False everywhere in both.
        """
        if are_columns(outputs, targets):
            return as_columns(outputs > 0), as_columns(targets > 0.5)

        classes = torch.arange(outputs.shape[1], device=outputs.device)
        flat = targets.reshape(-1, 1)
        counted = flat != self.ignore
        predicted = (outputs.argmax(1).reshape(-1, 1) == classes) & counted
        return predicted, (flat == classes) & counted

    @override
    def value(self, total: Tensor) -> float:
        if self.average == "micro":
            total = total.sum(1, keepdim=True)
        hits, false_positives, false_negatives = total.double()
        denominators = 2 * hits + false_positives + false_negatives
        occurring = denominators > 0
        return float((2 * hits[occurring] / denominators[occurring]).mean())


@dataclass(frozen=True)
class MicroF1(F1):
    """F1 with the counts of all classes or labels summed up first."""

    average: Average = "micro"  # Average over classes, which is always micro here.


@dataclass(frozen=True)
class LabelAccuracy(HitMetric):
    """Share of labels that are predicted correctly. Outputs above 0 predict that a label applies.

    Sums: number of correct labels, and of all labels (int64).
    """

    kinds: ClassVar[tuple[TargetKind, ...]] = ("labels",)
    is_rate: ClassVar[bool] = True

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        hits = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
        return torch.stack([hits.sum(), torch.ones_like(hits).sum()])
