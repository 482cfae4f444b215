"""Who holds which samples, for any number of clients: one order of positions, and where each client's begin."""

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
    """The positions of each client's samples. Two tensors, not one a client: there may be 342,477 of them."""

    order: Tensor  # positions in the pool, client after client
    offsets: Tensor  # (clients + 1,) where each client's begin in it

    @staticmethod
    def of(parts: Sequence[Sequence[int] | Array], count: int | None = None) -> Parts:
        """From positions a client, or masks: True where a sample, of `count` in all, is the client's."""
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
        """An order of positions, dealt from the front: the first client gets the first `sizes[0]`, and so on."""
        return Parts(order, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @staticmethod
    def owned(owner: Tensor, num_clients: int, order: Tensor | None = None) -> Parts:
        """From the client that owns each sample (−1: nobody does); with `order`, that of the samples it lists."""
        ranked = torch.argsort(owner, stable=True)[int((owner < 0).sum()) :]
        sizes = torch.bincount(owner[owner >= 0], minlength=num_clients)
        return Parts.split(ranked if order is None else order[ranked], sizes)

    @property
    def sizes(self) -> Tensor:
        """(client,) how many samples each has."""
        return self.offsets.diff()

    @property
    def owners(self) -> Tensor:
        """The client of every entry of `order`."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)

    def thinned(self, fraction: float, key: int, max_size: int | None = None) -> Parts:
        """A fraction of each client's samples and at most `max_size`, drawn at random, at least one of those it has."""
        if fraction == 1 and (max_size is None or int(self.sizes.max()) <= max_size):
            return self
        sizes = self.sizes
        kept = (sizes * fraction).round().long().clamp(min=1, max=max_size).minimum(sizes)
        return self.divided(kept, key)[0]

    def divided(self, counts: Tensor, key: int) -> tuple[Parts, Parts]:
        """Divide every client's samples at random in two. Both halves keep the order of the samples.

        Args:
            counts: (client,) Number of samples that are drawn from each client, at most its size.
            key: Key of the random numbers. The draw for a client does not depend on later clients.

        Returns:
            The samples that were drawn, and all others.
        """
        sizes = self.sizes
        mixed = torch.argsort(noise.bits(torch.tensor(key), len(self.order)), stable=True)
        mixed = mixed[torch.argsort(self.owners[mixed], stable=True)]  # Client after client.
        rank = torch.arange(len(mixed)) - self.offsets[:-1].repeat_interleave(sizes)
        is_drawn = torch.zeros(len(mixed), dtype=torch.bool)
        is_drawn[mixed[rank < counts.repeat_interleave(sizes)]] = True
        drawn = Parts.split(self.order[is_drawn], counts)
        others = Parts.split(self.order[~is_drawn], sizes - counts)
        return drawn, others

    def first(self, count: int) -> Parts:
        """The first so many clients."""
        return (
            self
            if count >= len(self)
            else Parts(self.order[: self.offsets[count]], self.offsets[: count + 1])
        )

    def head(self, count: int) -> Parts:
        """The first so many samples of every client."""
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
            return [self[one] for one in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        first, last = self.offsets[client : client + 2].tolist()
        return self.order[first:last]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.order[first:last] for first, last in pairwise(self.offsets.tolist()))


_WANTED = "a list of positions a client is wanted, such as [[0, 1, 2], [3, 4]], or a mask a client."


def _positions(part: Sequence[int] | Array, client: int, count: int | None) -> np.ndarray:
    """One client's positions, checked; nothing is rounded, and nothing that was not a position becomes one."""
    given = np.asarray(part.cpu() if isinstance(part, Tensor) else part)
    if (
        not given.ndim
    ):  # before the next is looked at: an owner a sample are as many as there are samples
        raise DataError(
            f"the part of client {client} is {given.item()!r:.40}; {_WANTED} An owner a sample is dealt by "
            "Pool.of(train, test, clients=owners).deal()."
        )
    if given.dtype.kind == "b":
        if count is not None and given.size != count:
            raise DataError(
                f"the mask of client {client} has {given.size} entries; there are {count} samples."
            )
        return np.flatnonzero(given)
    if given.size and given.dtype.kind not in "iu":
        raise DataError(
            f"the part of client {client} is of {given.dtype}; positions are whole numbers, from 0 on."
        )
    return given.astype(np.int64, copy=False).reshape(-1)
