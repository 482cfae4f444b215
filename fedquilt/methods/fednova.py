"""FedNova: normalised averaging for clients that take unequal numbers of steps (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquilt.checks import within
from fedquilt.methods.fedavg import FedAvg
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Mean
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Proximal
from fedquilt.terms import Job, Server


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Each client's change is divided by its effective step count, the sum scaled by their data-weighted mean.

    Momentum and a proximal term (`mu`) enter the count by their own recursion, `SGD.pace`. With equal steps and no
    momentum it is FedAvg.
    """

    mu: float = 0.0  # weight of the proximal term; 0: none
    paper = "Wang et al. 2020"
    copies = 2  # RaFL, Table 1: the normalised gradient travels beside the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, mu="[0, inf)")

    def learner(self, job: Job, world: World) -> Learner:
        phases = (Phase(Proximal(self.local.build_objective(), self.mu)),)
        return replace(super().learner(job, world), phases=phases, paced=True, mu=self.mu)

    def fold(self, server: Server, world: World) -> Fold:
        plain = frozenset(world.family.statistics)
        return Mean(
            world.family.cutter, self.weighting, self.server, paced=True, plain=plain
        ).begin(server)
