"""The task's loss as a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.tasks.metrics.base import (
    SumMetric,
    ratio,
)

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


@dataclass(frozen=True)
class MeanLoss(SumMetric):
    """Mean of the task's loss, as in training.

    Sums: the sum of the losses, and the divisor of the mean (float64).
    """

    task: Task  # Task that defines the loss.

    higher_is_better: ClassVar[bool] = False

    @property
    @override
    def name(self) -> str:
        return "loss"

    @classmethod
    @override
    def for_task(cls, task: Task) -> Self:
        return cls(task)

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.task.losses(outputs, targets)
        return torch.stack([losses.sum(dtype=torch.float64), self.task.total(targets).double()])

    @override
    def value(self, total: Tensor) -> float:
        return ratio(total[0], total[1])
