"""Errors of targets that are real numbers: RMSE, MAE and R²."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.tasks.metrics.base import (
    SumMetric,
    TargetKind,
    as_columns,
    ratio,
)


@dataclass(frozen=True)
class _OfNumbers(SumMetric):
    """Base class of metrics whose targets are real numbers."""

    kinds: ClassVar[tuple[TargetKind, ...]] = ("numbers",)
    higher_is_better: ClassVar[bool] = False

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(targets.shape).double() - targets.double()


def _sum_and_count(errors: Tensor) -> Tensor:
    """Return the sum of errors and their number, (2,)."""
    return torch.stack([errors.sum(), torch.ones_like(errors).sum()])


@dataclass(frozen=True)
class RMSE(_OfNumbers):
    """Root of the mean squared error, over all columns together."""

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _sum_and_count(self._errors(outputs, targets).square())

    @override
    def value(self, total: Tensor) -> float:
        return math.sqrt(ratio(total[0], total[1]))


@dataclass(frozen=True)
class MAE(_OfNumbers):
    """Mean absolute error, over all columns together."""

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _sum_and_count(self._errors(outputs, targets).abs())

    @override
    def value(self, total: Tensor) -> float:
        return ratio(total[0], total[1])


@dataclass(frozen=True)
class R2(_OfNumbers):
    """Share of the targets' variance that the outputs explain, as the mean over columns.

    Sums of each column, (4, column): squared errors, targets, squared targets, number of targets.
    A column whose targets are all equal has no variance to explain and is left out.
    """

    higher_is_better: ClassVar[bool] = True

    @override
    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = as_columns(self._errors(outputs, targets))
        true = as_columns(targets.double())
        sums = [
            errors.square().sum(0),
            true.sum(0),
            true.square().sum(0),
            torch.ones_like(true).sum(0),
        ]
        return torch.stack(sums)

    @override
    def value(self, total: Tensor) -> float:
        errors, true, squares, count = total.double()
        spread = squares - true.square() / count
        # Equal targets have a variance of 0 up to rounding errors.
        varying = spread > 1e-12 * squares
        return float((1 - errors[varying] / spread[varying]).mean())
