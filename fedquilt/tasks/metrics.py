"""Metrics of outputs, computed from sums that add over batches, or from all outputs at once."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt.checks import one_of, within
from fedquilt.errors import ConfigError
from fedquilt.names import find, is_reference, said

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task

Average = Literal["macro", "micro"]
# Kinds of targets: one class each, 0 or 1 for each label, or real numbers.
EvalSpec = Literal["classes", "labels", "numbers"]

_EVERY_KIND: tuple[EvalSpec, ...] = get_args(EvalSpec)


@dataclass(frozen=True)
class Metric:
    """A measure of the quality of outputs. Subclass `SumMetric` or `CollectedMetric`.

    Outputs have their classes, labels or columns in dimension 1: (sample, class, …).
    """

    higher_is_better: ClassVar[bool] = True  # False for errors and losses.
    kinds: ClassVar[tuple[EvalSpec, ...]] = _EVERY_KIND  # Kinds of targets that the metric reads.
    of_predictions: ClassVar[bool] = False  # True if outputs of absent classes may be masked.
    # True for a share of something, from 0 to 1, which tables show in percent.
    is_rate: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Return the key of the metric in records: the name of its class in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @classmethod
    def for_task(cls, task: Task) -> Self:
        """Create the metric with settings of the task, such as the target that is ignored."""
        return cls()

    def unfit(self, output_shape: tuple[int, ...]) -> str:
        """Return the reason why outputs of this shape cannot be measured, or an empty string."""
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
        """Return the metric from sums over all batches, or NaN if nothing was counted."""


class CollectedMetric(Metric, ABC):
    """A metric that needs the outputs of all samples at once.

    It cannot be computed if outputs must not leave a device (`Task.refuse_collected`).
    """

    @abstractmethod
    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of outputs (sample, class, …) and targets, NaN if it is undefined."""


# --- sums: classes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfClasses(SumMetric):
    """Base class of metrics whose targets are classes."""

    ignore: int = -100  # Targets with this value do not count.

    kinds: ClassVar[tuple[EvalSpec, ...]] = ("classes",)
    of_predictions: ClassVar[bool] = True
    is_rate: ClassVar[bool] = True

    @classmethod
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored)


@dataclass(frozen=True)
class Accuracy(_OfClasses):
    """Share of the targets whose class has the largest output.

    Sums: number of correct predictions, and of targets that count (int64).
    """

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != self.ignore
        hits = (outputs.argmax(1) == targets) & counted
        return torch.stack([hits.sum(), counted.sum()])

    def value(self, total: Tensor) -> float:
        return _ratio(total[0], total[1])


@dataclass(frozen=True)
class TopK(_OfClasses):
    """Share of the targets whose class is among the k largest outputs. k = 1 gives `Accuracy`.

    Its name is `top5` for k = 5. Sums: number of such targets, and of targets that count (int64).
    """

    k: int = 5  # Number of largest outputs among which the class must be.

    def __post_init__(self) -> None:
        within(self, k="[1, inf)")

    @property
    def name(self) -> str:
        return f"top{self.k}"

    def unfit(self, output_shape: tuple[int, ...]) -> str:
        classes = output_shape[1]
        if self.k <= classes:
            return ""
        return f"{self.name} was asked for; the output has {classes} classes."

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counted = targets != self.ignore
        largest = outputs.topk(self.k, dim=1).indices
        hits = (largest == targets.unsqueeze(1)).any(1) & counted
        return torch.stack([hits.sum(), counted.sum()])

    def value(self, total: Tensor) -> float:
        return _ratio(total[0], total[1])


