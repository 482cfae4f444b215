"""Cut points of a module: outputs of inner modules on which alone all later operations depend.

A stage may end at the output of a module if no later operation reads any other value that was
computed from the inputs before it. The recorded run of the module shows where this holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

import torch

from fedquilt.family.tracing.atoms import is_plain
from fedquilt.family.tracing.run import AtenCall, RecordedRun, Value, Visit
from fedquilt.hardware.torch_internals import schema_of, tree_leaves

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class CutPoint:
    """The output of a module that a stage may end with."""

    # Names of the modules that return this value, in the order in which they end
    paths: tuple[str, ...]
    value: Value  # The output
    stop: int  # Number of operations before it
    macs: int  # Multiply-adds of the operations before it

    @property
    def name(self) -> str:
        """Return the name of the outermost module that ends here. Of several, it is the last."""
        return min(reversed(self.paths), key=_depth)

    @property
    def depth(self) -> int:
        """Return the number of modules between the traced module and the named one."""
        return _depth(self.name)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the sizes of all dimensions but the batch's and the channels'."""
        channels = channel_dim(self.value)
        return tuple(size for dim, size in enumerate(self.value.shape) if dim not in (0, channels))


def _depth(path: str) -> int:
    return path.count(".")


def channel_dim(value: Value) -> int:
    """Return the number of the dimension that carries the channels.

    It is the only dimension behind the batch that has an axis. If there are none or several, it is
    the second one.
    """
    carrying = [dim for dim in range(1, len(value.shape)) if not is_plain(value.dims[dim])]
    return carrying[0] if len(carrying) == 1 else min(1, len(value.shape) - 1)


# --- which values are cut points ----------------------------------------------------------------


