"""Sub-models: cutting weights along named axes (gather) and writing them back (scatter).

One mechanism serves windows that wrap, prefixes, random sets, class rows and partial updates.
Positions per axis become rows per dimension (`rows.py`), and neighbouring rows are slices. On a GPU
every slice is a kernel launch. There the rows of all weights become positions in one vector
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Dims, Index, Positions, axes_in, size_of
from fedquilt.errors import SubmodelError
from fedquilt.family.rows import (
    Rows,
    add_at,
    blocks,
    count_trained,
    is_blocky,
    is_whole,
    kept_rows,
    put_at,
    take,
)
from fedquilt.hardware.torch_internals import foreach_add_
from fedquilt.tensors import BoundedCache, Flat, Map
from fedquilt.terms import Arch, Submodel, Weights

WHOLE = Index()  # Every axis has all positions.
MAX_MAP_BYTES = 1 << 30  # Bytes of maps that are cached
MAX_CACHED_CUTS = 16  # Cuts whose positions in a vector are cached, about those of one round


@lru_cache(maxsize=1024)
def prefix(arch: Arch) -> Submodel:
    """Return the sub-model of `arch` that has the first channels of every axis (HeteroFL)."""
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


@dataclass(frozen=True)
class Tally:
    """The sum of the weights of all clients that trained a position, for every position."""

    values: Tensor | float  # A vector, or one number if it is the same for every position.
    complete: bool  # True if every position is known to be trained by some client.


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
        self.positions = dict(held)


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
        self._rows: BoundedCache[tuple[Index, Index], dict[str, Rows]] = BoundedCache(memory)
        self._maps: BoundedCache[Hashable, Map] = BoundedCache(MAX_MAP_BYTES, attrgetter("nbytes"))
        self._offsets: BoundedCache[Hashable, Tensor] = BoundedCache(MAX_CACHED_CUTS)
        self._having: dict[frozenset[str], frozenset[str]] = {}
        self._axes = {
            name: frozenset(axis for dim in weight_dims for axis in axes_in(dim))
            for name, weight_dims in dims.items()
        }

    def rows(self, name: str, index: Index, within: Index = WHOLE) -> Rows:
        """Return the rows that `index` keeps of each dimension of a weight. They are cached.

        Args:
            name: Name of the weight.
            index: Positions to keep, by axis.
            within: Cut that the positions count within. By default they count within the server's
                state.
        """
        rows_by_name = self._rows.get((index, within), dict)
        if name not in rows_by_name:
            sizes = self.sizes | {axis: len(positions) for axis, positions in within.items()}
            rows_by_name[name] = kept_rows(self.dims[name], index, sizes)
        return rows_by_name[name]

    def _with(self, axes: frozenset[str]) -> frozenset[str]:
        """Return the names of the weights that have at least one of these axes. It is cached."""
        if axes not in self._having:
            self._having[axes] = frozenset(
                name for name, weight_axes in self._axes.items() if weight_axes & axes
            )
        return self._having[axes]

    def kernels(self, arch: Arch) -> int:
        """Return the size of `arch` as the number of outputs of its matrices and convolutions.

        FedRolex counts sizes like this (appendix A.3).
        """
        sizes = self.sizes | arch.sizes
        names = self.dims if self._names is None else self._names(arch.variant)
        return sum(size_of(self.dims[name][0], sizes) for name in names if len(self.dims[name]) > 1)

    def keeps(self, name: str, index: Index, within: Index = WHOLE) -> bool:
        """Return True if a cut keeps all of a weight, in the same order.

        Args:
            name: Name of the weight.
            index: Positions to keep, by axis.
            within: Cut that the positions count within. By default they count within the server's
                state.
        """
        if not any(axis in index for axis in self._axes[name]):
            return True
        return is_whole(self.rows(name, index, within))

    def is_flat(self, weight: Tensor) -> bool:
        """Return True if weights on the device of `weight` are cut at once, as one vector.

        It is True on a GPU, unless `flat` of the cutter decides.
        """
        return weight.is_cuda if self.flat is None else self.flat

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
        whole_weights = {name: weights[submodel.scope + name] for name in names}
        if not whole_weights:
            return {}
        if isinstance(weights, HeldWeights):
            return self.narrow(whole_weights, weights.positions[submodel.scope], submodel.positions)
        cut, one_by_one = self._split(submodel, names, whole_weights)
        gathered = {
            name: take(whole_weights[name], self.rows(name, submodel.index)) for name in one_by_one
        }
        if cut:
            flat = Flat.of(
                {
                    name: value
                    for name, value in whole_weights.items()
                    if value.dtype == whole_weights[cut[0]].dtype
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
            foreach_add_(targets, sources, alpha=scale)

    def tally(
        self, whole: Flat, arrivals: Sequence[tuple[Submodel, Index, Sequence[str], float]]
    ) -> Tally:
        """Add up the weights of the clients that trained each position.

        A client's weight is its factor in the merge, such as its number of samples.

        Args:
            whole: The whole weights, whose positions are counted.
            arrivals: For each client its sub-model, the positions that the scope has, the names of
                the weights that arrived, and the client's weight.
        """
        everywhere: dict[str, float] = dict.fromkeys(whole.shapes, 0.0)
        parts: dict[str, list[tuple[Rows, float]]] = {}
        at_once: list[tuple[Submodel, list[str], float]] = []
        for submodel, within, names, value in arrivals:
            cut, one_by_one = self._split(submodel, names, whole.parts)
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

        if len(parts) == len(whole.shapes):  # All entries are written below.
            counts = whole.same(torch.empty_like(whole.vector))
        else:
            device = whole.vector.device
            lengths = torch.tensor([shape.numel() for shape in whole.shapes.values()]).to(device)
            bases = torch.tensor(list(everywhere.values()), dtype=whole.vector.dtype).to(device)
            counts = whole.same(bases.repeat_interleave(lengths, output_size=whole.vector.numel()))
        for name, cuts in parts.items():
            counts.parts[name].copy_(
                count_trained(whole.shapes[name], cuts, everywhere[name], whole.vector)
            )
        for submodel, cut, value in at_once:
            flat_positions = self._where(submodel, cut, whole)
            counts.vector.index_add_(
                0, flat_positions, counts.vector.new_tensor(value).expand(len(flat_positions))
            )
        return Tally(counts.vector, complete)

    def _split(
        self, submodel: Submodel, names: Iterable[str], weights: Weights
    ) -> tuple[list[str], list[str]]:
        """Split names into weights that are cut at once and weights that are cut one by one.

        The second are those that are kept whole, and the few that are cut along other axes than
        widths, such as class rows. With them there would be many shapes of cuts, and a map for
        each. Under a scope, or where weights are not cut as one vector, all are cut one by one.

        Args:
            submodel: Positions to keep, and the scope.
            names: Names of the weights, without the scope.
            weights: A tensor of any shape for each name, of which device and type count.
        """
        names = list(names)
        first = weights[names[0]] if names else None
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
            if name in narrowed and name not in odd and weights[name].dtype == first.dtype
        }
        one_by_one = [name for name in names if name not in at_once]
        return [name for name in names if name in at_once], one_by_one

    def _where(self, submodel: Submodel, names: list[str], whole: Flat) -> Tensor:
        """Return the offsets of a cut's entries in a vector of whole weights, weight after weight.

        They are cached, and shared by what a client receives and sends back, whatever its class
        rows are. Nothing then waits for a client that is still training.

        Args:
            submodel: Positions to keep. Those of axes that are no widths, such as classes, are
                ignored.
            names: Weights whose entries are returned, in this order. All of them are narrowed.
            whole: The vector, of which names, shapes and device count.
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

        def new_map() -> Map:
            cut = [name for name in whole.shapes if name in narrowed]
            return Map(self.dims, self.sizes, dict(shape[0]), whole.starts, cut, device)

        map_of_shape = self._maps.get(shape, new_map)
        offsets = self._offsets.get((index, *key), lambda: map_of_shape.fill(index))
        if names == list(map_of_shape.spans):
            return offsets
        return torch.cat([offsets[slice(*map_of_shape.spans[name])] for name in names])

    # --- cuts of cuts ----------------------------------------------------------------------------

    def narrow(
        self, weights: Weights, outer: Index, inner: Index, lead: int = 0
    ) -> dict[str, Tensor]:
        """Cut a member's weights down to a smaller member. The result is differentiable.

        Args:
            weights: Tensors of the larger member, by name.
            outer: Positions of the larger member, by axis.
            inner: Positions to keep, a subset of `outer` on every axis. They are positions of the
                whole model.
            lead: Number of dimensions in front of the weights' own, such as one for clients. 0 has
                no effect.

        Returns:
            New tensors where an axis shrinks, and the same tensors where none does.
        """
        positions = self.places(outer, inner)
        touched = self._with(frozenset(positions))
        narrowed = dict(weights)
        for name, weight in weights.items():
            if name in touched:
                narrowed[name] = take(weight, self.rows(name, positions, outer), lead)
        return narrowed

    def overlay(
        self, base: Weights, base_index: Index, top: Weights, top_index: Index
    ) -> dict[str, Tensor]:
        """Write weights over others where they share names and positions, and return the result.

        The result has the names and positions of `base`. Names that only `top` has are left out.
        Tensors may be shared with `base` or `top`, so copy them before writing.

        Args:
            base: Tensors that are written over. They do not change.
            base_index: Positions of `base`, by axis.
            top: Tensors that are written.
            top_index: Positions of `top`, by axis.
        """
        common = self.common(base_index, top_index)
        into = self.places(base_index, common)
        out = self.places(top_index, common)
        result = dict(base)
        for name, weight in top.items():
            if name not in base:
                continue
            part = take(weight, self.rows(name, out, top_index))
            target_rows = self.rows(name, into, base_index)
            if is_whole(target_rows):
                result[name] = part
            elif part.numel():
                result[name] = base[name].clone()
                put_at(result[name], target_rows, part)
        return result

    def common(self, first: Index, second: Index) -> Index:
        """Return the positions that `first` and `second` share, in the order of `first`.

        It names every axis that one of them names. An axis that a cut does not name is whole in it.
        """
        axes = dict.fromkeys((*first, *second))  # The order is the same in every process.
        return Index({axis: self._at(first, axis).keep(self._at(second, axis)) for axis in axes})

    def union(self, first: Index, second: Index) -> Index:
        """Return the smallest cut that has all positions of `first` and `second`, ascending.

        It names only axes that both name. All others are whole.
        """
        # An axis that one of them keeps whole stays whole.
        axes = [axis for axis in first if axis in second]
        return Index(
            {axis: Positions.chosen(sorted({*first[axis], *second[axis]})) for axis in axes}
        )

    def places(self, outer: Index, inner: Index) -> Index:
        """Return the positions of `inner` as positions within `outer`, by axis.

        `inner` is a subset of `outer` on every axis. Axes on which the two are equal are left out.
        """
        positions: dict[str, Positions] = {}
        for axis in dict.fromkeys((*outer, *inner)):
            outer_positions, inner_positions = self._at(outer, axis), self._at(inner, axis)
            if outer_positions != inner_positions:
                positions[axis] = outer_positions.places(inner_positions)
        return Index(positions)

    def _at(self, index: Index, axis: str) -> Positions:
        """Return a cut's positions on an axis, which are all if the cut does not name it."""
        return index[axis] if axis in index else Positions.prefix(self.sizes[axis])
