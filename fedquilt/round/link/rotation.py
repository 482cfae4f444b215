"""Random rotation of a change before it is quantized (Konečný et al. 2016, section 3).

A quantizer rounds to levels between the smallest and the largest value of a tensor. One large value
makes all steps wide. A random rotation spreads it over all values, so that the steps get narrower.

The rotation of a tensor is the randomized Hadamard transform H·D·x / √n. D has random signs on its
diagonal, and H is the Walsh-Hadamard matrix of Sylvester's construction. H has a size n that is a
power of two, so the tensor is padded with zeros. H·D / √n is orthonormal. Its inverse is D·H / √n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fedquilt import noise


def padded(length: int) -> int:
    """Return the smallest power of two that is at least `length`, or 0 for an empty tensor."""
    return 1 << (length - 1).bit_length() if length else 0


def rotate(values: Tensor, lengths: Sequence[int], seed: Tensor) -> Tensor:
    """Pad every tensor of a change with zeros to a power of two, and rotate it.

    Args:
        values: (value,) The change, one tensor after the other.
        lengths: Number of values of every tensor.
        seed: () Seed of the random signs.

    Returns:
        (padded value,) The rotated tensors, one after the other. Each has `padded(length)` values.
    """
    sizes = [padded(length) for length in lengths]
    rotated = values.new_zeros(sum(sizes))
    rotated[_places(lengths, sizes, values.device)] = values
    return _transformed(rotated * _signs(seed, rotated), sizes)


def unrotate(rotated: Tensor, lengths: Sequence[int], seed: Tensor) -> Tensor:
    """Return the change that `rotate` was given.

    Args:
        rotated: (padded value,) The rotated tensors, one after the other.
        lengths: Number of values of every tensor before it was padded.
        seed: () Seed of the random signs.

    Returns:
        (value,) The tensors, one after the other.
    """
    sizes = [padded(length) for length in lengths]
    values = _transformed(rotated, sizes) * _signs(seed, rotated)
    return values[_places(lengths, sizes, rotated.device)]


def hadamard(rows: Tensor) -> Tensor:
    """Multiply every row by the orthonormal Walsh-Hadamard matrix, which is its own inverse.

    Args:
        rows: (row, n) Vectors whose length is a power of two.

    Returns:
        (row, n) H·x / √n for every row x, in n·log2(n) additions.
    """
    count, size = rows.shape
    half = 1
    while half < size:
        pairs = rows.reshape(count, size // (2 * half), 2, half)
        first, second = pairs.unbind(2)
        rows = torch.stack([first + second, first - second], dim=2)
        half *= 2
    return rows.reshape(count, size) * (1 / math.sqrt(size))


def _transformed(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply every tensor of a padded change by the Walsh-Hadamard matrix of its size.

    Tensors of one size are transformed together.

    Args:
        values: (padded value,) The tensors, one after the other.
        sizes: Number of values of every tensor, a power of two or 0.
    """
    parts = list(torch.split(values, list(sizes)))
    for size in sorted(set(sizes) - {0}):
        positions = [position for position, tensor_size in enumerate(sizes) if tensor_size == size]
        rows = hadamard(torch.stack([parts[position] for position in positions]))
        for position, row in zip(positions, rows, strict=True):
            parts[position] = row
    return torch.cat(parts)


def _signs(seed: Tensor, like: Tensor) -> Tensor:
    """Return one random sign, 1 or −1, for each value of a padded change.

    Args:
        seed: () Seed of the signs.
        like: (padded value,) Tensor whose length and type the result has.
    """
    hashes = noise.bits(noise.fold_in(seed, noise.Stream.ROTATION_SIGNS), len(like))
    return 1 - 2 * (hashes < 0).to(like.dtype)


def _places(lengths: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the positions (value,) of the unpadded values in the padded change.

    Args:
        lengths: Number of values of every tensor.
        sizes: The same with padding.
        device: Device of the result.
    """
    ends = accumulate(sizes)
    ranges = []
    for end, size, length in zip(ends, sizes, lengths, strict=True):
        start = end - size
        ranges.append(torch.arange(start, start + length, device=device))
    return torch.cat(ranges)
