"""Find the rule of an operation, and apply it to a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from fedquilt.family.tracing.atoms import Facts, is_plain, size

# Importing a module registers its rules.
from fedquilt.family.tracing.rules import (  # noqa: F401
    creation,
    lookups,
    norms,
    products,
    reductions,
    spatial,
    views,
)
from fedquilt.family.tracing.rules.elementwise import pointwise
from fedquilt.family.tracing.rules.operands import pin_all, unify_all
from fedquilt.family.tracing.rules.registry import RULES, Rule, aten
from fedquilt.family.tracing.run import AtenCall
from fedquilt.hardware.torch_internals import OpOverload, overload_name, qualified_name


@cache
def find_rule(op: OpOverload) -> Rule | None:
    """Return the rule of an ATen operation, or None if there is none.

    An in-place operation has the rule of its functional twin. All operations that torch tags as
    point-wise and that have no rule of their own share `pointwise`.
    """
    name = qualified_name(op.overloadpacket)
    own_rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if own_rule is None and torch.Tag.pointwise in _tags(op):
        return pointwise
    return own_rule


def _tags(op: OpOverload) -> Sequence[torch.Tag]:
    """Return an operation's tags.

    An in-place operation also has the tags of its functional twin, because torch does not repeat
    all of them.
    """
    twin = getattr(aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if not twin or overload_name(op) not in twin.overloads():
        return [*op.tags]
    return [*op.tags, *getattr(twin, overload_name(op)).tags]


def apply(call: AtenCall, facts: Facts) -> None:
    """Apply the rule of a call: unify dimensions of its inputs, and describe its outputs in-place.

    An output that was written in place keeps its dimensions, which are unified with those of the
    rule. Without a rule, all dimensions of the call are pinned.

    Args:
        call: The call.
        facts: Takes what the rule finds out.
    """
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
        if out.described:  # It was written in place, and keeps its dimensions.
            unify_all(out.dims, dims)
        else:
            out.dims, out.described = dims, True


def _unknown(call: AtenCall, facts: Facts) -> None:
    """Pin all dimensions of a call that has no rule.

    Args:
        call: The call.
        facts: Takes a note if an input had an axis.
    """
    had_axes = not all(is_plain(dim) for value in call.inputs for dim in value.dims)
    for value in (*call.inputs, *call.outs):
        pin_all(value.dims)
    for out in call.outs:
        out.described = True
    if had_axes:
        facts.notes.append(f"no rule for {call}: what it touches is never cut")
