"""Metrics of ranked scores, which need the outputs of all samples at once."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt.tasks.metrics.base import (
    CollectedMetric,
    TargetKind,
    are_columns,
    as_columns,
)

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


@dataclass(frozen=True)
class _OfScores(CollectedMetric):
    """Base class of metrics of ranked scores, averaged over labels or classes.

    Each class is compared with all others. Labels with an undefined metric are left out.
    """

    ignore: int = -100  # Class targets with this value do not count.

    kinds: ClassVar[tuple[TargetKind, ...]] = ("classes", "labels")
    is_rate: ClassVar[bool] = True

    @classmethod
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored)

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        scores, true = self._scores(outputs.detach().cpu(), targets.cpu())
        columns = zip(scores.unbind(1), true.unbind(1), strict=True)
        figures = [self._of_label(*_by_score(*column)) for column in columns]
        defined = [figure for figure in figures if not math.isnan(figure)]
        return sum(defined) / len(defined) if defined else math.nan

    def _scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and truth, both (position, label). Truth is True for labels that apply.

        For classes the score is the probability (softmax), and ignored positions are left out. For
        labels the score is the output.
        """
        if are_columns(outputs, targets):
            return as_columns(outputs), as_columns(targets > 0.5)

        counted = targets.flatten() != self.ignore
        probabilities = as_columns(outputs.double().softmax(1))
        true = F.one_hot(targets.flatten()[counted], outputs.shape[1]).bool()
        return probabilities[counted], true

    @abstractmethod
    def _of_label(self, positives: Tensor, negatives: Tensor) -> float:
        """Return the metric of one label.

        Args:
            positives: (score,) Number of positive samples at each score, the highest first.
            negatives: (score,) Number of negative samples at each score, the highest first.
        """


@dataclass(frozen=True)
class AveragePrecision(_OfScores):
    """Precision weighted by the recall gained at each distinct score: Σ (R_n − R_{n−1}) P_n."""

    def _of_label(self, positives: Tensor, negatives: Tensor) -> float:
        if not float(positives.sum()):
            return math.nan
        precision = positives.cumsum(0) / (positives + negatives).cumsum(0)
        return float((positives * precision).sum() / positives.sum())


@dataclass(frozen=True)
class AUROC(_OfScores):
    """Probability that a positive sample is scored above a negative one, ties counting half."""

    def _of_label(self, positives: Tensor, negatives: Tensor) -> float:
        pairs = float(positives.sum() * negatives.sum())
        if not pairs:
            return math.nan
        below = negatives.sum() - negatives.cumsum(0)
        return float((positives * (below + negatives / 2)).sum()) / pairs


def _by_score(scores: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Count positive and negative samples of one label at each distinct score, the highest first.

    Args:
        scores: (position,) Scores.
        true: (position,) True for positive samples.

    Returns:
        (score,) Numbers of positive and of negative samples, both float64.
    """
    values, score_index = torch.unique(scores, return_inverse=True)
    counts = torch.zeros(2, len(values), dtype=torch.float64)
    for row, mask in enumerate((true, ~true)):
        counts[row] = torch.bincount(score_index[mask], minlength=len(values)).double()
    positives, negatives = counts.flip(1)
    return positives, negatives
