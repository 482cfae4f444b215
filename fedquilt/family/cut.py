"""Sub-models: windows over named axes, gather and scatter.

One mechanism serves windows that wrap, prefixes, random sets, class rows and partial arrivals: an index per axis
becomes rows per dimension, and rows that are neighbours are slices. On a GPU, where every slice is a launch, the rows
of all weights become places in one vector instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Dims, Index, Positions, axes_in, positions_of, size_of
from fedquilt.errors import SubmodelError
from fedquilt.tensors import Flat, Map
from fedquilt.terms import Arch, Submodel, Weights

WHOLE = Index()  # every axis in full
_FEW_RUNS = 8  # up to here slices beat one indexed copy
_MAPS = 1 << 30  # bytes of maps that are kept
_PLACES = 16  # cuts whose places are kept: a round's


@lru_cache(maxsize=1024)
def prefix(arch: Arch) -> Submodel:
    """The first channels of every axis (HeteroFL)."""
    return Submodel(arch, Index({axis: Positions.prefix(width) for axis, width in arch.widths}))


def windows(arch: Arch, starts: Mapping[str, int], sizes: Mapping[str, int]) -> Submodel:
    """Neighbouring channels of every axis from a start of its own, wrapping at the end (FedRolex, equation 4)."""
    index = {
        axis: Positions.window(starts[axis], width, sizes[axis]) for axis, width in arch.widths
    }
    return Submodel(arch, Index(index))


def scattered(arch: Arch, sizes: Mapping[str, int], key: int) -> Submodel:
    """A random set of channels of every axis, in ascending order (Federated Dropout)."""
    index = {}
    for place, (axis, width) in enumerate(arch.widths):
        drawn = noise.order(noise.key(key, place), sizes[axis])[:width]
        index[axis] = Positions.chosen(sorted(drawn.tolist()))
    return Submodel(arch, Index(index))


def highest(arch: Arch, scores: Mapping[str, Tensor]) -> Submodel:
    """Return the sub-model of the positions with the highest scores on every axis, in ascending order.

    Args:
        arch: Member that says how many positions of each axis are kept.
        scores: (position,) for every axis of the member. Of equal scores the lower position counts more.

    Raises:
        SubmodelError: An axis has no scores, fewer than the member has channels, or one that is not a number.
    """
    index = {}
    for axis, width in arch.widths:
        scored = scores.get(axis)
        if scored is None or scored.dim() != 1 or len(scored) < width:
            found = "none" if scored is None else f"scores of shape {tuple(scored.shape)}"
            raise SubmodelError(
                f"the {width} highest positions of axis {axis!r} were asked for; {found} were found. "
                "One score for every position of the axis fits, as channel_scores returns them."
            )
        if bool(scored.isnan().any()):
            raise SubmodelError(
                f"the {width} highest positions of axis {axis!r} were asked for; some scores are not numbers."
            )
        ranked = torch.argsort(scored, descending=True, stable=True)
        index[axis] = Positions.chosen(sorted(ranked[:width].tolist()))
    return Submodel(arch, Index(index))


Rows = tuple[
    Positions | None, ...
]  # what a cut keeps of each dimension of a weight; None keeps all of it


def rows(dims: Dims, index: Mapping[str, Positions], sizes: Mapping[str, int]) -> Rows:
    """What a cut keeps of each dimension of a weight whose axes have these sizes."""
    kept = [positions_of(dim, index, sizes) for dim in dims]
    return tuple(
        None if k.covers(size_of(d, sizes)) else k for k, d in zip(kept, dims, strict=True)
    )


def take(weight: Tensor, cut: Rows, lead: int = 0) -> Tensor:
    """The kept rows of a weight, dimension by dimension; a view where neighbours allow. Skips `lead` dimensions."""
    for dim, kept in enumerate(cut, start=lead):
        if kept is None:
            continue
        if len(kept.runs) == 1:
            weight = weight.narrow(dim, kept.runs[0][0], len(kept))
        elif 1 < len(kept.runs) <= _FEW_RUNS:
            weight = torch.cat(
                [weight.narrow(dim, start, stop - start) for start, stop in kept.runs], dim
            )
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


def inside(cut: Rows, shape: Sequence[int]) -> Tensor:
    """True where a cut keeps an entry of a weight of this shape."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, kept in enumerate(cut):
        if kept is not None:
            row = torch.zeros(shape[dim], dtype=torch.bool).index_fill_(0, kept.tensor, True)
            mask &= row.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


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


@dataclass(frozen=True)
class Tally:
    """The sum of the weights of those clients that held a position, for every position."""

    values: Tensor | float  # A vector, or one number if it is the same for every position.
    complete: bool  # True if every position is known to be held by some client.


