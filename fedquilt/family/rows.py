"""Rows of one weight that a cut keeps: reading, writing, adding and counting them.

Neighbouring rows are slices. A cut with many runs of rows is read and written by index tensors
instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from fedquilt.axes import Dims, Positions, positions_of, size_of

MAX_SLICES = 8  # Number of slices up to which they are faster than one indexed copy
# Rows that a cut keeps of each dimension of a weight. None: it keeps all of them.
Rows = tuple[Positions | None, ...]


def kept_rows(dims: Dims, index: Mapping[str, Positions], sizes: Mapping[str, int]) -> Rows:
    """Return the rows that a cut keeps of each dimension of a weight, None if it keeps all.

    Args:
        dims: Dimensions of the weight as expressions of axes.
        index: Positions to keep, by axis. Axes that are missing are kept whole.
        sizes: Sizes of the axes before the cut.
    """
    rows: list[Positions | None] = []
    for dim in dims:
        positions = positions_of(dim, index, sizes)
        rows.append(None if positions.covers(size_of(dim, sizes)) else positions)
    return tuple(rows)


def take(weight: Tensor, cut: Rows, lead: int = 0) -> Tensor:
    """Return the entries of a weight that a cut keeps. It is a view if the rows are neighbours.

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
        elif 1 < len(positions.runs) <= MAX_SLICES:
            weight = torch.cat(
                [weight.narrow(dim, start, stop - start) for start, stop in positions.runs], dim
            )
        else:
            weight = weight.index_select(dim, positions.tensor.to(weight.device))
    return weight


def blocks(cut: Rows) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the rectangles that a cut consists of, one for each combination of runs of rows.

    Each is a pair: its slices of the whole weight, and its slices of the tensor that is cut out.
    Both have a slice for every dimension.
    """
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
    """Return True if a cut keeps every row of every dimension, in the same order."""
    return all(positions is None for positions in cut)


def is_blocky(cut: Rows) -> bool:
    """Return True if a cut has at most `MAX_SLICES` rectangles, so that slices are fast."""
    count = 1
    for positions in cut:
        count *= len(positions.runs) if positions is not None else 1
    return count <= MAX_SLICES


def inside(cut: Rows, shape: Sequence[int]) -> Tensor:
    """Return a mask on the CPU that is True where a cut keeps an entry. `shape` is the weight's."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for dim, positions in enumerate(cut):
        if positions is not None:
            row = torch.zeros(shape[dim], dtype=torch.bool).index_fill_(0, positions.tensor, True)
            mask &= row.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


def grid(cut: Rows, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return a cut as index tensors, which are faster than slices for sets with many runs.

    There is one for each dimension, and `whole[grid(…)]` is the cut.

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


def count_trained(
    shape: Sequence[int], cuts: Sequence[tuple[Rows, float]], base: float, example: Tensor
) -> Tensor:
    """Return the sum of the weights of all clients that trained each position of one weight.

    A dimension that no cut narrows, such as the two of a 3×3 kernel, has length 1 while the cuts
    are added, because the counts are the same along it.

    Args:
        shape: Shape of the weight.
        cuts: Rows that clients trained, each with the client's weight.
        base: Sum of the weights of the clients that trained all of it.
        example: A tensor with the dtype and the device of the result.

    Returns:
        A tensor that broadcasts to `shape`.
    """
    narrowed = [any(cut[dim] is not None for cut, _ in cuts) for dim in range(len(shape))]
    lengths = [
        length if is_narrowed else 1 for length, is_narrowed in zip(shape, narrowed, strict=True)
    ]
    counts = example.new_full(lengths, base)
    for cut, value in cuts:
        add_at(counts, cut, value)
    return counts
