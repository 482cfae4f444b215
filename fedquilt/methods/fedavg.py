"""FedAvg: every client trains the same net (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.methods.nested import WITHOUT_RATIOS
from fedquilt.methods.partial import TABLE_9
from fedquilt.methods.splitmix_settings import compared_presets
from fedquilt.round.federation import World
from fedquilt.round.method import Method, Presets, narrower, whatever_the_budget
from fedquilt.terms import Budget, Client, Job, Server, Submodel, Submodels


@dataclass(frozen=True)
class FedAvg(Method):
    """All clients train the same net, and the server averages it, weighted by their samples.

    Budgets are ignored. `share` 1 is the baseline that papers call "homogeneous (largest)". The
    smallest share of a fleet gives "homogeneous (smallest)".
    """

    share: float = 1.0  # Share of every axis that all clients train. 1 is the whole model.
    paper = "McMahan et al. 2017"
    ignores_budgets = True
    presets: ClassVar[Presets] = {**TABLE_9, **compared_presets(scaler=False), **WITHOUT_RATIOS}

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, share="(0, 1]")

    @property
    @override
    def note(self) -> str:
        return whatever_the_budget(self.share) if type(self).plan is FedAvg.plan else ""

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(world.family.fit(Budget(share=self.share)))]

    @override
    def divisor(self, job: Job, world: World) -> float:
        return self.share

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Cut a sub-model within a budget from the net of share `share`, which all clients train.

        It is never wider than that net, because channels beyond it were never trained.

        Args:
            server: State of the server.
            budget: Budget of the device.
            world: Family, task and random seed.
        """
        trained = world.family.fit(Budget(share=self.share))
        return (prefix(narrower(world.family.fit(budget), trained)),)
