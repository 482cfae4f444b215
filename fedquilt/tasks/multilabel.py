"""Multi-label classification: each of several labels applies to a sample or does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedquilt.tasks.metrics.base import TargetKind
from fedquilt.tasks.task import Task, columns_unfit


@dataclass(frozen=True)
class MultiLabel(Task):
    """Labels that are 1 if they apply to a sample, else 0.

    Targets are (sample, k) for k outputs, or (sample,) for one output. Outputs are logits. The loss
    is binary cross-entropy, averaged over samples and labels.
    """

    kind: ClassVar[TargetKind | None] = "labels"
    usual_metrics: ClassVar[tuple[str, ...]] = ("f1", "label_accuracy", "average_precision", "loss")

    @override
    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        if why := columns_unfit(targets, output_shape):
            return why
        invalid = targets[(targets != 0) & (targets != 1)]
        return f"a target is {invalid[0].item()}; labels are 0 or 1" if len(invalid) else ""

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.reshape(targets.shape)
        labels = targets.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return KL(teacher ‖ outputs) of each label as a Bernoulli variable.

        Args:
            outputs: (sample, label) Logits of the net that learns.
            teacher: (sample, label) Logits of the net that it learns from.
            targets: (sample, label), whose shape the result has.
        """
        taught, learnt = teacher.reshape(targets.shape), outputs.reshape(targets.shape)
        yes = taught.sigmoid() * (F.logsigmoid(taught) - F.logsigmoid(learnt))
        no = (-taught).sigmoid() * (F.logsigmoid(-taught) - F.logsigmoid(-learnt))
        return yes + no
