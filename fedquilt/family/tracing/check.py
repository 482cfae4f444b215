"""Check a layout: build members, run them, and compare what they compute with the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fedquilt.axes import Axis
from fedquilt.errors import TraceError
from fedquilt.family.build import build
from fedquilt.family.layout import Layout
from fedquilt.family.tracing.atoms import atoms_in
from fedquilt.family.tracing.compare import Mismatch, Numbers, compare, operation, visible_calls
from fedquilt.family.tracing.record import RunOptions, record
from fedquilt.family.tracing.run import RunError
from fedquilt.family.tracing.selection import fix_axes
from fedquilt.family.tracing.traced import Traced
from fedquilt.family.tracing.variant_runs import first_line, has_rule, small_constants


def check_members(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, fixed: Sequence[str]
) -> Layout:
    """Compare every shape and offset that members compute with what the axes predict.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        traced: Result of tracing, with the module's runs.
        layout: Its layout, with the axes fixed that the user named.
        fixed: Names that the user fixed, for messages.

    Returns:
        The layout. Axes of which one channel is too few have a larger least width.

    Raises:
        TraceError: A member does not follow the axes. The message says which axes to fix.
    """
    problem = current = _first_mismatch(module, inputs, traced, layout)
    if problem is None:
        return layout
    widened = _widened(module, inputs, traced, layout, problem)
    if widened is not None:
        return widened
    pinned: list[str] = []
    trial = layout
    # Axes are pinned until members work, so that the advice in the message has been tried.
    while current is not None:
        blamed = [name for name in current.suspects(traced) if not trial.axes[name].fixed]
        if not blamed and not current.layer and not current.axes:
            same_layer = tuple(
                call
                for run in traced.runs
                for call in run.calls
                if call.layer == current.call.layer
            )
            current = replace(current, layer=same_layer)
        elif blamed:
            pinned += blamed
            trial = fix_axes(trial, blamed, module)
            current = _first_mismatch(module, inputs, traced, trial)
        else:
            break
    names = ", ".join(map(repr, [*fixed, *pinned]))
    kind = type(module).__name__
    if problem.branch:
        cause = (
            f"{kind} takes another branch in a narrower member, since its code compares sizes "
            "that a cut changes"
        )
        rewrite = "take the decision in __init__ and keep it in an attribute"
    else:
        cause = f"{kind} has a size written into its code that a narrower member does not have"
        rewrite = "read it from a tensor's shape or from an attribute"
        if operation(problem.call) == "view":
            rewrite = "use x.flatten(1) or sizes read from x.shape"
    remedy = rewrite
    if current is None:
        remedy = f"{rewrite}, or pin what it depends on: fixed=[{names}]"
    raise TraceError(f"{cause}: {problem.call}: {problem.reason}. To mend it, {remedy}.")


def _widened(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, problem: Mismatch
) -> Layout | None:
    """Return the layout with a least width of two for the axes that fail with a single channel.

    Standardized convolutions need two inputs, and `x.squeeze()` drops a dimension of one. Members
    are checked again after each change, until all of them work.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        traced: Result of tracing, with the module's runs.
        layout: Layout whose members do not all follow the axes.
        problem: First mismatch of these members.

    Returns:
        A new layout, with a note about each change. None: single channels are not the cause of some
        mismatch.
    """
    notes = list(layout.notes)
    current: Mismatch | None = problem
    while current is not None:
        # Other layers that run the same line are likely to need the same.
        line = current.call.where
        same_line = tuple(call for run in traced.runs for call in run.calls if call.where == line)
        suspects = replace(current, layer=same_line).suspects(traced)
        narrow = [
            name for name in suspects if current.widths[name] < min(2, layout.axes[name].size)
        ]
        if not narrow:
            return None
        notes.append(
            f"members have at least 2 channels of {', '.join(narrow)}: with one, {current.call}: "
            f"{current.reason}"
        )
        widened_axes = {name: replace(layout.axes[name], least=2) for name in narrow}
        layout = replace(layout, axes={**layout.axes, **widened_axes}, notes=tuple(notes))
        current = _first_mismatch(module, inputs, traced, layout)
    return layout


def _first_mismatch(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout
) -> Mismatch | None:
    """Return the first mismatch of several members, or None if all of them follow the axes.

    Members are tried with uneven widths, then with the least widths. Last come widths at which
    sizes become equal that Python found unequal. A mismatch there means another branch, so that it
    names the axis.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        traced: Result of tracing, with the module's runs.
        layout: Layout from which members are built. Fixed axes keep their sizes.
    """
    free = [axis for axis in layout.axes.values() if not axis.fixed]
    numbers = Numbers()
    for widths in (_uneven(free), *_narrowest(free)) if free else ():
        mismatch = _mismatch(module, inputs, traced, layout, widths, numbers)
        if mismatch is not None:
            return mismatch
    numbers.complete = True
    for widths in _meetings(traced, layout):
        mismatch = _mismatch(module, inputs, traced, layout, widths, numbers)
        if mismatch is not None:
            return replace(mismatch, branch=True, axes=tuple(widths))
    return None


def _mismatch(
    module: nn.Module,
    inputs: tuple[Any, ...],
    traced: Traced,
    layout: Layout,
    cut_widths: Mapping[str, int],
    numbers: Numbers,
) -> Mismatch | None:
    """Build one member, and return the call in which it does not follow its axes.

    The member runs once for every recorded run of the module.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        traced: Result of tracing, with the module's runs.
        layout: Layout from which the member is built.
        cut_widths: Widths of the axes that are cut, by name. All other axes keep their sizes.
        numbers: Numbers that depend on a member's widths. New ones are added while it learns.

    Returns:
        The first mismatch, with all widths of the member. None: there is none.
    """
    constants = {
        name: buffer
        for name, buffer in small_constants(module).items()
        if all(isinstance(dim, int) for dim in layout.dims[name])
    }
    widths = {**layout.sizes, **cut_widths}
    member = build(module, layout, widths)
    for run in traced.runs:
        try:
            options = RunOptions(
                has_rule, constants=constants, train=run.train, variant=run.variant
            )
            member_calls = record(member, inputs, options).calls
        except RunError as failure:
            fails = f"the member fails here ({first_line(failure.__cause__)})"
            # The cause may be an earlier call, because -1 in a view accepts any number of channels.
            mismatch = compare(run.calls, failure.calls, traced, widths, numbers, fails)
            mismatch = mismatch or Mismatch(visible_calls(run.calls)[-1], fails)
        else:
            mismatch = compare(run.calls, member_calls, traced, widths, numbers)
        if mismatch is not None:
            return replace(mismatch, widths=widths)
    return None


def _uneven(free: Sequence[Axis]) -> dict[str, int]:
    """Return a width of about half of each axis, by name, with a different share for each.

    Equal shares would hide a confusion of two axes. No width is below the least width of its axis.
    """
    shares = (0.38 + 0.24 * (number * 0.618 % 1) for number in range(len(free)))
    return {
        axis.name: max(axis.least, min(axis.size - 1, round(axis.size * share)))
        for axis, share in zip(free, shares, strict=True)
    }


def _narrowest(free: Sequence[Axis]) -> list[dict[str, int]]:
    """Return one or two sets of widths by axis name: the least widths, and a variant of them.

    The variant exists if some axes have a least width above one. Those axes have three channels in
    it, because a width of two may work by being even.
    """
    smallest = {axis.name: axis.least for axis in free}
    odd = {axis.name: min(3, axis.size) for axis in free if axis.least > 1}
    return [smallest, smallest | odd] if odd else [smallest]


def _meetings(traced: Traced, layout: Layout) -> list[dict[str, int]]:
    """Return widths at which sizes become equal that Python compared and found unequal.

    Members of these widths may take another branch. Each dictionary has the width of a single axis
    by name. All other axes keep their sizes. Fixed axes are not tried.
    """
    meetings: dict[tuple[str, int], None] = {}
    for pair in dict.fromkeys(traced.unlike):
        dims = [dim for terms in pair for _, powers in terms for dim, _ in powers]
        for axis_atom in {
            axis_atom: None
            for dim in dims
            for axis_atom in atoms_in(dim)
            if axis_atom in traced.names
        }:
            axis = layout.axes[traced.names[axis_atom]]
            for width in range(axis.least, axis.least if axis.fixed else axis.size):
                first, second = (
                    traced.evaluate(terms, layout.sizes | {axis.name: width}) for terms in pair
                )
                if first == second:
                    meetings[axis.name, width] = None
    return [{name: width} for name, width in meetings]
