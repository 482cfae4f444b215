"""Rules of operations that treat every element alone."""

from __future__ import annotations

from fedquilt.family.tracing.atoms import Facts, unify
from fedquilt.family.tracing.rules.operands import broadcast
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(aten.copy, aten.fill, aten.masked_fill, aten.where, aten.lerp, aten.polar, aten.complex)
@rule(
    aten.bernoulli, aten.normal, aten.uniform, aten.exponential, aten.random, aten.rrelu_with_noise
)
def pointwise(call: AtenCall, facts: Facts) -> Dims:
    """Unify dimensions of inputs that meet in a broadcast, and return the output's dimensions."""
    return broadcast([value.dims for value in call.inputs], call.outs[0].shape)


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
def _same(call: AtenCall, facts: Facts) -> Dims:
    return call.inputs[0].dims


@rule(aten._prelu_kernel, aten.prelu)
def _prelu(call: AtenCall, facts: Facts) -> Dims:
    x, slope = call.inputs
    if len(slope.shape) == 1 and slope.shape[0] > 1 and len(x.shape) > 1:
        unify(x.dims[1], slope.dims[0])
        return x.dims
    return broadcast([x.dims, slope.dims], x.shape)
