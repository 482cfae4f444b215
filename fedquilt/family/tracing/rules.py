"""Rules of ATen operations: one small function per operation describes its dimensions.

A rule unifies dimensions that must be cut together, pins those that must not be cut, and returns
the dimensions of the outputs. All operations that torch tags as point-wise share one rule. An
operation without a rule pins all dimensions of its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from fedquilt.family.tracing.atoms import (
    Atom,
    Cat,
    Dim,
    Facts,
    atom,
    atoms_in,
    couple,
    fix,
    is_plain,
    parts,
    pin,
    plain,
    regroup,
    resolve,
    size,
    split,
    unify,
)
from fedquilt.family.tracing.record import Call
from fedquilt.hardware.torch_internals import OpOverload, OpOverloadPacket

aten: Any = torch.ops.aten

Dims = tuple[Dim, ...]
# A rule returns the dimensions (`Dims`) of the output, or a list of them for several outputs.
Rule = Callable[[Call, Facts], Any]
_RULES: dict[str, Rule] = {}


def rule(*packets: OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a rule for operations, with all their overloads and in-place versions."""

    def register(function: Rule) -> Rule:
        _RULES.update({packet._qualified_op_name: function for packet in packets})
        return function

    return register


@cache
def find_rule(op: OpOverload) -> Rule | None:
    """Return the rule of an operation, or that of point-wise ones. None: there is none."""
    name = op.overloadpacket._qualified_op_name
    own_rule = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if own_rule is None and torch.Tag.pointwise in _tags(op):
        return _pointwise
    return own_rule


def _tags(op: OpOverload) -> Sequence[torch.Tag]:
    """Return an operation's tags.

    An in-place operation also has the tags of its functional twin, because torch does not repeat
    all of them.
    """
    twin = getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None)
    return [
        *op.tags,
        *(
            getattr(twin, op._overloadname).tags
            if twin and op._overloadname in twin.overloads()
            else ()
        ),
    ]


def apply(call: Call, facts: Facts) -> None:
    """Unify the dimensions of a call's inputs, and describe its outputs."""
    call_rule = find_rule(call.op)
    if call_rule is None:
        _unknown(call, facts)
        return
    result = call_rule(call, facts)
    described = result if isinstance(result, list) else [result]
    for out, dims in zip(call.outs, described, strict=False):
        assert tuple(map(size, dims)) == out.shape, (
            f"the rule for {call} gave {dims} for {out.shape}"
        )
        if out.known:  # It was written in place, and keeps its dimensions.
            _unify_all(out.dims, dims)
        else:
            out.dims, out.known = dims, True


def _unknown(call: Call, facts: Facts) -> None:
    """Pin all dimensions of a call that has no rule."""
    had_axes = not all(is_plain(dim) for value in call.inputs for dim in value.dims)
    for value in (*call.inputs, *call.outs):
        _pin_all(value.dims)
    for out in call.outs:
        out.known = True
    if had_axes:
        facts.notes.append(f"no rule for {call}: what it touches is never cut")


def _unify_all(a: Dims, b: Dims) -> None:
    for left, right in zip(a, b, strict=True):
        unify(left, right)


def _pin_all(dims: Sequence[Dim]) -> None:
    for dim in dims:
        pin(dim)


def _argument(call: Call, name: str, default: Any = None) -> Any:
    """Return an argument by its name in the operation's schema, also if it is positional."""
    for position, declared in enumerate(call.op._schema.arguments):
        if declared.name == name:
            if position < len(call.args):
                return call.args[position]
            return call.kwargs.get(
                name, declared.default_value if declared.has_default_value() else default
            )
    return default


def _dims(call: Call, name: str, ndim: int) -> list[int]:
    """Return a `dim` argument as a list of numbers from 0 on. Without one, all are meant."""
    argument = _argument(call, name)
    if argument is None or argument == []:
        return list(range(ndim))
    return (
        [dim % ndim for dim in (argument if isinstance(argument, (list, tuple)) else [argument])]
        if ndim
        else []
    )


