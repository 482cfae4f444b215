"""Rules of operations that read or write at positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedquilt.family.tracing.atoms import Dim, Facts, pin, size, unify
from fedquilt.family.tracing.rules.operands import broadcast, pin_all
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(aten.index, aten._unsafe_index)
def _index(call: AtenCall, facts: Facts) -> Dims:
    x, indices = call.args[:2]
    untouched, first = _left_alone(x.dims, indices)
    shape = call.outs[0].shape[first : len(call.outs[0].shape) - len(untouched) + first]
    looked_up = broadcast([index.dims for index in indices if index is not None], shape)
    return (*untouched[:first], *looked_up, *untouched[first:])


@rule(aten.index_put, aten._unsafe_index_put)
def _index_put(call: AtenCall, facts: Facts) -> Dims:
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

    Dimensions that are indexed are pinned. The new dimensions are at position 0 if the indexed ones
    are not neighbours.

    Args:
        dims: Dimensions of the tensor that is indexed.
        indices: Value of the index tensor of each dimension. None: the dimension is kept.
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
            pin_all(dims[dim : dim + covered])
            insertions.add(len(untouched))
            dim += covered
    # torch puts the new dimensions in front if the indexed ones are not neighbours.
    return (*untouched, *dims[dim:]), min(insertions) if len(insertions) == 1 else 0


@rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def _scatter(call: AtenCall, facts: Facts) -> Dims:
    x, dim = call.args[:2]
    pin(x.dims[dim])
    for operand in call.inputs[1:]:
        for position, (dim_x, dim_operand) in enumerate(zip(x.dims, operand.dims, strict=False)):
            if position != dim % len(x.dims) and size(dim_x) == size(dim_operand):
                unify(dim_x, dim_operand)
            else:
                pin_all((dim_x, dim_operand))
    return x.dims  # type: ignore[no-any-return]


@rule(aten.index_select)
def _index_select(call: AtenCall, facts: Facts) -> Dims:
    x, dim, index = call.args
    pin(x.dims[dim])
    dims = list(x.dims)
    dims[dim] = index.dims[0] if index.dims else ()
    return tuple(dims)


@rule(aten.gather)
def _gather(call: AtenCall, facts: Facts) -> Dims:
    x, dim, index = call.args[:3]
    pin(x.dims[dim])
    for position, (dim_x, dim_index) in enumerate(zip(x.dims, index.dims, strict=True)):
        if position != dim % len(x.dims) and size(dim_x) == size(dim_index):
            unify(dim_x, dim_index)
        elif position != dim % len(x.dims):
            pin_all((dim_x, dim_index))
    return index.dims  # type: ignore[no-any-return]
