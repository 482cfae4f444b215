"""Weights concatenated into one vector, so that one operation handles all of them.

On a GPU a model has many small weights, and one kernel launch per weight costs more than the
arithmetic. With one vector, a cut is one gather and a merge is one scatter. The offsets of a cut's
entries in the vector depend on two things. The member's shape is handled once, by `Map`. The
positions that the cut keeps are filled in for each cut, by `Map.fill`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedquilt.axes import Dims, Expr, Positions, axes_in, positions_of, size_of
from fedquilt.hardware.device import to_device_async

Weights = Mapping[str, Tensor]


class Flat:
    """Named weights as one vector. `parts` has views of it by name."""

    def __init__(self, vector: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self.vector, self.shapes = vector, dict(shapes)

    @staticmethod
    def of(weights: Weights) -> Flat:
        """Copy weights of one type into one vector, in their order in the mapping."""
        vector = torch.cat([value.reshape(-1) for value in weights.values()])
        return Flat(vector, {name: value.shape for name, value in weights.items()})

    def read(self, weights: Weights, scope: str = "") -> Tensor:
        """Return other values for the same names as one vector, which must not be written to.

        They are concatenated in the order of this vector. A single weight is not copied. Names that
        are only in `weights` are ignored.

        Args:
            weights: Values by scope and name.
            scope: Prefix of the names in `weights`. "": none.
        """
        values = [weights[scope + name].reshape(-1) for name in self.shapes]
        return values[0] if len(values) == 1 else torch.cat(values)

    def same(self, vector: Tensor) -> Flat:
        """Return `vector`, which is not copied, under the names and shapes of this one."""
        return Flat(vector, self.shapes)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """Return views of the vector in the shapes of the weights, by name."""
        pieces = self.vector.split_with_sizes([shape.numel() for shape in self.shapes.values()])
        return {
            name: piece.view(self.shapes[name])
            for name, piece in zip(self.shapes, pieces, strict=True)
        }

    @property
    def starts(self) -> dict[str, int]:
        """Return the index of each weight's first entry in the vector, by name."""
        ends = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        return dict(zip(self.shapes, ends, strict=False))

    def __reduce__(self) -> tuple[type[Flat], tuple[Tensor, dict[str, torch.Size]]]:
        return Flat, (self.vector, self.shapes)  # Views are not pickled.


class Map:
    """Offsets of a member's entries in the vector of the whole model.

    One map serves all members of the same shape. `fill` adds the positions that a member keeps.
    """

    def __init__(
        self,
        dims: Mapping[str, Dims],
        sizes: Mapping[str, int],
        cut_sizes: Mapping[str, int],
        starts: Mapping[str, int],
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        """Compute the part of the offsets that does not depend on the kept positions.

        Args:
            dims: Dimensions of every weight, as expressions of axes.
            sizes: Full size of every axis.
            cut_sizes: Size after the cut, of every axis that is cut.
            starts: Offset of every weight in the vector.
            names: Weights to include, in order.
            device: Device of the result.
        """
        self._sizes, small = sizes, {**sizes, **cut_sizes}
        # Start of each cut dimension's positions among all positions that `fill` gets.
        self._cut: dict[Expr, int] = {}
        sources, strides = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
        fixed: list[Tensor] = []
        reached: list[list[Tensor]] = []
        # Step 0 is always zero. Weights with fewer cut dimensions than others use it.
        positions, steps = 0, 1
        for name in names:
            lengths = [size_of(dim, small) for dim in dims[name]]
            offset, weight_steps, stride = torch.tensor(starts[name], device=device), [], 1
            for dim_index in reversed(range(len(lengths))):
                dim, length = dims[name][dim_index], lengths[dim_index]
                along = torch.arange(length, device=device).view(
                    [-1] + [1] * (len(lengths) - 1 - dim_index)
                )
                if any(axis in cut_sizes for axis in axes_in(dim)):
                    if dim not in self._cut:
                        self._cut[dim] = positions
                        positions += length
                    sources.append(torch.arange(length) + self._cut[dim])
                    strides.append(torch.full((length,), stride))
                    weight_steps.append((steps + along).expand(lengths).reshape(-1))
                    steps += length
                else:
                    offset = offset + along * stride
                stride *= size_of(dim, sizes)
            fixed.append(offset.expand(lengths).reshape(-1))
            reached.append(weight_steps)
        self._fixed = torch.cat(fixed)
        ends = list(accumulate((len(offsets) for offsets in fixed), initial=0))
        # Start and end of each weight's entries in the result of `fill`.
        self.spans = dict(zip(names, pairwise(ends), strict=True))
        self._reached = [
            torch.cat(
                [
                    weight_steps[depth] if depth < len(weight_steps) else torch.zeros_like(offsets)
                    for weight_steps, offsets in zip(reached, fixed, strict=True)
                ]
            ).int()
            for depth in range(max(map(len, reached)))
        ]
        self._sources, self._strides = torch.cat(sources).to(device), torch.cat(strides).to(device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the map's large tensors."""
        return sum(tensor.nbytes for tensor in (self._fixed, *self._reached))

    def fill(self, index: Mapping[str, Positions]) -> Tensor:
        """Return the offsets of a cut's entries in the vector, as an int64 vector.

        Offsets are listed weight after weight, and in row-major order within each. `spans` says
        which belong to a weight.

        Args:
            index: Kept positions by axis. They are as many as the map was made for.
        """
        positions = torch.cat([positions_of(dim, index, self._sizes).tensor for dim in self._cut])
        steps = to_device_async(self._fixed.device, positions)[self._sources] * self._strides
        offsets = self._fixed
        for reached in self._reached:
            offsets = offsets + steps.index_select(0, reached)
        return offsets