class Reads:
    """The operations that compute and last read each value of a run, and which values are data.

    A value is data if it depends on the inputs.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._made: dict[Value, int] = {}
        self._last_read: dict[Value, int] = {}
        # The operation from which on a value depends on the inputs
        self._from_data: dict[Value, int] = {}
        # Values that share memory, because some are views of others
        self._aliases: dict[Value, list[Value]] = {}
        for number, call in enumerate(run.calls):
            for value in call.inputs:
                self._last_read[value] = number
            for value in call.outs:
                if value.weight is None:
                    self._made.setdefault(value, number)
            if _is_view(call):
                self._join(call)
            if self._depends(call):
                self._mark(call, number)
        for value in _values(run.output):
            self._last_read[value] = len(run.calls)

    def _depends(self, call: AtenCall) -> bool:
        """Return True if the result of a call depends on the inputs or on random numbers."""
        reads_data = (value in self._from_data or self._is_input(value) for value in call.inputs)
        return torch.Tag.nondeterministic_seeded in call.op.tags or any(reads_data)

    def _is_input(self, value: Value) -> bool:
        return value not in self._made and value.weight is None and not value.constant

    def _join(self, call: AtenCall) -> None:
        """Note that the outputs of a view share memory with its first input."""
        shared = self._aliases.setdefault(call.inputs[0], [call.inputs[0]])
        for view in call.outs:
            if view not in shared:
                shared.append(view)
            self._aliases[view] = shared

    def _mark(self, call: AtenCall, number: int) -> None:
        """Note that a call's outputs depend on the inputs.

        If the call writes in place, so do all views of the same memory.

        Args:
            call: Call whose result depends on the inputs.
            number: Position of the call in the run.
        """
        for value in call.outs:
            is_written = schema_of(call.op).is_mutable
            written = self._aliases.get(value, [value]) if is_written else [value]
            for target in written:
                if target in self._made:
                    self._from_data.setdefault(target, number)

    def crossing(self, visit: Visit) -> list[Value]:
        """Return the data that is computed before a module ends and read after it.

        The output of the module is not among them, and neither are weights and constants.

        Args:
            visit: Execution of the module.
        """
        return [
            value
            for value, since in self._from_data.items()
            if value is not visit.output and since < visit.stop <= self._last_read.get(value, -1)
        ]

    def maker(self, value: Value) -> AtenCall:
        """Return the operation from which on a value depends on the inputs.

        The value must have been computed from the inputs.
        """
        return self.run.calls[self._from_data[value]]

    def is_computed(self, value: Value) -> bool:
        """Return True if a value was computed from the inputs or from random numbers.

        Inputs themselves, weights and constants give False.
        """
        return value in self._from_data


def _is_view(call: AtenCall) -> bool:
    schema = schema_of(call.op)
    returns_alias = any(result.alias_info is not None for result in schema.returns)
    return returns_alias and not schema.is_mutable and bool(call.inputs)


def _values(tree: object) -> list[Value]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Value)]


def find_cuts(run: RecordedRun) -> list[CutPoint]:
    """Return all cut points of a run in order, without the module's own output.

    A module counts if it runs once and returns one tensor of at least two dimensions that is
    computed from the inputs. No other such value from before its end may be read later.
    """
    reads = Reads(run)
    macs = _cumulative_macs(run.calls)
    times = Counter(visit.path for visit in run.visits)
    paths_by_end: dict[tuple[Value, int], list[str]] = {}
    for visit in run.visits:
        value = visit.output
        if not visit.path or times[visit.path] > 1 or not isinstance(value, Value):
            continue
        is_end = value is run.output and visit.stop == len(run.calls)
        if is_end or len(value.shape) < 2 or not reads.is_computed(value) or reads.crossing(visit):
            continue
        paths_by_end.setdefault((value, visit.stop), []).append(visit.path)
    return [
        CutPoint(tuple(paths), value, stop, macs[stop])
        for (value, stop), paths in paths_by_end.items()
    ]


def _cumulative_macs(calls: Sequence[AtenCall]) -> list[int]:
    totals = [0]
    for call in calls:
        totals.append(totals[-1] + multiply_adds(call))
    return totals


def multiply_adds(call: AtenCall) -> int:
    """Return the multiply-adds of convolutions and matrix products; all else counts nothing."""
    packet = call.op.overloadpacket
    size = prod(call.outs[0].shape)
    if packet is aten.convolution or packet.__name__.startswith("conv"):
        weight = call.inputs[1].shape
        transposed = packet.__name__.startswith("conv_transpose") or bool(
            packet is aten.convolution and len(call.args) > 6 and call.args[6]
        )
        return (
            prod(call.inputs[0].shape) * prod(weight[1:]) if transposed else size * prod(weight[1:])
        )
    if packet in (aten.addmm, aten.baddbmm, aten.addbmm):
        return size * call.inputs[1].shape[-1]
    if packet in (aten.linear, aten.mm, aten.bmm, aten.matmul, aten.mv, aten.addmv):
        return size * call.inputs[0].shape[-1]
    return 0


# --- a choice of them ---------------------------------------------------------------------------


def propose(cuts: Sequence[CutPoint], count: int, run: RecordedRun) -> list[CutPoint]:
    """Choose cut points that end `count` stages, the last one included.

    Stages end where the resolution changes, as far as there are such cuts. Among these, or besides
    them, the choice is the one whose stages have the most equal numbers of multiply-adds.

    Args:
        cuts: All cut points, in order.
        count: Number of stages; at least as many `candidates` must be there.
        run: The run that they were found in.
    """
    options = candidates(cuts)
    marked = _where_resolution_changes(options, cuts, run)
    total = options[-1].macs  # without the last layer, because every stage has one like it
    if len(marked) >= count:
        allowed = marked
        forced: set[int] = {marked[-1]}
    else:
        allowed = _outermost(options, marked, count)
        forced = set(marked)

    @cache
    def best(start: int, num_ends: int, done: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the cheapest choice of `num_ends` ends among the allowed ones from `start` on.

        `done` are the multiply-adds of the stages before. The result is the cost and the choice.
        """
        if num_ends == 0:
            return None if any(index in forced for index in allowed[start:]) else (0.0, ())
        choices = []
        for position in range(start, len(allowed) - num_ends + 1):
            index = allowed[position]
            # What runs after the end of E_S is part of the last stage too.
            reached = options[index].macs if num_ends > 1 else total
            later = best(position + 1, num_ends - 1, reached)
            if later is not None:
                choices.append((float(reached - done) ** 2 + later[0], (index, *later[1])))
            if index in forced:
                break
        # If several choices cost the same, the one that ends latest is taken.
        return min(
            choices, key=lambda choice: (choice[0], [-index for index in choice[1]]), default=None
        )

    choice = best(0, count, 0)
    assert choice is not None, "there are fewer candidates than stages"
    return [options[index] for index in choice[1]]


