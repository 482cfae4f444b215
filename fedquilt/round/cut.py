"""Sub-models: windows over named axes, gather and scatter.

One mechanism serves windows that wrap, prefixes, random sets, class rows and partial arrivals: an index per axis
becomes rows per dimension, and rows that are neighbours are slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Dims, Index, Positions, positions_of, size_of
from fedquilt.terms import Arch, Submodel, Weights

WHOLE = Index()  # every axis in full
_FEW_RUNS = 8  # up to here slices beat one indexed copy


@lru_cache(maxsize=1024)
def prefix(arch: Arch) -> Submodel:
    """The first channels of every axis (HeteroFL)."""
    return Submodel(arch, Index({axis: Positions.prefix(width) for axis, width in arch.widths}))


def windows(arch: Arch, starts: Mapping[str, int], sizes: Mapping[str, int]) -> Submodel:
    """Neighbouring channels of every axis from a start of its own, wrapping at the end (FedRolex, equation 4)."""
    index = {axis: Positions.window(starts[axis], width, sizes[axis]) for axis, width in arch.widths}
    return Submodel(arch, Index(index))


def scattered(arch: Arch, sizes: Mapping[str, int], key: int) -> Submodel:
    """A random set of channels of every axis, in ascending order (Federated Dropout)."""
    index = {}
    for place, (axis, width) in enumerate(arch.widths):
        drawn = noise.order(noise.key(key, place), sizes[axis])[:width]
        index[axis] = Positions.chosen(sorted(drawn.tolist()))
    return Submodel(arch, Index(index))


Rows = tuple[Positions | None, ...]  # what a cut keeps of each dimension of a weight; None keeps all of it


def rows(dims: Dims, index: Mapping[str, Positions], sizes: Mapping[str, int]) -> Rows:
    """What a cut keeps of each dimension of a weight whose axes have these sizes."""
    kept = [positions_of(dim, index, sizes) for dim in dims]
    return tuple(None if k.covers(size_of(d, sizes)) else k for k, d in zip(kept, dims, strict=True))


def take(weight: Tensor, cut: Rows, lead: int = 0) -> Tensor:
    """The kept rows of a weight, dimension by dimension; a view where neighbours allow. Skips `lead` dimensions."""
    for dim, kept in enumerate(cut, start=lead):
        if kept is None:
            continue
        if len(kept.runs) == 1:
            weight = weight.narrow(dim, kept.runs[0][0], len(kept))
        elif 1 < len(kept.runs) <= _FEW_RUNS:
            weight = torch.cat([weight.narrow(dim, start, stop - start) for start, stop in kept.runs], dim)
        else:
            weight = weight.index_select(dim, kept.tensor.to(weight.device))
    return weight


def blocks(cut: Rows) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The rectangles a cut is made of, as slices of the whole and of the part."""
    spans: list[list[tuple[slice, slice]]] = []
    for kept in cut:
        at, span = 0, []
        for start, stop in kept.runs if kept is not None else ():
            span.append((slice(start, stop), slice(at, at + stop - start)))
            at += stop - start
        spans.append(span if kept is not None else [(slice(None), slice(None))])
    for combination in product(*spans):
        yield tuple(whole for whole, _ in combination), tuple(part for _, part in combination)


def is_whole(cut: Rows) -> bool:
    """Whether a cut keeps everything."""
    return all(kept is None for kept in cut)


def is_blocky(cut: Rows) -> bool:
    """Whether a cut is few enough rectangles for slices to be the fast way."""
    count = 1
    for kept in cut:
        count *= len(kept.runs) if kept is not None else 1
    return count <= _FEW_RUNS


