"""FedBN: norm layers stay on the client (Li et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.method import Presets
from fedquilt.round.federation import World
from fedquilt.round.training.filters import Parts
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import Local
from fedquilt.terms import Job

_NORMS = Parts(("norm",))


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of everything but the norms: their weights and statistics are each client's own.

    The result is as many nets as clients; their mean accuracy is reported.
    """

    local: Local = Local(norm="local")
    paper = "Li et al. 2021"
    presets: ClassVar[Presets] = {}  # FedAvg's measure norms for all clients

    @property
    def personal(self) -> bool:
        return True

    @property
    def note(self) -> str:
        return f"{super().note}; accuracy is the mean over clients, each with its norms"

    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), send=replace(_NORMS, other=True), keep=_NORMS)
