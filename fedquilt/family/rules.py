"""What each ATen operation says about the dimensions of its inputs and outputs: one small rule per operation.

A rule unifies dimensions that must be cut together, pins those that must not be cut, and returns the dimensions of the
outputs. Everything torch tags as point-wise shares one rule. An operation without a rule pins all it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fedquilt.family.atoms import (
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
from fedquilt.family.record import Call

aten: Any = torch.ops.aten

Dims = tuple[Dim, ...]
Rule = Callable[
    [Call, Facts], Any
]  # the dimensions (`Dims`) of the output, or a list of them for several outputs
_RULES: dict[str, Rule] = {}


def rule(*packets: OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a rule for operations, whatever their overload, in place or not."""

    def register(function: Rule) -> Rule:
        _RULES.update({packet._qualified_op_name: function for packet in packets})
        return function

    return register


@cache
def find_rule(op: OpOverload) -> Rule | None:
    """The rule for an operation, its own or that of all point-wise ones."""
    name = op.overloadpacket._qualified_op_name
    found = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if found is None and torch.Tag.pointwise in _tags(op):
        return _pointwise
    return found


def _tags(op: OpOverload) -> Sequence[torch.Tag]:
    """An operation's tags; in place, those of its functional twin too, since torch does not repeat them all."""
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
    """Learn from one call: unify its inputs' dimensions and describe its outputs."""
    found = find_rule(call.op)
    if found is None:
        _unknown(call, facts)
        return
    result = found(call, facts)
    described = result if isinstance(result, list) else [result]
    for out, dims in zip(call.outs, described, strict=False):
        assert tuple(map(size, dims)) == out.shape, (
            f"the rule for {call} gave {dims} for {out.shape}"
        )
        if out.known:  # written in place: the tensor keeps its dimensions
            _unify_all(out.dims, dims)
        else:
            out.dims, out.known = dims, True


def _unknown(call: Call, facts: Facts) -> None:
    lost = not all(is_plain(dim) for value in call.inputs for dim in value.dims)
    for value in (*call.inputs, *call.outs):
        _pin_all(value.dims)
    for out in call.outs:
        out.known = True
    if lost:
        facts.notes.append(f"no rule for {call}: what it touches is never cut")


def _unify_all(a: Dims, b: Dims) -> None:
    for one, other in zip(a, b, strict=True):
        unify(one, other)


def _pin_all(dims: Sequence[Dim]) -> None:
    for dim in dims:
        pin(dim)


def _argument(call: Call, name: str, default: Any = None) -> Any:
    """An argument by its name in the operation's schema, wherever the caller put it."""
    for position, declared in enumerate(call.op._schema.arguments):
        if declared.name == name:
            if position < len(call.args):
                return call.args[position]
            return call.kwargs.get(
                name, declared.default_value if declared.has_default_value() else default
            )
    return default


def _dims(call: Call, name: str, ndim: int) -> list[int]:
    """A `dim` argument as a list of positive numbers; none at all means every one."""
    given = _argument(call, name)
    if given is None or given == []:
        return list(range(ndim))
    return (
        [dim % ndim for dim in (given if isinstance(given, (list, tuple)) else [given])]
        if ndim
        else []
    )


def told(call: Call, mark: object) -> int | None:
    """The number a call was given where a rule left a mark: a slice's start, a norm's or convolution's groups."""
    if mark == "groups":
        given = (_argument(call, name) for name in ("groups", "num_groups", "group"))
        return next((n for n in given if n is not None), None)
    if isinstance(mark, tuple) and call.op.overloadpacket is aten.slice:
        start: int = _argument(call, "start") or 0
        return start if start >= 0 else start + int(call.inputs[0].shape[mark[1]])
    return None


def is_undefined(call: Call) -> bool:
    """Return True if a call takes the variance of so few values that it is no number."""
    if call.op.overloadpacket not in (aten.var, aten.std, aten.var_mean, aten.std_mean):
        return False
    x = call.inputs[0]
    correction = _argument(call, "correction")
    if correction is None:
        correction = int(_argument(call, "unbiased", True))
    return bool(prod(x.shape[dim] for dim in _dims(call, "dim", len(x.shape))) <= correction)


