"""Learning rates over the rounds of a run, and over the steps of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from fedquilt.checks import one_of, refuse, whole, within

Decay = Literal["constant", "cosine", "linear"]  # Shape of a falling learning rate.


class Schedule(Protocol):
    """Contract of a schedule of the learning rate over the rounds of a run."""

    def __call__(self, round: int) -> float:
        """Return the factor by which the learning rate is multiplied in a round, counted from 0."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def __call__(self, round: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Steps:
    """A learning rate that is multiplied by `factor` at each milestone."""

    milestones: tuple[int, ...]  # Rounds, counted from 0, at which the learning rate changes
    factor: float = 0.1  # Factor of the learning rate at each milestone. 1 has no effect

    def __post_init__(self) -> None:
        within(self, milestones="[0, inf)", factor="(0, inf)")

    def __call__(self, round: int) -> float:
        """Return `factor` to the power of the number of milestones up to this round, inclusive."""
        return self.factor ** sum(round >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """A learning rate that falls to 0 over `rounds`, on half a cosine."""

    rounds: int  # Rounds over which the learning rate falls to 0

    def __post_init__(self) -> None:
        within(self, rounds="[1, inf)")

    def __call__(self, round: int) -> float:
        """Return (1 + cos(π · round / rounds)) / 2, and 0 after `rounds`."""
        return _half_cosine(min(round, self.rounds), self.rounds)


@dataclass(frozen=True)
class WithinRound:
    """Schedule over the steps of a round: a linear warm-up, then a decay.

    By default the learning rate is constant. Of a client's K steps the first W are the warm-up.
    Step j, counted from 0, has the learning rate of the round times

        (j + 1) / (W + 1)        if j < W
        f + (1 − f) · d(t)       else, with t = (j − W) / (K − W)

    f is `final`, and d(t) is (1 + cos(π·t)) / 2 for a cosine, 1 − t for a line and 1 if the rate
    does not fall. So no step has rate 0. The first step after the warm-up has the full rate, and
    the rate would be f at step K. Without warm-up the cosine is torch's `CosineAnnealingLR` with
    T_max = K.

    Clients with different numbers of steps each have their own K. A step is a batch: if a batch has
    several updates, all of them have the same rate.
    """

    # Steps at the beginning of a round over which the learning rate rises. 0: no warm-up
    warmup_steps: int = 0
    # Length of the warm-up as a share of the client's steps, to the nearest step. 0: no warm-up
    warmup_share: float = 0.0
    # Decay after the warm-up. constant: none. cosine: on half a cosine. linear: on a line
    shape: Decay = "constant"
    final: float = 0.0  # Share of the learning rate that is left at the end of a round if it falls

    def __post_init__(self) -> None:
        within(self, warmup_steps="[0, inf)", warmup_share="[0, 1)", final="[0, 1]")
        one_of(self, shape=Decay)
        problems = {}
        if not whole(self.warmup_steps):
            problems["warmup_steps"] = (
                f"{self.warmup_steps} was asked for; it must be a whole number of steps."
            )
        if self.warmup_steps and self.warmup_share:
            problems["warmup_share"] = (
                f"{self.warmup_share} was asked for beside warmup_steps = {self.warmup_steps}; one "
                "of them says how long the warm-up is, and the other must be 0."
            )
        if self.final and self.shape == "constant":
            problems["final"] = (
                f"{self.final} was asked for with shape = 'constant', which does not fall; shape = "
                "'cosine' or 'linear' would work."
            )
        refuse(self, problems)

    def __call__(self, step: int, steps: int) -> float:
        """Return the factor of the round's learning rate in one step.

        Args:
            step: Number of the client's steps before this one in the round.
            steps: Number of the client's steps in the round.
        """
        warmup = self.num_warmup(steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.shape == "constant":
            return 1.0

        done = step - warmup
        falling = steps - warmup
        decay = _half_cosine(done, falling) if self.shape == "cosine" else 1 - done / falling
        return self.final + (1 - self.final) * decay

    def factors(self, steps: int) -> list[float]:
        """Return the factor of the round's learning rate in each of `steps` steps, in order."""
        return [self(step, steps) for step in range(steps)]

    def num_warmup(self, steps: int) -> int:
        """Return the number W of warm-up steps of a client that takes `steps` steps in the round.

        A warm-up given as a share leaves at least one step after it.
        """
        return self.warmup_steps or max(0, min(round(self.warmup_share * steps), steps - 1))

    @property
    def is_constant(self) -> bool:
        """Return True if all steps of a round have the same learning rate."""
        return not self.warmup_steps and not self.warmup_share and self.shape == "constant"

    def __str__(self) -> str:
        parts = []
        if self.warmup_steps:
            parts.append(f"warm-up of {self.warmup_steps} step{'s'[: self.warmup_steps != 1]}")
        if self.warmup_share:
            parts.append(f"warm-up of {100 * self.warmup_share:g} %")
        if self.shape != "constant":
            parts.append(f"{self.shape} to {self.final:g}")
        return ", ".join(parts) or "constant"


def _half_cosine(done: int, total: int) -> float:
    """Return (1 + cos(π · done / total)) / 2.

    It falls from 1 at `done` 0 to 0 at `done` = `total`.
    """
    return 0.5 * (1 + math.cos(math.pi * done / total))
