"""Base classes of metrics, and the arithmetic that several of them share."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from torch import Tensor

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


# Kinds of targets: one class each, 0 or 1 for each label, or real numbers.
TargetKind = Literal["classes", "labels", "numbers"]
_EVERY_KIND: tuple[TargetKind, ...] = get_args(TargetKind)


@dataclass(frozen=True)
class Metric:
    """A measure of the quality of outputs. Subclass `SumMetric` or `CollectedMetric`.

    Outputs have their classes, labels or columns in dimension 1: (sample, class, …).
    """

    higher_is_better: ClassVar[bool] = True  # False for errors and losses.
    kinds: ClassVar[tuple[TargetKind, ...]] = _EVERY_KIND  # Kinds of targets that the metric reads.
    of_predictions: ClassVar[bool] = False  # True if outputs of absent classes may be masked.
    # True for a share of something, from 0 to 1, which tables show in percent.
    is_rate: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Return the key of the metric in records: the name of its class in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @classmethod
    def for_task(cls, task: Task) -> Self:
        """Create the metric with settings of the task, such as the target that is ignored.

        This base version uses no setting. Subclasses override it.
        """
        return cls()

    def unfit(self, output_shape: tuple[int, ...]) -> str:
        """Return the reason why outputs cannot be measured, or an empty string.

        Args:
            output_shape: Shape of a model's output with its classes in dimension 1. Its first
                entry has no effect.
        """
        return ""


class SumMetric(Metric, ABC):
    """A metric that is computed from sums, which add over batches and devices."""

    same_sums_as: str = ""  # Metric with equal sums, so that they are computed once. Empty: none.

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sums of one batch.

        The function must be pure, because it may be called under `vmap`. The shape of the sums must
        not depend on the number of samples.

        Args:
            outputs: (sample, class, …), classes, labels or columns in dimension 1.
            targets: (sample, …).
        """

    @abstractmethod
    def value(self, total: Tensor) -> float:
        """Return the metric from `total`, the sums over all batches.

        The result is NaN if nothing was counted.
        """

    def max_count(self, samples: int, output_shape: tuple[int, ...]) -> int:
        """Return the largest whole number that sums over samples may have.

        Args:
            samples: Number of samples.
            output_shape: Shape of a model's output, whose first entry has no effect.
        """
        return 2 * samples * math.prod(output_shape[1:])

    def implausible(self, total: Tensor, samples: int, output_shape: tuple[int, ...]) -> str:
        """Return the reason why sums cannot be those of samples, or an empty string.

        Sums that devices send are checked by it. Whole numbers are counts, and must be from 0 to
        `max_count`.

        Args:
            total: Sums over all batches.
            samples: Number of samples.
            output_shape: Shape of a model's output, whose first entry has no effect.
        """
        if total.is_floating_point():
            return ""
        most = self.max_count(samples, output_shape)
        if bool(((total < 0) | (total > most)).any()):
            return f"{self.name} has counts {total.flatten().tolist()[:4]}; 0 to {most} would fit"
        return ""


class HitMetric(SumMetric):
    """A metric whose sums are a number of hits, and the number of targets that count."""

    def implausible(self, total: Tensor, samples: int, output_shape: tuple[int, ...]) -> str:
        """Return the reason why sums cannot be those of samples, or an empty string.

        There are no more hits than targets.

        Args:
            total: Sums over all batches.
            samples: Number of samples.
            output_shape: Shape of a model's output, whose first entry has no effect.
        """
        if int(total[0]) > int(total[1]):
            return f"{self.name} has {int(total[0])} hits of {int(total[1])} targets"
        return super().implausible(total, samples, output_shape)

    def value(self, total: Tensor) -> float:
        """Return the share of hits, or NaN if nothing was counted."""
        return ratio(total[0], total[1])


class CollectedMetric(Metric, ABC):
    """A metric that needs the outputs of all samples at once.

    It cannot be computed if outputs must not leave a device (`Task.refuse_collected`).
    """

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric over all samples, NaN if it is undefined.

        Args:
            outputs: (sample, class, …) Outputs of all samples, classes or labels in dimension 1.
            targets: (sample, …) Their targets.
        """


def are_columns(outputs: Tensor, targets: Tensor) -> bool:
    """Return True if every output has its own target, as for labels and real numbers.

    False: targets are classes, one for all outputs of a position.

    Args:
        outputs: (sample, column, …) Outputs of a net.
        targets: (sample, column, …) or (sample, …) Targets. With one output both forms give True.
    """
    return targets.dim() == outputs.dim() or outputs.shape[1] == 1


def as_columns(values: Tensor) -> Tensor:
    """Reshape (sample, column, …) to (position, column), and (sample,) to one column."""
    if values.dim() == 1:
        return values.unsqueeze(1)
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def ratio(part: Tensor, whole: Tensor) -> float:
    """Divide two tensors of one number each as Python numbers, so that ratios of counts are exact.

    The result is NaN if `whole` is 0.
    """
    count = whole.item()
    return part.item() / count if count else math.nan