def told(call: Call, mark: object) -> int | None:
    """Return the number that a call has at a mark: the start of a slice, or a number of groups.

    It is None if the call has no such number.
    """
    if mark == "groups":
        arguments = (_argument(call, name) for name in ("groups", "num_groups", "group"))
        return next((n for n in arguments if n is not None), None)
    if isinstance(mark, tuple) and call.op.overloadpacket is aten.slice:
        start: int = _argument(call, "start") or 0
        return start if start >= 0 else start + int(call.inputs[0].shape[mark[1]])
    return None


def is_undefined(call: Call) -> bool:
    """Return True if a call takes the variance of too few values, so that it is not a number."""
    if call.op.overloadpacket not in (aten.var, aten.std, aten.var_mean, aten.std_mean):
        return False
    x = call.inputs[0]
    correction = _argument(call, "correction")
    if correction is None:
        correction = int(_argument(call, "unbiased", True))
    return bool(prod(x.shape[dim] for dim in _dims(call, "dim", len(x.shape))) <= correction)


# --- element-wise -------------------------------------------------------------------------------


def _broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of a broadcast. Shapes are aligned at the right, and ones stretch."""
    result: list[Dim] = []
    for position in range(-len(shape), 0):
        aligned = [dims[position] for dims in operands if len(dims) >= -position]
        aligned = [dim for dim in aligned if size(dim) == shape[position]]
        for operand in aligned[1:]:
            unify(aligned[0], operand)
        result.append(aligned[0] if aligned else atom(shape[position]))
    return tuple(result)


@rule(aten.copy, aten.fill, aten.masked_fill, aten.where, aten.lerp, aten.polar, aten.complex)
@rule(
    aten.bernoulli, aten.normal, aten.uniform, aten.exponential, aten.random, aten.rrelu_with_noise
)
def _pointwise(call: Call, facts: Facts) -> Dims:
    return _broadcast([value.dims for value in call.inputs], call.outs[0].shape)


@rule(
    aten.clone,
    aten.detach,
    aten.alias,
    aten.lift_fresh,
    aten.lift_fresh_copy,
    aten._to_copy,
    aten.contiguous,
)
@rule(
    aten.to,
    aten.type_as,
    aten.zero,
    aten._conj,
    aten.full_like,
    aten.zeros_like,
    aten.ones_like,
    aten.empty_like,
)
@rule(aten.rand_like, aten.randn_like)
@rule(
    aten.dropout,
    aten.native_dropout,
    aten.feature_dropout,
    aten.alpha_dropout,
    aten.feature_alpha_dropout,
)
def _same(call: Call, facts: Facts) -> Dims:
    return call.inputs[0].dims


@rule(aten._prelu_kernel, aten.prelu)
def _prelu(call: Call, facts: Facts) -> Dims:
    x, slope = call.inputs
    if len(slope.shape) == 1 and slope.shape[0] > 1 and len(x.shape) > 1:
        unify(x.dims[1], slope.dims[0])
        return x.dims
    return _broadcast([x.dims, slope.dims], x.shape)


# --- views --------------------------------------------------------------------------------------


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
def _view(call: Call, facts: Facts) -> Dims:
    x, out = call.inputs[0], call.outs[0]
    if prod(x.shape) != prod(out.shape):  # The bytes are viewed as another dtype.
        _pin_all(x.dims)
        return tuple(plain(n) for n in out.shape)
    groups = regroup(x.dims, out.shape, ("outer", "inner"))
    # Of a dimension that the view splits, only one piece will be cut. Which one it is, is decided
    # once all calls are known (`tracer._settle`).
    for source in range(len(x.dims)):
        pieces = [tuple(factor for origin, factor in group if origin == source) for group in groups]
        pieces = [piece for piece in pieces if piece]
        if len(pieces) > 1:
            facts.views.append(pieces)
    return tuple(tuple(factor for _, factor in group) for group in groups)


@rule(aten.permute)
def _permute(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    return tuple(x.dims[dim] for dim in call.args[1])


@rule(aten.transpose)
def _transpose(call: Call, facts: Facts) -> Dims:
    x, a, b = call.args
    dims = list(x.dims)
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@rule(aten.t)
def _t(call: Call, facts: Facts) -> Dims:
    return tuple(call.args[0].dims[::-1])


@rule(aten.expand)
def _expand(call: Call, facts: Facts) -> Dims:
    return _broadcast([call.args[0].dims], call.outs[0].shape)


@rule(aten.repeat)
def _repeat(call: Call, facts: Facts) -> Dims:
    x, repeats = call.args
    dims = ((),) * (len(repeats) - len(x.dims)) + x.dims
    return tuple((*plain(times), *dim) for times, dim in zip(repeats, dims, strict=True))


@rule(aten.slice)
def _slice(call: Call, facts: Facts) -> Dims:
    x, out = call.args[0], call.outs[0]
    dim = (_argument(call, "dim") or 0) % len(x.shape)
    start = _argument(call, "start") or 0
    length = out.shape[dim]
    dims = list(x.dims)
    if length == x.shape[dim]:
        return x.dims  # type: ignore[no-any-return]
    if _argument(call, "step") not in (None, 1):
        pin(dims[dim])
        dims[dim] = plain(length)
        return tuple(dims)
    start = max(0, min(start + x.shape[dim] if start < 0 else start, x.shape[dim]))
    pieces = _ranges(dims[dim], [start, length, x.shape[dim] - start - length], facts)
    out.marks["start", dim] = pieces[0]
    dims[dim] = pieces[1]
    return tuple(dims)


def _ranges(dim: Dim, sizes: Sequence[int], facts: Facts) -> list[Dim]:
    """Split a dimension into ranges, and note them if its outermost factor is an atom."""
    is_axis = any(isinstance(factor, Atom) for factor in resolve(dim)[:1])
    pieces = parts(dim, sizes)
    if is_axis:
        facts.slices.append(pieces)
    return pieces


@rule(aten.select, aten.unbind)
def _select(call: Call, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (_argument(call, "dim") or 0) % len(x.shape)
    pin(x.dims[dim])
    remaining = tuple(d for position, d in enumerate(x.dims) if position != dim)
    return [remaining] * len(call.outs)


@rule(
    aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.chunk
)
@rule(aten.unsafe_chunk, aten.tensor_split)
def _split(call: Call, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (_argument(call, "dim") or 0) % len(x.shape)
    sizes = [out.shape[dim] for out in call.outs]
    if isinstance(call.args[1], int) and len(set(sizes)) > 1:
        pin(x.dims[dim])  # No cut keeps both equal pieces and a remainder.
    pieces = _ranges(x.dims[dim], sizes, facts)
    if isinstance(call.args[1], int):
        for piece in pieces[1:]:
            unify(pieces[0], piece)  # The code asks for equal pieces.
    return [(*x.dims[:dim], piece, *x.dims[dim + 1 :]) for piece in pieces]


@rule(aten.cat)
def _cat(call: Call, facts: Facts) -> Dims:
    out = call.outs[0]
    # torch skips tensors of shape (0,).
    tensors = [value for value in call.args[0] if len(value.shape) == len(out.shape)]
    along = (_argument(call, "dim") or 0) % len(out.shape)
    first, *later_tensors = tensors
    for tensor in later_tensors:
        for dim in range(len(out.shape)):
            if dim != along:
                unify(first.dims[dim], tensor.dims[dim])
    joined = (Cat(tuple(value.dims[along] for value in tensors)),)
    return (*first.dims[:along], joined, *first.dims[along + 1 :])


@rule(aten.stack)
def _stack(call: Call, facts: Facts) -> Dims:
    tensors, out = call.args[0], call.outs[0]
    along = (_argument(call, "dim") or 0) % len(out.shape)
    for tensor in tensors[1:]:
        _unify_all(tensors[0].dims, tensor.dims)
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
def _pad(call: Call, facts: Facts) -> Dims:
    x, pads = call.args[0], list(call.args[1])
    constant = (
        call.op.overloadpacket is aten.constant_pad_nd or _argument(call, "mode") == "constant"
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
def _pixel_shuffle(call: Call, facts: Facts) -> Dims:
    x, r = call.args
    *batch, channels, height, width = x.dims
    outer, inner = split(channels, (size(channels) // (r * r), r * r))
    pin(inner)
    return (*batch, outer, (*height, *plain(r)), (*width, *plain(r)))


@rule(aten.pixel_unshuffle)
def _pixel_unshuffle(call: Call, facts: Facts) -> Dims:
    x, r = call.args
    *batch, channels, height, width = x.dims
    _pin_all((height, width))
    return (*batch, (*channels, *plain(r * r)), *(plain(n) for n in call.outs[0].shape[-2:]))


@rule(aten.channel_shuffle, aten.native_channel_shuffle)
def _channel_shuffle(call: Call, facts: Facts) -> Dims:
    x, groups = call.args
    batch, channels, *space = x.dims
    outer, inner = split(channels, (groups, size(channels) // groups), ("groups", "inside"))
    fix(outer)
    return (batch, (*inner, *outer), *space)


@rule(aten.im2col)
def _im2col(call: Call, facts: Facts) -> Dims:
    x, kernel = call.args[:2]
    *batch, channels, height, width = x.dims
    _pin_all((height, width))
    return (*batch, (*channels, *plain(kernel[0] * kernel[1])), plain(call.outs[0].shape[-1]))


# --- products -----------------------------------------------------------------------------------


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul)
def _product(call: Call, facts: Facts) -> Dims:
    a, b = call.args[:2]
    return _contract(call, a.dims, b.dims, facts)


@rule(aten.addmm, aten.baddbmm, aten.addmv)
def _added_product(call: Call, facts: Facts) -> Dims:
    bias, a, b = call.args[:3]
    return _broadcast([_contract(call, a.dims, b.dims, facts), bias.dims], call.outs[0].shape)


def _contract(call: Call, a: Dims, b: Dims, facts: Facts) -> Dims:
    """Return the dimensions of (… row, inner) times (… inner, column).

    A vector has no row or no column.
    """
    row, column = a[-2:-1], b[-1:] if len(b) > 1 else ()
    inner = b[-2:][0]
    unify(a[-1], inner)
    batches = [dims[:-2] for dims in (a, b)]
    shape = call.outs[0].shape
    batch = _broadcast(batches, shape[: len(shape) - len(row) - len(column)])
    if batch:
        facts.contracted.append((call.layer, inner))
        _call_heads(batch, (*row, inner, *column))
    return (*batch, *row, *column)


def _call_heads(batch: Sequence[Dim], within: Sequence[Dim]) -> None:
    """Give the roles of heads to pieces of a view that a batched product runs over.

    Roles only affect the names of axes.
    """
    for dims, old_role, new_role in ((batch, "outer", "heads"), (within, "inner", "dim")):
        for piece in (piece for dim in dims for piece in atoms_in(dim)):
            piece.role = new_role if piece.role == old_role else piece.role


@rule(aten.scaled_dot_product_attention)
def _attention(call: Call, facts: Facts) -> Dims:
    query, key, value = (operand.dims for operand in call.args[:3])
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    couple(key[-2])
    shape = call.outs[0].shape
    if size(query[-3]) != size(key[-3]):  # Each key head serves several query heads.
        groups, _ = split(query[-3], (size(key[-3]), size(query[-3]) // size(key[-3])))
        unify(groups, key[-3])
        key, value = ((*dims[:-3], query[-3], *dims[-2:]) for dims in (key, value))
    batch = _broadcast([query[:-2], key[:-2], value[:-2]], shape[:-2])
    mask = _argument(call, "attn_mask")
    if mask is not None:
        _broadcast([mask.dims, (*batch, query[-2], key[-2])], (*shape[:-1], size(key[-2])))
    facts.contracted.append((call.layer, query[-1]))
    _call_heads(batch, (query[-1], value[-1]))
    return (*batch, query[-2], value[-1])


@rule(aten.einsum)
def _einsum(call: Call, facts: Facts) -> Dims:
    text, tensors = call.args[0].replace(" ", ""), call.args[1]
    shape = call.outs[0].shape
    inputs, arrow, outputs = text.partition("->")
    sides = inputs.split(",")
    rests: list[Dims] = []  # Dimensions that "..." stands for
    dim_of: dict[str, Dim] = {}
    uses: dict[str, int] = {}
    for side, tensor in zip(sides, tensors, strict=True):
        leading, dots, trailing = side.partition("...")
        named = [
            *zip(leading, tensor.dims, strict=False),
            *zip(trailing[::-1], tensor.dims[::-1], strict=False),
        ]
        rests.append(tensor.dims[len(leading) : len(tensor.dims) - len(trailing)] if dots else ())
        for label, dim in named:
            uses[label] = uses.get(label, 0) + 1
            if size(dim_of.setdefault(label, dim)) == 1:
                dim_of[label] = dim  # A size of one stretches.
            elif size(dim) > 1:
                unify(dim_of[label], dim)
    if not arrow:
        outputs = "..." * any(rests) + "".join(sorted(label for label in uses if uses[label] == 1))
    for label, times in uses.items():
        if times == 1 and label not in outputs:
            couple(dim_of[label])
    head, _, tail = outputs.partition("...")
    batch_shape = shape[len(head) : len(shape) - len(tail)]
    dims = (
        *(dim_of[label] for label in head),
        *_broadcast(rests, batch_shape),
        *(dim_of[label] for label in tail),
    )
    shared = [dim_of[label] for label in uses if uses[label] > 1 and label in outputs]
    summed = [dim_of[label] for label in uses if uses[label] > 1 and label not in outputs]
    if shared:
        facts.contracted += [(call.layer, dim) for dim in summed]
        _call_heads(shared, [dim for label, dim in dim_of.items() if dim not in shared])
    return dims


@rule(aten._trilinear)
def _trilinear(call: Call, facts: Facts) -> Dims:
    """Describe nn.Bilinear: three tensors are stretched along new dimensions, multiplied and
    summed.
    """
    values, stretched, summed = call.args[:3], call.args[3:6], call.args[6]
    operands: list[Dims] = []
    for value, new in zip(values, stretched, strict=True):
        own_dims = iter(value.dims)
        operands.append(
            tuple(
                () if position in new else next(own_dims)
                for position in range(len(value.dims) + len(new))
            )
        )
    shape = [max(map(size, dims)) for dims in zip(*operands, strict=True)]
    return tuple(
        dim for position, dim in enumerate(_broadcast(operands, shape)) if position not in summed
    )


@rule(aten._cdist_forward, aten.cdist)
def _distances(call: Call, facts: Facts) -> Dims:
    a, b = (value.dims for value in call.inputs)
    unify(a[-1], b[-1])
    couple(a[-1])
    return (*_broadcast([a[:-2], b[:-2]], call.outs[0].shape[:-2]), a[-2], b[-2])


@rule(aten.linear)
def _linear(call: Call, facts: Facts) -> Dims:
    x, weight, *bias = (value.dims for value in call.inputs)
    unify(x[-1], weight[-1])
    for dims in bias:
        unify(dims[0], weight[0])
    return (*x[:-1], *weight[:-1])


@rule(aten.convolution)
def _convolution(call: Call, facts: Facts) -> Dims:
    x, weight, bias, stride, padding, _, transposed, _, groups = call.args[:9]
    out = call.outs[0]
    kernel = weight.shape[2:]
    _pin_all(weight.dims[2:])
    batch, channels, *space = x.dims
    if any(n != 1 for n in (*kernel, *stride)) or any(padding):
        _pin_all(space)  # Neighbours are mixed, so these are positions and no channels.
        space = [plain(n) for n in out.shape[2:]]
    grouped = weight.dims[0]  # (groups out) in; (groups in) out if transposed
    if groups == 1:
        out_channels = weight.dims[1] if transposed else grouped
        unify(channels, grouped if transposed else weight.dims[1])
    else:
        count, inside = _grouped(channels, groups, facts)
        weight_count, weight_inside = _grouped(grouped, groups, facts)
        unify(count, weight_count)
        unify(inside, weight_inside if transposed else weight.dims[1])
        last = weight.dims[1] if transposed else weight_inside
        if size(inside) == 1:
            pin(last)  # Depth-wise: each channel is a group, and keeps its number of outputs.
        if transposed:
            facts.groups.append((count, last))
        out_channels = (*count, *last)
        out.marks["groups"] = count
    if bias is not None:
        unify(bias.dims[0], out_channels)
    return (batch, out_channels, *space)


def _grouped(channels: Dim, groups: int, facts: Facts) -> tuple[Dim, Dim]:
    """Split channels into groups and the channels inside each, and note it."""
    outer, inner = split(channels, (groups, size(channels) // groups), ("groups", "inside"))
    facts.groups.append((outer, inner))
    return outer, inner


@rule(aten.embedding)
def _embedding(call: Call, facts: Facts) -> Dims:
    weight, index = call.args[:2]
    # Tokens look rows up, so that none is cut. A tied output layer may name them.
    fix(weight.dims[0])
    return (*index.dims, *weight.dims[1:])


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def _embedding_bag(call: Call, facts: Facts) -> Dims:
    weight = call.args[0]
    fix(weight.dims[0])
    return (plain(call.outs[0].shape[0]), weight.dims[1])


# --- norms --------------------------------------------------------------------------------------


@rule(
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training
)
@rule(
    aten._native_batch_norm_legit_functional,
    aten.batch_norm,
    aten._batch_norm_no_update,
    aten.instance_norm,
)
def _batch_norm(call: Call, facts: Facts) -> Dims:
    x, *statistics_and_affine = call.inputs
    for value in statistics_and_affine:
        unify(x.dims[1], value.dims[0])
    return x.dims


@rule(aten.native_layer_norm, aten.layer_norm, aten._fused_rms_norm, aten.rms_norm)
def _layer_norm(call: Call, facts: Facts) -> Dims:
    x, *affine = call.inputs
    count = len(call.args[1])
    for dim in x.dims[-count:]:
        couple(dim)
    for value in affine:
        _unify_all(x.dims[-count:], value.dims)
    return x.dims


@rule(aten.native_group_norm, aten.group_norm)
def _group_norm(call: Call, facts: Facts) -> Dims:
    x, *affine = call.inputs
    groups = told(call, "groups")
    assert groups is not None
    for value in affine:
        unify(x.dims[1], value.dims[0])
    outer, inner = _grouped(x.dims[1], groups, facts)
    couple(inner)
    call.outs[0].marks["groups"] = outer
    return x.dims


@rule(aten._weight_norm_interface, aten._weight_norm)
def _weight_norm(call: Call, facts: Facts) -> Dims:
    direction, length = call.inputs
    for direction_dim, length_dim in zip(direction.dims, length.dims, strict=True):
        if size(length_dim) == size(direction_dim):
            unify(direction_dim, length_dim)
        else:
            couple(direction_dim)
    return direction.dims


# --- along a dimension --------------------------------------------------------------------------


@rule(aten._softmax, aten._safe_softmax, aten.softmax, aten._log_softmax, aten.log_softmax)
def _along(call: Call, facts: Facts) -> Dims:
    x = call.inputs[0]
    for dim in _dims(call, "dim", len(x.shape)):
        couple(x.dims[dim])
    return x.dims


@rule(aten.cumsum, aten.cumprod, aten.logcumsumexp)
def _in_order(call: Call, facts: Facts) -> Dims:
    x = call.inputs[0]
    # A cut may reorder what it keeps.
    _pin_all([x.dims[dim] for dim in _dims(call, "dim", len(x.shape))])
    return x.dims


@rule(
    aten.sum,
    aten.mean,
    aten.amax,
    aten.amin,
    aten.prod,
    aten.var,
    aten.std,
    aten.var_mean,
    aten.std_mean,
)
@rule(aten.logsumexp, aten.linalg_vector_norm, aten.norm, aten.all, aten.any)
def _reduce(call: Call, facts: Facts) -> list[Dims]:
    x, out = call.inputs[0], call.outs[0]
    reduced = _dims(call, "dim", len(x.shape))
    for dim in reduced:
        couple(x.dims[dim])
    remaining = [() if position in reduced else dim for position, dim in enumerate(x.dims)]
    if len(out.shape) != len(x.shape):
        remaining = [dim for position, dim in enumerate(x.dims) if position not in reduced]
    return [tuple(remaining)] * len(call.outs)


@rule(
    aten.max, aten.min, aten.argmax, aten.argmin, aten.sort, aten.topk, aten.median, aten.kthvalue
)
def _ranked(call: Call, facts: Facts) -> list[Dims]:
    x = call.inputs[0]
    if len(call.inputs) == 2:
        return [_broadcast([x.dims, call.inputs[1].dims], call.outs[0].shape)]  # max(a, b)
    if call.op.overloadpacket in (aten.max, aten.min) and not any(
        out.read for out in call.outs[1:]
    ):
        return _reduce(call, facts)[:1]  # type: ignore[no-any-return]
    ranked = _dims(call, "dim", len(x.shape))
    # The result contains positions as numbers, so that positions must not move.
    _pin_all([x.dims[dim] for dim in ranked])
    described: list[Dims] = []
    for out in call.outs:
        if len(out.shape) == len(x.shape):
            described.append(
                tuple(
                    plain(out.shape[position]) if position in ranked else dim
                    for position, dim in enumerate(x.dims)
                )
            )
        else:
            described.append(
                tuple(dim for position, dim in enumerate(x.dims) if position not in ranked)
            )
    return described


@rule(aten.flip, aten.roll)
def _reorder(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    reordered = call.args[1] if call.op.overloadpacket is aten.flip else _argument(call, "dims")
    _pin_all([x.dims[dim] for dim in reordered or range(len(x.dims))])
    return x.dims  # type: ignore[no-any-return]


@rule(aten.tril, aten.triu)
def _triangle(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    _pin_all(x.dims[-2:])
    return x.dims  # type: ignore[no-any-return]


# --- pools and upsampling -----------------------------------------------------------------------


def _spatial(count: int) -> Rule:
    """Return the rule of operations that change the last `count` dimensions, such as pooling."""

    def pooled(call: Call, facts: Facts) -> list[Dims]:
        x = call.inputs[0]
        _pin_all(x.dims[-count:])
        return [(*x.dims[:-count], *(plain(n) for n in out.shape[-count:])) for out in call.outs]

    return pooled


for _count, _names in {
    1: "avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_linear1d max_pool1d_with_indices",
    2: "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_avg_pool2d "
    "adaptive_max_pool2d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_bicubic2d _upsample_bicubic2d_aa grid_sampler_2d fractional_max_pool2d max_unpool2d",
    3: "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_avg_pool3d "
    "adaptive_max_pool3d grid_sampler_3d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d",
}.items():
    rule(*(getattr(aten, _name) for _name in _names.split() if hasattr(aten, _name)))(
        _spatial(_count)
    )


# --- look-ups -----------------------------------------------------------------------------------


@rule(aten.index, aten._unsafe_index)
def _index(call: Call, facts: Facts) -> Dims:
    x, indices = call.args[:2]
    untouched, first = _left_alone(x.dims, indices)
    shape = call.outs[0].shape[first : len(call.outs[0].shape) - len(untouched) + first]
    looked_up = _broadcast([index.dims for index in indices if index is not None], shape)
    return (*untouched[:first], *looked_up, *untouched[first:])


@rule(aten.index_put, aten._unsafe_index_put)
def _index_put(call: Call, facts: Facts) -> Dims:
    x, indices, values = call.args[:3]
    untouched, first = _left_alone(x.dims, indices)
    looked_up = max(
        1 if index.is_mask else len(index.shape) for index in indices if index is not None
    )
    target: list[Dim | None] = [*untouched[:first], *[None] * looked_up, *untouched[first:]]
    for dim, written in zip(reversed(target), reversed(values.dims), strict=False):
        if dim is None:
            pin(written)
        elif size(written) > 1:  # A size of one stretches.
            unify(dim, written)
    return x.dims  # type: ignore[no-any-return]


def _left_alone(dims: Dims, indices: Sequence[Any]) -> tuple[Dims, int]:
    """Return the dimensions that a look-up keeps, and the position of the new ones among them.

    Dimensions that are indexed are pinned.
    """
    untouched: list[Dim] = []
    insertions: set[int] = set()
    dim = 0
    for index in indices:
        if index is None:
            untouched.append(dims[dim])
            dim += 1
        else:
            covered = len(index.shape) if index.is_mask else 1
            _pin_all(dims[dim : dim + covered])
            insertions.add(len(untouched))
            dim += covered
    # torch puts the new dimensions in front if the indexed ones are not neighbours.
    return (*untouched, *dims[dim:]), min(insertions) if len(insertions) == 1 else 0


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def _scatter(call: Call, facts: Facts) -> Dims:
    x, dim = call.args[:2]
    pin(x.dims[dim])
    for operand in call.inputs[1:]:
        for position, (dim_x, dim_operand) in enumerate(zip(x.dims, operand.dims, strict=False)):
            if position != dim % len(x.dims) and size(dim_x) == size(dim_operand):
                unify(dim_x, dim_operand)
            else:
                _pin_all((dim_x, dim_operand))
    return x.dims  # type: ignore[no-any-return]


@rule(aten.diagonal)
def _diagonal(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    removed = [_argument(call, name) % len(x.dims) for name in ("dim1", "dim2")]
    _pin_all([x.dims[position] for position in removed])
    return (
        *(dim for position, dim in enumerate(x.dims) if position not in removed),
        plain(call.outs[0].shape[-1]),
    )


@rule(aten.view_as_complex)
def _view_as_complex(call: Call, facts: Facts) -> Dims:
    *dims, pair = call.args[0].dims
    pin(pair)
    return tuple(dims)


@rule(aten.view_as_real)
def _view_as_real(call: Call, facts: Facts) -> Dims:
    return (*call.args[0].dims, plain(2))


@rule(aten.unfold)
def _unfold(call: Call, facts: Facts) -> Dims:
    x, dim = call.args[:2]
    dims = list(x.dims)
    dim %= len(dims)  # A negative number would count from another end in the result.
    pin(dims[dim])
    dims[dim] = plain(call.outs[0].shape[dim])
    return (*dims, plain(call.outs[0].shape[-1]))


@rule(aten.index_select)
def _index_select(call: Call, facts: Facts) -> Dims:
    x, dim, index = call.args
    pin(x.dims[dim])
    dims = list(x.dims)
    dims[dim] = index.dims[0] if index.dims else ()
    return tuple(dims)


@rule(aten.gather)
def _gather(call: Call, facts: Facts) -> Dims:
    x, dim, index = call.args[:3]
    pin(x.dims[dim])
    for position, (dim_x, dim_index) in enumerate(zip(x.dims, index.dims, strict=True)):
        if position != dim % len(x.dims) and size(dim_x) == size(dim_index):
            unify(dim_x, dim_index)
        elif position != dim % len(x.dims):
            _pin_all((dim_x, dim_index))
    return index.dims  # type: ignore[no-any-return]


# --- made from nothing --------------------------------------------------------------------------


@rule(
    aten.full,
    aten.zeros,
    aten.ones,
    aten.empty,
    aten.rand,
    aten.randn,
    aten.new_zeros,
    aten.new_ones,
    aten.new_empty,
)
@rule(aten.new_full, aten.scalar_tensor, aten.empty_strided, aten.new_empty_strided)
def _made(call: Call, facts: Facts) -> Dims:
    """Describe a new tensor of equal entries or random numbers, whose sizes may be cut."""
    return tuple(atom(n) for n in call.outs[0].shape)


@rule(
    aten.arange,
    aten.linspace,
    aten.eye,
    aten.randperm,
    aten.tril_indices,
    aten.triu_indices,
    aten.hann_window,
)
def _counted(call: Call, facts: Facts) -> Dims:
    # The values depend on positions, so that positions must not move.
    return tuple(plain(n) for n in call.outs[0].shape)
