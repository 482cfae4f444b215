"""Rules of products: matrices, attention, einsum, convolutions and embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.family.tracing.atoms import (
    Dim,
    Facts,
    atoms_in,
    couple,
    fix,
    pin,
    plain,
    size,
    split,
    unify,
)
from fedquilt.family.tracing.rules.operands import argument, broadcast, pin_all, split_groups
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul)
def _product(call: AtenCall, facts: Facts) -> Dims:
    a, b = call.args[:2]
    return _contract(call, a.dims, b.dims, facts)


@rule(aten.addmm, aten.baddbmm, aten.addmv)
def _added_product(call: AtenCall, facts: Facts) -> Dims:
    bias, a, b = call.args[:3]
    return broadcast([_contract(call, a.dims, b.dims, facts), bias.dims], call.outs[0].shape)


def _contract(call: AtenCall, a: Dims, b: Dims, facts: Facts) -> Dims:
    """Return the dimensions of the product of (… row, inner) and (… inner, column).

    A vector has no row or no column. The inner dimensions are unified. If the product is batched,
    `facts.contracted` gets the inner dimension.

    Args:
        call: Call of the product.
        a: Dimensions of the left factor.
        b: Dimensions of the right factor.
        facts: Facts about dimensions.
    """
    row, column = a[-2:-1], b[-1:] if len(b) > 1 else ()
    inner = b[-2:][0]
    unify(a[-1], inner)
    batches = [dims[:-2] for dims in (a, b)]
    shape = call.outs[0].shape
    batch = broadcast(batches, shape[: len(shape) - len(row) - len(column)])
    if batch:
        facts.contracted.append((call.layer, inner))
        _call_heads(batch, (*row, inner, *column))
    return (*batch, *row, *column)


def _call_heads(batch: Sequence[Dim], within: Sequence[Dim]) -> None:
    """Give the roles "heads" and "dim" to pieces of a view that a batched product runs over.

    Only atoms with the roles "outer" and "inner" change. Roles only affect the names of axes.

    Args:
        batch: Batch dimensions of the product. Their "outer" atoms become "heads".
        within: The other dimensions. Their "inner" atoms become "dim".
    """
    for dims, old_role, new_role in ((batch, "outer", "heads"), (within, "inner", "dim")):
        for piece in (piece for dim in dims for piece in atoms_in(dim)):
            piece.role = new_role if piece.role == old_role else piece.role


@rule(aten.scaled_dot_product_attention)
def _attention(call: AtenCall, facts: Facts) -> Dims:
    query, key, value = (operand.dims for operand in call.args[:3])
    unify(query[-1], key[-1])
    unify(key[-2], value[-2])
    couple(key[-2])
    shape = call.outs[0].shape
    if size(query[-3]) != size(key[-3]):  # Each key head serves several query heads.
        groups, _ = split(query[-3], (size(key[-3]), size(query[-3]) // size(key[-3])))
        unify(groups, key[-3])
        key, value = ((*dims[:-3], query[-3], *dims[-2:]) for dims in (key, value))
    batch = broadcast([query[:-2], key[:-2], value[:-2]], shape[:-2])
    mask = argument(call, "attn_mask")
    if mask is not None:
        broadcast([mask.dims, (*batch, query[-2], key[-2])], (*shape[:-1], size(key[-2])))
    facts.contracted.append((call.layer, query[-1]))
    _call_heads(batch, (query[-1], value[-1]))
    return (*batch, query[-2], value[-1])


@rule(aten.einsum)
def _einsum(call: AtenCall, facts: Facts) -> Dims:
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
        *broadcast(rests, batch_shape),
        *(dim_of[label] for label in tail),
    )
    shared = [dim_of[label] for label in uses if uses[label] > 1 and label in outputs]
    summed = [dim_of[label] for label in uses if uses[label] > 1 and label not in outputs]
    if shared:
        facts.contracted += [(call.layer, dim) for dim in summed]
        _call_heads(shared, [dim for label, dim in dim_of.items() if dim not in shared])
    return dims


@rule(aten._trilinear)
def _trilinear(call: AtenCall, facts: Facts) -> Dims:
    """Describe nn.Bilinear.

    Three tensors are stretched along new dimensions, multiplied and summed.
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
        dim for position, dim in enumerate(broadcast(operands, shape)) if position not in summed
    )


@rule(aten._cdist_forward, aten.cdist)
def _distances(call: AtenCall, facts: Facts) -> Dims:
    a, b = (value.dims for value in call.inputs)
    unify(a[-1], b[-1])
    couple(a[-1])
    return (*broadcast([a[:-2], b[:-2]], call.outs[0].shape[:-2]), a[-2], b[-2])


@rule(aten.linear)
def _linear(call: AtenCall, facts: Facts) -> Dims:
    x, weight, *bias = (value.dims for value in call.inputs)
    unify(x[-1], weight[-1])
    for dims in bias:
        unify(dims[0], weight[0])
    return (*x[:-1], *weight[:-1])


@rule(aten.convolution)
def _convolution(call: AtenCall, facts: Facts) -> Dims:
    x, weight, bias, stride, padding, _, transposed, _, groups = call.args[:9]
    out = call.outs[0]
    kernel = weight.shape[2:]
    pin_all(weight.dims[2:])
    batch, channels, *space = x.dims
    if any(n != 1 for n in (*kernel, *stride)) or any(padding):
        pin_all(space)  # Neighbours are mixed, so these are positions and no channels.
        space = [plain(n) for n in out.shape[2:]]
    grouped = weight.dims[0]  # (groups out) in; (groups in) out if transposed
    if groups == 1:
        out_channels = weight.dims[1] if transposed else grouped
        unify(channels, grouped if transposed else weight.dims[1])
    else:
        count, inside = split_groups(channels, groups, facts)
        weight_count, weight_inside = split_groups(grouped, groups, facts)
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


@rule(aten.embedding)
def _embedding(call: AtenCall, facts: Facts) -> Dims:
    weight, index = call.args[:2]
    # Tokens look rows up, so that none is cut. A tied output layer may name them.
    fix(weight.dims[0])
    return (*index.dims, *weight.dims[1:])


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def _embedding_bag(call: AtenCall, facts: Facts) -> Dims:
    weight = call.args[0]
    fix(weight.dims[0])
    return (plain(call.outs[0].shape[0]), weight.dims[1])
