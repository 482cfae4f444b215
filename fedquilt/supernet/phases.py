"""Phases of progressive shrinking, which open one kind of choice after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedquilt.supernet.space import Config, Space, SpaceChoice

PHASE_KINDS = ("kernels", "depths", "expansions", "widths")  # Order in which choices are opened.
# Members that are trained in each step, by phase.
NETS_PER_STEP = {"largest": 1, "kernels": 1, "depths": 2, "expansions": 4, "widths": 4}


@dataclass(frozen=True)
class ShrinkingPhase:
    """One phase of progressive shrinking, which opens options of one kind of choice.

    Choices of later kinds have their largest option. Kernel transforms are frozen before the kernel
    phase. Norm statistics of the largest net are frozen in every shrinking phase, and measured
    again after it.
    """

    kind: str  # Kind of choice that the phase opens, or "largest" before any is open.
    num_options: int  # Number of open options of this kind, counted from the largest one.

    @property
    def name(self) -> str:
        """Return a readable name, such as "depths (2 options)"."""
        return self.kind if self.kind == "largest" else f"{self.kind} ({self.num_options} options)"

    @property
    def nets(self) -> int:
        """Return the number of sampled members whose gradients one step adds up."""
        return NETS_PER_STEP[self.kind]

    @property
    def trains_transforms(self) -> bool:
        """Return True if kernel transforms are trained: in all phases but "largest"."""
        return self.kind != "largest"

    def options(self, choice: SpaceChoice) -> tuple[float, ...]:
        """Return the options of a choice that members of this phase may take, ascending.

        Choices of earlier kinds have all options. Choices of the phase's kind have their
        `num_options` largest. Choices of later kinds have their largest alone.
        """
        if self.kind == "largest":
            return choice.options[-1:]
        opens = PHASE_KINDS.index(choice.kind)
        current = PHASE_KINDS.index(self.kind)
        if opens < current:
            return choice.options
        return choice.options[-self.num_options :] if opens == current else choice.options[-1:]

    def sample(self, space: Space, generator: torch.Generator) -> Config:
        """Draw a member, with every choice uniform over the options that this phase opens.

        Args:
            space: Space of the member.
            generator: Source of random numbers, which is advanced.
        """
        draws = torch.rand(len(space.choices), generator=generator, dtype=torch.float64).tolist()
        values = []
        for choice, draw in zip(space.choices, draws, strict=True):
            options = self.options(choice)
            values.append(options[math.floor(draw * len(options))])
        return space.unflat(values)


def phases(space: Space) -> list[ShrinkingPhase]:
    """List the phases of a space in order: the largest net, then one kind of choice after another.

    Kernels open at once. The other kinds open their two largest options first, then all. A kind
    without a choice has no phase.
    """
    phase_list = [ShrinkingPhase("largest", 1)]
    for kind in PHASE_KINDS:
        num_options = max(
            (len(choice.options) for choice in space.choices if choice.kind == kind),
            default=1,
        )
        steps = {num_options} if kind == "kernels" else {min(2, num_options), num_options}
        phase_list += [ShrinkingPhase(kind, count) for count in sorted(steps) if count > 1]
    return phase_list