def grid(cut: Rows, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """The same cut as index tensors, for sets with many runs."""
    axes = [
        (kept.tensor if kept is not None else torch.arange(length)).to(device)
        for kept, length in zip(cut, shape, strict=True)
    ]
    return torch.meshgrid(*axes, indexing="ij") if axes else ()


def add_at(whole: Tensor, cut: Rows, part: Tensor | float, scale: float = 1.0) -> None:
    """`whole[cut] += scale * part`, in place; the positions of one cut are distinct."""
    if not is_blocky(cut):
        index = grid(cut, whole.shape, whole.device)
        whole[index] += scale * part
        return
    for there, here in blocks(cut):
        if isinstance(part, Tensor):
            whole[there].add_(part[here], alpha=scale)
        else:
            whole[there].add_(scale * part)


def put_at(whole: Tensor, cut: Rows, part: Tensor) -> None:
    """`whole[cut] = part`, in place."""
    if not is_blocky(cut):
        whole[grid(cut, whole.shape, whole.device)] = part
        return
    for there, here in blocks(cut):
        whole[there] = part[here]


class Cutter:
    """Gathers and scatters sub-models of one layout; remembers the rows of the cuts it saw last."""

    def __init__(self, dims: Mapping[str, Dims], sizes: Mapping[str, int], memory: int = 256) -> None:
        self.dims = dims
        self.sizes = dict(sizes)
        self._memory = memory
        self._rows: dict[tuple[Index, Index], dict[str, Rows]] = {}

    def rows(self, name: str, index: Index, within: Index = WHOLE) -> Rows:
        """What `index` keeps of a weight; its positions count within the server's state, or within another cut."""
        known = self._rows.get((index, within))
        if known is None:
            if len(self._rows) >= self._memory:  # random cuts never come back: forget the oldest
                self._rows.pop(next(iter(self._rows)))
            known = self._rows[index, within] = {}
        if name not in known:
            sizes = self.sizes | {axis: len(positions) for axis, positions in within.items()}
            known[name] = rows(self.dims[name], index, sizes)
        return known[name]

    def kernels(self, arch: Arch) -> int:
        """A member's size as FedRolex's appendix A.3 counts it: the outputs of its matrices and convolutions."""
        sizes = self.sizes | arch.sizes
        return sum(size_of(dims[0], sizes) for dims in self.dims.values() if len(dims) > 1)

    def gather(self, weights: Weights, submodel: Submodel, names: Sequence[str]) -> dict[str, Tensor]:
        """Cut the named weights out of a whole state. Views where possible: copy before writing."""
        return {name: take(weights[submodel.scope + name], self.rows(name, submodel.index)) for name in names}

    def narrow(self, weights: Weights, held: Index, wanted: Index, lead: int = 0) -> dict[str, Tensor]:
        """From weights cut as `held`, those at `wanted`'s positions (global ones, among `held`'s). Differentiable."""
        places = self.places(held, wanted)
        return {name: take(weight, self.rows(name, places, held), lead) for name, weight in weights.items()}

    def overlay(self, base: Weights, held: Index, top: Weights, other: Index) -> dict[str, Tensor]:
        """`base` (cut as `held`) with `top` (cut as `other`) written over it where they share positions."""
        common = self.common(held, other)
        into, out = self.places(held, common), self.places(other, common)
        result = dict(base)
        for name, weight in top.items():
            part, there = take(weight, self.rows(name, out, other)), self.rows(name, into, held)
            if is_whole(there):
                result[name] = part
            elif part.numel():
                result[name] = base[name].clone()
                put_at(result[name], there, part)
        return result

    def common(self, one: Index, other: Index) -> Index:
        """The global positions two cuts share, in `one`'s order."""
        axes = dict.fromkeys((*one, *other))  # in an order that is the same in every process
        return Index({axis: self._at(one, axis).keep(self._at(other, axis)) for axis in axes})

    def union(self, one: Index, other: Index) -> Index:
        """The smallest cut that has the positions of both, ascending."""
        axes = [axis for axis in one if axis in other]  # an axis that either keeps whole stays whole
        return Index({axis: Positions.chosen(sorted({*one[axis], *other[axis]})) for axis in axes})

    def places(self, held: Index, wanted: Index) -> Index:
        """Where `wanted`'s positions stand in `held`'s order, axis by axis; axes that agree are left out."""
        pairs = ((axis, self._at(held, axis), self._at(wanted, axis)) for axis in dict.fromkeys((*held, *wanted)))
        return Index({axis: mine.places(theirs) for axis, mine, theirs in pairs if mine != theirs})

    def _at(self, index: Index, axis: str) -> Positions:
        return index[axis] if axis in index else Positions.prefix(self.sizes[axis])
