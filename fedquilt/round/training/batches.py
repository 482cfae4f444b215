"""The batches of a client: their order, their sizes, and random changes to their samples."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.round.training.local import LastBatch, Local
from fedquilt.tasks import Task


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


def augmented(inputs: Tensor, targets: Tensor, local: Local, key: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Crop and flip a batch at random, its targets as the task says. Pure: may be vmapped.

    Args:
        inputs: (sample, …).
        targets: (sample, …). Most do not change.
        local: Which crops and flips there are.
        key: Key from which they are drawn.
        task: Task that knows whether targets are images too.
    """
    changed = task.augment_targets(targets, lambda images: augment(images, local, key))
    return augment(inputs, local, key), changed


def augment(inputs: Tensor, local: Local, key: Tensor) -> Tensor:
    """Random crops and flips of a batch of images, drawn from the key. Pure: may be vmapped."""
    if (local.crop or local.flip) and inputs.dim() != 4:
        raise ConfigError(
            f"crop = {local.crop} and flip = {local.flip} were asked for; they are for images (channel, height, "
            f"width), and a sample has shape {tuple(inputs.shape[1:])}."
        )
    if local.crop:
        pad = local.crop
        height, width = inputs.shape[-2:]
        if pad >= min(height, width):
            raise ConfigError(
                f"crop = {pad} was asked for; images are {height}×{width}, so that some crops would be of padding "
                f"alone. Up to {min(height, width) - 1} fits."
            )
        padded = F.pad(inputs, (pad,) * 4)
        shift = noise.uniform(noise.fold_in(key, -1), (2, len(inputs)), torch.float32)
        top, left = (shift * (2 * pad + 1)).long()
        rows = top[:, None] + torch.arange(height, device=inputs.device)
        columns = left[:, None] + torch.arange(width, device=inputs.device)
        padded = torch.take_along_dim(padded, rows[:, None, :, None], -2)
        inputs = torch.take_along_dim(padded, columns[:, None, None, :], -1)
    if local.flip:
        flipped = noise.uniform(noise.fold_in(key, -2), (len(inputs),), torch.float32) < 0.5
        inputs = torch.where(flipped.reshape([-1] + [1] * (inputs.dim() - 1)), inputs.flip(-1), inputs)
    return inputs
