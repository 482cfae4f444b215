"""Try a task on a few samples before a run, so that a mistake in it is found early."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import said
from fedquilt.tasks.metrics.base import SumMetric
from fedquilt.tasks.task import Task

T = TypeVar("T")


def check_task(task: Task, outputs: Tensor, targets: Tensor, name: str = "data") -> None:
    """Run the loss and all metrics once on a few samples, and refuse invalid results.

    It tests a task of the user's own before a run. No weights are changed.

    Args:
        task: Task to check.
        outputs: (sample, class, …) Outputs of a model for at least two samples, classes in
            dimension 1.
        targets: (sample, …) Their targets.
        name: Name of the data set, for error messages.

    Raises:
        DataError: The targets do not fit the outputs.
        ConfigError: The loss or a metric fails, or returns the wrong shape or type, alone or under
            vmap.
    """
    outputs = outputs.detach()
    task.check(targets, outputs.shape, name)
    _check_loss(task, outputs, targets)
    for metric in task.measured:
        if isinstance(metric, SumMetric):
            _check_sums(task, metric, outputs, targets)
    collected = _called(task, "collected_values", lambda: task.collected_values(outputs, targets))
    for figure, value in collected.items():
        _check_figure(task, figure, value)


def _check_loss(task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Raise a ConfigError if `losses`, `counted` or `mean_loss` is wrong in shape or type.

    The mean loss must also have a gradient under vmap that is not 0 everywhere. The arguments are
    those of `check_task`.
    """
    losses = _called(task, "losses", lambda: task.losses(outputs, targets))
    counted = _called(task, "counted", lambda: task.counted(targets))
    _check_tensor(task, "losses", losses)
    _check_tensor(task, "counted", counted)
    if losses.shape != counted.shape or losses.shape[:1] != targets.shape[:1]:
        raise ConfigError(
            f"{type(task).__name__}.losses returned shape {tuple(losses.shape)} and `counted` "
            f"{tuple(counted.shape)} for {len(targets)} samples with targets of shape "
            f"{tuple(targets.shape[1:])}; both must be alike and begin with the sample: "
            f"({len(targets)}, …)."
        )

    weights = torch.ones(len(targets), dtype=outputs.dtype, device=outputs.device)
    for sample_weights in (None, weights):
        loss = _called(task, "mean_loss", partial(task.mean_loss, outputs, targets, sample_weights))
        _check_tensor(task, "mean_loss", loss)
        if loss.shape or not loss.is_floating_point():
            raise ConfigError(
                f"{type(task).__name__}.mean_loss returned {loss.dtype} of shape "
                f"{tuple(loss.shape)}; one real number fits, of shape ()."
            )
    gradient = _called(
        task,
        "mean_loss under vmap",
        lambda: vmap(grad(task.mean_loss))(outputs[None], targets[None]),
    )
    if not bool(gradient.any()):
        raise ConfigError(
            f"{type(task).__name__}.mean_loss has a gradient of 0 at all outputs of the example, "
            "so that nothing would be learnt. It must be computed from the outputs by operations "
            "of torch that have a gradient."
        )


def _check_sums(task: Task, metric: SumMetric, outputs: Tensor, targets: Tensor) -> None:
    """Raise a ConfigError if sums do not add up over batches, or change shape under vmap.

    The sums of the first sample and of the others must add to the sums of all. The value of the
    metric is checked too.

    Args:
        task: Task of the metric, for messages.
        metric: Metric to check.
        outputs: (sample, class, …) Outputs of at least two samples.
        targets: (sample, …) Their targets.
    """
    subject = f"metric {metric.name!r}"
    total = _called(task, subject, lambda: metric.sums(outputs, targets))
    _check_tensor(task, subject, total)
    first = _called(task, subject, lambda: metric.sums(outputs[:1], targets[:1]))
    remainder = _called(task, subject, lambda: metric.sums(outputs[1:], targets[1:]))
    if not total.shape == first.shape == remainder.shape:
        raise ConfigError(
            f"{type(task).__name__}: the sums of the {subject} have shape {tuple(total.shape)} "
            f"for {len(targets)} samples and {tuple(first.shape)} for one; they must not depend "
            "on the number of samples."
        )
    summed = (first + remainder).double()
    if not torch.allclose(summed, total.double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"{type(task).__name__}: the sums of the {subject} over one batch are "
            f"{total.tolist()}, and over two parts of it {(first + remainder).tolist()}; they must "
            "add up. Return sums, and divide in `value`."
        )
    stacked = vmap(metric.sums)
    mapped = _called(task, f"{subject} under vmap", lambda: stacked(outputs[None], targets[None]))
    if mapped.shape[1:] != total.shape:
        raise ConfigError(
            f"{type(task).__name__}: the sums of the {subject} have shape {tuple(total.shape)}, "
            f"and under vmap {tuple(mapped.shape[1:])}; they must be alike."
        )
    _check_figure(task, metric.name, _called(task, subject, lambda: metric.value(total)))


def _called(task: Task, part: str, function: Callable[[], T]) -> T:
    """Call a function, and raise any error of the user's code as a ConfigError.

    Errors of fedquilt stay as they are.

    Args:
        task: Task whose part is called, for the message.
        part: Name of the part, such as "losses".
        function: Calls the part.
    """
    try:
        return function()
    except FedquiltError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__}: {part} was tried on a few samples and failed: {said(error)}"
        ) from error


def _check_tensor(task: Task, part: str, value: object) -> None:
    if not isinstance(value, Tensor):
        type_name = type(value).__name__
        raise ConfigError(f"{type(task).__name__}: {part} returned a {type_name}; a tensor fits.")


def _check_figure(task: Task, name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(
            f"{type(task).__name__}: the value of the metric {name!r} is a "
            f"{type(value).__name__}; a float fits, such as tensor.item()."
        )