@dataclass(frozen=True)
class Perplexity(_OfClasses):
    """Exponential of the mean cross-entropy, without label smoothing and class weights."""

    same_sums_as: str = ""  # Metric with equal sums, so that they are computed once. Empty: none.

    higher_is_better: ClassVar[bool] = False
    of_predictions: ClassVar[bool] = False
    is_rate: ClassVar[bool] = False

    @classmethod
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored, same_sums_as="loss" if task.is_plain_entropy else "")

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, ignore_index=self.ignore, reduction="none")
        return torch.stack([losses.double().sum(), (targets != self.ignore).sum().double()])

    def value(self, total: Tensor) -> float:
        entropy = _ratio(total[0], total[1])
        try:
            return math.exp(entropy)
        except OverflowError:
            return math.inf


# --- sums: masks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfMasks(_OfClasses):
    """Overlap of predicted and true masks, of one class or as the mean over foreground classes.

    Voxels whose target is ignored count neither as predicted nor as true.
    """

    label: int | None = None  # Class that is measured. None: the mean over foreground classes.
    background: bool = False  # True if the mean includes class 0.
    same_sums_as: str = ""  # Metric with equal sums, so that they are computed once. Empty: none.

    stem: ClassVar[str]  # Name of the mean. The metric of class 1 is called STEM_1.
    sums_of: ClassVar[str]  # Name of the metric with the same sums.

    @property
    def name(self) -> str:
        return self.stem if self.label is None else f"{self.stem}_{self.label}"

    @classmethod
    def for_task(cls, task: Task, label: int | None = None) -> Self:
        shared = "" if label is None and cls.stem == cls.sums_of else cls.sums_of
        return cls(task.ignored, label, task.counts_background, shared)

    def unfit(self, output_shape: tuple[int, ...]) -> str:
        classes = output_shape[1]
        if len(output_shape) < 3:
            shape = tuple(output_shape[1:])
            return (
                f"{self.name} was asked for; the output has shape {shape} a sample. It measures "
                "masks, so that outputs (class, *size) would fit."
            )
        if self.label is not None and self.label >= classes:
            return (
                f"{self.name} was asked for; the output has {classes} classes, so that "
                f"{self.stem}_0 to {self.stem}_{classes - 1} would fit."
            )
        return ""

    @property
    def _first(self) -> int:
        """Return the first class of the mean."""
        return 0 if self.background else 1

    def _sizes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Count voxels of each sample and class.

        Returns:
            (sample, class) Number of voxels that are predicted and true, and the number of
            predicted ones plus the number of true ones. Both are int64.
        """
        classes = torch.arange(outputs.shape[1], device=outputs.device).unsqueeze(1)
        flat = targets.flatten(1).unsqueeze(1)  # (sample, 1, voxel)
        counted = flat != self.ignore
        predicted = (outputs.argmax(1).flatten(1).unsqueeze(1) == classes) & counted
        true = (flat == classes) & counted
        return (predicted & true).sum(2), predicted.sum(2) + true.sum(2)


@dataclass(frozen=True)
class Dice(_OfMasks):
    """Dice of the foreground, 2 |P ∩ G| / (|P| + |G|), as the mean over volumes.

    `dice_1` is the Dice of class 1, over the volumes in which class 1 is true or predicted.

    A class that is neither in a volume's mask nor predicted there is left out of the volume's mean
    over foreground classes. A class that is predicted but not in the mask scores 0. A volume
    without any foreground in mask and prediction is left out.

    Sums, (3, class + 1), float64: Dice and IoU of each class and of the mean over foreground
    classes, summed over volumes, and the number of volumes that have them.
    """

    stem: ClassVar[str] = "dice"
    sums_of: ClassVar[str] = "dice"
    row: ClassVar[int] = 0  # Row of the sums that the metric reads.

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        overlap, sizes = self._sizes(outputs, targets)
        present = sizes > 0
        number = present[:, self._first :].sum(1)

        rows = []
        for scores in (_dice(overlap, sizes), _iou(overlap, sizes)):
            mean = scores[:, self._first :].sum(1) / number.clamp(min=1)
            rows.append(torch.cat([scores.sum(0), mean.sum(0, keepdim=True)]))
        volumes = torch.cat([present.sum(0), (number > 0).sum(0, keepdim=True)])
        return torch.stack([*rows, volumes.double()])

    def value(self, total: Tensor) -> float:
        column = -1 if self.label is None else self.label
        return _ratio(total[self.row, column], total[2, column])


@dataclass(frozen=True)
class IoU(Dice):
    """Intersection over union of the foreground, |P ∩ G| / |P ∪ G|, as the mean over volumes.

    `iou_1` is that of class 1. Classes and volumes are left out as for Dice.
    """

    stem: ClassVar[str] = "iou"
    row: ClassVar[int] = 1


@dataclass(frozen=True)
class PooledDice(_OfMasks):
    """Dice of all test voxels together, as the mean over foreground classes.

    `pooled_dice_1` is that of class 1. A class that is neither in a mask nor predicted anywhere is
    left out.

    Sums, (2, class), int64: number of voxels that are predicted and true, and the number of
    predicted ones plus the number of true ones.
    """

    stem: ClassVar[str] = "pooled_dice"
    sums_of: ClassVar[str] = "pooled_dice"

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        overlap, sizes = self._sizes(outputs, targets)
        return torch.stack([overlap.sum(0), sizes.sum(0)])

    def value(self, total: Tensor) -> float:
        overlap, sizes = total
        present = sizes > 0
        if self.label is None:
            present[: self._first] = False
        else:
            present &= torch.arange(len(sizes)) == self.label
        return float(self._scores(overlap[present], sizes[present]).mean())

    def _scores(self, overlap: Tensor, sizes: Tensor) -> Tensor:
        return _dice(overlap, sizes)


@dataclass(frozen=True)
class PooledIoU(PooledDice):
    """Intersection over union of all test voxels together, as the mean over foreground classes.

    `pooled_iou_1` is that of class 1. A class that is neither in a mask nor predicted anywhere is
    left out.
    """

    stem: ClassVar[str] = "pooled_iou"

    def _scores(self, overlap: Tensor, sizes: Tensor) -> Tensor:
        return _iou(overlap, sizes)


def _dice(overlap: Tensor, sizes: Tensor) -> Tensor:
    """Return Dice from counts of voxels, 0 if a class is neither predicted nor true."""
    return 2 * overlap / sizes.clamp(min=1).double()


def _iou(overlap: Tensor, sizes: Tensor) -> Tensor:
    """Return intersection over union from counts, 0 if a class is neither predicted nor true."""
    return overlap / (sizes - overlap).clamp(min=1).double()


# --- sums: classes or labels --------------------------------------------------------------------


@dataclass(frozen=True)
class F1(SumMetric):
    """F1 of classes (the largest output) or of labels (outputs above 0), from counts.

    `macro` is the mean over the classes that occur among targets or predictions. `micro` adds up
    the counts of all classes first.

    Sums, (3, class), int64: true positives, false positives and false negatives of each class.
    """

    average: Average = "macro"  # Average over classes: macro or micro.
    ignore: int = -100  # Class targets with this value do not count.

    kinds: ClassVar[tuple[EvalSpec, ...]] = ("classes", "labels")
    of_predictions: ClassVar[bool] = True
    is_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of(self, average=Average)

    @property
    def name(self) -> str:
        return "f1" if self.average == "macro" else "micro_f1"

    @classmethod
    def for_task(cls, task: Task) -> Self:
        return cls(ignore=task.ignored)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, true = self._yes_or_no(outputs, targets)
        hits = (predicted & true).sum(0)
        return torch.stack([hits, (predicted & ~true).sum(0), (true & ~predicted).sum(0)])

    def _yes_or_no(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as booleans, (position, class)."""
        if _are_columns(outputs, targets):
            return _columns(outputs > 0), _columns(targets > 0.5)

        classes = torch.arange(outputs.shape[1], device=outputs.device)
        flat = targets.reshape(-1, 1)
        counted = flat != self.ignore
        predicted = (outputs.argmax(1).reshape(-1, 1) == classes) & counted
        return predicted, (flat == classes) & counted

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

    average: Average = "micro"


