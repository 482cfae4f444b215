"""Arrays, tensors and datasets of the user as checked tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedquilt.data.datasets import arrays_of
from fedquilt.data.parts import Array
from fedquilt.errors import DataError

_log = logging.getLogger(__name__)
Samples = tuple[Array, Array] | Dataset[Any]  # (inputs, targets), or a Dataset of such pairs


IGNORED = -100  # Target of padding, which counts neither in the loss nor in the accuracy.
MAX_CLASSES = 2**20  # Limit on classes. Larger targets are taken for something else than labels.
_ONE = "one array or tensor of all samples is wanted"
_JOIN = (
    "If there is one array for each client, join the arrays of all clients (numpy.concatenate), "
    "and list each client's rows in `parts`."
)


def read_samples(samples: Samples, name: str, set_name: str) -> tuple[Array, Array]:
    """Return (inputs, targets) of one set. A torch Dataset is read into arrays, and a pair stays.

    Args:
        samples: (inputs, targets), or a torch Dataset of such pairs.
        name: Name of the data for messages.
        set_name: "training" or "test", for messages.
    """
    if isinstance(samples, Dataset):
        return arrays_of(samples, f"{name}: the {set_name} set")
    return samples


def number_named_targets(
    train: tuple[Array, Array],
    test: tuple[Array, Array] | None,
    class_names: tuple[str, ...],
    name: str,
) -> tuple[tuple[Array, Array], tuple[Array, Array] | None, tuple[str, ...]]:
    """Replace targets that are names, such as "cat", by numbers. Other targets stay as they are.

    Both sets are numbered alike. Nothing changes unless the targets of every set are names.

    Args:
        train: (inputs, targets) of the training set.
        test: The same for the test set. None: there is none.
        class_names: Names in the order of their numbers. Empty: the names in the targets, sorted.
        name: Name of the data for messages.

    Returns:
        Both sets with the same inputs, and the names of the classes in the order of their numbers.
        These are `class_names` if targets are not names.

    Raises:
        DataError: A target is not in `class_names`.
    """
    sets = [train] if test is None else [train, test]
    if not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and _are_names(pair[1]) for pair in sets
    ):
        return train, test, class_names
    codes, names = coded([np.asarray(targets).astype(str) for _, targets in sets])
    if class_names:
        if unknown := [label for label in names if label not in class_names]:
            raise DataError(
                f"{name}: there is a target {unknown[0]!r}; classes are {', '.join(class_names)}."
            )
        numbers = np.asarray([class_names.index(label) for label in names])
        codes, names = [numbers[code] for code in codes], tuple(class_names)
    pairs = [(inputs, code) for (inputs, _), code in zip(sets, codes, strict=True)]
    return pairs[0], None if test is None else pairs[1], names


def _are_names(targets: Any) -> bool:
    """Return True if all targets are text, in an array, a list or a column of a table.

    Tensors and lists of different lengths are not text.
    """
    if isinstance(targets, Tensor):
        return False
    try:
        array = np.asarray(targets)
    except ValueError:  # They have different lengths. `target_tensor` reports it.
        return False
    return array.dtype.kind == "U" or _holds_names(array)


def tensor_pair(pair: tuple[Array, Array], name: str, set_name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as tensors of a type that is supported.

    Args:
        pair: (inputs, targets) of one set.
        name: Name of the data for messages.
        set_name: "training" or "test", for messages.

    Raises:
        DataError: These are not two arrays, or have values that are not supported.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(
            f"{name}: the {set_name} set is a {type(pair).__name__}; (inputs, targets) belong "
            f"there, and of each {_ONE}."
        )
    inputs = input_tensor(pair[0], name)
    targets = target_tensor(pair[1], f"{name}: the {set_name} targets")
    return inputs, _without_column(targets, inputs)


def _without_column(targets: Tensor, inputs: Tensor) -> Tensor:
    """Return classes of shape (sample, 1) as (sample,), because columns of tables have that shape.

    With inputs of shape (sample, 1) the targets stay, because these may be sequences of one token
    with one class each.
    """
    is_column = targets.dtype == torch.int64 and targets.shape[1:] == (1,)
    return targets.squeeze(1) if is_column and inputs.shape[1:] != (1,) else targets


def input_tensor(array: Array, name: str) -> Tensor:
    """Return inputs as a tensor of bytes, real numbers or int64, without gradients.

    Bytes and real numbers keep their type. Other whole numbers and booleans become int64. The
    tensor may share the array's memory.

    Args:
        array: (sample, …) Inputs of all samples.
        name: Name of the data for messages.

    Raises:
        DataError: These are several arrays, or have values that are not numbers.
    """
    if isinstance(array, np.ndarray) and array.dtype.kind not in "buif":
        raise DataError(
            f"{name}: inputs are {array.dtype}; bytes, real numbers or whole numbers fit."
        )
    if isinstance(array, np.ndarray) and array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)  # torch supports few operations on other unsigned types.
    # Several inputs per sample are refused here, because torch might stack them.
    if isinstance(array, tuple) and any(isinstance(part, (Tensor, np.ndarray)) for part in array):
        raise DataError(f"{name}: {len(array)} inputs a sample were given; {_ONE}. {_JOIN}")
    try:
        if isinstance(array, list) and any(isinstance(part, np.ndarray) for part in array):
            array = np.asarray(array)  # torch is slow with lists of arrays, and warns.
        inputs = torch.as_tensor(array).detach()  # Samples need no gradients.
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = f" {_JOIN}" if isinstance(array, list) else ""
        raise DataError(
            f"{name}: inputs are a {type(array).__name__}; {_ONE} ({error}).{remedy}"
        ) from error
    is_integer = not inputs.is_floating_point() and inputs.dtype != torch.uint8
    return inputs.long() if is_integer else inputs


def target_tensor(array: Array, description: str) -> Tensor:
    """Return targets as a tensor whose type tells the task.

    Whole numbers are classes and become int64. Booleans of shape (sample, label) are labels and
    stay bool. Other booleans become int64. Real numbers become float32, and float64 stays.

    Args:
        array: (sample, …) Targets of all samples.
        description: Description of the targets for messages.

    Raises:
        DataError: Targets are neither numbers nor booleans, or are not finite.
    """
    try:
        array = array.numpy(force=True) if isinstance(array, Tensor) else np.asarray(array)
    except ValueError as error:
        raise DataError(
            f"{description} are a {type(array).__name__} of different lengths; {_ONE}. {_JOIN}"
        ) from error
    if array.dtype.kind == "f":
        floats = array if array.dtype == np.float64 else array.astype(np.float32)
        real = torch.as_tensor(floats)
        if num_bad := int((~real.isfinite()).sum()):
            raise DataError(
                f"{description}: {num_bad} of {real.numel()} are not finite; leave out these "
                "samples, or fill them in."
            )
        return real
    if array.dtype.kind == "b" and array.ndim == 2:
        return torch.as_tensor(array)
    return _numbers(
        array,
        description,
        "classes are whole numbers (int64), and targets of a regression real numbers",
    )


def count_classes(name: str, targets: Tensor, test_targets: Tensor, announced: int) -> int:
    """Return the number of classes. 0: targets are real numbers or rows of labels, not classes.

    It is the announced number, or else one more than the largest target of both sets.

    Args:
        name: Name of the data for messages.
        targets: Targets of the training set.
        test_targets: Targets of the test set.
        announced: Number of classes that the user gave. 0: none was given.

    Raises:
        DataError: The announced number is too small, targets are not classes although a number was
            announced, no target counts, or there are more than `MAX_CLASSES` classes.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool:
        if announced:
            raise DataError(
                f"{name}: {announced} classes were announced; targets are {targets.dtype}. Give "
                "classes as whole numbers from 0 on."
            )
        return 0
    top = int(max(targets.max(), test_targets.max()))
    if top < 0:
        raise DataError(
            f"{name}: no target counts, because all are {IGNORED}. Give at least one class from 0 "
            "on."
        )
    if 0 < announced <= top:
        raise DataError(f"{name}: there is a target {top}; {announced} classes were announced.")
    if max(announced, top + 1) > MAX_CLASSES:
        raise DataError(
            f"{name}: a target is {top}, which would make {max(announced, top + 1):,} classes; "
            f"at most {MAX_CLASSES:,} fit. Number the classes from 0 on without gaps, or give "
            "their names."
        )
    return announced or top + 1


