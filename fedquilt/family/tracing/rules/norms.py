"""Rules of norm layers."""

from __future__ import annotations

from fedquilt.family.tracing.atoms import Facts, couple, size, unify
from fedquilt.family.tracing.rules.operands import number_at, split_groups, unify_all
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


@rule(
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training
)
@rule(
    aten._native_batch_norm_legit_functional,
    aten.batch_norm,
    aten._batch_norm_no_update,
    aten.instance_norm,
)
def _batch_norm(call: AtenCall, facts: Facts) -> Dims:
    x, *statistics_and_affine = call.inputs
    for value in statistics_and_affine:
        unify(x.dims[1], value.dims[0])
    return x.dims


@rule(aten.native_layer_norm, aten.layer_norm, aten._fused_rms_norm, aten.rms_norm)
def _layer_norm(call: AtenCall, facts: Facts) -> Dims:
    x, *affine = call.inputs
    count = len(call.args[1])
    for dim in x.dims[-count:]:
        couple(dim)
    for value in affine:
        unify_all(x.dims[-count:], value.dims)
    return x.dims


@rule(aten.native_group_norm, aten.group_norm)
def _group_norm(call: AtenCall, facts: Facts) -> Dims:
    x, *affine = call.inputs
    groups = number_at(call, "groups")
    assert groups is not None
    for value in affine:
        unify(x.dims[1], value.dims[0])
    outer, inner = split_groups(x.dims[1], groups, facts)
    couple(inner)
    call.outs[0].marks["groups"] = outer
    return x.dims


@rule(aten._weight_norm_interface, aten._weight_norm)
def _weight_norm(call: AtenCall, facts: Facts) -> Dims:
    direction, length = call.inputs
    for direction_dim, length_dim in zip(direction.dims, length.dims, strict=True):
        if size(length_dim) == size(direction_dim):
            unify(direction_dim, length_dim)
        else:
            couple(direction_dim)
    return direction.dims
