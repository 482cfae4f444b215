"""Conversion of torch datasets to arrays, for which every sample is read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fedquilt.data.parts import Array
from fedquilt.errors import DataError


def arrays_of(dataset: Dataset[Any], what: str) -> tuple[Tensor, Array]:
    """Read all samples of a dataset, and return (inputs, targets) in the dataset's order.

    Random transforms are applied once to each sample, because a run keeps its samples in memory.
    Targets are a tensor if the first one is a tensor, or else a NumPy array.

    Args:
        dataset: Pairs (input, target), with inputs of equal shape.
        what: Name of the set for messages.

    Raises:
        DataError: There is no sample, or a sample is not a pair, not an array, or differs in shape
            from the first one.
    """
    inputs: list[Tensor] = []
    targets: list[Any] = []
    for index, sample in enumerate(_samples(dataset)):
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise DataError(
                f"{what}: sample {index} is a {type(sample).__name__}; a pair (input, target) is "
                "needed."
            )
        inputs.append(_tensor(sample[0], f"{what}: the input of sample {index}"))
        targets.append(sample[1])
        if inputs[-1].shape != inputs[0].shape:
            raise DataError(
                f"{what}: the first input has shape {tuple(inputs[0].shape)} and that of sample "
                f"{index} {tuple(inputs[-1].shape)}; all must be alike. A transform can crop, pad "
                "or resize them."
            )
    if not inputs:
        raise DataError(
            f"{what}: the {type(dataset).__name__} is empty; it needs at least one sample."
        )
    if isinstance(targets[0], Tensor):
        return torch.stack(inputs), torch.stack(targets)
    return torch.stack(inputs), np.asarray(targets)


def _samples(dataset: Dataset[Any]) -> Iterator[Any]:
    """Return an iterator over a dataset's samples, in its order.

    A dataset with a length is indexed up to its length, because it need not raise IndexError. An
    `IterableDataset` is iterated over until it ends.
    """
    if isinstance(dataset, IterableDataset):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))  # type: ignore[arg-type]


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, (Tensor, np.ndarray, int, float)):
        return torch.as_tensor(value)
    raise DataError(
        f"{what} is a {type(value).__name__}; a tensor or an array is needed, such as a transform "
        "gives (torchvision's ToTensor() for images)."
    )
