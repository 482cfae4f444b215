"""Classification: one class for each target, with cross-entropy and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import outside, refuse
from fedquilt.errors import DataError
from fedquilt.hardware.torch_internals import outside_functorch
from fedquilt.tasks.metrics.base import TargetKind
from fedquilt.tasks.task import Augment, Task


@dataclass(frozen=True)
class Classification(Task):
    """One class for each sample, or for each position of a sample, such as a pixel.

    The loss is cross-entropy. With class weights, the mean loss is divided by the sum of the
    weights of all targets that count, as torch does. `losses` is F.cross_entropy with
    reduction="none". `mean_loss` without sample weights is F.cross_entropy itself.
    """

    label_smoothing: float = 0.0  # Share of each target that is spread over all classes. 0: none.
    class_weights: tuple[float, ...] = ()  # Factor of the loss of each class. Empty: 1 for all.
    ignore: int = -100  # Targets with this value are ignored in the loss and in metrics.

    kind: ClassVar[TargetKind | None] = "classes"
    usual_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "loss")

    def __post_init__(self) -> None:
        problems = outside(self, label_smoothing="[0, 1)", class_weights="[0, inf)")
        if self.class_weights and not any(self.class_weights):
            problems["class_weights"] = "only zeros were asked for; at least one must be above 0."
        refuse(self, problems)
        object.__setattr__(self, "class_weights", tuple(self.class_weights))  # A list has no hash.
        super().__post_init__()

    @property
    @override
    def ignored(self) -> int:
        return self.ignore

    @override
    def num_outputs(self, targets: Tensor, num_classes: int) -> int:
        if not num_classes:
            raise DataError(
                f"{type(self).__name__} was asked for; targets are {targets.dtype} of shape "
                f"{tuple(targets.shape[1:])}, not classes. Give whole numbers from 0 on."
            )
        if self.ignore != num_classes - 1:
            return num_classes
        # The largest target value is ignored, such as 255 at the edges of objects. It is no class.
        classes = targets[targets != self.ignore]
        return int(classes.max()) + 1 if len(classes) else num_classes

    @override
    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        classes, positions = output_shape[1], tuple(output_shape[2:])
        if targets.is_floating_point() or targets.dtype == torch.bool:
            return f"targets are {targets.dtype}; classes are whole numbers from 0 on (int64)"
        if tuple(targets.shape[1:]) == (1,) and not positions:
            return (
                f"targets have shape {tuple(targets.shape)}; the output has {classes} classes for "
                f"each sample, so that targets of shape ({len(targets)},) would fit: "
                "targets.reshape(-1)"
            )
        if tuple(targets.shape[1:]) != positions:
            return (
                f"targets have shape {tuple(targets.shape[1:])} a sample; the output has "
                f"{classes} classes for each position of {positions}, so that targets of shape "
                f"{positions} would fit"
            )
        if self.class_weights and len(self.class_weights) != classes:
            count = len(self.class_weights)
            return f"there are {count} class weights; the output has {classes} classes"
        outliers = targets[(targets != self.ignore) & ((targets < 0) | (targets >= classes))]
        if len(outliers):
            return (
                f"a target is {int(outliers[0])}; the output has {classes} classes, so that 0 to "
                f"{classes - 1} fit, and {self.ignore} for targets that do not count"
            )
        return ""

    def augment_targets(self, targets: Tensor, augment: Augment) -> Tensor:
        """Crop and flip masks (sample, *size) like their inputs. Padded pixels do not count.

        Classes of whole samples, and tokens, have fewer dimensions and are returned unchanged.

        Args:
            targets: Targets of one batch.
            augment: Crops and flips images (sample, channel, *size) as the inputs were.
        """
        if targets.dim() < 3:
            return targets
        return augment(targets.unsqueeze(1), self.ignore).squeeze(1)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() == 2 or outputs.stride(1) != 1:
            return self._cross_entropy(outputs, targets, "none")
        # Classes are the last dimension in memory, as in token models. Reshaping to one row per
        # position takes a quarter of the time.
        rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
        return self._cross_entropy(rows, targets.reshape(-1), "none").reshape(targets.shape)

    @property
    @override
    def is_plain_entropy(self) -> bool:
        return not self.label_smoothing and not self.class_weights

    @override
    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            return self._cross_entropy(outputs, targets, "mean")
        return super().mean_loss(outputs, targets, weights)

    def _cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        # Under autocast outputs are bfloat16, and cross-entropy is computed in float32.
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        return F.cross_entropy(
            outputs,
            targets,
            weight=self._class_weights(dtype, outputs.device),
            ignore_index=self.ignore,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )

    @override
    def counted(self, targets: Tensor) -> Tensor:
        return targets != self.ignore

    @override
    def total(self, targets: Tensor) -> Tensor:
        weights = self._class_weights(torch.float64, targets.device)
        if weights is None:
            return super().total(targets)
        counted = self.counted(targets)
        return torch.where(counted, weights[targets.where(counted, 0)], 0.0).sum()

    def _class_weights(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return _constant(self.class_weights, dtype, device) if self.class_weights else None

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return KL(teacher ‖ outputs) over the classes, in the shape of the targets.

        It is 0 for targets that do not count.

        Args:
            outputs: (sample, class, …) Logits of the net that learns.
            teacher: (sample, class, …) Logits of the net that it learns from.
            targets: (sample, …) Targets, which determine the positions that count.
        """
        return divergence(outputs, teacher) * self.counted(targets)


def divergence(outputs: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher ‖ outputs) over the classes of every position, (sample, …), without a mean.

    Args:
        outputs: (sample, class, …) Logits of the net that learns.
        teacher: (sample, class, …) Logits of the net that it learns from.
    """
    taught = F.log_softmax(teacher, 1)
    learnt = F.log_softmax(outputs, 1)
    return (taught.exp() * (taught - learnt)).sum(1)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as a tensor, the same one in every call with equal arguments.

    It is cached, because numbers cannot be copied to a GPU while a CUDA graph is captured. It is
    created outside of transforms and of inference mode, so that later calls can use it inside or
    outside of them (test_class_weights_are_made_once).
    """
    with outside_functorch(), torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
