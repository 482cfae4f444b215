"""The weights of several clients end to end, a line each, so that what is done to all of them is one operation.

Nets nested in a client's own are cut from its line by one gather, and their gradients go back by one scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.round.cut import Cutter
from fedquilt.round.local import State


@dataclass(frozen=True)
class Lines:
    """Where each weight stands in a line."""

    shapes: Mapping[str, torch.Size]  # of one client's weights, in the order in which they stand
    channels_last: bool  # convolutions lie in memory as the fast kernels of a GPU want them

    def __len__(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def views(self, lines: Tensor) -> State:
        """(client, entry) as weights with the clients in front; what is written into them is written into the lines."""
        starts = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        return {
            name: self._view(lines[:, start : start + shape.numel()], shape)
            for (name, shape), start in zip(self.shapes.items(), starts, strict=False)
        }

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        """(client, entry) of weights with the clients in front."""
        return torch.cat([self._row(state[name], shape) for name, shape in self.shapes.items()], 1)

    def nested(self, cutter: Cutter, held: Index, wanted: Index) -> Inner:
        """Of weights cut as `held`, the entries that `wanted` keeps."""
        inside = cutter.narrow(self.views(torch.arange(len(self))[None]), held, wanted, lead=1)
        shapes = {name: inside[name].shape[1:] for name in self.shapes}
        return Inner(self.join(inside)[0], Lines(shapes, self.channels_last))

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
        """Onto where the entries stand; no two stand at one place."""
        outer.index_copy_(1, self.places, self.cut(outer) + own)