@dataclass(frozen=True)
class LabelAccuracy(SumMetric):
    """Share of labels that are predicted correctly. Outputs above 0 predict that a label applies.

    Sums: number of correct labels, and of all labels (int64).
    """

    kinds: ClassVar[tuple[EvalSpec, ...]] = ("labels",)
    is_rate: ClassVar[bool] = True

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        hits = (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
        return torch.stack([hits.sum(), torch.ones_like(hits).sum()])

    def value(self, total: Tensor) -> float:
        return _ratio(total[0], total[1])


# --- sums: real numbers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfNumbers(SumMetric):
    """Base class of metrics whose targets are real numbers."""

    kinds: ClassVar[tuple[EvalSpec, ...]] = ("numbers",)
    higher_is_better: ClassVar[bool] = False

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(targets.shape).double() - targets.double()


@dataclass(frozen=True)
class RMSE(_OfNumbers):
    """Root of the mean squared error, over all columns together."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        squares = self._errors(outputs, targets).square()
        return torch.stack([squares.sum(), torch.ones_like(squares).sum()])

    def value(self, total: Tensor) -> float:
        return math.sqrt(_ratio(total[0], total[1]))


@dataclass(frozen=True)
class MAE(_OfNumbers):
    """Mean absolute error, over all columns together."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = self._errors(outputs, targets).abs()
        return torch.stack([errors.sum(), torch.ones_like(errors).sum()])

    def value(self, total: Tensor) -> float:
        return _ratio(total[0], total[1])


@dataclass(frozen=True)
class R2(_OfNumbers):
    """Share of the targets' variance that the outputs explain, as the mean over columns.

    Sums of each column, (4, column): squared errors, targets, squared targets, number of targets.
    A column whose targets are all equal has no variance to explain and is left out.
    """

    higher_is_better: ClassVar[bool] = True

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = _columns(self._errors(outputs, targets))
        true = _columns(targets.double())
        sums = [
            errors.square().sum(0),
            true.sum(0),
            true.square().sum(0),
            torch.ones_like(true).sum(0),
        ]
        return torch.stack(sums)

    def value(self, total: Tensor) -> float:
        errors, true, squares, count = total.double()
        spread = squares - true.square() / count
        # Equal targets have a variance of 0 up to rounding errors.
        varying = spread > 1e-12 * squares
        return float((1 - errors[varying] / spread[varying]).mean())


# --- sums: every kind ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss(SumMetric):
    """Mean of the task's loss, as in training.

    Sums: the sum of the losses, and the divisor of the mean (float64).
    """

    task: Task  # Task that defines the loss.

    higher_is_better: ClassVar[bool] = False

    @classmethod
    def for_task(cls, task: Task) -> Self:
        return cls(task)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.task.losses(outputs, targets)
        return torch.stack([losses.sum(dtype=torch.float64), self.task.total(targets).double()])

    def value(self, total: Tensor) -> float:
        return _ratio(total[0], total[1])


def _are_columns(outputs: Tensor, targets: Tensor) -> bool:
    """Return True if every output has its own target. False: one class for all outputs."""
    return targets.dim() == outputs.dim() or outputs.shape[1] == 1


def _columns(values: Tensor) -> Tensor:
    """Reshape (sample, column, …) to (position, column), and (sample,) to one column."""
    if values.dim() == 1:
        return values.unsqueeze(1)
    return values.movedim(1, -1).reshape(-1, values.shape[1])


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Divide Python numbers, so that the ratio of counts is exact. Return NaN for 0 / 0."""
    count = whole.item()
    return part.item() / count if count else math.nan


# --- collected ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfScores(CollectedMetric):
    """Base class of metrics of ranked scores, averaged over labels or classes.

    Each class is compared with all others. Labels with an undefined metric are left out.
    """

    ignore: int = -100  # Class targets with this value do not count.

    kinds: ClassVar[tuple[EvalSpec, ...]] = ("classes", "labels")
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
        """Return scores and truth as (position, label). The score of a class is its probability."""
        if _are_columns(outputs, targets):
            return _columns(outputs), _columns(targets > 0.5)

        counted = targets.flatten() != self.ignore
        probabilities = _columns(outputs.double().softmax(1))
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
    """Count positive and negative samples at each distinct score, the highest first."""
    values, score_index = torch.unique(scores, return_inverse=True)
    counts = torch.zeros(2, len(values), dtype=torch.float64)
    for row, mask in enumerate((true, ~true)):
        counts[row] = torch.bincount(score_index[mask], minlength=len(values)).double()
    positives, negatives = counts.flip(1)
    return positives, negatives


# --- by name ------------------------------------------------------------------------------------

METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "top5": TopK,
    "loss": Loss,
    "perplexity": Perplexity,
    "f1": F1,
    "micro_f1": MicroF1,
    "label_accuracy": LabelAccuracy,
    "average_precision": AveragePrecision,
    "auroc": AUROC,
    "rmse": RMSE,
    "mae": MAE,
    "r2": R2,
    "dice": Dice,
    "iou": IoU,
    "pooled_dice": PooledDice,
    "pooled_iou": PooledIoU,
}
_TOP_K = re.compile(r"top[1-9]\d*")
_OF_CLASS = re.compile(r"(dice|iou|pooled_dice|pooled_iou)_(0|[1-9]\d*)")


def kind_of(figure: str) -> type[Metric] | None:
    """Return the class of the metric that a figure in the records shows, without its task.

    Args:
        figure: `NAME`, `local_NAME` or `NAME/DOMAIN`.

    Returns:
        The class, or None if the name is not in `METRICS`.
    """
    name = figure.partition("/")[0].removeprefix("local_")
    if _TOP_K.fullmatch(name):
        return TopK
    if of_class := _OF_CLASS.fullmatch(name):
        name = of_class[1]
    return METRICS.get(name)


def find_metric(name: str, task: Task) -> Metric:
    """Return a metric by its name, with the settings of a task.

    Args:
        name: A name in `METRICS`, `file.py:Metric`, `top` and a number (`top5`), or one of `dice_`,
            `iou_`, `pooled_dice_` and `pooled_iou_` followed by a class (`dice_1`).
        task: Task whose targets the metric reads.

    Raises:
        ConfigError: The name is unknown, is not the name of a metric, or the metric cannot read
            the task's targets.
    """
    if _TOP_K.fullmatch(name):
        metric: Any = TopK(ignore=task.ignored, k=int(name.removeprefix("top")))
    elif of_class := _OF_CLASS.fullmatch(name):
        overlap = METRICS[of_class[1]]
        assert issubclass(overlap, _OfMasks)
        metric = overlap.for_task(task, int(of_class[2]))
    else:
        metric = _made(find(METRICS, name, "metric"), name, task)
    if task.kind is not None and task.kind not in metric.kinds:
        fitting = [metric_name for metric_name, kind in METRICS.items() if task.kind in kind.kinds]
        raise ConfigError(
            f"the metric {name!r} was asked for with {type(task).__name__}; it reads "
            f"{' or '.join(metric.kinds)}, and "
            f"this task has {task.kind} as targets. Metrics for these: {', '.join(fitting)}."
        )
    assert isinstance(metric, Metric)
    return metric


def _made(factory: Any, name: str, task: Task) -> Metric:
    """Create a metric from its class, or from a function of the user."""
    is_metric = isinstance(factory, type) and issubclass(factory, Metric)
    try:
        metric = factory.for_task(task) if is_metric else factory()
    except Exception as error:
        if not is_reference(name):
            raise
        raise ConfigError(f"the metric {name} was called and failed: {said(error)}") from error
    if not isinstance(metric, (SumMetric, CollectedMetric)):
        raise ConfigError(
            f"the metric {name} was asked for; it is a {type(metric).__name__}. A subclass of "
            "fedquilt.tasks.SumMetric or CollectedMetric fits."
        )
    return metric
