"""Who holds what: ways to deal a pool of samples to clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import DataError


def iid(targets: Tensor, num_clients: int, seed: int = 0) -> list[Tensor]:
    """Shuffle and deal: equal shares, up to one sample."""
    if num_clients > len(targets):
        raise DataError(f"{num_clients} clients were asked for; {len(targets)} samples can serve at most that many.")
    return list(torch.tensor_split(noise.order(noise.key(seed, 11), len(targets)), num_clients))


def shards(
    targets: Tensor, test_targets: Tensor, num_clients: int, labels: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """`labels` classes a client, the test set split alike (HeteroFL): each class is cut into equal shards and dealt."""
    classes = int(max(targets.max(), test_targets.max())) + 1
    if not 1 <= labels <= classes:
        raise DataError(f"{labels} labels a client were asked for; there are {classes} classes.")
    # Every client draws `labels` different classes; each class is then shared by those who drew it.
    dealt: list[list[int]] = []
    deck: list[int] = []
    for client in range(num_clients):
        hand: list[int] = []
        while len(hand) < labels:
            fresh = [c for c in deck if c not in hand]
            if not fresh:
                deck += noise.order(noise.key(seed, 12, client, len(hand), len(deck)), classes).tolist()
                continue
            hand.append(fresh[0])
            deck.remove(fresh[0])
        dealt.append(hand)
    return _deal(targets, dealt, classes, seed), _deal(test_targets, dealt, classes, seed)


def _deal(targets: Tensor, dealt: list[list[int]], classes: int, seed: int) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in dealt]
    for label in range(classes):
        takers = [client for client, hand in enumerate(dealt) if label in hand]
        samples = (targets == label).nonzero().flatten()
        samples = samples[noise.order(noise.key(seed, 13, label), len(samples))]
        if len(samples) < len(takers):
            raise DataError(f"class {label} has {len(samples)} samples for {len(takers)} clients that hold it.")
        for client, shard in zip(takers, torch.tensor_split(samples, max(1, len(takers))), strict=False):
            parts[client].append(shard)
    return [torch.cat(part) for part in parts]
