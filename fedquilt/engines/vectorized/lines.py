"""Weights of several clients in one row each, so that one operation changes all of them.

A nested net is cut from a client's row by one gather. Its gradients are added back by one scatter.
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

# Every weight starts at a multiple of this number of entries. There, GPU kernels can load 16 bytes
# at once. For weights at other addresses, cuDNN has slow kernels or none, as
# `test_nets_of_real_widths_are_captured_in_every_precision` shows.
ALIGNMENT = 64


@dataclass(frozen=True)
class Lines:
    """Layout of a member's weights in one row.

    Entries between two weights, and the last entry of the row, are padding and stay zero.
    """

    shapes: Mapping[str, torch.Size]  # Shapes of one client's weights, in the order of the row
    channels_last: bool  # Convolutions are stored with their channels last

    @cached_property
    def _starts(self) -> list[int]:
        """Return the first entry of every weight, followed by the length of the row.

        The row has at least one entry of padding at its end.
        """
        starts = [0]
        for number, shape in enumerate(self.shapes.values(), start=1):
            end = starts[-1] + shape.numel() + (number == len(self.shapes))
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return starts

    def __len__(self) -> int:
        return self._starts[-1]

    def views(self, lines: Tensor) -> State:
        """Return weights, with clients in the first dimension, as views of rows (client, entry).

        Writing into the views changes the rows.
        """
        return {
            name: self._view(lines[:, start : start + shape.numel()], shape)
            for (name, shape), start in zip(self.shapes.items(), self._starts, strict=False)
        }

    def join(self, state: Mapping[str, Tensor], between: int = 0) -> Tensor:
        """Return weights as rows of shape (client, entry).

        Args:
            state: Weights by name, with clients in the first dimension.
            between: Value of the padding.
        """
        first = state[next(iter(self.shapes))]
        filling, pieces = first.new_full((len(first), ALIGNMENT), between), []
        for (name, shape), start, stop in zip(
            self.shapes.items(), self._starts, self._starts[1:], strict=False
        ):
            pieces += [self._row(state[name], shape), filling[:, : stop - start - shape.numel()]]
        return torch.cat(pieces, 1)

    def nested(self, cutter: Cutter, outer: Index, inner: Index) -> Inner:
        """Return the entries of a row that a nested net keeps.

        Padding of the nested net refers to the last entry of the row, which is padding too.

        Args:
            cutter: Cutter of the family.
            outer: Positions of the outer net, to which the row belongs.
            inner: Positions of the nested net, a subset of `outer` on every axis.
        """
        nested_entries = cutter.narrow(
            self.views(torch.arange(len(self))[None]), outer, inner, lead=1
        )
        nested_lines = Lines(
            {name: nested_entries[name].shape[1:] for name in self.shapes}, self.channels_last
        )
        return Inner(nested_lines.join(nested_entries, between=len(self) - 1)[0], nested_lines)

    def _view(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return a part of the rows as one weight of shape (client, …), without copying.

        Args:
            part: Entries of the weight in every row, (client, entry).
            shape: Shape of one client's weight.
        """
        stored_shape = (shape[0], *shape[2:], shape[1]) if self._is_turned(shape) else shape
        # For a single client, strides must equal those of a weight with a new first dimension.
        if len(part) == 1:
            weight = part[0].view(stored_shape).unsqueeze(0)
        else:
            weight = part.view(len(part), *stored_shape)
        return weight.movedim(-1, 2) if self._is_turned(shape) else weight

    def _row(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Return one weight as a part of the rows, (client, entry). It is the inverse of `_view`.

        Args:
            value: Weight, with clients in the first dimension.
            shape: Shape of one client's weight.
        """
        if self._is_turned(shape):
            value = value.movedim(2, -1)
        return value.reshape(len(value), -1)

    def _is_turned(self, shape: torch.Size) -> bool:
        """Return True if a weight of this shape is stored with its channels last."""
        return self.channels_last and len(shape) == 4


@dataclass(frozen=True)
class Inner:
    """Nested net: its entries in the rows of the outer net, and the layout of its own rows."""

    entries: Tensor  # (entry,) Position in the outer net's row, for each entry of the nested net
    lines: Lines  # Layout of the nested net's rows

    def to(self, device: torch.device) -> Inner:
        """Return the nested net with its positions on a device."""
        return Inner(self.entries.to(device), self.lines)

    def cut(self, outer: Tensor) -> Tensor:
        """Return the rows of the nested net, cut from the rows (client, entry) of the outer net."""
        return outer.index_select(1, self.entries)

    def add(self, outer: Tensor, inner: Tensor) -> None:
        """Add rows of the nested net to the rows of the outer net, in-place.

        Positions are unique, except for that of padding, which stays zero.
        """
        outer.index_copy_(1, self.entries, self.cut(outer) + inner)
