"""Weights end to end in one vector, so that what is done to all of them is done once.

On a GPU a model's weights are so many small pieces that touching them one by one costs more than the arithmetic. There
a cut is one gather and a merge one scatter over the vector. Where the entries of a cut stand in it depends on the
member's shape, worked out once, and on the positions it keeps, which are filled in for each cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedquilt.axes import Dims, Expr, Positions, axes_in, positions_of, size_of
from fedquilt.devices import onto

Weights = Mapping[str, Tensor]


class Flat:
    """Named weights as one vector; `parts` are views of it."""

    def __init__(self, vector: Tensor, shapes: Mapping[str, torch.Size]) -> None:
        self.vector, self.shapes = vector, dict(shapes)

    @staticmethod
    def of(weights: Weights) -> Flat:
        """Copy some weights."""
        vector = torch.cat([value.reshape(-1) for value in weights.values()])
        return Flat(vector, {name: value.shape for name, value in weights.items()})

    def read(self, weights: Weights, scope: str = "") -> Tensor:
        """Return other values for the same names as one vector, which must not be written to.

        A single weight is not copied.
        """
        values = [weights[scope + name].reshape(-1) for name in self.shapes]
        return values[0] if len(values) == 1 else torch.cat(values)

    def same(self, vector: Tensor) -> Flat:
        """Other values for the same names."""
        return Flat(vector, self.shapes)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        pieces = self.vector.split_with_sizes([shape.numel() for shape in self.shapes.values()])
        return {
            name: piece.view(self.shapes[name])
            for name, piece in zip(self.shapes, pieces, strict=True)
        }

    @property
    def starts(self) -> dict[str, int]:
        """Where each weight begins."""
        ends = accumulate((shape.numel() for shape in self.shapes.values()), initial=0)
        return dict(zip(self.shapes, ends, strict=False))

    def __reduce__(self) -> tuple[type[Flat], tuple[Tensor, dict[str, torch.Size]]]:
        return Flat, (self.vector, self.shapes)  # the views are made again


class Map:
    """Where the entries of members of one shape stand in the vector of the whole, but for the positions they keep."""

    def __init__(
        self,
        dims: Mapping[str, Dims],
        sizes: Mapping[str, int],
        kept: Mapping[str, int],
        starts: Mapping[str, int],
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        """Of the named weights, which begin at `starts`; `kept` are the lengths of the axes that are cut."""
        self._sizes, small = sizes, {**sizes, **kept}
        self._cut: dict[
            Expr, int
        ] = {}  # where each dimension's positions begin among all that are filled in
        sources, strides = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
        fixed: list[Tensor] = []
        reached: list[list[Tensor]] = []
        positions, steps = (
            0,
            1,
        )  # the first step is 0, for weights with fewer cut dimensions than others
        for name in names:
            lengths = [size_of(dim, small) for dim in dims[name]]
            offset, own, stride = torch.tensor(starts[name], device=device), [], 1
            for place in reversed(range(len(lengths))):
                dim, length = dims[name][place], lengths[place]
                along = torch.arange(length, device=device).view(
                    [-1] + [1] * (len(lengths) - 1 - place)
                )
                if any(axis in kept for axis in axes_in(dim)):
                    if dim not in self._cut:
                        self._cut[dim] = positions
                        positions += length
                    sources.append(torch.arange(length) + self._cut[dim])
                    strides.append(torch.full((length,), stride))
                    own.append((steps + along).expand(lengths).reshape(-1))
                    steps += length
                else:
                    offset = offset + along * stride
                stride *= size_of(dim, sizes)
            fixed.append(offset.expand(lengths).reshape(-1))
            reached.append(own)
        self._fixed = torch.cat(fixed)
        ends = list(accumulate((len(at) for at in fixed), initial=0))
        self.spans = dict(
            zip(names, pairwise(ends), strict=True)
        )  # where each weight's entries are among all
        self._reached = [
            torch.cat(
                [
                    own[depth] if depth < len(own) else torch.zeros_like(at)
                    for own, at in zip(reached, fixed, strict=True)
                ]
            ).int()
            for depth in range(max(map(len, reached)))
        ]
        self._sources, self._strides = torch.cat(sources).to(device), torch.cat(strides).to(device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._fixed, *self._reached))

    def fill(self, index: Mapping[str, Positions]) -> Tensor:
        """The places in the vector of all entries of one cut, weight after weight."""
        kept = torch.cat([positions_of(dim, index, self._sizes).tensor for dim in self._cut])
        steps = onto(self._fixed.device, kept)[self._sources] * self._strides
        places = self._fixed
        for reached in self._reached:
            places = places + steps.index_select(0, reached)
        return places
