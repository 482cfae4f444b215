"""FedNova: normalized averaging for unequal numbers of local steps (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.methods.fedavg import FedAvg
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold
from fedquilt.round.merge import Mean
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Proximal
from fedquilt.terms import Job, Server


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg that divides each client's change by its effective number of steps.

    The sum of the normalized changes is multiplied by the data-weighted mean of the effective
    numbers of steps. `SGD.effective_steps` computes them, including momentum and the proximal term
    (`mu`). If all clients take equally many steps without momentum, this is FedAvg.
    """

    mu: float = 0.0  # Weight of the proximal term. 0: no proximal term.
    paper = "Wang et al. 2020"
    wire_factor = 2  # RaFL, Table 1: clients send the normalized gradient beside the weights.

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, mu="[0, inf)")

    @override
    def learner(self, job: Job, world: World) -> Learner:
        phases = (Phase(Proximal(self.local.build_objective(), self.mu)),)
        return replace(super().learner(job, world), phases=phases, paced=True, mu=self.mu)

    @override
    def fold(self, server: Server, world: World) -> Fold:
        plain = frozenset(world.family.statistics)
        return Mean(
            world.family.cutter, self.weighting, self.server_optimizer, paced=True, plain=plain
        ).begin(server)
