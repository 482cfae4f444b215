"""The batches of a client: their order and their sizes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.round.training.local import LastBatch, LocalTraining


def batched(samples: Tensor, batch_size: int, last_batch: LastBatch = "keep") -> list[Tensor]:
    """Split samples, or their positions, into batches in the given order.

    Batches are views of `samples`. If there are fewer samples than `batch_size`, they are one
    batch, even with `drop`.

    Args:
        samples: (sample, …) Samples or positions.
        batch_size: Samples per batch.
        last_batch: What is done with a last batch that is not full: `keep` it, `drop` it, or
            `merge` it with the one before. `keep` also merges a batch of one sample.
    """
    edges = list(range(0, len(samples), batch_size))
    if len(edges) > 1 and (tail := len(samples) - edges[-1]) < batch_size:
        if last_batch == "drop":
            samples = samples[: edges.pop()]
        elif last_batch == "merge" or tail == 1:
            edges.pop()
    return [samples[start:stop] for start, stop in pairwise([*edges, len(samples)])]


def num_batches(size: int, local: LocalTraining) -> int:
    """Return the number of batches that a client with `size` samples trains on in one round.

    It counts all epochs of `local`.
    """
    return local.epochs * len(batched(torch.empty(size), local.batch_size, local.last_batch))


def itinerary(size: int, local: LocalTraining, key: int) -> list[Tensor]:
    """Return the batches of a client's round, in order, as positions among the client's samples.

    Samples are shuffled anew in every epoch, and epochs follow one another. Each batch is
    (sample,).

    Args:
        size: Number of the client's samples.
        local: Batch size, number of epochs, and treatment of the last batch.
        key: Random key of the client and round.
    """
    batches = []
    for epoch in range(local.epochs):
        order = noise.order(noise.key(key, epoch), size)
        batches += batched(order, local.batch_size, local.last_batch)
    return batches
