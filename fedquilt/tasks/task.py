"""The abstract task: how targets, loss and metrics belong together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from fedquilt.checks import refuse, within
from fedquilt.errors import ConfigError, DataError
from fedquilt.tasks.metrics import CollectedMetric, Kind, Metric, SumMetric, find_metric


class Augment(Protocol):
    """Random crops and flips of one batch, which `Task.augment_targets` can apply to targets."""

    def __call__(self, images: Tensor, padding: float = 0.0, /) -> Tensor:
        """Return images (sample, channel, *size), moved as the inputs were moved.

        Args:
            images: (sample, channel, *size), with the size of the inputs.
            padding: Value of pixels that a crop takes from outside of the image.
        """


@dataclass(frozen=True)
class Task(ABC):
    """Meaning of targets, the loss of an output, and its metrics.

    Outputs reach a task with their classes, labels or columns in dimension 1: (sample, class, …).
    The caller moves that dimension there. `losses`, `total`, `mean_loss`, `divergences` and `sums`
    are pure: they may be vmapped, differentiated by `torch.func.grad` and captured in a CUDA
    graph, so nothing in them depends on values.

    A subclass of one's own needs `losses`, and `usual_metrics` or `make_metrics`.
    """

    _: KW_ONLY
    metrics: tuple[str, ...] = ()  # Metrics by name, main one first. Empty: the task's usual ones
    max_samples: int = 10_000  # Test samples whose outputs are kept for metrics that need them all

    kind: ClassVar[Kind | None] = None  # What targets are. None: a kind of the user's own
    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # Names of metrics, the main one first

    def __post_init__(self) -> None:
        within(self, max_samples="[1, inf)")
        if isinstance(self.metrics, str):
            told = (
                f"{self.metrics!r} was asked for; a list of names would work: [{self.metrics!r}]."
            )
            refuse(self, {"metrics": told})
        object.__setattr__(self, "metrics", tuple(self.metrics))  # A list has no hash.
        names = [metric.name for metric in self.measured]
        if not names:
            raise ConfigError(f"{type(self).__name__} has no metrics; it needs at least one.")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"{type(self).__name__} has the metric {repeated[0]!r} more than once; name each once."
            )

    # --- targets ----------------------------------------------------------------------------------

    @property
    def has_classes(self) -> bool:
        """Return True if every target is one class, as masked losses and class rows need it."""
        return self.kind == "classes"

    @property
    def ignored(self) -> int:
        """Return the value of targets that do not count, where the task has such a value."""
        return -100

    @property
    def is_plain_entropy(self) -> bool:
        """Return True if the loss is cross-entropy without label smoothing and class weights."""
        return False

    @property
    def counts_background(self) -> bool:
        """Return True if class 0 counts in the means of Dice and IoU over classes."""
        return False

    def settled(self, output_shape: Sequence[int]) -> Self:
        """Return the task with all that depends on the model's output fixed.

        It is called before a run. A task that is settled must stay as it is.

        Args:
            output_shape: Shape of a model's output with its classes in dimension 1.
        """
        return self

    def blank_targets(self, output_shape: Sequence[int]) -> Tensor:
        """Return targets for samples that have none. All of them count, and their values mean nothing.

        Distillation on public samples needs them, because means divide by the targets that count.

        Args:
            output_shape: Shape of the outputs with their classes in dimension 1: (sample, class, …).
        """
        if self.kind == "classes":
            return torch.full((output_shape[0], *output_shape[2:]), 1 if self.ignored == 0 else 0)
        return torch.zeros(
            tuple(output_shape), dtype=torch.bool if self.kind == "labels" else torch.float32
        )

    def num_outputs(self, targets: Tensor, num_classes: int) -> int:
        """Return how many numbers a model puts out for each sample: target columns, or classes.

        Args:
            targets: Targets of all samples.
            num_classes: Classes of the data set, 0 where targets are not classes.
        """
        return 1 if targets.dim() == 1 else targets.shape[1]

    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        """Return why targets do not fit the output, or an empty string if they do.

        Args:
            targets: Targets of any number of samples.
            output_shape: Shape of a model's output with its classes in dimension 1. Its first
                entry does not matter.
        """
        return ""

    def check(self, targets: Tensor, output_shape: Sequence[int], name: str = "data") -> None:
        """Raise an error if targets or metrics do not fit the output.

        Args:
            targets: Targets of any number of samples.
            output_shape: Shape of a model's output with its classes in dimension 1. Its first
                entry does not matter.
            name: Name of the data set for the message.

        Raises:
            DataError: The targets do not fit the output.
            ConfigError: A metric does not fit it.
        """
        if len(output_shape) < 2:
            raise DataError(
                f"{type(self).__name__}: the model's output has shape {tuple(output_shape)}; "
                "(sample, outputs) is "
                "needed, also where there is one output for each sample."
            )
        if why := self.unfit(targets, output_shape):
            raise DataError(f"{type(self).__name__} was asked for on {name}; {why}.")
        for metric in self.measured:
            if why := metric.unfit(tuple(output_shape)):
                raise ConfigError(f"{type(self).__name__} on {name}: {why}")

    def check_whole(self, targets: Tensor, name: str) -> None:
        """Raise an error if all targets of a data set together cannot be learnt or measured.

        Args:
            targets: All training targets, or all test targets.
            name: Name of the data set for the message.

        Raises:
            DataError: As above.
        """
        return

    def augment_targets(self, targets: Tensor, augment: Augment) -> Tensor:
        """Apply to targets what local training does to their inputs (random crops and flips).

        Most targets do not change with it. A task whose targets are images returns
        `augment(targets)`.

        Args:
            targets: Targets of one batch.
            augment: Crops and flips images (sample, channel, *size) as the inputs were cropped and
                flipped.
        """
        return targets

    # --- loss -------------------------------------------------------------------------------------

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every target, 0 for those that do not count: (sample, …).

        Args:
            outputs: (sample, class, …).
            targets: (sample, …).
        """

    def counted(self, targets: Tensor) -> Tensor:
        """Return True for targets that count, in the shape of `losses`."""
        return torch.ones_like(targets, dtype=torch.bool)

    def total(self, targets: Tensor) -> Tensor:
        """Return what the mean loss divides by: the number of targets that count."""
        return self.counted(targets).sum()

    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss over the targets that count: the scalar that training descends.

        A sample with many targets (a text with many tokens) counts as often as it has targets that
        count.

        Args:
            outputs: (sample, class, …).
            targets: (sample, …).
            weights: (sample,) Factor of each sample's losses. The mean still divides by `total`.
                None: 1 for each.
        """
        return self.mean(self.losses(outputs, targets), targets, weights)

    def mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average values of single targets, in the shape of `losses`, as `mean_loss` does."""
        if weights is not None:
            losses = losses * weights.reshape(-1, *[1] * (losses.dim() - 1))
        return losses.sum() / self.total(targets).to(losses.dtype)

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return how far outputs are from a teacher's, for every target.

        It is 0 where they agree and where a target does not count. Distillation uses its mean,
        `divergences(…).sum() / counted(targets).sum()`.

        Args:
            outputs: (sample, class, …) of the net that learns.
            teacher: (sample, class, …) of the net that it learns from.
            targets: (sample, …), which say what counts.
        """
        raise ConfigError(
            f"{type(self).__name__} was asked for with a method that distils; it does not say how "
            "far outputs are from "
            f"a teacher's. Define {type(self).__name__}.divergences, or choose a method that does "
            "not distil."
        )

    # --- metrics ----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> tuple[Metric, ...]:
        """Return the metrics, the main one first."""
        return self.make_metrics()

    def make_metrics(self) -> tuple[Metric, ...]:
        """Make the metrics, by the names that were asked for or the task's usual ones."""
        names = self.metrics or self.usual_metrics
        return tuple(find_metric(name, self) for name in names)

    @property
    def main(self) -> Metric:
        """Return the metric that tables, targets, milestones and trackers use."""
        return self.measured[0]

    @property
    def collected(self) -> tuple[CollectedMetric, ...]:
        """Return the metrics that need the outputs of all samples."""
        return tuple(metric for metric in self.measured if isinstance(metric, CollectedMetric))

    def sums(
        self,
        outputs: Tensor,
        targets: Tensor,
        present: Tensor | None = None,
        absent: float = -math.inf,
    ) -> dict[str, Tensor]:
        """Return the sums of one batch for every metric that has sums, by name.

        They add over batches and devices. Whole numbers stay exact, and all others are float64.

        Args:
            outputs: (sample, class, …).
            targets: (sample, …).
            present: (class,) False for classes whose outputs are replaced by `absent` in
                predictions. None: nowhere.
            absent: With -inf the class is never predicted. With 0 it is where all other outputs
                are negative.
        """
        hidden = hide_absent(outputs, present, absent)
        found: dict[str, Tensor] = {}
        for metric in self.measured:
            if not isinstance(metric, SumMetric):
                continue
            if metric.same_sums_as in found:
                found[metric.name] = found[metric.same_sums_as]
            else:
                seen = hidden if metric.of_predictions else outputs
                found[metric.name] = _exact(metric.sums(seen, targets))
        return found

    def metric_of(self, figure: str) -> Metric:
        """Return the metric that a figure in the records is made of.

        Args:
            figure: A metric's name, `local_NAME` (the mean over clients' own test samples),
                `NAME/DOMAIN`, or `standard` and `robust`, which are the main metric.
        """
        name = figure.partition("/")[0]
        named = {metric.name: metric for metric in self.measured}
        return named.get(name) or named.get(name.removeprefix("local_")) or self.main

    def values(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of summed-up sums, by name."""
        return {
            metric.name: metric.value(totals[metric.name])
            for metric in self.measured
            if isinstance(metric, SumMetric) and metric.name in totals
        }

    def collected_values(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics that need all outputs, of the samples at `kept_positions`."""
        return {metric.name: metric.value(outputs, targets) for metric in self.collected}

    def kept_positions(self, count: int) -> Tensor:
        """Return which of `count` samples are kept: all, or `max_samples` at equal distances."""
        kept = min(count, self.max_samples)
        return torch.arange(kept) * count // max(kept, 1)

    def refuse_collected(self, who: str) -> None:
        """Raise an error if a metric needs outputs where they must not leave a device.

        Args:
            who: What keeps outputs on devices, for the message: "the engine 'remote'".
        """
        if names := ", ".join(metric.name for metric in self.collected):
            others = [metric.name for metric in self.measured if isinstance(metric, SumMetric)]
            raise ConfigError(
                f"{type(self).__name__} measures {names}, which needs the outputs of all samples; "
                f"{who} does not let "
                f"outputs leave a device. task.metrics = {others} would work."
            )


def _exact(sums: Tensor) -> Tensor:
    return sums.double() if sums.is_floating_point() else sums


def hide_absent(outputs: Tensor, present: Tensor | None, absent: float = -math.inf) -> Tensor:
    """Replace the outputs of classes that are not present.

    Args:
        outputs: (sample, class, …).
        present: (class,) False where outputs are replaced. None: nowhere.
        absent: What they are replaced by.
    """
    if present is None:
        return outputs
    return outputs.masked_fill(~present.reshape([1, -1] + [1] * (outputs.dim() - 2)), absent)


def columns_unfit(targets: Tensor, output_shape: Sequence[int]) -> str:
    """Return why targets are not one for each output, or an empty string if they are.

    They have shape (sample, k, …) for k outputs, or (sample,) for one output.
    """
    wanted = tuple(output_shape[1:])
    found = tuple(targets.shape[1:])
    if found == wanted or (not found and wanted == (1,)):
        return ""
    return f"the output of a sample has shape {wanted} and asks for as many targets; they have shape {found}"
