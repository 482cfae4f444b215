"""Images and volumes of different sizes in one array, with masks that are −100 in the padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedquilt.checks import whole
from fedquilt.data.federated import IGNORED, Normalise, Pool, Scale
from fedquilt.errors import ConfigError, DataError

NormaliseEach = Literal[Normalise, "sample"]  # "sample": every sample by the mean and std of its own channels

MAX_VALUES = 2**28  # Values of one sample after padding: 1 GiB as float32.


def common_sides(sizes: Sequence[Sequence[int]], multiple_of: int, name: str) -> tuple[int, ...]:
    """Return the smallest sides that hold all samples.

    Args:
        sizes: Size of every sample, such as (height, width).
        multiple_of: Sides are rounded up to a multiple of this number. 1 has no effect.
        name: Name of the data set for messages.

    Raises:
        ConfigError: `multiple_of` is not a whole number above 0.
        DataError: A padded sample would have more than `MAX_VALUES` values.
    """
    if not whole(multiple_of, 1):
        raise ConfigError(f"multiple_of = {multiple_of} was asked for {name}; a whole number of 1 or more fits.")
    sides = tuple(-(-max(lengths) // multiple_of) * multiple_of for lengths in zip(*sizes, strict=True))
    if math.prod(sides) > MAX_VALUES:
        raise DataError(
            f"{name}: samples would be padded to {told(sides)} values; at most {MAX_VALUES:,} are allowed. Cut or "
            "resize the largest samples."
        )
    return sides


def stacked(arrays: Sequence[np.ndarray], sides: Sequence[int], fill: int, dtype: np.dtype | type) -> np.ndarray:
    """Stack arrays into one, with padding at the end of every side.

    Args:
        arrays: Arrays whose last dimensions are a size: (channel, *size) or (*size).
        sides: Sides of the result, none shorter than an array's.
        fill: Value of the padding.
        dtype: Type of the result.

    Returns:
        (sample, *sides) or (sample, channel, *sides).
    """
    leading = arrays[0].shape[: arrays[0].ndim - len(sides)]
    shape = (len(arrays), *leading, *sides)
    try:
        stack = np.full(shape, fill, dtype)
    except MemoryError as error:
        raise DataError(f"{len(arrays)} samples padded to {told(sides)} do not fit into memory: {error}.") from error
    for position, array in enumerate(arrays):
        box = [slice(length) for length in array.shape[array.ndim - len(sides) :]]
        stack[position][(..., *box)] = array
    return stack


def boxes(array: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Return views of the true part of every padded sample.

    Args:
        array: (sample, …, *sides)
        sizes: (sample, dimension) True size of every sample, from the beginning of each side.
    """
    return [sample[(..., *map(slice, size))] for sample, size in zip(array, sizes.tolist(), strict=True)]


def are_masks(inputs: np.ndarray, targets: np.ndarray) -> bool:
    """Return True if targets are masks: a whole number for every pixel or voxel of an input.

    Args:
        inputs: (sample, channel, *size)
        targets: (sample, …)
    """
    return targets.dtype.kind in "bui" and targets.ndim >= 3 and targets.shape[1:] == inputs.shape[2:]


def padded(
    inputs: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    shapes: Sequence[np.ndarray | None],
    public: np.ndarray | None,
    multiple_of: int,
    standardise: bool,
    name: str,
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray | None]:
    """Pad arrays with masks to common sides, and mark what is outside of true shapes with −100.

    Args:
        inputs: (sample, channel, *sides) of the training part and, if there is one, of the test part.
        masks: (sample, *sides) of the same parts.
        shapes: (sample, dimension) True shapes in each part. None: all of an array is true.
        public: (sample, channel, *sides) of inputs that have no masks. None: there are none.
        multiple_of: Sides are rounded up to a multiple of this number. 1 has no effect.
        standardise: Standardise every sample inside of its true shape.
        name: Name of the data set for messages.

    Returns:
        Inputs and masks of the parts, and public inputs.
    """
    arrays = [*inputs] if public is None else [*inputs, public]
    sides = common_sides([values.shape[2:] for values in arrays], multiple_of, name)
    true_inputs, true_masks = [], []
    for values, targets, sizes in zip(inputs, masks, shapes, strict=True):
        if not are_masks(values, targets) or len(values) != len(targets):
            raise DataError(
                f"{name}: inputs have shape {values.shape} and masks {targets.shape} of {targets.dtype}; a mask has a "
                "whole number for every pixel or voxel."
            )
        checked = _true_shapes(sizes, values, name)
        true_inputs.append(boxes(values, checked))
        true_masks.append(boxes(targets, checked))

    def stack(samples: Sequence[np.ndarray]) -> np.ndarray:
        if standardise:
            return stacked([standardised(sample) for sample in samples], sides, 0, np.float32)
        return stacked(samples, sides, 0, _stored_type(samples[0]))

    outputs = [padded_masks(part, sides) for part in true_masks]
    check_foreground(name, outputs)
    return [stack(part) for part in true_inputs], outputs, None if public is None else stack(list(public))


