"""The batches of a client: their order and their sizes."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from fedquilt import noise
from fedquilt.round.training.local import LastBatch, Local


def batched(samples: Tensor, batch_size: int, last_batch: LastBatch = "keep") -> list[Tensor]:
    """Samples, or their positions, in batches. A tail of one sample joins the batch before it."""
    edges = list(range(0, len(samples), batch_size))
    if len(edges) > 1 and (tail := len(samples) - edges[-1]) < batch_size:
        if last_batch == "drop":
            samples = samples[: edges.pop()]
        elif last_batch == "merge" or tail == 1:
            edges.pop()
    return [samples[start:stop] for start, stop in pairwise([*edges, len(samples)])]


def itinerary(size: int, local: Local, key: int) -> list[Tensor]:
    """The samples of each batch a client goes through in one round, epoch after epoch, in an order of its own."""
    batches = []
    for epoch in range(local.epochs):
        order = noise.order(noise.key(key, epoch), size)
        batches += batched(order, local.batch_size, local.last_batch)
    return batches
