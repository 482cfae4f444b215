"""FjORD: ordered dropout with self-distillation (Horváth et al. 2021), as FedResCuE's appendix A.2 states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods.method import Presets
from fedquilt.methods.nested import GRIDS, Nested, Slimming
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Job


@dataclass(frozen=True)
class FjORD(Nested):
    """One step on the whole net's loss plus that of drawn nets, which learn from the labels and from the whole net."""

    paper = "Horváth et al. 2021"
    # One ratio a batch in its own paper; on Digits the sum of nine losses that S = 4 gives does not learn.
    presets: ClassVar[Presets] = {
        **GRIDS,
        "fedrescue-digits": {**GRIDS["fedrescue-digits"], "samples": 1},
        "fjord": {"samples": 1},
    }

    def learner(self, job: Job, world: World) -> Learner:
        return self.drawing(Slimming, self.samples, True, job, world, supervised=True)
