"""Regression of real numbers with squared, absolute or Huber loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.tasks.metrics.base import TargetKind
from fedquilt.tasks.task import Task, columns_unfit

LossName = Literal["mse", "mae", "huber"]


@dataclass(frozen=True)
class Regression(Task):
    """Regression of real numbers: (sample, k) for k outputs, or (sample,) for one output."""

    loss: LossName = "mse"  # Loss of each number: squared (mse), absolute (mae) or huber.
    delta: float = 1.0  # Error at which the Huber loss changes from squared to linear.

    kind: ClassVar[TargetKind | None] = "numbers"
    usual_metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2", "loss")

    def __post_init__(self) -> None:
        if self.loss not in _LOSSES:
            raise ConfigError(
                f"Regression: the loss {self.loss!r} was asked for; there is no such loss."
                f"{nearest(str(self.loss), _LOSSES)}",
                {"loss": f"{self.loss!r} was asked for.{nearest(str(self.loss), _LOSSES)}"},
            )
        within(self, delta="(0, inf)")
        super().__post_init__()

    @override
    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        if not targets.is_floating_point():
            return f"targets are {targets.dtype}; real numbers fit, such as targets.float()"
        if why := columns_unfit(targets, output_shape):
            return why
        num_not_finite = int((~targets.isfinite()).sum())
        return f"{num_not_finite} targets are not finite" if num_not_finite else ""

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Outputs may be bfloat16. The loss is computed in the precision of the targets.
        dtype = torch.promote_types(outputs.dtype, targets.dtype)
        predicted = outputs.reshape(targets.shape).to(dtype)
        return _LOSSES[self.loss](predicted, targets.to(dtype), self.delta)

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the outputs with the teacher's outputs as targets.

        Args:
            outputs: (sample, column) Outputs of the net that learns.
            teacher: (sample, column) Outputs of the net that it learns from.
            targets: (sample, column), whose shape the result has.
        """
        return self.losses(outputs, teacher.reshape(targets.shape))


def _mse(outputs: Tensor, targets: Tensor, delta: float) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="none")


def _mae(outputs: Tensor, targets: Tensor, delta: float) -> Tensor:
    return F.l1_loss(outputs, targets, reduction="none")


def _huber(outputs: Tensor, targets: Tensor, delta: float) -> Tensor:
    return F.huber_loss(outputs, targets, reduction="none", delta=delta)


_LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "mse": _mse,
    "mae": _mae,
    "huber": _huber,
}
