"""FedProx: a proximal term keeps clients near what they received (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.methods.fedavg import FedAvg
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Proximal
from fedquilt.terms import Job


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with mu/2 · ‖w − w_received‖² added to the local objective.

    With `mu` 0 this is FedAvg.
    """

    mu: float = 0.01  # Weight of the proximal term. 0 gives FedAvg.
    paper = "Li et al. 2020"

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, mu="[0, inf)")

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return replace(
            super().learner(job, world),
            phases=(Phase(Proximal(self.local.build_objective(), self.mu)),),
        )
