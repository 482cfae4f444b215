"""The weights of several clients end to end, a line each, so that what is done to all of them is one operation.

Nets nested in a client's own are cut from its line by one gather, and their gradients go back by one scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.family.cut import Cutter
from fedquilt.round.training.optimizers import State

_APART = 64  # a weight starts at a multiple of so many entries, where kernels of a GPU can load 16 bytes at once


@dataclass(frozen=True)
class Lines:
    """Where each weight stands in a line. What lies between two weights, and the last entry, stays zero."""

    shapes: Mapping[str, torch.Size]  # of one client's weights, in the order in which they stand
    channels_last: bool  # convolutions lie in memory as the fast kernels of a GPU want them

    @cached_property
    def _starts(self) -> list[int]:
        """Of every weight, and after them the end, which leaves an entry to spare."""
        starts = [0]
        for place, shape in enumerate(self.shapes.values(), start=1):
            taken = starts[-1] + shape.numel() + (place == len(self.shapes))
            starts.append(-(-taken // _APART) * _APART)
        return starts

    def __len__(self) -> int:
        return self._starts[-1]

    def views(self, lines: Tensor) -> State:
        """(client, entry) as weights with the clients in front; what is written into them is written into the lines."""
        return {
            name: self._view(lines[:, start : start + shape.numel()], shape)
            for (name, shape), start in zip(self.shapes.items(), self._starts, strict=False)
        }

    def join(self, state: Mapping[str, Tensor], between: int = 0) -> Tensor:
        """(client, entry) of weights with the clients in front."""
        first = state[next(iter(self.shapes))]
        filling, pieces = first.new_full((len(first), _APART), between), []
        for (name, shape), start, stop in zip(
            self.shapes.items(), self._starts, self._starts[1:], strict=False
        ):
            pieces += [self._row(state[name], shape), filling[:, : stop - start - shape.numel()]]
        return torch.cat(pieces, 1)

    def nested(self, cutter: Cutter, held: Index, wanted: Index) -> Inner:
        """Of weights cut as `held`, the entries that `wanted` keeps; what lies between them is the entry to spare."""
        inside = cutter.narrow(self.views(torch.arange(len(self))[None]), held, wanted, lead=1)
        own = Lines({name: inside[name].shape[1:] for name in self.shapes}, self.channels_last)
        return Inner(own.join(inside, between=len(self) - 1)[0], own)

    def _view(self, part: Tensor, shape: torch.Size) -> Tensor:
        lying = (shape[0], *shape[2:], shape[1]) if self._turned(shape) else shape
        # Of one client: with the strides of a weight that has a dimension put in front.
        whole = part[0].view(lying).unsqueeze(0) if len(part) == 1 else part.view(len(part), *lying)
        return whole.movedim(-1, 2) if self._turned(shape) else whole

    def _row(self, value: Tensor, shape: torch.Size) -> Tensor:
        return (value.movedim(2, -1) if self._turned(shape) else value).reshape(len(value), -1)

    def _turned(self, shape: torch.Size) -> bool:
        return self.channels_last and len(shape) == 4


@dataclass(frozen=True)
class Inner:
    """A net within others: where its entries stand in their lines, and lines of its own."""

    places: Tensor
    lines: Lines

    def to(self, device: torch.device) -> Inner:
        return Inner(self.places.to(device), self.lines)

    def cut(self, outer: Tensor) -> Tensor:
        return outer.index_select(1, self.places)

    def add(self, outer: Tensor, own: Tensor) -> None:
        """Onto where the entries stand; no two stand at one place, but those that stay zero."""
        outer.index_copy_(1, self.places, self.cut(outer) + own)
