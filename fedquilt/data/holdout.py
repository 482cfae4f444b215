"""Choice of samples that are held out for testing, where data has no test set."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import DataError

_log = logging.getLogger(__name__)


def held_out(
    count: int, groups: Tensor | None, name: str, noun: str = "samples"
) -> tuple[Tensor, Tensor]:
    """Choose a fifth of the samples for testing and log a warning about it.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample, of each of which a fifth is chosen. None:
            a fifth of all samples is chosen.
        name: Name of the data for messages.
        noun: Noun for the samples in messages.

    Returns:
        Positions of the other samples, and of those that are held out.

    Raises:
        DataError: There are too few samples.
    """
    remaining, tests = fifth(count, groups)
    if not len(tests):
        whose = "" if groups is None else " of every client or domain"
        raise DataError(
            f"{name} has no test part, and {count} {noun} are too few to hold out a fifth{whose}."
        )
    _log.warning(
        "%s has no test part: %d of its %d %s are held out for testing.",
        name,
        len(tests),
        count,
        noun,
    )
    return remaining, tests


def fifth(count: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split samples at random into four fifths and one fifth.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample. Each of these is split by itself, so that
            every client keeps samples. None: all samples are split together.

    Returns:
        Positions of four fifths of the samples, and of one fifth.
    """
    order = noise.order(noise.key(noise.NO_SEED, noise.Stream.TEST_SPLIT), count)
    if groups is None:
        return order[count // 5 :], order[: count // 5]
    order = order[torch.argsort(groups[order], stable=True)]
    sizes = torch.bincount(groups)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    is_held_out = torch.arange(count) - first < (sizes // 5).repeat_interleave(sizes)
    return order[~is_held_out], order[is_held_out]
