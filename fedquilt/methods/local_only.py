"""Local training without federation, the baseline that every federated method must beat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from fedquilt.family.cut import prefix
from fedquilt.methods.nested import WITHOUT_RATIOS
from fedquilt.round.federation import World
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.filters import All, Nothing
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Client, Job, Server, Submodel


@dataclass(frozen=True)
class LocalOnly(Method):
    """Clients train the largest net within their budgets on their own data, and share nothing."""

    paper = "baseline"
    presets: ClassVar[Presets] = WITHOUT_RATIOS

    @property
    @override
    def personal(self) -> bool:
        return True

    @property
    @override
    def note(self) -> str:
        return (
            "every client trains what fits its budget, alone; accuracy is the mean over clients, "
            "each with its net"
        )

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world))]

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), send=Nothing(), keep=All())
