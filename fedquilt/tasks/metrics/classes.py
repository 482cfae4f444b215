"""Metrics of targets that are one class each: accuracy, top-k and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import within
from fedquilt.tasks.metrics.base import (
    HitMetric,
    SumMetric,
    TargetKind,
    ratio,
)

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


@dataclass(frozen=True)
class ClassMetric(SumMetric):
    """Base class of metrics whose targets are classes."""

    ignore: int = -100  # Targets with this value do not count.

    kinds: ClassVar[tuple[TargetKind, ...]] = ("classes",)
    of_predictions: ClassVar[bool] = True
    is_rate: ClassVar[bool] = True

    @classmethod
    @override
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored)


@dataclass(frozen=True)
class ClassHits(ClassMetric, HitMetric):
    """Base class of metrics that count the targets whose class was found."""

    @override
    def max_count(self, samples: int, output_shape: tuple[int, ...]) -> int:
        return samples * math.prod(output_shape[2:])


@dataclass(frozen=True)
class Accuracy(ClassHits):
    """Share of the targets whose class has the largest output.

    Sums: number of correct predictions, and of targets that count (int64).
    """

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != self.ignore
        hits = (outputs.argmax(1) == targets) & counted
        return torch.stack([hits.sum(), counted.sum()])


@dataclass(frozen=True)
class TopK(ClassHits):
    """Share of the targets whose class is among the k largest outputs. k = 1 gives `Accuracy`.

    Its name is `top5` for k = 5. Sums: number of such targets, and of targets that count (int64).
    """

    k: int = 5  # Number of largest outputs among which the class must be.

    def __post_init__(self) -> None:
        within(self, k="[1, inf)")

    @property
    @override
    def name(self) -> str:
        return f"top{self.k}"

    @override
    def unfit(self, output_shape: tuple[int, ...]) -> str:
        classes = output_shape[1]
        if self.k <= classes:
            return ""
        return f"{self.name} was asked for; the output has {classes} classes."

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != self.ignore
        largest = outputs.topk(self.k, dim=1).indices
        hits = (largest == targets.unsqueeze(1)).any(1) & counted
        return torch.stack([hits.sum(), counted.sum()])


@dataclass(frozen=True)
class Perplexity(ClassMetric):
    """Exponential of the mean cross-entropy, without label smoothing and class weights."""

    same_sums_as: str = ""  # Metric with equal sums, so that they are computed once. Empty: none.

    higher_is_better: ClassVar[bool] = False
    of_predictions: ClassVar[bool] = False
    is_rate: ClassVar[bool] = False

    @classmethod
    @override
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored, same_sums_as="loss" if task.is_plain_entropy else "")

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, ignore_index=self.ignore, reduction="none")
        return torch.stack([losses.double().sum(), (targets != self.ignore).sum().double()])

    @override
    def value(self, total: Tensor) -> float:
        entropy = ratio(total[0], total[1])
        try:
            return math.exp(entropy)
        except OverflowError:
            return math.inf
