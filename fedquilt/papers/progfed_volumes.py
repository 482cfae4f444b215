"""Volumes made from a seed, for the smoke runs of ProgFed's segmentation presets."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.data import Pool

EDGE = 4  # Side of the cube that each foreground class has in a volume, in voxels
NOISE = 0.5  # Standard deviation of the noise, where neighbouring classes differ by 1

_SITE = 49  # Distinguishes these random numbers from all others of the same seed
_TRAIN, _TEST = range(2)


def cubes(train: int = 24, test: int = 6, side: int = 16, classes: int = 3, seed: int = 0) -> Pool:
    """Return noisy volumes with one cube of every foreground class, and their masks.

    Args:
        train: Number of training volumes.
        test: Number of test volumes.
        side: Voxels along each of the three sides.
        classes: Number of classes, the background included.
        seed: Random seed of positions and noise.
    """
    samples = _samples(noise.key(seed, _SITE, _TRAIN), train, side, classes)
    test_samples = _samples(noise.key(seed, _SITE, _TEST), test, side, classes)
    return Pool.of(samples, test_samples, name="cubes", num_classes=classes)


def _samples(key: int, count: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return volumes (sample, 1, side, side, side) and masks (sample, side, side, side)."""
    corners = noise.bits(torch.tensor(key), count * (classes - 1) * 3) % (side - EDGE + 1)
    masks = torch.zeros(count, side, side, side, dtype=torch.int64)
    for mask, places in zip(masks, corners.reshape(count, classes - 1, 3).tolist(), strict=True):
        for label, (z, y, x) in enumerate(places, 1):
            mask[z : z + EDGE, y : y + EDGE, x : x + EDGE] = label
    uniform = noise.uniform(torch.tensor(key), masks.shape, torch.float32)
    centred = (uniform - 0.5) * 12**0.5  # A uniform number has a standard deviation of 12^(−1/2)
    return (masks + NOISE * centred).unsqueeze(1), masks