# --- element-wise ------------------------------------------------------------------------------------------------


def _broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Align at the right; a size of one stretches to whatever the others are."""
    found: list[Dim] = []
    for position in range(-len(shape), 0):
        here = [dims[position] for dims in operands if len(dims) >= -position]
        here = [dim for dim in here if size(dim) == shape[position]]
        for other in here[1:]:
            unify(here[0], other)
        found.append(here[0] if here else atom(shape[position]))
    return tuple(found)


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


# --- views -------------------------------------------------------------------------------------------------------


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
    if prod(x.shape) != prod(out.shape):  # bytes seen as another type
        _pin_all(x.dims)
        return tuple(plain(n) for n in out.shape)
    groups = regroup(x.dims, out.shape, ("outer", "inner"))
    # A dimension taken apart: only one of its pieces will be cut, and that is decided when all is known.
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
    whole = any(isinstance(factor, Atom) for factor in resolve(dim)[:1])
    pieces = parts(dim, sizes)
    if whole:
        facts.slices.append(pieces)
    return pieces


@rule(aten.select, aten.unbind)
def _select(call: Call, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (_argument(call, "dim") or 0) % len(x.shape)
    pin(x.dims[dim])
    rest = tuple(d for at, d in enumerate(x.dims) if at != dim)
    return [rest] * len(call.outs)


@rule(
    aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.chunk
)
@rule(aten.unsafe_chunk, aten.tensor_split)
def _split(call: Call, facts: Facts) -> list[Dims]:
    x = call.args[0]
    dim = (_argument(call, "dim") or 0) % len(x.shape)
    sizes = [out.shape[dim] for out in call.outs]
    if isinstance(call.args[1], int) and len(set(sizes)) > 1:
        pin(x.dims[dim])  # pieces of one size and a remainder: no cut keeps both
    pieces = _ranges(x.dims[dim], sizes, facts)
    if isinstance(call.args[1], int):
        for piece in pieces[1:]:
            unify(pieces[0], piece)  # cut into equal pieces, so they must stay equal
    return [(*x.dims[:dim], piece, *x.dims[dim + 1 :]) for piece in pieces]


@rule(aten.cat)
def _cat(call: Call, facts: Facts) -> Dims:
    out = call.outs[0]
    tensors = [
        value for value in call.args[0] if len(value.shape) == len(out.shape)
    ]  # torch skips shape (0,)
    along = (_argument(call, "dim") or 0) % len(out.shape)
    first, *others = tensors
    for other in others:
        for dim in range(len(out.shape)):
            if dim != along:
                unify(first.dims[dim], other.dims[dim])
    joined = (Cat(tuple(value.dims[along] for value in tensors)),)
    return (*first.dims[:along], joined, *first.dims[along + 1 :])


@rule(aten.stack)
def _stack(call: Call, facts: Facts) -> Dims:
    tensors, out = call.args[0], call.outs[0]
    along = (_argument(call, "dim") or 0) % len(out.shape)
    for other in tensors[1:]:
        _unify_all(tensors[0].dims, other.dims)
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
        before, after = pads[2 * step : 2 * step + 2]
        dim = len(dims) - 1 - step
        if before == after == 0:
            continue
        if constant and before >= 0 and after >= 0:
            dims[dim] = (Cat((plain(before), dims[dim], plain(after))),)
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


# --- products ----------------------------------------------------------------------------------------------------


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul)
def _product(call: Call, facts: Facts) -> Dims:
    a, b = call.args[:2]
    return _contract(call, a.dims, b.dims, facts)


@rule(aten.addmm, aten.baddbmm, aten.addmv)
def _added_product(call: Call, facts: Facts) -> Dims:
    bias, a, b = call.args[:3]
    return _broadcast([_contract(call, a.dims, b.dims, facts), bias.dims], call.outs[0].shape)


def _contract(call: Call, a: Dims, b: Dims, facts: Facts) -> Dims:
    """(… row, inner) times (… inner, column), where a vector has no row or no column."""
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
    """Pieces of a view that a batched product runs over are heads; names only."""
    for dims, before, after in ((batch, "outer", "heads"), (within, "inner", "dim")):
        for one in (one for dim in dims for one in atoms_in(dim)):
            one.role = after if one.role == before else one.role


@rule(aten.scaled_dot_product_attention)
def _attention(call: Call, facts: Facts) -> Dims:
    query, key, value = (one.dims for one in call.args[:3])
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    couple(key[-2])
    shape = call.outs[0].shape
    if size(query[-3]) != size(key[-3]):  # grouped queries: each key head serves several in a row
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
    before, arrow, after = text.partition("->")
    sides = before.split(",")
    rests: list[Dims] = []  # what "..." stands for
    found: dict[str, Dim] = {}
    uses: dict[str, int] = {}
    for side, tensor in zip(sides, tensors, strict=True):
        left, dots, right = side.partition("...")
        named = [
            *zip(left, tensor.dims, strict=False),
            *zip(right[::-1], tensor.dims[::-1], strict=False),
        ]
        rests.append(tensor.dims[len(left) : len(tensor.dims) - len(right)] if dots else ())
        for label, dim in named:
            uses[label] = uses.get(label, 0) + 1
            if size(found.setdefault(label, dim)) == 1:
                found[label] = dim  # a size of one stretches
            elif size(dim) > 1:
                unify(found[label], dim)
    if not arrow:
        after = "..." * any(rests) + "".join(sorted(label for label in uses if uses[label] == 1))
    for label, times in uses.items():
        if times == 1 and label not in after:
            couple(found[label])
    head, _, tail = after.partition("...")
    rest = shape[len(head) : len(shape) - len(tail)]
    dims = (
        *(found[label] for label in head),
        *_broadcast(rests, rest),
        *(found[label] for label in tail),
    )
    kept = [found[label] for label in uses if uses[label] > 1 and label in after]
    summed = [found[label] for label in uses if uses[label] > 1 and label not in after]
    if kept:
        facts.contracted += [(call.layer, dim) for dim in summed]
        _call_heads(kept, [dim for label, dim in found.items() if dim not in kept])
    return dims


@rule(aten._trilinear)
def _trilinear(call: Call, facts: Facts) -> Dims:
    """Three tensors, each stretched along its new dimensions, multiplied and summed: nn.Bilinear."""
    values, stretched, summed = call.args[:3], call.args[3:6], call.args[6]
    operands: list[Dims] = []
    for value, new in zip(values, stretched, strict=True):
        given = iter(value.dims)
        operands.append(
            tuple(() if at in new else next(given) for at in range(len(value.dims) + len(new)))
        )
    shape = [max(map(size, dims)) for dims in zip(*operands, strict=True)]
    return tuple(dim for at, dim in enumerate(_broadcast(operands, shape)) if at not in summed)


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
        _pin_all(space)  # neighbours are mixed: positions, not channels
        space = [plain(n) for n in out.shape[2:]]
    grouped = weight.dims[0]  # (groups out) in, or when transposed (groups in) out
    if groups == 1:
        made = weight.dims[1] if transposed else grouped
        unify(channels, grouped if transposed else weight.dims[1])
    else:
        count, inside = _grouped(channels, groups, facts)
        weight_count, weight_inside = _grouped(grouped, groups, facts)
        unify(count, weight_count)
        unify(inside, weight_inside if transposed else weight.dims[1])
        last = weight.dims[1] if transposed else weight_inside
        if size(inside) == 1:
            pin(last)  # depth-wise: the channels are the groups, several outputs each stay several
        if transposed:
            facts.groups.append((count, last))
        made = (*count, *last)
        out.marks["groups"] = count
    if bias is not None:
        unify(bias.dims[0], made)
    return (batch, made, *space)


def _grouped(channels: Dim, groups: int, facts: Facts) -> tuple[Dim, Dim]:
    outer, inner = split(channels, (groups, size(channels) // groups), ("groups", "inside"))
    facts.groups.append((outer, inner))
    return outer, inner


@rule(aten.embedding)
def _embedding(call: Call, facts: Facts) -> Dims:
    weight, index = call.args[:2]
    fix(weight.dims[0])  # looked up by number: rows never go, but a tied output layer may name them
    return (*index.dims, *weight.dims[1:])


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def _embedding_bag(call: Call, facts: Facts) -> Dims:
    weight = call.args[0]
    fix(weight.dims[0])
    return (plain(call.outs[0].shape[0]), weight.dims[1])


# --- norms -------------------------------------------------------------------------------------------------------


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
    x, *others = call.inputs
    for other in others:
        unify(x.dims[1], other.dims[0])
    return x.dims


@rule(aten.native_layer_norm, aten.layer_norm, aten._fused_rms_norm, aten.rms_norm)
def _layer_norm(call: Call, facts: Facts) -> Dims:
    x, *affine = call.inputs
    count = len(call.args[1])
    for dim in x.dims[-count:]:
        couple(dim)
    for other in affine:
        _unify_all(x.dims[-count:], other.dims)
    return x.dims


@rule(aten.native_group_norm, aten.group_norm)
def _group_norm(call: Call, facts: Facts) -> Dims:
    x, *affine = call.inputs
    groups = told(call, "groups")
    assert groups is not None
    for other in affine:
        unify(x.dims[1], other.dims[0])
    outer, inner = _grouped(x.dims[1], groups, facts)
    couple(inner)
    call.outs[0].marks["groups"] = outer
    return x.dims


@rule(aten._weight_norm_interface, aten._weight_norm)
def _weight_norm(call: Call, facts: Facts) -> Dims:
    direction, length = call.inputs
    for one, other in zip(direction.dims, length.dims, strict=True):
        if size(other) == size(one):
            unify(one, other)
        else:
            couple(one)
    return direction.dims


# --- along a dimension -------------------------------------------------------------------------------------------


@rule(aten._softmax, aten._safe_softmax, aten.softmax, aten._log_softmax, aten.log_softmax)
def _along(call: Call, facts: Facts) -> Dims:
    x = call.inputs[0]
    for dim in _dims(call, "dim", len(x.shape)):
        couple(x.dims[dim])
    return x.dims


@rule(aten.cumsum, aten.cumprod, aten.logcumsumexp)
def _in_order(call: Call, facts: Facts) -> Dims:
    x = call.inputs[0]
    _pin_all(
        [x.dims[dim] for dim in _dims(call, "dim", len(x.shape))]
    )  # a cut may reorder what it keeps
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
    kept = [() if at in reduced else dim for at, dim in enumerate(x.dims)]
    if len(out.shape) != len(x.shape):
        kept = [dim for at, dim in enumerate(x.dims) if at not in reduced]
    return [tuple(kept)] * len(call.outs)


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
    _pin_all(
        [x.dims[dim] for dim in ranked]
    )  # which position won is a number: positions must not move
    found: list[Dims] = []
    for out in call.outs:
        if len(out.shape) == len(x.shape):
            found.append(
                tuple(
                    plain(out.shape[at]) if at in ranked else dim for at, dim in enumerate(x.dims)
                )
            )
        else:
            found.append(tuple(dim for at, dim in enumerate(x.dims) if at not in ranked))
    return found


@rule(aten.flip, aten.roll)
def _reorder(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    given = call.args[1] if call.op.overloadpacket is aten.flip else _argument(call, "dims")
    _pin_all([x.dims[dim] for dim in given or range(len(x.dims))])
    return x.dims  # type: ignore[no-any-return]


@rule(aten.tril, aten.triu)
def _triangle(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    _pin_all(x.dims[-2:])
    return x.dims  # type: ignore[no-any-return]


# --- pools and upsampling ----------------------------------------------------------------------------------------


def _spatial(count: int) -> Rule:
    def pooled(call: Call, facts: Facts) -> list[Dims]:
        x = call.inputs[0]
        _pin_all(x.dims[-count:])
        return [(*x.dims[:-count], *(plain(n) for n in out.shape[-count:])) for out in call.outs]

    return pooled


for _count, _names in {
    1: "avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_linear1d max_pool1d_with_indices",
    2: "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d "
    "_upsample_bicubic2d_aa grid_sampler_2d fractional_max_pool2d max_unpool2d",
    3: "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
    "grid_sampler_3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}.items():
    rule(*(getattr(aten, _name) for _name in _names.split() if hasattr(aten, _name)))(
        _spatial(_count)
    )


# --- look-ups ----------------------------------------------------------------------------------------------------


@rule(aten.index, aten._unsafe_index)
def _index(call: Call, facts: Facts) -> Dims:
    x, indices = call.args[:2]
    rest, first = _left_alone(x.dims, indices)
    shape = call.outs[0].shape[first : len(call.outs[0].shape) - len(rest) + first]
    looked_up = _broadcast([index.dims for index in indices if index is not None], shape)
    return (*rest[:first], *looked_up, *rest[first:])


@rule(aten.index_put, aten._unsafe_index_put)
def _index_put(call: Call, facts: Facts) -> Dims:
    x, indices, values = call.args[:3]
    rest, first = _left_alone(x.dims, indices)
    looked_up = max(
        1 if index.is_mask else len(index.shape) for index in indices if index is not None
    )
    target: list[Dim | None] = [*rest[:first], *[None] * looked_up, *rest[first:]]
    for dim, written in zip(reversed(target), reversed(values.dims), strict=False):
        if dim is None:
            pin(written)
        elif size(written) > 1:  # a size of one stretches
            unify(dim, written)
    return x.dims  # type: ignore[no-any-return]


def _left_alone(dims: Dims, indices: Sequence[Any]) -> tuple[Dims, int]:
    """The dimensions that a look-up keeps, and where among them those it makes go; the ones it looks in are pinned."""
    rest: list[Dim] = []
    places: set[int] = set()
    at = 0
    for index in indices:
        if index is None:
            rest.append(dims[at])
            at += 1
        else:
            covered = len(index.shape) if index.is_mask else 1
            _pin_all(dims[at : at + covered])
            places.add(len(rest))
            at += covered
    return (*rest, *dims[at:]), min(places) if len(
        places
    ) == 1 else 0  # torch moves parted look-ups to the front


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def _scatter(call: Call, facts: Facts) -> Dims:
    x, dim = call.args[:2]
    pin(x.dims[dim])
    for other in call.inputs[1:]:
        for at, (one, two) in enumerate(zip(x.dims, other.dims, strict=False)):
            if at != dim % len(x.dims) and size(one) == size(two):
                unify(one, two)
            else:
                _pin_all((one, two))
    return x.dims  # type: ignore[no-any-return]


@rule(aten.diagonal)
def _diagonal(call: Call, facts: Facts) -> Dims:
    x = call.args[0]
    gone = [_argument(call, name) % len(x.dims) for name in ("dim1", "dim2")]
    _pin_all([x.dims[at] for at in gone])
    return (
        *(dim for at, dim in enumerate(x.dims) if at not in gone),
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
    dim %= len(dims)  # the result has one dimension more, so its end is no place to count from
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
    for at, (one, other) in enumerate(zip(x.dims, index.dims, strict=True)):
        if at != dim % len(x.dims) and size(one) == size(other):
            unify(one, other)
        elif at != dim % len(x.dims):
            _pin_all((one, other))
    return index.dims  # type: ignore[no-any-return]


# --- made from nothing -------------------------------------------------------------------------------------------


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
    return tuple(
        plain(n) for n in call.outs[0].shape
    )  # values tell positions apart, so positions must not move
