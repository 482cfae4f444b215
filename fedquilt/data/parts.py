"""Samples of each client, stored in two tensors for any number of clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import DataError

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Parts(Sequence[Tensor]):
    """Positions of each client's samples in a pool.

    They are two tensors and not one per client, because there may be 342,477 clients.
    """

    order: Tensor  # (sample,) Positions in the pool, client after client.
    offsets: Tensor  # (clients + 1,) Index in `order` at which the samples of each client begin.

    @staticmethod
    def of(parts: Sequence[Sequence[int] | Array], count: int | None = None) -> Parts:
        """Return parts from a list of positions or a boolean mask for each client.

        A `Parts` object is returned as it is. Positions are not compared with `count`.

        Args:
            parts: Positions of each client's samples, or masks that are True at its samples.
            count: Number of samples in the pool, which masks must have. None: not checked.
        """
        if isinstance(parts, Parts):
            return parts
        if isinstance(parts, Mapping) or not isinstance(parts, Iterable):
            raise DataError(f"parts are a {type(parts).__name__}; {_WANTED}")
        pieces = [_positions(part, client, count) for client, part in enumerate(parts)]
        order = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        return Parts.split(
            torch.from_numpy(order),
            torch.tensor([len(piece) for piece in pieces], dtype=torch.int64),
        )

    @staticmethod
    def split(order: Tensor, sizes: Tensor) -> Parts:
        """Divide positions into consecutive parts.

        Args:
            order: (sample,) Positions, client after client.
            sizes: (client,) Number of samples of each client.
        """
        return Parts(order, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @staticmethod
    def owned(owner: Tensor, num_clients: int, order: Tensor | None = None) -> Parts:
        """Return parts from the client of each sample. A client's samples keep their order.

        Args:
            owner: (sample,) Client of each sample. −1: none, so that the sample is left out.
            num_clients: Number of clients.
            order: (sample,) Position in the pool of each entry of `owner`. None: 0, 1, 2, …
        """
        ranked = torch.argsort(owner, stable=True)[int((owner < 0).sum()) :]
        sizes = torch.bincount(owner[owner >= 0], minlength=num_clients)
        return Parts.split(ranked if order is None else order[ranked], sizes)

    @property
    def sizes(self) -> Tensor:
        """Return the number of samples of each client, (client,)."""
        return self.offsets.diff()

    @property
    def owners(self) -> Tensor:
        """Return the client of every entry of `order`, (sample,), in ascending order."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def thinned(self, fraction: float, key: int, max_size: int | None = None) -> Parts:
        """Return a random subset of each client's samples, at least one of them, in their order.

        Args:
            fraction: Fraction of its samples that each client keeps, rounded. 1 has no effect.
            key: Key of the random numbers.
            max_size: Largest number of samples that a client keeps. None: no limit.
        """
        if fraction == 1 and (max_size is None or int(self.sizes.max()) <= max_size):
            return self
        sizes = self.sizes
        counts = (sizes * fraction).round().long().clamp(min=1, max=max_size).minimum(sizes)
        return self.divided(counts, key)[0]

    def divided(self, counts: Tensor, key: int) -> tuple[Parts, Parts]:
        """Divide every client's samples at random in two sets. Samples keep their order in both.

        Args:
            counts: (client,) Number of samples that are drawn from each client, at most its size.
            key: Key of the random numbers. The draw for a client does not depend on later clients.

        Returns:
            Parts with the samples that were drawn, and parts with all others, for the same clients.
        """
        sizes = self.sizes
        mixed = torch.argsort(noise.bits(torch.tensor(key), len(self.order)), stable=True)
        mixed = mixed[torch.argsort(self.owners[mixed], stable=True)]  # Sorted by client.
        rank = torch.arange(len(mixed)) - self.offsets[:-1].repeat_interleave(sizes)
        is_drawn = torch.zeros(len(mixed), dtype=torch.bool)
        is_drawn[mixed[rank < counts.repeat_interleave(sizes)]] = True
        drawn_parts = Parts.split(self.order[is_drawn], counts)
        remaining_parts = Parts.split(self.order[~is_drawn], sizes - counts)
        return drawn_parts, remaining_parts

    def first(self, count: int) -> Parts:
        """Return the parts of clients 0 to `count` − 1. There may be fewer clients than that."""
        return (
            self
            if count >= len(self)
            else Parts(self.order[: self.offsets[count]], self.offsets[: count + 1])
        )

    def head(self, count: int) -> Parts:
        """Return parts with the first `count` samples of every client, or all if it has fewer."""
        sizes = self.sizes
        rank = torch.arange(len(self.order)) - self.offsets[:-1].repeat_interleave(sizes)
        return Parts.split(self.order[rank < count], sizes.clamp(max=count))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[index] for index in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        first, last = self.offsets[client : client + 2].tolist()
        return self.order[first:last]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.order[first:last] for first, last in pairwise(self.offsets.tolist()))


_WANTED = "a list of positions a client is wanted, such as [[0, 1, 2], [3, 4]], or a mask a client."


def _positions(part: Sequence[int] | Array, client: int, count: int | None) -> np.ndarray:
    """Return the positions of one client's samples as int64, after checking their type.

    A mask becomes the positions at which it is True. Real numbers are refused, never rounded.

    Args:
        part: Positions, or a boolean mask.
        client: Number of the client, for messages.
        count: Number of samples in the pool, which a mask must have. None: unknown.
    """
    array = np.asarray(part.cpu() if isinstance(part, Tensor) else part)
    # A single number per client usually means a list with the owner of each sample. It is refused
    # at the first one, because there may be as many as samples.
    if not array.ndim:
        raise DataError(
            f"the part of client {client} is {array.item()!r:.40}; {_WANTED} If you know the "
            "client of each sample, use Pool.of(train, test, clients=owners).partition()."
        )
    if array.dtype.kind == "b":
        if count is not None and array.size != count:
            raise DataError(
                f"the mask of client {client} has {array.size} entries; there are {count} samples."
            )
        return np.flatnonzero(array)
    if array.size and array.dtype.kind not in "iu":
        raise DataError(
            f"the part of client {client} is of {array.dtype}; positions are whole numbers, from 0 "
            "on."
        )
    return array.astype(np.int64, copy=False).reshape(-1)
