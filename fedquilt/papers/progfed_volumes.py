"""Volumes made from a seed, for the smoke runs of ProgFed's segmentation presets."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.data import Pool

EDGE = 4  # Side of the cube that each foreground class has in a volume, in voxels
NOISE = 0.5  # Standard deviation of the noise, where neighbouring classes differ by 1
_TRAIN, _TEST = range(2)


def cubes(
    train: int = 24,  # Number of training volumes.
    test: int = 6,  # Number of test volumes.
    side: int = 16,  # Voxels along each of the three sides.
    channels: int = 1,  # Number of channels, which differ by their noise.
    classes: int = 3,  # Number of classes, the background included.
    seed: int = 0,  # Random seed of positions and noise.
) -> Pool:
    """Noisy volumes made from a seed, with one cube of every foreground class, and their masks."""
    samples = _samples(
        noise.key(seed, noise.Stream.GENERATED_VOLUMES, _TRAIN), train, side, channels, classes
    )
    test_samples = _samples(
        noise.key(seed, noise.Stream.GENERATED_VOLUMES, _TEST), test, side, channels, classes
    )
    return Pool.of(samples, test_samples, name="cubes", num_classes=classes)


def _samples(key: int, count: int, side: int, channels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random volumes and their masks.

    A mask has a cube of each foreground class at a random place, with sides of `EDGE` voxels. Later
    classes cover earlier ones. A volume is its mask plus noise, in every channel.

    Args:
        key: Key of the random numbers.
        count: Number of samples.
        side: Voxels along each of the three sides.
        channels: Number of channels of a volume.
        classes: Number of classes. Class 0 is the background.

    Returns:
        Volumes (sample, channel, side, side, side) and masks (sample, side, side, side).
    """
    corners = noise.bits(torch.tensor(key), count * (classes - 1) * 3) % (side - EDGE + 1)
    masks = torch.zeros(count, side, side, side, dtype=torch.int64)
    for mask, places in zip(masks, corners.reshape(count, classes - 1, 3).tolist(), strict=True):
        for label, (z, y, x) in enumerate(places, 1):
            mask[z : z + EDGE, y : y + EDGE, x : x + EDGE] = label
    uniform = noise.uniform(torch.tensor(key), (count, channels, side, side, side), torch.float32)
    centered = (uniform - 0.5) * 12**0.5  # A uniform number has a standard deviation of 12^(−1/2)
    return masks.unsqueeze(1) + NOISE * centered, masks
