"""Tasks: the meaning of targets, the loss of outputs, and the metrics that are reported."""

from __future__ import annotations

from fedquilt.errors import ConfigError
from fedquilt.names import find, is_reference, said
from fedquilt.tasks.check import check_task
from fedquilt.tasks.classification import Classification
from fedquilt.tasks.infer import classes_second, infer
from fedquilt.tasks.metrics.base import CollectedMetric, Metric, SumMetric
from fedquilt.tasks.metrics.registry import METRICS
from fedquilt.tasks.multilabel import MultiLabel
from fedquilt.tasks.next_token import NextToken
from fedquilt.tasks.regression import Regression
from fedquilt.tasks.segmentation import Segmentation
from fedquilt.tasks.task import Augment, Task, hide_absent

__all__ = [
    "METRICS",
    "TASKS",
    "Augment",
    "Classification",
    "CollectedMetric",
    "Metric",
    "MultiLabel",
    "NextToken",
    "Regression",
    "Segmentation",
    "SumMetric",
    "Task",
    "check_task",
    "classes_second",
    "find_task",
    "hide_absent",
    "infer",
    "is_own",
]

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "next_token": NextToken,
    "regression": Regression,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
}


def find_task(task: str | Task) -> Task:
    """Return a task by name with its default options. A task object is returned unchanged.

    Args:
        task: A name in `TASKS`, `file.py:Task`, or a task.

    Raises:
        ConfigError: The name is unknown, is not the name of a task, or the user's task fails.
    """
    if isinstance(task, Task):
        return task
    factory = find(TASKS, task, "task")
    try:
        instance = factory()
    except Exception as error:
        if not is_reference(task):
            raise
        raise ConfigError(f"the task {task} was called and failed: {said(error)}") from error
    if not isinstance(instance, Task):
        raise ConfigError(
            f"the task {task} was asked for; it is a {type(instance).__name__}. A subclass of "
            "fedquilt.tasks.Task fits."
        )
    return instance


def is_own(task: Task) -> bool:
    """Return True if the class of the task or of one of its metrics is the user's own code."""
    parts = (type(task), *(type(metric) for metric in task.measured))
    return any(not part.__module__.startswith(f"{__name__}.") for part in parts)
