"""FjORD: ordered dropout with self-distillation (Horváth et al. 2021).

The algorithm is the one in appendix A.2 of FedResCuE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedquilt.methods.nested import GRIDS, Nested, Slimming
from fedquilt.round.federation import World
from fedquilt.round.method import Presets
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Job


@dataclass(frozen=True)
class FjORD(Nested):
    """Each step adds up the losses of the whole net and of drawn nets.

    Drawn nets learn from the labels and from the whole net.
    """

    paper = "Horváth et al. 2021"
    # The paper of FjORD draws one ratio per batch. S = 4 gives a sum of nine losses, which does not
    # learn on Digits.
    presets: ClassVar[Presets] = {
        **GRIDS,
        "fedrescue-digits": {**GRIDS["fedrescue-digits"], "samples": 1},
        "fjord": {"samples": 1},
    }

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return self.drawing(Slimming, self.samples, True, job, world, supervised=True)
