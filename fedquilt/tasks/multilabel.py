"""Several labels, each of which a sample has or has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedquilt.tasks.metrics import Kind
from fedquilt.tasks.task import Task, columns_unfit


@dataclass(frozen=True)
class MultiLabel(Task):
    """Labels that a sample has (1) or has not (0): (sample, k) for k outputs, or (sample,) for one.

    The loss is binary cross-entropy of the outputs as logits, as the mean over samples and labels.
    """

    kind: ClassVar[Kind | None] = "labels"
    usual_metrics: ClassVar[tuple[str, ...]] = ("f1", "label_accuracy", "average_precision", "loss")

    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        if why := columns_unfit(targets, output_shape):
            return why
        others = targets[(targets != 0) & (targets != 1)]
        return f"a target is {others[0].item()}; labels are 0 or 1" if len(others) else ""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.reshape(targets.shape)
        labels = targets.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return KL(teacher ‖ outputs) of each label, a Bernoulli variable."""
        taught, learnt = teacher.reshape(targets.shape), outputs.reshape(targets.shape)
        yes = taught.sigmoid() * (F.logsigmoid(taught) - F.logsigmoid(learnt))
        no = (-taught).sigmoid() * (F.logsigmoid(-taught) - F.logsigmoid(-learnt))
        return yes + no
