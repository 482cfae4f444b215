"""Random changes to the samples of a batch: crops, flips and other intensities.

Images are (sample, channel, height, width) and volumes (sample, channel, depth, height, width).
Everything is drawn from the key of a step, so that every engine draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt import noise as random
from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.tasks import Task
from fedquilt.units import sides

if TYPE_CHECKING:
    from fedquilt.round.training.local import LocalTraining


@dataclass(frozen=True)
class Intensity:
    """Random changes to the values of inputs: x · factor + offset + noise. Targets do not change.

    Numbers are in the unit that models see, which is after normalization.
    """

    scale: float = 0.0  # Each sample is multiplied by a factor from [1 − scale, 1 + scale]. 0: by 1
    offset: float = 0.0  # A number from [−offset, offset] is added to each sample. 0: none
    noise: float = 0.0  # Standard deviation of normal noise that is added to every value. 0: none

    def __post_init__(self) -> None:
        within(self, scale="[0, 1]", offset="[0, inf)", noise="[0, inf)")

    def __call__(self, inputs: Tensor, key: Tensor) -> Tensor:
        """Return inputs with other intensities. The function is pure and may be vmapped.

        Factor and offset are drawn for each sample, and noise for each value.

        Args:
            inputs: (sample, …) real numbers.
            key: Key from which factors, offsets and noise are drawn.

        Raises:
            ConfigError: Inputs are not real numbers.
        """
        if not inputs.is_floating_point():
            raise ConfigError(
                f"intensity = {self} was asked for; inputs are {inputs.dtype}, and real numbers "
                "would fit."
            )
        if self.scale or self.offset:
            samples = random.uniform(
                random.fold_in(key, random.Stream.INTENSITY), (2, len(inputs)), inputs.dtype
            )
            factors, offsets = (2 * samples - 1).reshape(2, -1, *[1] * (inputs.dim() - 1))
            inputs = inputs * (1 + self.scale * factors) + self.offset * offsets
        if self.noise:
            samples = random.normal(
                random.fold_in(key, random.Stream.INTENSITY_NOISE), inputs.shape, inputs.dtype
            )
            inputs = inputs + self.noise * samples
        return inputs


def augmented(
    inputs: Tensor, targets: Tensor, local: LocalTraining, key: Tensor, task: Task
) -> tuple[Tensor, Tensor]:
    """Augment a batch and its targets. The function is pure and may be vmapped.

    Args:
        inputs: (sample, …).
        targets: (sample, …). Masks are cropped and flipped as their images are. Most other targets
            do not change.
        local: Settings of crops, flips and intensities.
        key: Key from which they are drawn.
        task: Task that knows whether targets are images too.

    Returns:
        New inputs and new targets, of the same shapes.

    Raises:
        ConfigError: Settings of `local` do not fit the inputs or their masks.
    """
    size = tuple(inputs.shape[2:])

    def as_inputs(images: Tensor, padding: float = 0.0) -> Tensor:
        if local.crop and tuple(images.shape[2:]) != size:
            raise ConfigError(
                f"crop = {local.crop} was asked for; inputs have the size {sides(size)} and their "
                f"masks {sides(images.shape[2:])}. Masks of the inputs' size would fit, or crop = "
                "0."
            )
        return moved(images, local, key, padding)

    return augment(inputs, local, key), task.augment_targets(targets, as_inputs)


def augment(inputs: Tensor, local: LocalTraining, key: Tensor) -> Tensor:
    """Return inputs with random crops, flips and intensities.

    The function is pure and may be vmapped.

    Args:
        inputs: (sample, …).
        local: Settings of crops, flips and intensities.
        key: Key from which they are drawn.

    Raises:
        ConfigError: Settings of `local` do not fit the inputs.
    """
    inputs = moved(inputs, local, key)
    return inputs if local.intensity is None else local.intensity(inputs, key)


def moved(images: Tensor, local: LocalTraining, key: Tensor, padding: float = 0.0) -> Tensor:
    """Crop and flip images or volumes at random. The function is pure and may be vmapped.

    Each sample has a crop and flips of its own. The shape does not change. If `local` asks for
    neither, `images` is returned as it is.

    Args:
        images: (sample, channel, *size).
        local: Settings of crops and flips.
        key: Key from which they are drawn.
        padding: Value of pixels that a crop takes from outside of the image.

    Raises:
        ConfigError: Samples are no images or volumes, or crop or axes do not fit their size.
    """
    if not local.crop and not local.flip:
        return images
    if images.dim() not in (4, 5):
        raise ConfigError(
            f"crop = {local.crop} and flip = {local.flip} were asked for; they are for images "
            "(channel, height, width) and volumes (channel, depth, height, width), and a sample "
            f"has shape {tuple(images.shape[1:])}."
        )
    if local.crop:
        images = _cropped(images, local.crop, random.fold_in(key, random.Stream.CROP), padding)
    if local.flip:
        axes = _flipped_axes(local.flip_axes, images.dim() - 2)
        images = _flipped(images, axes, random.fold_in(key, random.Stream.FLIP))
    return images


def _cropped(images: Tensor, margin: int, key: Tensor, padding: float) -> Tensor:
    """Pad every side by a margin, and crop each sample to the old size at a random position.

    Args:
        images: (sample, channel, *size).
        margin: Pixels of padding on every side, fewer than the shortest side has.
        key: Key from which positions are drawn, one for each sample and axis.
        padding: Value of the padded pixels.

    Raises:
        ConfigError: The margin is not below the shortest side.
    """
    size = images.shape[2:]
    if margin >= min(size):
        raise ConfigError(
            f"crop = {margin} was asked for; images are {sides(size)}, so that some crops would be "
            f"of padding alone. Up to {min(size) - 1} fits."
        )
    padded = F.pad(images, (margin,) * (2 * len(size)), value=padding)
    fractions = random.uniform(key, (len(size), len(images)), torch.float32)
    starts = (fractions * (2 * margin + 1)).long()
    for axis, side in enumerate(size):
        # (sample, side)
        positions = starts[axis][:, None] + torch.arange(side, device=images.device)
        shape = [len(images)] + [1] * (images.dim() - 1)
        shape[2 + axis] = side
        padded = torch.take_along_dim(padded, positions.reshape(shape), 2 + axis)
    return padded


def _flipped(images: Tensor, axes: tuple[int, ...], key: Tensor) -> Tensor:
    """Mirror each sample along each axis with probability 1/2, independently.

    Args:
        images: (sample, channel, *size).
        axes: Dimensions of `images` to mirror along.
        key: Key from which flips are drawn.
    """
    is_flipped = random.uniform(key, (len(axes), len(images)), torch.float32) < 0.5
    for index, axis in enumerate(axes):
        mirrored = is_flipped[index].reshape([-1] + [1] * (images.dim() - 1))
        images = torch.where(mirrored, images.flip(axis), images)
    return images


def _flipped_axes(flip_axes: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return the dimensions of (sample, channel, *size) that are flipped.

    Args:
        flip_axes: Axes of the size, 0 for the first and -1 for the last. Empty: only the last.
        dims: Number of axes of the size.

    Raises:
        ConfigError: An axis does not exist, or is named twice.
    """
    if unfit := [axis for axis in flip_axes if not -dims <= axis < dims]:
        raise ConfigError(
            f"flip_axes = {list(flip_axes)} was asked for; images have {dims} axes, so that "
            f"{unfit[0]} is none of them. 0 to {dims - 1} would fit, and -1 for the last."
        )
    axes = tuple(2 + axis % dims for axis in flip_axes or (-1,))
    if len(set(axes)) < len(axes):
        raise ConfigError(
            f"flip_axes = {list(flip_axes)} was asked for; images have {dims} axes, so that one of "
            "them is named twice. Name each once."
        )
    return axes


def check_augmentation(inputs: Tensor, targets: Tensor, local: LocalTraining, task: Task) -> None:
    """Try crops, flips and intensities on a few samples, and refuse those that do not fit.

    Args:
        inputs: (sample, …) A few samples as models see them.
        targets: (sample, …) Their targets.
        local: Settings of local training.
        task: Task that knows whether targets are images too.

    Raises:
        ConfigError: A setting does not fit the samples or their targets.
    """
    key = torch.tensor(random.key(random.Stream.TRIAL_BATCH), device=inputs.device)
    augmented(inputs, targets, local, key, task)
