"""Weights concatenated into one vector, and a bounded cache for tensors.

On a GPU a model has many small weights, and one kernel launch per weight costs more than the
arithmetic. With one vector, a cut is one gather and a merge is one scatter. The offsets of a cut's
entries in the vector depend on two things. The member's shape is handled once, by `Map`. The
positions that the cut keeps are filled in for each cut, by `Map.fill`.

`BoundedCache` keeps what is costly to compute and too large to keep for a whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedquilt.axes import Dims, Expr, Positions, axes_in, positions_of, size_of
from fedquilt.hardware.device import to_device_async

Weights = Mapping[str, Tensor]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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


class BoundedCache(Generic[K, V]):
    """Results by key, of which the oldest are dropped if their sizes exceed a limit together.

    The newest result is always kept. Looking a result up does not make it newer.
    """

    def __init__(self, limit: int, size: Callable[[V], int] | None = None) -> None:
        """Create an empty cache.

        Args:
            limit: Largest sum of sizes.
            size: Returns the size of a result, such as its bytes. None: every result has size 1.
        """
        self._limit = limit
        self._size = size
        self._total = 0
        self._results: dict[K, V] = {}

    def __len__(self) -> int:
        """Return the number of cached results."""
        return len(self._results)

    def get(self, key: K, compute: Callable[[], V]) -> V:
        """Return the result of a key, which is computed and cached if it is missing.

        A full cache drops its oldest result before it computes, so that both need not fit into
        memory at once.

        Args:
            key: Key of the result.
            compute: Returns the result. It is called only if the cache does not have it.
        """
        try:
            return self._results[key]
        except KeyError:
            pass
        while self._results and self._total >= self._limit:
            self._drop_oldest()
        result = compute()
        self._results[key] = result
        self._total += self._size_of(result)
        while len(self._results) > 1 and self._total > self._limit:
            self._drop_oldest()
        return result

    def clear(self) -> None:
        """Drop all results."""
        self._results.clear()
        self._total = 0

    def _drop_oldest(self) -> None:
        self._total -= self._size_of(self._results.pop(next(iter(self._results))))

    def _size_of(self, result: V) -> int:
        return 1 if self._size is None else self._size(result)
