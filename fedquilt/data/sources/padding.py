"""Images and volumes of different sizes in one array, with masks that are −100 in the padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedquilt.checks import whole
from fedquilt.data.convert import IGNORED
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Normalize, Scale
from fedquilt.errors import ConfigError, DataError

# "sample" standardises every sample by the mean and standard deviation of its own channels.
NormalizeEach = Literal[Normalize, "sample"]
MAX_VALUES = 2**28  # Values of one channel of a sample after padding: 1 GiB as float32.


# --- files of arrays ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedPart:
    """Samples of one part of a data set, training or test, which may have masks as targets."""

    inputs: np.ndarray  # (sample, channel, *sides)
    targets: np.ndarray  # (sample, …) A mask is (*sides).
    shapes: np.ndarray | None = None  # (sample, dimension) True shapes. None: none was padded.

    @property
    def has_masks(self) -> bool:
        """Return True if targets are masks: a whole number for every pixel or voxel."""
        if self.targets.dtype.kind not in "bui" or self.targets.ndim < 3:
            return False
        return self.targets.shape[1:] == self.inputs.shape[2:]

    def checked_shapes(self, name: str) -> np.ndarray:
        """Return the true shape of every sample without padding, (sample, dimension).

        Without `shapes` every sample has the sides of the inputs.

        Args:
            name: Name of the data set for messages.

        Raises:
            DataError: Inputs, masks and true shapes do not fit each other.
        """
        check_values(self.inputs, name)
        count = len(self.inputs)
        sides = self.inputs.shape[2:]
        if not self.has_masks or len(self.targets) != count:
            raise DataError(
                f"{name}: inputs have shape {self.inputs.shape} and masks {self.targets.shape} of "
                f"{self.targets.dtype}; a mask has a whole number for every pixel or voxel."
            )
        if self.shapes is None:
            return np.tile(sides, (count, 1))
        if self.shapes.dtype.kind not in "ui" or self.shapes.shape != (count, len(sides)):
            raise DataError(
                f"{name}: true shapes are {self.shapes.dtype} of shape {self.shapes.shape}; "
                f"{count} samples of {shape_text(sides)} need whole numbers of shape "
                f"{(count, len(sides))}."
            )
        outside = ((self.shapes < 1) | (self.shapes > np.array(sides))).any(1)
        if outside.any():
            sample = int(outside.argmax())
            raise DataError(
                f"{name}: sample {sample} has the true shape "
                f"{shape_text(self.shapes[sample].tolist())}; it must be at least 1 and at most "
                f"{shape_text(sides)}, as the array is."
            )
        return self.shapes

    def padded(self, sides: Sequence[int], standardize: bool, name: str) -> PaddedPart:
        """Return the part with new sides: inputs are 0 and masks −100 outside of true shapes.

        Args:
            sides: Sides of the result, none shorter than those of the inputs.
            standardize: True: standardise every sample inside of its true shape.
            name: Name of the data set, which errors begin with.

        Raises:
            DataError: Inputs, masks and true shapes do not fit each other.
        """
        shapes = self.checked_shapes(name)
        inputs = stacked_inputs(_boxes(self.inputs, shapes), sides, standardize)
        return PaddedPart(inputs, padded_masks(_boxes(self.targets, shapes), sides))


def check_values(inputs: np.ndarray, name: str) -> None:
    """Raise a DataError that names the data set `name`, if inputs are empty or not numbers."""
    if inputs.dtype.kind not in "buif":
        raise DataError(f"{name}: inputs are {inputs.dtype}; bytes, real or whole numbers fit.")
    if not inputs.size:
        raise DataError(f"{name}: inputs have shape {inputs.shape}; there must be some values.")


def _boxes(array: np.ndarray, shapes: np.ndarray) -> list[np.ndarray]:
    """Return views of the true part of every padded sample.

    Args:
        array: (sample, …, *sides)
        shapes: (sample, dimension) True shape of every sample, from the beginning of each side.
    """
    boxes = [tuple(map(slice, shape)) for shape in shapes.tolist()]
    return [sample[(..., *box)] for sample, box in zip(array, boxes, strict=True)]


# --- padding ------------------------------------------------------------------------------------


def common_sides(sizes: Sequence[Sequence[int]], multiple_of: int, name: str) -> tuple[int, ...]:
    """Return the smallest sides that hold all samples.

    Args:
        sizes: Size of every sample, such as (height, width).
        multiple_of: Sides are rounded up to a multiple of this number. 1 has no effect.
        name: Name of the data set for messages.

    Raises:
        ConfigError: `multiple_of` is not a whole number above 0.
        DataError: A padded sample would have more than `MAX_VALUES` values, or samples have
            different numbers of dimensions.
    """
    if not whole(multiple_of, 1):
        raise ConfigError(
            f"multiple_of = {multiple_of} was asked for {name}; a whole number of 1 or more fits."
        )
    if len({len(size) for size in sizes}) > 1:
        raise DataError(f"{name}: some samples are images and others volumes; they must be alike.")
    longest = np.array(sizes).max(0).tolist()
    sides = tuple(-(-length // multiple_of) * multiple_of for length in longest)
    if math.prod(sides) > MAX_VALUES:
        raise DataError(
            f"{name}: samples would be padded to {shape_text(sides)} values; at most "
            f"{MAX_VALUES:,} are allowed. Cut or resize the largest samples."
        )
    return sides


def stacked(
    arrays: Sequence[np.ndarray],
    sides: Sequence[int],
    fill: int,
    dtype: np.dtype | type,
) -> np.ndarray:
    """Stack arrays into one, with padding at the end of every side.

    Args:
        arrays: Arrays whose last dimensions are a size: (channel, *size) or (*size).
        sides: Sides of the result, none shorter than an array's.
        fill: Value of the padding.
        dtype: Type of the result.

    Returns:
        (sample, channel, *sides) or (sample, *sides).

    Raises:
        DataError: The result does not fit into memory.
    """
    leading = arrays[0].shape[: arrays[0].ndim - len(sides)]
    try:
        stack = np.full((len(arrays), *leading, *sides), fill, dtype)
    except MemoryError as error:
        raise DataError(
            f"{len(arrays)} samples padded to {shape_text(sides)} do not fit into memory: {error}."
        ) from error
    for position, array in enumerate(arrays):
        box = [slice(length) for length in array.shape[len(leading) :]]
        stack[position][(..., *box)] = array
    return stack


def stacked_inputs(
    samples: Sequence[np.ndarray],
    sides: Sequence[int],
    standardize: bool,
) -> np.ndarray:
    """Stack images or volumes (channel, *size) into (sample, channel, *sides), 0 in the padding.

    Bytes and real numbers keep their type. Other whole numbers become float32.

    Args:
        samples: Images or volumes.
        sides: Sides of the result, none shorter than a sample's.
        standardize: Standardise every channel of every sample, as float32.
    """
    if standardize:
        return stacked([standardized(sample) for sample in samples], sides, 0, np.float32)
    dtype = samples[0].dtype
    is_stored = dtype.kind == "f" or dtype == np.uint8
    return stacked(samples, sides, 0, dtype if is_stored else np.float32)


def padded_masks(masks: Sequence[np.ndarray], sides: Sequence[int]) -> np.ndarray:
    """Stack masks (*size) into int64 (sample, *sides), with −100 in the padding.

    Args:
        masks: Masks, whose sizes may differ.
        sides: Sides of the result, none shorter than a mask's.
    """
    return stacked(masks, sides, IGNORED, np.int64)


def check_foreground(name: str, masks: Sequence[np.ndarray]) -> None:
    """Refuse masks that have no class besides 0, the background.

    Args:
        name: Name of the data set for messages.
        masks: (sample, *sides) of the training and of the test part.

    Raises:
        DataError: There is no class above 0.
    """
    if any((part > 0).any() for part in masks):
        return
    raise DataError(
        f"{name}: no mask has foreground; no value is above 0. Classes are numbered from 0, which "
        f"is the background, and {IGNORED} does not count."
    )


# --- normalization ------------------------------------------------------------------------------


def standardized(sample: np.ndarray) -> np.ndarray:
    """Return a sample as float32, every channel with mean 0 and standard deviation 1.

    A channel that is constant becomes 0.

    Args:
        sample: (channel, *size) Values of one sample.
    """
    values = sample.astype(np.float64)
    axes = tuple(range(1, sample.ndim))
    centered = values - values.mean(axes, keepdims=True)
    std = centered.std(axes, keepdims=True)
    return np.asarray(centered / np.where(std > 0, std, 1.0), np.float32)


def each_standardized(samples: np.ndarray, name: str) -> np.ndarray:
    """Return samples as float32, every channel of every sample standardised.

    Args:
        samples: (sample, channel, …)
        name: Name of the data set for messages.

    Raises:
        DataError: A channel of a sample is a single number, so that it would become 0.
    """
    check_values(samples, name)
    if samples.ndim < 3:
        raise DataError(
            f'normalize = "sample" was asked for; samples of {name} have shape '
            f"{samples.shape[1:]}. It needs several values for each channel, (channel, …)."
        )
    return np.stack([standardized(sample) for sample in samples])


def scale_of_counted(
    pool: Pool,
    normalize: NormalizeEach,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> Scale | None:
    """Return the scale of data with masks, measured where masks of training samples count.

    So padding has no part in mean and standard deviation.

    Args:
        pool: Data whose targets are masks. With "sample" they may be anything.
        normalize: The way asked for. With "sample" values are standardised already.
        mean: Mean of each channel, if it was given. Empty: by `normalize`.
        std: Standard deviation of each channel, together with `mean`.

    Raises:
        ConfigError: Mean or standard deviation were given beside "sample".
    """
    if normalize != "sample":
        return Scale.of(pool.inputs, normalize, mean, std, counted=pool.targets != IGNORED)
    if mean or std:
        raise ConfigError(
            'normalize = "sample" was asked for, which measures mean and std of every sample, and '
            "so were mean or std. Leave out one of the two."
        )
    return None


def shape_text(sides: Sequence[int]) -> str:
    """Return a size in the form 48×64×48."""
    return "×".join(map(str, sides))
