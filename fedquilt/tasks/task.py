"""The abstract task, which defines targets, loss and metrics."""

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
from fedquilt.tasks.metrics.base import CollectedMetric, Metric, SumMetric, TargetKind
from fedquilt.tasks.metrics.registry import find_metric


class Augment(Protocol):
    """Random crops and flips of one batch, which `Task.augment_targets` can apply to targets."""

    def __call__(self, images: Tensor, padding: float = 0.0, /) -> Tensor:
        """Return images that are cropped and flipped exactly like the inputs.

        Args:
            images: (sample, channel, *size) Images with the size of the inputs.
            padding: Value of pixels that a crop takes from outside of the image.
        """


@dataclass(frozen=True)
class Task(ABC):
    """A learning task: the meaning of targets, the loss of outputs, and metrics.

    Outputs have their classes, labels or columns in dimension 1: (sample, class, …). The caller
    moves that dimension there. `losses`, `total`, `mean_loss`, `divergences` and `sums` must be
    pure functions without control flow that depends on values. They may be called under `vmap` and
    `torch.func.grad`, and captured in a CUDA graph.

    A new task implements `losses`, and `usual_metrics` or `make_metrics`.
    """

    _: KW_ONLY
    metrics: tuple[str, ...] = ()  # Names of metrics, the main one first. Empty: the usual ones.
    max_samples: int = 10_000  # Test samples whose outputs are kept for metrics of all outputs.

    kind: ClassVar[TargetKind | None] = None  # Kind of targets. None: a kind that fedquilt lacks.
    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # Names of metrics, the main one first.

    def __post_init__(self) -> None:
        within(self, max_samples="[1, inf)")
        if isinstance(self.metrics, str):
            problem = (
                f"{self.metrics!r} was asked for; a list of names would work: [{self.metrics!r}]."
            )
            refuse(self, {"metrics": problem})
        object.__setattr__(self, "metrics", tuple(self.metrics))  # A list has no hash.
        names = [metric.name for metric in self.measured]
        if not names:
            raise ConfigError(f"{type(self).__name__} has no metrics; it needs at least one.")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"{type(self).__name__} has the metric {repeated[0]!r} more than once; name each "
                "once."
            )

    # --- targets ---------------------------------------------------------------------------------

    @property
    def has_classes(self) -> bool:
        """Return True if every target is one class, as masked losses and class rows require."""
        return self.kind == "classes"

    @property
    def ignored(self) -> int:
        """Return the value of targets that do not count. Only tasks with classes use it."""
        return -100

    @property
    def is_plain_entropy(self) -> bool:
        """Return True if the loss is cross-entropy without label smoothing and class weights."""
        return False

    @property
    def counts_background(self) -> bool:
        """Return True if class 0 counts in the means of Dice and IoU over classes.

        Tasks without masks return False.
        """
        return False

    def settled(self, output_shape: Sequence[int]) -> Self:
        """Return the task with all settings that depend on the model's output.

        It is called before a run. Calling it twice must give the same task.

        Args:
            output_shape: Shape of a model's output with its classes in dimension 1.
        """
        return self

    def blank_targets(self, output_shape: Sequence[int]) -> Tensor:
        """Return placeholder targets for samples without targets. All of them count.

        Distillation on public samples needs them, because means divide by the number of targets
        that count.

        Args:
            output_shape: Shape of the outputs with their classes in dimension 1: (sample, class,
                …).
        """
        if self.kind == "classes":
            return torch.full((output_shape[0], *output_shape[2:]), 1 if self.ignored == 0 else 0)
        return torch.zeros(
            tuple(output_shape), dtype=torch.bool if self.kind == "labels" else torch.float32
        )

    def num_outputs(self, targets: Tensor, num_classes: int) -> int:
        """Return the number of outputs that a model needs: target columns, or classes.

        Args:
            targets: Targets of all samples.
            num_classes: Classes of the data set. 0: targets are not classes.
        """
        return 1 if targets.dim() == 1 else targets.shape[1]

    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        """Return the reason why targets do not fit the output, or an empty string if they fit.

        Args:
            targets: Targets of any number of samples.
            output_shape: Shape of a model's output with its classes in dimension 1. Its first
                entry has no effect.
        """
        return ""

    def check(self, targets: Tensor, output_shape: Sequence[int], name: str = "data") -> None:
        """Raise an error if targets or metrics do not fit the output.

        Args:
            targets: Targets of any number of samples.
            output_shape: Shape of a model's output with its classes in dimension 1. Its first
                entry has no effect.
            name: Name of the data set for the message.

        Raises:
            DataError: The targets do not fit the output.
            ConfigError: A metric does not fit it.
        """
        if len(output_shape) < 2:
            raise DataError(
                f"{type(self).__name__}: the model's output has shape {tuple(output_shape)}; "
                "(sample, outputs) is needed, also where there is one output for each sample."
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
            DataError: The targets cannot be learnt or measured.
        """
        return

    def augment_targets(self, targets: Tensor, augment: Augment) -> Tensor:
        """Apply the random crops and flips of the inputs to their targets.

        Most targets do not change. A task whose targets are images returns `augment(targets)`.

        Args:
            targets: Targets of one batch.
            augment: Crops and flips images (sample, channel, *size) as the inputs were cropped and
                flipped.
        """
        return targets

    # --- loss ------------------------------------------------------------------------------------

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every target, (sample, …). It is 0 for targets that do not count.

        Args:
            outputs: (sample, class, …) Outputs of a net.
            targets: (sample, …) Targets.
        """

    def counted(self, targets: Tensor) -> Tensor:
        """Return booleans in the shape of `losses`, True for targets that count. Here all count."""
        return torch.ones_like(targets, dtype=torch.bool)

    def total(self, targets: Tensor) -> Tensor:
        """Return the divisor of the mean loss, a scalar: the number of targets that count."""
        return self.counted(targets).sum()

    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss over the targets that count: the scalar that training descends.

        The weight of a sample is its number of targets that count, such as the tokens of a text.

        Args:
            outputs: (sample, class, …) Outputs of a net.
            targets: (sample, …) Targets.
            weights: (sample,) Factor of each sample's losses. The mean still divides by `total`.
                None: 1 for each.
        """
        return self.mean(self.losses(outputs, targets), targets, weights)

    def mean(self, losses: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average values of single targets as `mean_loss` does.

        Args:
            losses: (sample, …) Values in the shape of `losses`, 0 for targets that do not count.
            targets: (sample, …) Targets.
            weights: (sample,) Factor of each sample. None: 1 for each.
        """
        if weights is not None:
            losses = losses * weights.reshape(-1, *[1] * (losses.dim() - 1))
        return losses.sum() / self.total(targets).to(losses.dtype)

    def divergences(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return the distance of outputs from a teacher's outputs, for every target.

        It is 0 if both agree or if the target does not count. Distillation uses its mean,
        `divergences(…).sum() / counted(targets).sum()`.

        Args:
            outputs: (sample, class, …) Outputs of the net that learns.
            teacher: (sample, class, …) Outputs of the net that it learns from.
            targets: (sample, …) Targets, which determine the positions that count.
        """
        raise ConfigError(
            f"{type(self).__name__} was asked for with a method that distils; it does not say how "
            f"far outputs are from a teacher's. Define {type(self).__name__}.divergences, or "
            "choose a method that does not distil."
        )

    # --- metrics ---------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> tuple[Metric, ...]:
        """Return the metrics, the main one first. They are created once for each task object."""
        return self.make_metrics()

    def make_metrics(self) -> tuple[Metric, ...]:
        """Create the metrics that the user names in `metrics`, or the usual ones of the task."""
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

        Sums add over batches and devices. Integers stay exact, and real numbers are float64.

        Args:
            outputs: (sample, class, …) Outputs of a net.
            targets: (sample, …) Targets.
            present: (class,) False for classes whose outputs are replaced by `absent` before a
                prediction. None: no class is replaced.
            absent: Replacement. With -inf the class is never predicted. With 0 it is predicted if
                all other outputs are negative.
        """
        hidden = hide_absent(outputs, present, absent)
        sums_by_name: dict[str, Tensor] = {}
        for metric in self.measured:
            if not isinstance(metric, SumMetric):
                continue
            if metric.same_sums_as in sums_by_name:
                sums_by_name[metric.name] = sums_by_name[metric.same_sums_as]
            else:
                visible = hidden if metric.of_predictions else outputs
                sums_by_name[metric.name] = _exact(metric.sums(visible, targets))
        return sums_by_name

    def metric_of(self, figure: str) -> Metric:
        """Return the metric that a figure in the records shows. Unknown names give the main metric.

        Args:
            figure: A metric's name, `local_NAME` (the mean over clients' own test samples),
                `NAME/DOMAIN`, or `standard` and `robust`, which show the main metric.
        """
        name = figure.partition("/")[0]
        named = {metric.name: metric for metric in self.measured}
        return named.get(name) or named.get(name.removeprefix("local_")) or self.main

    def values(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics by name, from `totals`, which are their sums over all batches by name.

        Metrics without sums in `totals` are left out.
        """
        return {
            metric.name: metric.value(totals[metric.name])
            for metric in self.measured
            if isinstance(metric, SumMetric) and metric.name in totals
        }

    def collected_values(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the values of the metrics that need all outputs at once, by name.

        Args:
            outputs: (sample, class, …) Outputs of the samples at `kept_positions`.
            targets: (sample, …) Their targets.
        """
        return {metric.name: metric.value(outputs, targets) for metric in self.collected}

    def kept_positions(self, count: int) -> Tensor:
        """Return positions of samples whose outputs are kept for metrics that need all of them.

        These are all positions of `count` samples, or `max_samples` evenly spaced ones if there are
        more.
        """
        num_kept = min(count, self.max_samples)
        return torch.arange(num_kept) * count // max(num_kept, 1)

    def refuse_collected(self, component: str) -> None:
        """Raise a ConfigError if a metric needs outputs where they must not leave a device.

        Args:
            component: It keeps outputs on devices. An example is "the engine 'remote'".
        """
        if names := ", ".join(metric.name for metric in self.collected):
            sum_metrics = [metric.name for metric in self.measured if isinstance(metric, SumMetric)]
            raise ConfigError(
                f"{type(self).__name__} measures {names}, which needs the outputs of all samples; "
                f"{component} does not let outputs leave a device. task.metrics = {sum_metrics} "
                "would work."
            )


def _exact(sums: Tensor) -> Tensor:
    return sums.double() if sums.is_floating_point() else sums


def hide_absent(outputs: Tensor, present: Tensor | None, absent: float = -math.inf) -> Tensor:
    """Return outputs in which classes that are not present have the value `absent`.

    The result is a copy, or the same tensor if `present` is None.

    Args:
        outputs: (sample, class, …) Outputs of a net.
        present: (class,) False for classes whose outputs are replaced. None: no class.
        absent: Value that replaces them.
    """
    if present is None:
        return outputs
    return outputs.masked_fill(~present.reshape([1, -1] + [1] * (outputs.dim() - 2)), absent)


def columns_unfit(targets: Tensor, output_shape: Sequence[int]) -> str:
    """Return the reason why targets are not one for each output, or an empty string if they are.

    Args:
        targets: Targets, which should be (sample, k, …) for k outputs, or (sample,) for one output.
        output_shape: Shape of a model's output, (sample, k, …).
    """
    expected = tuple(output_shape[1:])
    shape = tuple(targets.shape[1:])
    if shape == expected or (not shape and expected == (1,)):
        return ""
    return (
        f"the output of a sample has shape {expected} and asks for as many targets; they have "
        f"shape {shape}"
    )
