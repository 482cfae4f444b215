"""Learning rates over the rounds of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from fedquilt.checks import within


class Schedule(Protocol):
    def __call__(self, round: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def __call__(self, round: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Steps:
    """The learning rate times `factor` at each milestone round."""

    milestones: tuple[int, ...]  # rounds, from 0
    factor: float = 0.1  # that the learning rate is multiplied by

    def __post_init__(self) -> None:
        within(self, milestones="[0, inf)", factor="(0, inf)")

    def __call__(self, round: int) -> float:
        return self.factor ** sum(round >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """The learning rate falls to 0 over `rounds` on half a cosine."""

    rounds: int  # over which it falls

    def __post_init__(self) -> None:
        within(self, rounds="[1, inf)")

    def __call__(self, round: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(round, self.rounds) / self.rounds))
