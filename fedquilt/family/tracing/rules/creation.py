"""Rules of operations that make a new tensor."""

from __future__ import annotations

from fedquilt.family.tracing.atoms import Facts, atom, plain
from fedquilt.family.tracing.rules.registry import Dims, aten, rule
from fedquilt.family.tracing.run import AtenCall


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
def _made(call: AtenCall, facts: Facts) -> Dims:
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
def _counted(call: AtenCall, facts: Facts) -> Dims:
    # The values depend on positions, so that positions must not move.
    return tuple(plain(n) for n in call.outs[0].shape)
