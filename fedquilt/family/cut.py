"""Sub-models: cutting weights along named axes (gather) and writing them back (scatter).

One mechanism serves windows that wrap, prefixes, random sets, class rows and partial updates.
Positions per axis become rows per dimension, and neighbouring rows are slices. On a GPU every slice
is a kernel launch. There the rows of all weights become positions in one vector instead.
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

WHOLE = Index()  # Every axis has all positions.
_FEW_RUNS = 8  # Number of slices up to which they are faster than one indexed copy
_MAPS = 1 << 30  # Bytes of maps that are cached
_PLACES = 16  # Cuts whose positions in a vector are cached, about those of one round


@lru_cache(maxsize=1024)
def prefix(arch: Arch) -> Submodel:
    """Return the sub-model of the first channels of every axis (HeteroFL)."""
    return Submodel(arch, Index({axis: Positions.prefix(width) for axis, width in arch.widths}))


def windows(arch: Arch, starts: Mapping[str, int], sizes: Mapping[str, int]) -> Submodel:
    """Return the sub-model of neighbouring channels of every axis (FedRolex, equation 4).

    Args:
        arch: Member that says how many channels of each axis are kept.
        starts: First position of each axis. A window wraps at the end of its axis.
        sizes: Sizes of the axes in the whole model.
    """
    index = {
        axis: Positions.window(starts[axis], width, sizes[axis]) for axis, width in arch.widths
    }
    return Submodel(arch, Index(index))


def scattered(arch: Arch, sizes: Mapping[str, int], key: int) -> Submodel:
    """Return a sub-model of random channels of every axis, in ascending order (Federated Dropout).

    Args:
        arch: Member that says how many channels of each axis are kept.
        sizes: Sizes of the axes in the whole model.
        key: Random key. Equal keys give equal channels.
    """
    index = {}
    for number, (axis, width) in enumerate(arch.widths):
        positions = noise.order(noise.key(key, number), sizes[axis])[:width]
        index[axis] = Positions.chosen(sorted(positions.tolist()))
    return Submodel(arch, Index(index))


def highest(arch: Arch, scores: Mapping[str, Tensor]) -> Submodel:
    """Return the sub-model of the positions with the highest scores on every axis.

    Positions are in ascending order. Of equal scores, the lower position is preferred.

    Args:
        arch: Member that says how many positions of each axis are kept.
        scores: (position,) for every axis of the member.

    Raises:
        SubmodelError: An axis has no scores, fewer than the member has channels, or one that is not
            a number.
    """
    index = {}
    for axis, width in arch.widths:
        scored = scores.get(axis)
        if scored is None or scored.dim() != 1 or len(scored) < width:
            shortage = "none" if scored is None else f"scores of shape {tuple(scored.shape)}"
            raise SubmodelError(
                f"the {width} highest positions of axis {axis!r} were asked for; {shortage} were "
                "found. "
                "One score for every position of the axis fits, as channel_scores returns them."
            )
        if bool(scored.isnan().any()):
            raise SubmodelError(
                f"the {width} highest positions of axis {axis!r} were asked for; some scores are "
                "not numbers."
            )
        ranked = torch.argsort(scored, descending=True, stable=True)
        index[axis] = Positions.chosen(sorted(ranked[:width].tolist()))
    return Submodel(arch, Index(index))


# Rows that a cut keeps of each dimension of a weight. None: it keeps all of them.
Rows = tuple[Positions | None, ...]


def rows(dims: Dims, index: Mapping[str, Positions], sizes: Mapping[str, int]) -> Rows:
    """Return the rows that a cut keeps of each dimension of a weight.

    Args:
        dims: Dimensions of the weight as expressions of axes.
        index: Positions to keep, by axis. Axes that are missing are kept whole.
        sizes: Sizes of the axes before the cut.
    """
    positions = [positions_of(dim, index, sizes) for dim in dims]
    return tuple(
        None if k.covers(size_of(d, sizes)) else k for k, d in zip(positions, dims, strict=True)
    )


def take(weight: Tensor, cut: Rows, lead: int = 0) -> Tensor:
    """Return the rows of a weight that a cut keeps. It is a view if the rows are neighbours.

    Args:
        weight: The weight.
        cut: Rows to keep of each dimension.
        lead: Number of dimensions in front of the weight's own, which are not cut. 0 has no effect.
    """
    for dim, positions in enumerate(cut, start=lead):
        if positions is None:
            continue
        if len(positions.runs) == 1:
            weight = weight.narrow(dim, positions.runs[0][0], len(positions))
        elif 1 < len(positions.runs) <= _FEW_RUNS:
            weight = torch.cat(
                [weight.narrow(dim, start, stop - start) for start, stop in positions.runs], dim
            )
        else:
            weight = weight.index_select(dim, positions.tensor.to(weight.device))
    return weight


def blocks(cut: Rows) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the rectangles that a cut consists of, as slices of the whole and of the part."""
    spans: list[list[tuple[slice, slice]]] = []
    for positions in cut:
        offset, span = 0, []
        for start, stop in positions.runs if positions is not None else ():
            span.append((slice(start, stop), slice(offset, offset + stop - start)))
            offset += stop - start
        spans.append(span if positions is not None else [(slice(None), slice(None))])
    for combination in product(*spans):
        yield tuple(outer for outer, _ in combination), tuple(inner for _, inner in combination)