def _stored_type(sample: np.ndarray) -> np.dtype:
    """Return the type in which intensities are stored: whole numbers that are not bytes become real numbers."""
    return sample.dtype if sample.dtype.kind == "f" or sample.dtype == np.uint8 else np.dtype(np.float32)


def _true_shapes(shapes: np.ndarray | None, inputs: np.ndarray, name: str) -> np.ndarray:
    """Return the checked true shape of every sample: (sample, dimension)."""
    sides = inputs.shape[2:]
    if shapes is None:
        return np.tile(sides, (len(inputs), 1))
    if shapes.dtype.kind not in "ui" or shapes.shape != (len(inputs), len(sides)):
        raise DataError(
            f"{name}: true shapes are {shapes.dtype} of shape {shapes.shape}; {len(inputs)} samples of {told(sides)} "
            f"need whole numbers of shape {(len(inputs), len(sides))}."
        )
    wrong = ((shapes < 1) | (shapes > np.array(sides))).any(1)
    if wrong.any():
        sample = int(wrong.argmax())
        raise DataError(
            f"{name}: sample {sample} has the true shape {told(shapes[sample].tolist())}; it must be at least 1 and at "
            f"most {told(sides)}, as the array is."
        )
    return shapes


def padded_masks(masks: Sequence[np.ndarray], sides: Sequence[int]) -> np.ndarray:
    """Stack masks (*size) into (sample, *sides), −100 in the padding."""
    return stacked(masks, sides, IGNORED, np.int64)


def standardised(sample: np.ndarray) -> np.ndarray:
    """Return (channel, *size) as float32, every channel with mean 0 and standard deviation 1.

    A channel that is constant becomes 0.

    Args:
        sample: (channel, *size) Values of one sample.
    """
    values = sample.astype(np.float64)
    axes = tuple(range(1, sample.ndim))
    centred = values - values.mean(axes, keepdims=True)
    std = centred.std(axes, keepdims=True)
    return np.asarray(centred / np.where(std > 0, std, 1.0), np.float32)


def each_standardised(samples: np.ndarray) -> np.ndarray:
    """Return (sample, channel, …) as float32, every channel of every sample standardised."""
    if samples.ndim < 2:
        raise DataError(f'normalise = "sample" was asked for; a sample has one value in shape {samples.shape}.')
    return np.stack([standardised(sample) for sample in samples])


def scale_of_counted(
    pool: Pool, normalise: NormaliseEach, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Scale | None:
    """Return the scale of data with masks, measured where masks of training samples count.

    So padding has no part in mean and standard deviation.

    Args:
        pool: Data whose targets are masks.
        normalise: The way asked for. With "sample" values are standardised already.
        mean: Mean of each channel, if it was given. Empty: by `normalise`.
        std: Standard deviation of each channel, together with `mean`.
    """
    if normalise == "sample":
        refuse_both(normalise, mean, std)
        return None
    return Scale.of(pool.inputs, normalise, mean, std, counted=pool.targets != IGNORED)


def refuse_both(normalise: NormaliseEach, mean: Sequence[float], std: Sequence[float]) -> None:
    """Refuse a mean and a standard deviation beside normalise = "sample"."""
    if normalise == "sample" and (mean or std):
        raise ConfigError(
            'normalise = "sample" was asked for, which measures mean and std of every sample, and so were mean or '
            "std. Leave out one of the two."
        )


def check_foreground(name: str, masks: Sequence[np.ndarray]) -> None:
    """Refuse masks in which no class but 0, the background, is anywhere.

    Args:
        name: Name of the data set for messages.
        masks: (sample, *sides) of the training and of the test part.
    """
    if not any((part > 0).any() for part in masks):
        found = ", ".join(str(value) for value in sorted({int(v) for part in masks for v in np.unique(part)}))
        raise DataError(
            f"{name}: no mask has foreground; all values are {found}. Classes are numbered from 0, which is the "
            f"background, and {IGNORED} does not count."
        )


def told(sides: Sequence[int]) -> str:
    """Return a size in the form 48×64×48."""
    return "×".join(map(str, sides))
