"""Compare the run of a member with that of the module, call by call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from fedquilt.family.tracing.atoms import atoms_in
from fedquilt.family.tracing.rules.operands import is_undefined, number_at
from fedquilt.family.tracing.run import AtenCall, Value
from fedquilt.family.tracing.traced import Traced
from fedquilt.hardware.torch_internals import tree_leaves


@dataclass(frozen=True)
class Mismatch:
    """A call in which a member does not follow its axes."""

    call: AtenCall  # Call of the module
    reason: str  # Phrase that says what the member does instead
    branch: bool = False  # True: it computes something else. False: only sizes differ.
    # All calls of the layer, if it is not clear which one is the cause
    layer: tuple[AtenCall, ...] = ()
    axes: tuple[str, ...] = ()  # Axes that are the cause, if they are known
    widths: Mapping[str, int] = field(default_factory=dict)  # Widths of the member

    def suspects(self, traced: Traced) -> list[str]:
        """Return the names of the axes that may be the cause, without duplicates.

        They are `axes` if these are known. Otherwise they are all axes of the inputs and outputs of
        `call`, and of the calls in `layer`.
        """
        if self.axes:
            return list(self.axes)
        values = [*self.call.inputs, *self.call.outs]
        values += [value for call in self.layer for value in (*call.inputs, *call.outs)]
        atoms = (axis_atom for value in values for dim in value.dims for axis_atom in atoms_in(dim))
        return list(
            dict.fromkeys(
                traced.names[axis_atom] for axis_atom in atoms if axis_atom in traced.names
            )
        )


@dataclass
class Numbers:
    """The numbers among the arguments of the module's calls that depend on a member's widths.

    All other numbers are the same in every member. If such a number differs at a width where a
    comparison becomes equal, the member took another branch: `x * (2 if self.a != self.b else 3)`.
    """

    varying: set[tuple[AtenCall, int]] = field(default_factory=set)  # (call, position)
    complete: bool = False  # True once members of all kinds of widths have run

    def difference(self, call: AtenCall, member_call: AtenCall) -> str | None:
        """Return a description of a number that should be equal in a member's call and is not.

        Before `complete` is True, numbers that differ are added to `varying`, and None is returned.
        Afterwards, numbers in `varying` may differ.

        Args:
            call: Call of the module.
            member_call: The corresponding call of the member.

        Returns:
            Phrase such as "3, not 2" about the first such number. None: there is none.
        """
        pairs = zip(self._of(call), self._of(member_call), strict=False)
        different = [
            (position, expected, actual)
            for position, (expected, actual) in enumerate(pairs)
            if expected != actual
        ]
        if not self.complete:
            self.varying.update((call, position) for position, _, _ in different)
            return None
        return next(
            (
                f"{actual}, not {expected}"
                for position, expected, actual in different
                if (call, position) not in self.varying
            ),
            None,
        )

    @staticmethod
    def _of(call: AtenCall) -> list[int | float]:
        leaves = tree_leaves((call.args, call.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, (int, float))]


def compare(
    expected: Sequence[AtenCall],
    actual: Sequence[AtenCall],
    traced: Traced,
    widths: Mapping[str, int],
    numbers: Numbers,
    fails: str = "",
) -> Mismatch | None:
    """Return the first call in which a member differs from the module. None: there is none.

    Args:
        expected: Calls of the module.
        actual: Calls of the member.
        traced: Result of tracing, which predicts the shapes of the member.
        widths: Width of every axis in the member.
        numbers: Numbers that depend on a member's widths. New ones are added while it learns.
        fails: Phrase that says why the member's run stopped. "": it did not.
    """
    sources = _Sources(expected, actual)
    for call, member_call in _aligned(expected, actual, sources):
        if member_call is None:
            assert call is not None
            return Mismatch(call, fails or "the member is done before", branch=not fails)
        if call is None:
            return Mismatch(
                visible_calls(expected)[-1], "the member computes more after it", branch=True
            )
        if operation(call) != operation(member_call):
            return Mismatch(call, f"the member computes {operation(member_call)} here", branch=True)
        if (different := sources.difference(call, member_call)) is not None:
            return Mismatch(call, f"the member computes it from {different}", branch=True)
        if (different := numbers.difference(call, member_call)) is not None:
            return Mismatch(call, f"the member computes it with {different}", branch=True)
        if is_undefined(member_call) and not is_undefined(call):
            return Mismatch(call, "the member takes the variance of too few values")
        for value, member_value in zip(call.outs, member_call.outs, strict=False):
            predicted = tuple(traced.predict(dim, widths) for dim in value.dims)
            if value.described and predicted != member_value.shape:
                return Mismatch(
                    call, f"the member gets shape {member_value.shape}, its axes say {predicted}"
                )
            for mark, dim in value.marks.items():
                number, expected_number = number_at(member_call, mark), traced.predict(dim, widths)
                if number is not None and number != expected_number:
                    return Mismatch(
                        call, f"the member has the number {number}, its axes say {expected_number}"
                    )
    return None


def _aligned(
    expected: Sequence[AtenCall], actual: Sequence[AtenCall], sources: _Sources
) -> Iterator[tuple[AtenCall | None, AtenCall | None]]:
    """Yield pairs of corresponding calls of the module and of a member, in order.

    Copies are left out. Calls that make constants may be missing in one run, because forward caches
    a table. Such calls without a partner are skipped. The first other call without a partner ends
    the sequence.

    Args:
        expected: Calls of the module.
        actual: Calls of the member.
        sources: Receives the calls of the member that are skipped.

    Yields:
        (call of the module, call of the member). The last pair may have None, or two calls that
        differ.
    """
    calls, member_calls = deque(visible_calls(expected)), deque(visible_calls(actual))
    while calls or member_calls:
        call = calls[0] if calls else None
        member_call = member_calls[0] if member_calls else None
        if (
            call
            and member_call
            and operation(call) == operation(member_call)
            and _line(call) == _line(member_call)
        ):
            yield calls.popleft(), member_calls.popleft()
        elif member_call and (member_call.constant or _is_needless(member_call)):
            sources.skip(member_calls.popleft())
        elif call and call.constant:
            calls.popleft()
        else:
            yield call, member_call
            return


def _line(call: AtenCall) -> str:
    """Return the line of a call that makes a constant, and "" for other calls.

    A member may have more or fewer calls that make constants. They are therefore paired by their
    lines.
    """
    return call.where if call.constant else ""


class _Sources:
    """The tensors of a member and the tensors of the module that they correspond to.

    Shapes alone do not show that a member took another branch, because `self.a(x)` and `self.b(x)`
    may have equal shapes.
    """

    def __init__(self, expected: Sequence[AtenCall], actual: Sequence[AtenCall]) -> None:
        self._originals: dict[Value, Value] = {}
        self._partners: dict[Value, Value] = {}
        for call in (*expected, *actual):
            if call.op.overloadpacket in _COPIES:
                self.skip(call)

    def skip(self, call: AtenCall) -> None:
        """Treat the result of a call as its first input, as for a copy.

        A call without tensors among its arguments has no effect.
        """
        if call.inputs:
            self._originals[call.outs[0]] = self._original(call.inputs[0])

    def _original(self, value: Value) -> Value:
        return self._originals.get(value, value)

    def difference(self, call: AtenCall, member_call: AtenCall) -> str | None:
        """Return a description of what a member's call is computed from, if that is not the same.

        Constants are not compared. If the inputs correspond, the outputs of both calls are noted as
        corresponding.

        Args:
            call: Call of the module.
            member_call: The call of the member that is compared with it.

        Returns:
            Phrase such as "2 tensors, not 1", or the name of another weight. None: the inputs
            correspond.
        """
        if len(call.inputs) != len(member_call.inputs):
            return f"{len(member_call.inputs)} tensors, not {len(call.inputs)}"
        for value, member_value in zip(call.inputs, member_call.inputs, strict=True):
            value, member_value = self._original(value), self._original(member_value)
            if value.constant or member_value.constant:
                continue
            if (
                value.weight != member_value.weight
                or self._partners.setdefault(value, member_value) is not member_value
            ):
                return repr(member_value.weight) if member_value.weight else "another tensor"
        self._partners.update(zip(call.outs, member_call.outs, strict=False))
        return None


def _is_needless(call: AtenCall) -> bool:
    """Return True if a call views a single number in another shape.

    torch does that to write a number to many positions.
    """
    return operation(call) == "view" and prod(call.outs[0].shape) == 1


def visible_calls(calls: Sequence[AtenCall]) -> list[AtenCall]:
    """Return the calls that are not copies (`clone`, `alias`, `detach`, `contiguous`), in order.

    torch makes copies or not depending on strides, so that they say nothing about the computation.
    """
    return [call for call in calls if call.op.overloadpacket not in _COPIES]


def operation(call: AtenCall) -> str:
    """Return the name of a call's operation, which is "view" for all kinds of views."""
    packet = call.op.overloadpacket
    return "view" if packet in _VIEWS else str(packet.__name__)


_COPIES = {
    torch.ops.aten.clone,
    torch.ops.aten.alias,
    torch.ops.aten.detach,
    torch.ops.aten.contiguous,
}
_VIEWS = {
    torch.ops.aten.view,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.reshape,
    torch.ops.aten._reshape_alias,
}
