"""Rules of operations that view, cut or join tensors without computing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fedquilt.family.tracing.atoms import (
    Atom,
    Cat,
    Dim,
    Facts,
    fix,
    parts,
    pin,
    plain,
    regroup,
    resolve,
    size,
    split,
    unify,
)
from fedquilt.family.tracing.rules.operands import argument, broadcast, pin_all, unify_all
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten._reshape_alias,
    aten.unsqueeze,
    aten.squeeze,
    aten.view_copy,
)
@rule(aten.flatten, aten.unflatten, aten.view_as, aten.reshape_as)
def _view(call: AtenCall, facts: Facts) -> Dims:
    x, out = call.inputs[0], call.outs[0]
    if prod(x.shape) != prod(out.shape):  # The bytes are viewed as another dtype.
        pin_all(x.dims)
        return tuple(plain(n) for n in out.shape)
    groups = regroup(x.dims, out.shape, ("outer", "inner"))
    # Of a dimension that the view splits, only one piece will be cut. Which one it is, is decided
    # once all calls are known (`pinning.settle`).
    for source in range(len(x.dims)):
        pieces = [tuple(factor for origin, factor in group if origin == source) for group in groups]
        pieces = [piece for piece in pieces if piece]
        if len(pieces) > 1:
            facts.views.append(pieces)
    return tuple(tuple(factor for _, factor in group) for group in groups)


@rule(aten.permute)
def _permute(call: AtenCall, facts: Facts) -> Dims:
    x = call.args[0]
    return tuple(x.dims[dim] for dim in call.args[1])


@rule(aten.transpose)
def _transpose(call: AtenCall, facts: Facts) -> Dims:
    x, a, b = call.args
    dims = list(x.dims)
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@rule(aten.t)
def _t(call: AtenCall, facts: Facts) -> Dims:
    return tuple(call.args[0].dims[::-1])


@rule(aten.expand)
def _expand(call: AtenCall, facts: Facts) -> Dims:
    return broadcast([call.args[0].dims], call.outs[0].shape)


@rule(aten.repeat)
def _repeat(call: AtenCall, facts: Facts) -> Dims:
    x, repeats = call.args
    dims = ((),) * (len(repeats) - len(x.dims)) + x.dims
    return tuple((*plain(times), *dim) for times, dim in zip(repeats, dims, strict=True))


@rule(aten.slice)
def _slice(call: AtenCall, facts: Facts) -> Dims:
    x, out = call.args[0], call.outs[0]
    dim = (argument(call, "dim") or 0) % len(x.shape)
    start = argument(call, "start") or 0
    length = out.shape[dim]
    dims = list(x.dims)
    if length == x.shape[dim]:
        return x.dims  # type: ignore[no-any-return]
    if argument(call, "step") not in (None, 1):
        pin(dims[dim])
        dims[dim] = plain(length)
        return tuple(dims)
    start = max(0, min(start + x.shape[dim] if start < 0 else start, x.shape[dim]))
    pieces = _ranges(dims[dim], [start, length, x.shape[dim] - start - length], facts)
    out.marks["start", dim] = pieces[0]
    dims[dim] = pieces[1]
    return tuple(dims)


def _ranges(dim: Dim, sizes: Sequence[int], facts: Facts) -> list[Dim]:
    """Split a dimension into consecutive ranges, and return one dimension for each.

    Args:
        dim: The dimension.
        sizes: Lengths of the ranges, in order.
        facts: Takes the ranges as one fact if the outermost factor of `dim` is an atom.
    """
    is_axis = any(isinstance(factor, Atom) for factor in resolve(dim)[:1])
    pieces = parts(dim, sizes)
    if is_axis:
        facts.slices.append(pieces)
    return pieces


@rule(aten.select, aten.unbind)
def _select(call: AtenCall, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (argument(call, "dim") or 0) % len(x.shape)
    pin(x.dims[dim])
    remaining = tuple(d for position, d in enumerate(x.dims) if position != dim)
    return [remaining] * len(call.outs)


@rule(
    aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.chunk
)
@rule(aten.unsafe_chunk, aten.tensor_split)
def _split(call: AtenCall, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (argument(call, "dim") or 0) % len(x.shape)
    sizes = [out.shape[dim] for out in call.outs]
    if isinstance(call.args[1], int) and len(set(sizes)) > 1:
        pin(x.dims[dim])  # No cut keeps both equal pieces and a remainder.
    pieces = _ranges(x.dims[dim], sizes, facts)
    if isinstance(call.args[1], int):
        for piece in pieces[1:]:
            unify(pieces[0], piece)  # The code asks for equal pieces.
    return [(*x.dims[:dim], piece, *x.dims[dim + 1 :]) for piece in pieces]


@rule(aten.cat)
def _cat(call: AtenCall, facts: Facts) -> Dims:
    out = call.outs[0]
    # torch skips tensors of shape (0,).
    tensors = [value for value in call.args[0] if len(value.shape) == len(out.shape)]
    along = (argument(call, "dim") or 0) % len(out.shape)
    first, *later_tensors = tensors
    for tensor in later_tensors:
        for dim in range(len(out.shape)):
            if dim != along:
                unify(first.dims[dim], tensor.dims[dim])
    joined = (Cat(tuple(value.dims[along] for value in tensors)),)
    return (*first.dims[:along], joined, *first.dims[along + 1 :])


@rule(aten.stack)
def _stack(call: AtenCall, facts: Facts) -> Dims:
    tensors, out = call.args[0], call.outs[0]
    along = (argument(call, "dim") or 0) % len(out.shape)
    for tensor in tensors[1:]:
        unify_all(tensors[0].dims, tensor.dims)
    dims = list(tensors[0].dims)
    dims.insert(along, plain(len(tensors)))
    return tuple(dims)


@rule(
    aten.constant_pad_nd,
    aten.pad,
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.reflection_pad3d,
)
@rule(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)
def _pad(call: AtenCall, facts: Facts) -> Dims:
    x, pads = call.args[0], list(call.args[1])
    constant = (
        call.op.overloadpacket is aten.constant_pad_nd or argument(call, "mode") == "constant"
    )
    dims = list(x.dims)
    for step in range(len(pads) // 2):
        left_pad, right_pad = pads[2 * step : 2 * step + 2]
        dim = len(dims) - 1 - step
        if left_pad == right_pad == 0:
            continue
        if constant and left_pad >= 0 and right_pad >= 0:
            dims[dim] = (Cat((plain(left_pad), dims[dim], plain(right_pad))),)
        else:
            pin(dims[dim])
            dims[dim] = plain(call.outs[0].shape[dim])
    return tuple(dims)


@rule(aten.pixel_shuffle)
def _pixel_shuffle(call: AtenCall, facts: Facts) -> Dims:
    x, r = call.args
    *batch, channels, height, width = x.dims
    outer, inner = split(channels, (size(channels) // (r * r), r * r))
    pin(inner)
    return (*batch, outer, (*height, *plain(r)), (*width, *plain(r)))


@rule(aten.pixel_unshuffle)
def _pixel_unshuffle(call: AtenCall, facts: Facts) -> Dims:
    x, r = call.args
    *batch, channels, height, width = x.dims
    pin_all((height, width))
    return (*batch, (*channels, *plain(r * r)), *(plain(n) for n in call.outs[0].shape[-2:]))


@rule(aten.channel_shuffle, aten.native_channel_shuffle)
def _channel_shuffle(call: AtenCall, facts: Facts) -> Dims:
    x, groups = call.args
    batch, channels, *space = x.dims
    outer, inner = split(channels, (groups, size(channels) // groups), ("groups", "inside"))
    fix(outer)
    return (batch, (*inner, *outer), *space)


@rule(aten.im2col)
def _im2col(call: AtenCall, facts: Facts) -> Dims:
    x, kernel = call.args[:2]
    *batch, channels, height, width = x.dims
    pin_all((height, width))
    return (*batch, (*channels, *plain(kernel[0] * kernel[1])), plain(call.outs[0].shape[-1]))


@rule(aten.diagonal)
def _diagonal(call: AtenCall, facts: Facts) -> Dims:
    x = call.args[0]
    removed = [argument(call, name) % len(x.dims) for name in ("dim1", "dim2")]
    pin_all([x.dims[position] for position in removed])
    return (
        *(dim for position, dim in enumerate(x.dims) if position not in removed),
        plain(call.outs[0].shape[-1]),
    )


@rule(aten.view_as_complex)
def _view_as_complex(call: AtenCall, facts: Facts) -> Dims:
    *dims, pair = call.args[0].dims
    pin(pair)
    return tuple(dims)


@rule(aten.view_as_real)
def _view_as_real(call: AtenCall, facts: Facts) -> Dims:
    return (*call.args[0].dims, plain(2))


@rule(aten.unfold)
def _unfold(call: AtenCall, facts: Facts) -> Dims:
    x, dim = call.args[:2]
    dims = list(x.dims)
    dim %= len(dims)  # A negative number would count from another end in the result.
    pin(dims[dim])
    dims[dim] = plain(call.outs[0].shape[dim])
    return (*dims, plain(call.outs[0].shape[-1]))