def _outermost(options: Sequence[CutPoint], marked: Sequence[int], count: int) -> list[int]:
    """Return the candidates that may end a stage, as ascending indices in `options`.

    These are the marked ones and all others up to some depth of modules. The depth is the smallest
    that gives `count` candidates.

    Args:
        options: Possible ends of stages, in order.
        marked: Indices of candidates that are always included.
        count: Number of candidates that are needed at least.
    """
    depth = 0
    while True:
        allowed = [
            number for number, cut in enumerate(options) if cut.depth <= depth or number in marked
        ]
        if len(allowed) >= count:
            return allowed
        depth += 1


def candidates(cuts: Sequence[CutPoint]) -> list[CutPoint]:
    """Return one cut for each convolution or product, in order.

    Cuts with no convolution or product between them form a group. Of each group, the cut of the
    outermost module is chosen, and of several the last. Cuts before the first convolution or
    product are left out.

    Within a group, cuts after the positions vanish, by a flattening or a mean over all of them, are
    left out. Heads pool themselves.
    """
    groups: dict[int, list[CutPoint]] = {}
    for cut in cuts:
        if cut.macs:
            groups.setdefault(cut.macs, []).append(cut)
    cuts_chosen = []
    for group in groups.values():
        usable = group[:1]
        for earlier, later in pairwise(group):
            if vanishes(earlier.positions, later.positions):
                break
            usable.append(later)
        cuts_chosen.append(min(reversed(usable), key=lambda cut: cut.depth))
    return cuts_chosen


def vanishes(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return True if positions are lost altogether, and not by a pooling over a few.

    With an equal number of dimensions, all sizes must become 1, and one must have been above 2.
    With unequal numbers, there must be fewer positions, or no dimension left.

    Args:
        before: Sizes of all dimensions but the batch's and the channels'.
        after: The same sizes at a later cut.
    """
    if len(before) != len(after):
        return _are_fewer(before, after)
    return max(after, default=1) == 1 and max(before, default=1) > 2


def _are_fewer(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return prod(after) < prod(before) or (bool(before) and not after)


def _shrinks(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return True if some size drops to half or less, or if dimensions vanish.

    The small loss by a convolution without padding does not count.

    Args:
        before: Sizes of all dimensions but the batch's and the channels'.
        after: The same sizes at a later cut.
    """
    if len(before) != len(after):
        return _are_fewer(before, after)
    return any(
        2 * small <= large + 1 and small < large for large, small in zip(before, after, strict=True)
    )


def _where_resolution_changes(
    options: Sequence[CutPoint], cuts: Sequence[CutPoint], run: RecordedRun
) -> list[int]:
    """Return the candidates after which the resolution drops, as ascending indices in `options`.

    The resolution is the size of all dimensions besides batch and channels, such as height and
    width. It drops between two neighbouring cuts if `_shrinks` is True for them. There are two
    cases:

    (1) A pooling. No convolution or product comes between the cuts, and some resolution remains.
    The candidate of these cuts is returned, so that the pooling belongs to the stage before it.

    (2) A layer with a stride, or the loss of all resolution by a flattening or a mean. The stage
    ends before it. Of all candidates since the last drop, the outermost module is returned, and of
    several the last.

    Args:
        options: Possible ends of stages, as `candidates` chose them from `cuts`.
        cuts: All cut points, in order.
        run: The run that they were found in. Its output counts as one more cut.
    """
    assert isinstance(run.output, Value)
    end = CutPoint(("",), run.output, len(run.calls), _cumulative_macs(run.calls)[-1])
    group_of = {cut.macs: number for number, cut in enumerate(options)}
    marked: set[int] = set()
    segment: list[int] = []  # candidates since the resolution last changed
    for earlier, later in zip(cuts, [*cuts[1:], end], strict=True):
        number = group_of.get(earlier.macs)
        if number is not None and number not in segment:
            segment.append(number)
        if not _shrinks(earlier.positions, later.positions):
            continue
        pools = earlier.macs == later.macs and not vanishes(earlier.positions, later.positions)
        if pools and number is not None:
            marked.add(number)
        elif segment:
            marked.add(min(reversed(segment), key=lambda index: options[index].depth))
        segment = []
    return sorted(marked)
