"""Metrics by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError
from fedquilt.names import find, is_reference, said
from fedquilt.tasks.metrics.base import (
    CollectedMetric,
    Metric,
    SumMetric,
)
from fedquilt.tasks.metrics.classes import Accuracy, Perplexity, TopK
from fedquilt.tasks.metrics.labels import F1, LabelAccuracy, MicroF1
from fedquilt.tasks.metrics.loss import MeanLoss
from fedquilt.tasks.metrics.masks import Dice, IoU, MaskMetric, PooledDice, PooledIoU
from fedquilt.tasks.metrics.numbers import MAE, R2, RMSE
from fedquilt.tasks.metrics.ranking import AUROC, AveragePrecision

if TYPE_CHECKING:
    from fedquilt.tasks.task import Task


METRICS: dict[str, type[Metric]] = {
    "accuracy": Accuracy,
    "top5": TopK,
    "loss": MeanLoss,
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
    """Return the class of the built-in metric that a figure in the records shows.

    No task is needed. `top5` gives `TopK`, and `dice_1` the class of `dice`.

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
        assert issubclass(overlap, MaskMetric)
        metric = overlap.for_task(task, int(of_class[2]))
    else:
        metric = _made(find(METRICS, name, "metric"), name, task)
    if task.kind is not None and task.kind not in metric.kinds:
        fitting = [metric_name for metric_name, kind in METRICS.items() if task.kind in kind.kinds]
        raise ConfigError(
            f"the metric {name!r} was asked for with {type(task).__name__}; it reads "
            f"{' or '.join(metric.kinds)}, and this task has {task.kind} as targets. Metrics for "
            f"these: {', '.join(fitting)}."
        )
    assert isinstance(metric, Metric)
    return metric


def _made(factory: Any, name: str, task: Task) -> Metric:
    """Create a metric from its class with a task's settings, or by calling a user's function.

    Args:
        factory: Class of a metric, or a function without arguments that returns a metric.
        name: Name by which the user asked for it, for messages.
        task: Task whose targets the metric reads.

    Raises:
        ConfigError: The user's code fails, or returns no metric.
    """
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
