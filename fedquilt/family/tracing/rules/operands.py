"""Helpers that rules share: arguments of a call, and dimensions of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fedquilt.family.tracing.atoms import Dim, Facts, atom, pin, size, split, unify
from fedquilt.family.tracing.rules.registry import Dims, aten
from fedquilt.family.tracing.run import AtenCall
from fedquilt.hardware.torch_internals import schema_of


def unify_all(a: Dims, b: Dims) -> None:
    """Unify the dimensions of two tensors pair by pair. Both must have equally many."""
    for left, right in zip(a, b, strict=True):
        unify(left, right)


def pin_all(dims: Sequence[Dim]) -> None:
    """Pin every dimension, so that none of them is cut."""
    for dim in dims:
        pin(dim)


def argument(call: AtenCall, name: str, default: Any = None) -> Any:
    """Return an argument by its name in the operation's schema, also if it is positional.

    Args:
        call: The call.
        name: Name of the argument in the schema of the operation.
        default: Result if the schema has neither the argument nor a default value for it.
    """
    for position, declared in enumerate(schema_of(call.op).arguments):
        if declared.name == name:
            if position < len(call.args):
                return call.args[position]
            return call.kwargs.get(
                name, declared.default_value if declared.has_default_value() else default
            )
    return default


def dims_argument(call: AtenCall, name: str, ndim: int) -> list[int]:
    """Return a `dim` argument as a list of numbers from 0 on, also if it is negative or one int.

    Args:
        call: The call.
        name: Name of the argument. If it is None or empty, all dimensions are returned.
        ndim: Number of dimensions of the tensor.
    """
    dims = argument(call, name)
    if dims is None or dims == []:
        return list(range(ndim))
    if not ndim:
        return []
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    return [dim % ndim for dim in dims]


def number_at(call: AtenCall, mark: object) -> int | None:
    """Return the number that a call has at a mark: the start of a slice, or a number of groups.

    A negative start is converted to one from 0 on.

    Args:
        call: The call.
        mark: "groups", or ("start", number of the sliced dimension).

    Returns:
        The number. None: the call has no such number.
    """
    if mark == "groups":
        arguments = (argument(call, name) for name in ("groups", "num_groups", "group"))
        return next((n for n in arguments if n is not None), None)
    if isinstance(mark, tuple) and call.op.overloadpacket is aten.slice:
        start: int = argument(call, "start") or 0
        return start if start >= 0 else start + int(call.inputs[0].shape[mark[1]])
    return None


def is_undefined(call: AtenCall) -> bool:
    """Return True if a call takes the variance of too few values, so that it is not a number.

    Standard deviations count too. Other operations give False.
    """
    if call.op.overloadpacket not in (aten.var, aten.std, aten.var_mean, aten.std_mean):
        return False
    x = call.inputs[0]
    correction = argument(call, "correction")
    if correction is None:
        correction = int(argument(call, "unbiased", True))
    num_values = prod(x.shape[dim] for dim in dims_argument(call, "dim", len(x.shape)))
    return bool(num_values <= correction)


def broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of a broadcast, and unify those that meet.

    Args:
        operands: Dimensions of the tensors. They are aligned at the right, and sizes of 1 stretch.
        shape: Shape of the result. A size that no operand has becomes a new atom.
    """
    result: list[Dim] = []
    for position in range(-len(shape), 0):
        aligned = [dims[position] for dims in operands if len(dims) >= -position]
        aligned = [dim for dim in aligned if size(dim) == shape[position]]
        for operand in aligned[1:]:
            unify(aligned[0], operand)
        result.append(aligned[0] if aligned else atom(shape[position]))
    return tuple(result)


def split_groups(channels: Dim, groups: int, facts: Facts) -> tuple[Dim, Dim]:
    """Split channels into groups and the channels inside each.

    Args:
        channels: The dimension of the channels.
        groups: Number of groups.
        facts: Takes the pair of dimensions as a new fact.

    Returns:
        The dimension of the groups, and that of the channels inside each.
    """
    outer, inner = split(channels, (groups, size(channels) // groups), ("groups", "inside"))
    facts.groups.append((outer, inner))
    return outer, inner