def is_whole(cut: Rows) -> bool:
    """Return True if a cut keeps everything."""
    return all(positions is None for positions in cut)


def is_blocky(cut: Rows) -> bool:
    """Return True if a cut has so few rectangles that slices are fast."""
    count = 1
    for positions in cut:
        count *= len(positions.runs) if positions is not None else 1
    return count <= _FEW_RUNS


def inside(cut: Rows, shape: Sequence[int]) -> Tensor:
    """Return a mask of a weight's shape that is True where a cut keeps an entry."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, positions in enumerate(cut):
        if positions is not None:
            row = torch.zeros(shape[dim], dtype=torch.bool).index_fill_(0, positions.tensor, True)
            mask &= row.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


def grid(cut: Rows, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return a cut as index tensors, which are faster than slices for sets with many runs.

    Args:
        cut: Rows to keep of each dimension.
        shape: Shape of the whole weight.
        device: Device of the index tensors.
    """
    axes = [
        (positions.tensor if positions is not None else torch.arange(length)).to(device)
        for positions, length in zip(cut, shape, strict=True)
    ]
    return torch.meshgrid(*axes, indexing="ij") if axes else ()


def add_at(whole: Tensor, cut: Rows, part: Tensor | float, scale: float = 1.0) -> None:
    """Compute `whole[cut] += scale * part` in place.

    Args:
        whole: The whole weight.
        cut: Rows of each dimension. The positions of one cut are distinct.
        part: Tensor of the cut's shape, or one number for all its entries.
        scale: Factor of the part. 1 has no effect.
    """
    if not is_blocky(cut):
        index = grid(cut, whole.shape, whole.device)
        whole[index] += scale * part
        return
    for outer, inner in blocks(cut):
        if isinstance(part, Tensor):
            whole[outer].add_(part[inner], alpha=scale)
        else:
            whole[outer].add_(scale * part)


def put_at(whole: Tensor, cut: Rows, part: Tensor) -> None:
    """Compute `whole[cut] = part` in place.

    Args:
        whole: The whole weight.
        cut: Rows of each dimension.
        part: Tensor of the cut's shape.
    """
    if not is_blocky(cut):
        whole[grid(cut, whole.shape, whole.device)] = part
        return
    for outer, inner in blocks(cut):
        whole[outer] = part[inner]


@dataclass(frozen=True)
class Tally:
    """The sum of the weights of all clients that trained a position, for every position."""

    values: Tensor | float  # A vector, or one number if it is the same for every position.
    complete: bool  # True if every position is known to be trained by some client.