def _numbers(array: Array, description: str, fit: str) -> Tensor:
    """Convert whole numbers or booleans to a tensor of int64.

    Args:
        array: Array or tensor.
        description: Name of the values in the message, in the plural.
        fit: Advice in the message on what would work.

    Raises:
        DataError: The values have another type, such as float.
    """
    array = array.numpy(force=True) if isinstance(array, Tensor) else np.asarray(array)
    if array.dtype.kind not in "bui":
        raise DataError(f"{description} are {array.dtype}; {fit}.")
    return torch.as_tensor(array.astype(np.int64))


def number_groups(
    train: Array | Sequence[str] | None, test: Array | Sequence[str] | None, description: str
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Return the client, or the domain, of each sample of both sets as a number.

    Names are numbered in sorted order over both sets together. Numbers stay as they are.

    Args:
        train: (sample,) Client or domain of each training sample. None: unknown.
        test: (sample,) The same for the test set.
        description: Description for messages, such as "mine: clients".

    Returns:
        Numbers of the training set and of the test set, each None if it is unknown. Then the names
        in the order of their numbers, empty if numbers were given.

    Raises:
        DataError: They are neither whole numbers nor names, or only one set has names.
    """
    present = [labels for labels in (train, test) if labels is not None]
    plain = [
        labels.numpy(force=True) if isinstance(labels, Tensor) else np.asarray(labels)
        for labels in present
    ]
    plain = [labels.astype(str) if _holds_names(labels) else labels for labels in plain]
    names: tuple[str, ...] = ()
    if plain and all(labels.dtype.kind == "U" for labels in plain):
        plain, names = coded(plain)
    codes = [
        _numbers(labels, description, "whole numbers from 0 on fit, or names") for labels in plain
    ]
    return None if train is None else codes[0], None if test is None else codes[-1], names


def _holds_names(codes: np.ndarray) -> bool:
    """Return True if an array holds text as bytes or as Python strings, as columns of tables do.

    NumPy's own type for text (kind U) and empty arrays give False.
    """
    if not codes.size:
        return False
    return codes.dtype.kind == "S" or (
        codes.dtype.kind == "O" and all(isinstance(label, str) for label in codes.flat)
    )


def coded(named: Sequence[np.ndarray]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Replace names in several arrays by numbers, the same number for a name in all of them.

    Args:
        named: Arrays of names, of any shapes.

    Returns:
        Arrays of numbers in the same shapes, and the sorted names. Number k stands for name k.
    """
    names, codes = np.unique(
        np.concatenate([array.reshape(-1) for array in named]), return_inverse=True
    )
    pieces = np.split(codes, np.cumsum([array.size for array in named])[:-1])
    shaped = [piece.reshape(array.shape) for piece, array in zip(pieces, named, strict=True)]
    return shaped, tuple(map(str, names))


def check_samples(
    name: str, set_name: str, inputs: Tensor, targets: Tensor, groups: dict[str, Tensor | None]
) -> None:
    """Refuse inputs, targets and groups of one set that do not fit each other.

    Args:
        name: Name of the data for messages.
        set_name: "training" or "test", for messages.
        inputs: (sample, …)
        targets: (sample, …)
        groups: (sample,) Number of each sample's client and domain, by the keys "clients" and
            "domains". None: unknown.

    Raises:
        DataError: Lengths differ, the set is empty, a class is negative but not −100, or the number
            of a client or domain is negative.
    """
    if not (inputs.dim() and targets.dim()):
        raise DataError(
            f"{name}: the {set_name} set has a single number for inputs or targets; {_ONE}."
        )
    if len(inputs) != len(targets):
        raise DataError(
            f"{name}: the {set_name} set has {len(inputs)} inputs and {len(targets)} targets; they "
            "must pair up."
        )
    if not len(inputs):
        raise DataError(f"{name}: the {set_name} set is empty; it needs at least one sample.")
    are_classes = targets.dtype == torch.int64
    if (
        are_classes
        and int(low := targets.min()) < 0
        and bool((targets[targets < 0] != IGNORED).any())
    ):
        raise DataError(
            f"{name}: a {set_name} target is {int(low)}; classes count from 0, and {IGNORED} is "
            "for padding."
        )
    for noun, codes in groups.items():
        if codes is not None and (codes.dim() != 1 or len(codes) != len(inputs)):
            raise DataError(
                f"{name}: the {set_name} set has {len(inputs)} samples and {tuple(codes.shape)} "
                f"{noun}."
            )
        if codes is not None and int(codes.min()) < 0:
            raise DataError(f"{name}: one of the {noun} is {int(codes.min())}; they count from 0.")


def warn_of_nan(test_inputs: Tensor, name: str) -> None:
    """Log a warning if test inputs hold NaN or infinite values. Nothing is changed or refused.

    Args:
        test_inputs: (sample, …) Inputs of the test set.
        name: Name of the data for the message.
    """
    if not test_inputs.is_floating_point():
        return
    is_finite = test_inputs.isfinite().reshape(len(test_inputs), -1).all(1)
    if not bool(is_finite.all()):
        _log.warning(
            "%d of the %d test samples of %s hold values that are not finite (NaN or infinite). "
            "Predictions for them count as wrong. Leave out these samples, or fill in the values.",
            int((~is_finite).sum()),
            len(test_inputs),
            name,
        )
