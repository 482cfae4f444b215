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
    """Choose a fifth of the samples at random for testing, and log a warning about it.

    The choice is the same in every call with the same `count` and `groups`.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample, of each of which a fifth is chosen. None:
            a fifth of all samples is chosen.
        name: Name of the data for messages.
        noun: Noun for the samples in messages.

    Returns:
        Positions of the other samples for training, and positions of the samples for testing.

    Raises:
        DataError: There are so few samples that none would be held out.
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
    """Split samples into four fifths and one fifth, at random but equally in every call.

    The fifth is rounded down, so that a group of fewer than five samples gives none.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample. Each of these is split by itself, so that
            every client keeps samples. None: all samples are split together.

    Returns:
        Positions of four fifths of the samples, and positions of one fifth. Both are shuffled.
    """
    order = noise.order(noise.key(noise.NO_SEED, noise.Stream.TEST_SPLIT), count)
    if groups is None:
        return order[count // 5 :], order[: count // 5]
    order = order[torch.argsort(groups[order], stable=True)]
    sizes = torch.bincount(groups)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    is_held_out = torch.arange(count) - first < (sizes // 5).repeat_interleave(sizes)
    return order[~is_held_out], order[is_held_out]
