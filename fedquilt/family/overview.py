"""Summary of a family: its axes, and the sizes of some members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquilt.display import Overview, shortened
from fedquilt.terms import Budget
from fedquilt.units import amount

if TYPE_CHECKING:
    from fedquilt.family.family import Family

_SHARES = (1.0, 0.5, 0.25, 0.125)  # Members whose number of parameters is shown


def overview_of(family: Family) -> Overview:
    """Return the size of a family's model, the size of each axis, and those of some members.

    Axes that can be cut come first. Nothing is traced or run.
    """
    axes = sorted(family.layout.axes.values(), key=lambda axis: axis.fixed)
    num_cut = sum(not axis.fixed for axis in axes)
    nouns = "axis" if num_cut == 1 else "axes"
    title = (
        f"{family.title}: {amount(family.count(family.whole))} parameters, {num_cut} {nouns} that "
        "can be cut"
    )
    rows = [(axis.name, f"{axis.size:,}", "kept whole" if axis.fixed else "") for axis in axes]
    shown, notes = shortened(rows, "axes")
    sizes = [
        f"{amount(family.count(family.fit(Budget(share=share))))} at {share:g}" for share in _SHARES
    ]
    notes.append(f"Parameters by share: {', '.join(sizes)}")
    if len(family.variants) > 1:
        names, more = shortened([(variant,) for variant in family.variants], "variants")
        notes.append(f"Variants: {', '.join([*(name for (name,) in names), *more])}")
    if family.variant != family.variants[0]:
        notes.append(f"Members are of the variant {family.variant}.")
    return Overview(title, ("axis", "channels", ""), shown, notes)
