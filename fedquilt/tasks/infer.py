"""Find the task that fits targets and a model's output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedquilt.errors import ConfigError, DataError
from fedquilt.tasks.classification import Classification
from fedquilt.tasks.multilabel import MultiLabel
from fedquilt.tasks.next_token import NextToken
from fedquilt.tasks.regression import Regression
from fedquilt.tasks.task import Task


def infer(
    targets: Tensor,
    output_shape: Sequence[int],
    class_dim: int = 1,
    name: str = "data",
) -> Task:
    """Return the task that fits targets and the shape of a model's output.

    - Integers are classes if the output has one dimension more than the targets. If targets have
      shape (sample, length), the classes are tokens.
    - Integers that are all 0 or 1, one for each output, are labels.
    - Real numbers, one for each output, are regression targets. If they are all 0 or 1, they may
      also be labels.

    Args:
        targets: Targets of any number of samples. All of them are checked.
        output_shape: Shape of the model's output, which begins with the sample. The number of
            samples has no effect.
        class_dim: Dimension of the output with the classes, labels or columns.
        name: Name of the data set, for error messages.

    Raises:
        DataError: No task fits.
        ConfigError: More than one task fits, so that the user has to choose.
    """
    shape = classes_second(output_shape, class_dim)
    classes = NextToken() if targets.dim() == 2 else Classification()
    candidates: list[Task] = [classes, MultiLabel(), Regression()]
    reasons = {task: task.unfit(targets, shape) for task in candidates}
    fitting = [task for task, why in reasons.items() if not why]

    if classes in fitting or len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(type(task).__name__ for task in fitting)
        raise ConfigError(
            f"{name}: {names} both fit targets of {targets.dtype} that are all 0 or 1 and outputs "
            f"of shape {tuple(shape[1:])}. Choose one: task=MultiLabel() or task=Regression(), "
            "--task multilabel or --task regression."
        )
    listed_reasons = "\n  ".join(f"{type(task).__name__}: {why}." for task, why in reasons.items())
    raise DataError(
        f"{name}: targets are {targets.dtype} of shape {tuple(targets.shape[1:])} a sample, and "
        "the model's output has "
        f"shape {tuple(output_shape[1:])} a sample; no task fits both.\n  {listed_reasons}\n"
        "Give other targets or another model, or a task of your own: task=…, --task file.py:Task."
    )


def classes_second(output_shape: Sequence[int], class_dim: int) -> tuple[int, ...]:
    """Return the shape of an output after its classes were moved to dimension 1.

    Args:
        output_shape: Shape of the output, which begins with the sample.
        class_dim: Dimension of the classes in this shape.

    Raises:
        DataError: The output has one dimension, so that samples would be classes.
    """
    if len(output_shape) < 2:
        raise DataError(
            f"the model's output has shape {tuple(output_shape)}; (sample, outputs) is needed, "
            "also where there is one output for each sample."
        )
    shape = list(output_shape)
    shape.insert(1, shape.pop(class_dim))
    return tuple(shape)