def count(
    shape: Sequence[int], cuts: Sequence[tuple[Rows, float]], base: float, like: Tensor
) -> Tensor:
    """Return the sum of the weights of all clients that trained each position of one weight.

    A dimension that no cut narrows, such as the two of a 3×3 kernel, has length 1 while the cuts
    are added, because the counts are the same along it.

    Args:
        shape: Shape of the weight.
        cuts: Rows that clients trained, each with the client's weight.
        base: Sum of the weights of the clients that trained all of it.
        like: A tensor with the dtype and the device of the result.

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


class HeldWeights(dict[str, Tensor]):
    """Weights at some positions of the whole model, by scope and name.

    A device has them in place of the whole model's initial weights, which may not fit into its
    memory.
    """

    def __init__(self, weights: Weights, held: Mapping[str, Index]) -> None:
        """Take weights and their positions.

        Args:
            weights: Weights by scope and name.
            held: Positions of all weights of a scope, by scope.
        """
        super().__init__(weights)
        self.held = dict(held)


class Cutter:
    """Cuts sub-models out of whole states and writes them back. Recent cuts are cached.

    Args:
        dims: Dimensions of every weight as expressions of axes.
        sizes: Sizes of the axes.
        memory: Number of cuts whose rows are cached.
        flat: True: all weights are cut at once, as parts of one vector. None: only on a GPU.
        names: Returns the weights of a variant of a union. None: every member has all weights.
    """

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
        self.flat = flat
        self._names = names
        self._memory = memory
        self._rows: dict[tuple[Index, Index], dict[str, Rows]] = {}
        self._maps: dict[Hashable, Map] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._having: dict[frozenset[str], frozenset[str]] = {}
        self._axes = {
            name: frozenset(axis for dim in weight_dims for axis in axes_in(dim))
            for name, weight_dims in dims.items()
        }

    def rows(self, name: str, index: Index, within: Index = WHOLE) -> Rows:
        """Return the rows that `index` keeps of a weight.

        Args:
            name: Name of the weight.
            index: Positions to keep, by axis.
            within: Cut that the positions count within. By default they count within the server's
                state.
        """
        cached = self._rows.get((index, within))
        if cached is None:
            # Random cuts never recur, so the oldest is dropped.
            if len(self._rows) >= self._memory:
                self._rows.pop(next(iter(self._rows)))
            cached = self._rows[index, within] = {}
        if name not in cached:
            sizes = self.sizes | {axis: len(positions) for axis, positions in within.items()}
            cached[name] = rows(self.dims[name], index, sizes)
        return cached[name]

    def _with(self, axes: frozenset[str]) -> frozenset[str]:
        """Return the weights that have at least one of these axes."""
        if axes not in self._having:
            self._having[axes] = frozenset(
                name for name, weight_axes in self._axes.items() if weight_axes & axes
            )
        return self._having[axes]

    def kernels(self, arch: Arch) -> int:
        """Return a member's size as the number of outputs of its matrices and convolutions.

        FedRolex counts sizes like this (appendix A.3).
        """
        sizes = self.sizes | arch.sizes
        names = self.dims if self._names is None else self._names(arch.variant)
        return sum(size_of(self.dims[name][0], sizes) for name in names if len(self.dims[name]) > 1)

    def keeps(self, name: str, index: Index, within: Index = WHOLE) -> bool:
        """Return True if a cut keeps all of a weight, in the same order. The arguments are those of
        `rows`.

        Args:
            name: Name of the weight.
            index: Positions to keep, by axis.
            within: Cut that the positions count within.
        """
        return not any(axis in index for axis in self._axes[name]) or is_whole(
            self.rows(name, index, within)
        )

    def is_flat(self, like: Tensor) -> bool:
        """Return True if weights like this are cut and merged at once, as parts of one vector."""
        return like.is_cuda if self.flat is None else self.flat

    # --- many weights at once --------------------------------------------------------------------

    def gather(
        self, weights: Weights, submodel: Submodel, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Cut the named weights out of a whole state.

        Args:
            weights: The whole state, by scope and name.
            submodel: Positions to keep, and the scope.
            names: Names of the weights, without the scope.

        Returns:
            Tensors by name. They are views where possible, so copy them before writing.
        """
        full_weights = {name: weights[submodel.scope + name] for name in names}
        if not full_weights:
            return {}
        if isinstance(weights, HeldWeights):
            return self.narrow(full_weights, weights.held[submodel.scope], submodel.held)
        cut, one_by_one = self._split(submodel, names, full_weights)
        gathered = {
            name: take(full_weights[name], self.rows(name, submodel.index)) for name in one_by_one
        }
        if cut:
            flat = Flat.of(
                {
                    name: value
                    for name, value in full_weights.items()
                    if value.dtype == full_weights[cut[0]].dtype
                }
            )
            sizes = self.sizes | {
                axis: len(positions) for axis, positions in submodel.index.items()
            }
            shapes = {
                name: torch.Size([size_of(dim, sizes) for dim in self.dims[name]]) for name in cut
            }
            gathered |= Flat(
                flat.vector.index_select(0, self._where(submodel, cut, flat)), shapes
            ).parts
        return {name: gathered[name] for name in names}

    def add(
        self,
        whole: Flat,
        submodel: Submodel,
        parts: Weights,
        scale: float = 1.0,
        within: Index = WHOLE,
    ) -> None:
        """Compute `whole[cut] += scale * part` in place, for every weight of a sub-model.

        Args:
            whole: The weights that are added to.
            submodel: Positions of the parts.
            parts: Tensors to add, by name.
            scale: Factor of the parts. 1 has no effect.
            within: Positions that `whole` has, if it is a cut itself.
        """
        cut, one_by_one = self._split(submodel, parts, parts)
        if cut:
            flat_positions = self._where(submodel, cut, whole)
            part = torch.cat([parts[name].reshape(-1) for name in cut])
            whole.vector.index_add_(0, flat_positions, part, alpha=scale)
        targets, sources = [], []
        for name in one_by_one:
            cut_rows = self.rows(name, submodel.index, within)
            if is_blocky(cut_rows):
                for wide, narrow in blocks(cut_rows):
                    targets.append(whole.parts[name][wide])
                    sources.append(parts[name][narrow])
            else:
                add_at(whole.parts[name], cut_rows, parts[name], scale)
        if targets:
            torch._foreach_add_(targets, sources, alpha=scale)

    def tally(
        self, like: Flat, held: Sequence[tuple[Submodel, Index, Sequence[str], float]]
    ) -> Tally:
        """Add up the weights of the clients that trained each position.

        Args:
            like: The weights whose positions are counted.
            held: For each client its sub-model, the positions that the scope has, the names of the
                weights that arrived, and the client's weight.
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

        if len(parts) == len(like.shapes):  # All entries are written below.
            counts = like.same(torch.empty_like(like.vector))
        else:
            device = like.vector.device
            lengths = torch.tensor([shape.numel() for shape in like.shapes.values()]).to(device)
            bases = torch.tensor(list(everywhere.values()), dtype=like.vector.dtype).to(device)
            counts = like.same(bases.repeat_interleave(lengths, output_size=like.vector.numel()))
        for name, cuts in parts.items():
            counts.parts[name].copy_(count(like.shapes[name], cuts, everywhere[name], like.vector))
        for submodel, cut, value in at_once:
            flat_positions = self._where(submodel, cut, like)
            counts.vector.index_add_(
                0, flat_positions, counts.vector.new_tensor(value).expand(len(flat_positions))
            )
        return Tally(counts.vector, complete)

    def _split(
        self, submodel: Submodel, names: Iterable[str], like: Weights
    ) -> tuple[list[str], list[str]]:
        """Split names into weights that are cut at once and weights that are cut one by one.

        The second are those that are kept whole, and the few that are cut along other axes than
        widths, such as class rows. With them there would be many shapes of cuts, and a map for
        each.
        """
        names = list(names)
        first = like[names[0]] if names else None
        if first is None or not self.is_flat(first):
            return [], names
        if submodel.scope:  # A scope may hold a member, whose vector is shorter.
            return [], names
        widths, index = submodel.arch.sizes, submodel.index
        odd = self._with(frozenset(axis for axis in index if axis not in widths))
        narrowed = self._with(
            frozenset(
                axis for axis, positions in index.items() if not positions.covers(self.sizes[axis])
            )
        )
        at_once = {
            name
            for name in names
            if name in narrowed and name not in odd and like[name].dtype == first.dtype
        }
        return [name for name in names if name in at_once], [
            name for name in names if name not in at_once
        ]

    def _where(self, submodel: Submodel, names: list[str], whole: Flat) -> Tensor:
        """Return the positions of a cut's entries in a vector of whole weights.

        They are computed once for what a client receives and sends back, whatever its class rows
        are, so that a client that is still training need not be waited for.
        """
        widths, device = submodel.arch.sizes, whole.vector.device
        index = Index(
            {axis: positions for axis, positions in submodel.index.items() if axis in widths}
        )
        narrowed = self._with(
            frozenset(
                axis for axis, positions in index.items() if not positions.covers(self.sizes[axis])
            )
        )
        key = tuple(whole.shapes), device
        shape = tuple((axis, len(positions)) for axis, positions in index.items()), *key
        if shape not in self._maps:
            cut = [name for name in whole.shapes if name in narrowed]
            self._maps[shape] = Map(
                self.dims, self.sizes, dict(shape[0]), whole.starts, cut, device
            )
            while (
                len(self._maps) > 1
                and sum(cached_map.nbytes for cached_map in self._maps.values()) > _MAPS
            ):
                self._maps.pop(next(iter(self._maps)))
        map_of_shape = self._maps[shape]
        if (index, *key) not in self._places:
            if len(self._places) >= _PLACES:
                self._places.pop(next(iter(self._places)))
            self._places[index, *key] = map_of_shape.fill(index)
        flat_positions = self._places[index, *key]
        if names == list(map_of_shape.spans):
            return flat_positions
        return torch.cat([flat_positions[slice(*map_of_shape.spans[name])] for name in names])

    # --- cuts of cuts ----------------------------------------------------------------------------

    def narrow(
        self, weights: Weights, held: Index, wanted: Index, lead: int = 0
    ) -> dict[str, Tensor]:
        """Cut a member's weights down to a smaller member. The result is differentiable.

        Args:
            weights: Tensors of the larger member, by name.
            held: Positions of the larger member, by axis.
            wanted: Positions to keep, a subset of `held` on every axis. They count in the whole
                model.
            lead: Number of dimensions in front of the weights' own, such as one for clients.
        """
        positions = self.places(held, wanted)
        touched = self._with(frozenset(positions))
        return {
            name: take(weight, self.rows(name, positions, held), lead)
            if name in touched
            else weight
            for name, weight in weights.items()
        }

    def overlay(self, base: Weights, held: Index, top: Weights, other: Index) -> dict[str, Tensor]:
        """Write weights over others where they share names and positions, and return the result.

        Args:
            base: Tensors that are written over. They do not change.
            held: Positions of `base`, by axis.
            top: Tensors that are written.
            other: Positions of `top`, by axis.
        """
        common = self.common(held, other)
        into, out = self.places(held, common), self.places(other, common)
        result = dict(base)
        for name, weight in top.items():
            if name not in base:
                continue
            part, target_rows = (
                take(weight, self.rows(name, out, other)),
                self.rows(name, into, held),
            )
            if is_whole(target_rows):
                result[name] = part
            elif part.numel():
                result[name] = base[name].clone()
                put_at(result[name], target_rows, part)
        return result

    def common(self, one: Index, other: Index) -> Index:
        """Return the positions that two cuts share, in the order of `one`."""
        axes = dict.fromkeys((*one, *other))  # The order is the same in every process.
        return Index({axis: self._at(one, axis).keep(self._at(other, axis)) for axis in axes})

    def union(self, one: Index, other: Index) -> Index:
        """Return the smallest cut that has the positions of both, in ascending order."""
        # An axis that one of them keeps whole stays whole.
        axes = [axis for axis in one if axis in other]
        return Index({axis: Positions.chosen(sorted({*one[axis], *other[axis]})) for axis in axes})

    def places(self, held: Index, wanted: Index) -> Index:
        """Return the positions of `wanted` as positions within `held`, by axis.

        Axes on which the two are equal are left out.
        """
        pairs = (
            (axis, self._at(held, axis), self._at(wanted, axis))
            for axis in dict.fromkeys((*held, *wanted))
        )
        return Index({axis: outer.places(inner) for axis, outer, inner in pairs if outer != inner})

    def _at(self, index: Index, axis: str) -> Positions:
        """Return a cut's positions on an axis, which are all if the cut does not name it."""
        return index[axis] if axis in index else Positions.prefix(self.sizes[axis])