def count(
    shape: Sequence[int], cuts: Sequence[tuple[Rows, float]], base: float, like: Tensor
) -> Tensor:
    """Return how much every position of one weight was held.

    A dimension that no cut narrows (the two of a 3×3 kernel, say) has length 1 while the cuts are
    added, because the counts are the same along all of it.

    Args:
        shape: Shape of the weight.
        cuts: What clients held of the weight, with how much they count.
        base: How much the clients count that held all of it.
        like: A tensor of the dtype and on the device of the result.

    Returns:
        A tensor that broadcasts to `shape`.
    """
    narrowed = [any(cut[dim] is not None for cut, _ in cuts) for dim in range(len(shape))]
    lengths = [
        length if is_narrowed else 1 for length, is_narrowed in zip(shape, narrowed, strict=True)
    ]
    counts = like.new_full(lengths, base)
    for cut, value in cuts:
        add_at(counts, cut, value)
    return counts


class Cutter:
    """Gathers and scatters sub-models of one layout; remembers the cuts it saw last."""

    def __init__(
        self,
        dims: Mapping[str, Dims],
        sizes: Mapping[str, int],
        memory: int = 256,
        flat: bool | None = None,
        names: Callable[[str], Iterable[str]] | None = None,
    ) -> None:
        self.dims = dims
        self.sizes = dict(sizes)
        self.flat = flat  # cut all weights at once; None: on a GPU
        self._names = (
            names  # Weights of a variant of a union; None: every member counts all weights
        )
        self._memory = memory
        self._rows: dict[tuple[Index, Index], dict[str, Rows]] = {}
        self._maps: dict[Hashable, Map] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._having: dict[frozenset[str], frozenset[str]] = {}
        self._axes = {
            name: frozenset(axis for dim in own for axis in axes_in(dim))
            for name, own in dims.items()
        }

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

    def _with(self, axes: frozenset[str]) -> frozenset[str]:
        """The weights that have some of these axes."""
        if axes not in self._having:
            self._having[axes] = frozenset(name for name, own in self._axes.items() if own & axes)
        return self._having[axes]

    def kernels(self, arch: Arch) -> int:
        """A member's size as FedRolex's appendix A.3 counts it: the outputs of its matrices and convolutions."""
        sizes = self.sizes | arch.sizes
        own = self.dims if self._names is None else self._names(arch.variant)
        return sum(size_of(self.dims[name][0], sizes) for name in own if len(self.dims[name]) > 1)

    def keeps(self, name: str, index: Index, within: Index = WHOLE) -> bool:
        """Whether a cut keeps all of a weight, in its own order."""
        return not any(axis in index for axis in self._axes[name]) or is_whole(
            self.rows(name, index, within)
        )

    def is_flat(self, like: Tensor) -> bool:
        """Return True if weights such as this one are cut and merged at once, as parts of one vector."""
        return like.is_cuda if self.flat is None else self.flat

    # --- many weights at once ----------------------------------------------------------------------------------

    def gather(
        self, weights: Weights, submodel: Submodel, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Cut the named weights out of a whole state. Views where possible: copy before writing."""
        whole = {name: weights[submodel.scope + name] for name in names}
        cut, one_by_one = self._split(submodel, names, whole)
        found = {name: take(whole[name], self.rows(name, submodel.index)) for name in one_by_one}
        if cut:
            flat = Flat.of(
                {name: value for name, value in whole.items() if value.dtype == whole[cut[0]].dtype}
            )
            sizes = self.sizes | {axis: len(kept) for axis, kept in submodel.index.items()}
            shapes = {
                name: torch.Size([size_of(dim, sizes) for dim in self.dims[name]]) for name in cut
            }
            found |= Flat(
                flat.vector.index_select(0, self._where(submodel, cut, flat)), shapes
            ).parts
        return {name: found[name] for name in names}

    def add(
        self,
        whole: Flat,
        submodel: Submodel,
        parts: Weights,
        scale: float = 1.0,
        within: Index = WHOLE,
    ) -> None:
        """`whole[cut] += scale * part` for every weight of a sub-model, in place; a scope may hold less, `within`."""
        cut, one_by_one = self._split(submodel, parts, parts)
        if cut:
            places = self._where(submodel, cut, whole)
            part = torch.cat([parts[name].reshape(-1) for name in cut])
            whole.vector.index_add_(0, places, part, alpha=scale)
        there, here = [], []
        for name in one_by_one:
            kept = self.rows(name, submodel.index, within)
            if is_blocky(kept):
                for wide, narrow in blocks(kept):
                    there.append(whole.parts[name][wide])
                    here.append(parts[name][narrow])
            else:
                add_at(whole.parts[name], kept, parts[name], scale)
        if there:
            torch._foreach_add_(there, here, alpha=scale)

    def tally(
        self, like: Flat, held: Sequence[tuple[Submodel, Index, Sequence[str], float]]
    ) -> Tally:
        """Add up how much the clients count that held each position.

        Args:
            like: The weights whose positions are counted.
            held: Sub-models, the positions that their scope holds, the names of the weights that arrived, and how much
                their clients count.
        """
        everywhere: dict[str, float] = dict.fromkeys(like.shapes, 0.0)
        parts: dict[str, list[tuple[Rows, float]]] = {}
        at_once: list[tuple[Submodel, list[str], float]] = []
        for submodel, within, names, value in held:
            cut, one_by_one = self._split(submodel, names, like.parts)
            if cut:
                at_once.append((submodel, cut, value))
            for name in one_by_one:
                if self.keeps(name, submodel.index, within):
                    everywhere[name] += value
                else:
                    parts.setdefault(name, []).append(
                        (self.rows(name, submodel.index, within), value)
                    )
        values = set(everywhere.values())
        complete = min(values) > 0
        if complete and not parts and not at_once and len(values) == 1:
            return Tally(values.pop(), complete)

        if len(parts) == len(like.shapes):  # all of them are written below
            counts = like.same(torch.empty_like(like.vector))
        else:
            device = like.vector.device
            lengths = torch.tensor([shape.numel() for shape in like.shapes.values()]).to(device)
            bases = torch.tensor(list(everywhere.values()), dtype=like.vector.dtype).to(device)
            counts = like.same(bases.repeat_interleave(lengths, output_size=like.vector.numel()))
        for name, cuts in parts.items():
            counts.parts[name].copy_(count(like.shapes[name], cuts, everywhere[name], like.vector))
        for submodel, cut, value in at_once:
            places = self._where(submodel, cut, like)
            counts.vector.index_add_(0, places, counts.vector.new_tensor(value).expand(len(places)))
        return Tally(counts.vector, complete)

    def _split(
        self, submodel: Submodel, names: Iterable[str], like: Weights
    ) -> tuple[list[str], list[str]]:
        """(cut at once, one by one): the second are those kept whole, and the few cut along other axes than widths.

        Those others are class rows: with them there would be many shapes of cuts, and a map for each.
        """
        names = list(names)
        first = like[names[0]] if names else None
        if first is None or not self.is_flat(first):
            return [], names
        if submodel.scope:  # a scope may hold a member, whose weights have other places in a vector
            return [], names
        widths, index = submodel.arch.sizes, submodel.index
        odd = self._with(frozenset(axis for axis in index if axis not in widths))
        moved = self._with(
            frozenset(axis for axis, kept in index.items() if not kept.covers(self.sizes[axis]))
        )
        at_once = {
            name
            for name in names
            if name in moved and name not in odd and like[name].dtype == first.dtype
        }
        return [name for name in names if name in at_once], [
            name for name in names if name not in at_once
        ]

    def _where(self, submodel: Submodel, names: list[str], whole: Flat) -> Tensor:
        """The places of a cut's entries in a vector of whole weights.

        They are found once for what a client gets and sends back, whichever of its class rows count: a client that is
        still training need not be waited for.
        """
        widths, device = submodel.arch.sizes, whole.vector.device
        index = Index({axis: kept for axis, kept in submodel.index.items() if axis in widths})
        moved = self._with(
            frozenset(axis for axis, kept in index.items() if not kept.covers(self.sizes[axis]))
        )
        key = tuple(whole.shapes), device
        shape = tuple((axis, len(kept)) for axis, kept in index.items()), *key
        if shape not in self._maps:
            cut = [name for name in whole.shapes if name in moved]
            self._maps[shape] = Map(
                self.dims, self.sizes, dict(shape[0]), whole.starts, cut, device
            )
            while len(self._maps) > 1 and sum(one.nbytes for one in self._maps.values()) > _MAPS:
                self._maps.pop(next(iter(self._maps)))
        known = self._maps[shape]
        if (index, *key) not in self._places:
            if len(self._places) >= _PLACES:
                self._places.pop(next(iter(self._places)))
            self._places[index, *key] = known.fill(index)
        places = self._places[index, *key]
        if names == list(known.spans):
            return places
        return torch.cat([places[slice(*known.spans[name])] for name in names])

    # --- cuts of cuts --------------------------------------------------------------------------------------------

    def narrow(
        self, weights: Weights, held: Index, wanted: Index, lead: int = 0
    ) -> dict[str, Tensor]:
        """From weights cut as `held`, those at `wanted`'s positions (global ones, among `held`'s). Differentiable."""
        places = self.places(held, wanted)
        touched = self._with(frozenset(places))
        return {
            name: take(weight, self.rows(name, places, held), lead) if name in touched else weight
            for name, weight in weights.items()
        }

    def overlay(self, base: Weights, held: Index, top: Weights, other: Index) -> dict[str, Tensor]:
        """`base` (cut as `held`) with `top` (cut as `other`) written over it where they share names and positions."""
        common = self.common(held, other)
        into, out = self.places(held, common), self.places(other, common)
        result = dict(base)
        for name, weight in top.items():
            if name not in base:
                continue
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
        axes = [
            axis for axis in one if axis in other
        ]  # an axis that either keeps whole stays whole
        return Index({axis: Positions.chosen(sorted({*one[axis], *other[axis]})) for axis in axes})

    def places(self, held: Index, wanted: Index) -> Index:
        """Where `wanted`'s positions stand in `held`'s order, axis by axis; axes that agree are left out."""
        pairs = (
            (axis, self._at(held, axis), self._at(wanted, axis))
            for axis in dict.fromkeys((*held, *wanted))
        )
        return Index({axis: mine.places(theirs) for axis, mine, theirs in pairs if mine != theirs})

    def _at(self, index: Index, axis: str) -> Positions:
        return index[axis] if axis in index else Positions.prefix(self.sizes[axis])
