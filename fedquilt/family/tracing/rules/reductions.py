"""Rules of operations along a dimension: softmax, sums, sorting."""

from __future__ import annotations

from fedquilt.family.tracing.atoms import Facts, couple, plain
from fedquilt.family.tracing.rules.operands import argument, broadcast, dims_argument, pin_all
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(aten._softmax, aten._safe_softmax, aten.softmax, aten._log_softmax, aten.log_softmax)
def _along(call: AtenCall, facts: Facts) -> Dims:
    x = call.inputs[0]
    for dim in dims_argument(call, "dim", len(x.shape)):
        couple(x.dims[dim])
    return x.dims


@rule(aten.cumsum, aten.cumprod, aten.logcumsumexp)
def _in_order(call: AtenCall, facts: Facts) -> Dims:
    x = call.inputs[0]
    # A cut may reorder what it keeps.
    pin_all([x.dims[dim] for dim in dims_argument(call, "dim", len(x.shape))])
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
def reduce(call: AtenCall, facts: Facts) -> list[Dims]:
    """Couple the dimensions that are reduced, and return the remaining ones for every output.

    With `keepdim`, a reduced dimension remains with size 1.
    """
    x, out = call.inputs[0], call.outs[0]
    reduced = dims_argument(call, "dim", len(x.shape))
    for dim in reduced:
        couple(x.dims[dim])
    remaining = [() if position in reduced else dim for position, dim in enumerate(x.dims)]
    if len(out.shape) != len(x.shape):
        remaining = [dim for position, dim in enumerate(x.dims) if position not in reduced]
    return [tuple(remaining)] * len(call.outs)


@rule(
    aten.max, aten.min, aten.argmax, aten.argmin, aten.sort, aten.topk, aten.median, aten.kthvalue
)
def _ranked(call: AtenCall, facts: Facts) -> list[Dims]:
    x = call.inputs[0]
    if len(call.inputs) == 2:
        return [broadcast([x.dims, call.inputs[1].dims], call.outs[0].shape)]  # max(a, b)
    if call.op.overloadpacket in (aten.max, aten.min) and not any(
        out.read for out in call.outs[1:]
    ):
        return reduce(call, facts)[:1]  # type: ignore[no-any-return]
    ranked = dims_argument(call, "dim", len(x.shape))
    # The result contains positions as numbers, so that positions must not move.
    pin_all([x.dims[dim] for dim in ranked])
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
def _reorder(call: AtenCall, facts: Facts) -> Dims:
    x = call.args[0]
    reordered = call.args[1] if call.op.overloadpacket is aten.flip else argument(call, "dims")
    pin_all([x.dims[dim] for dim in reordered or range(len(x.dims))])
    return x.dims  # type: ignore[no-any-return]


@rule(aten.tril, aten.triu)
def _triangle(call: AtenCall, facts: Facts) -> Dims:
    x = call.args[0]
    pin_all(x.dims[-2:])
    return x.dims  # type: ignore[no-any-return]
