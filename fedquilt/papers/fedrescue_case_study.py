"""FedResCuE's case study (section 3.2, appendix A.1).

It asks whether a wider net should build on a narrower one, or overwrite it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.methods import Method
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.regions import Between, Everywhere
from fedquilt.terms import Client, Job, Server, Submodel


@dataclass(frozen=True)
class ProgressiveColumns(Method):
    r"""Clients train one after another, one in each round, each with the share that it can hold.

    In the case study the first client holds half of the width and has MNIST, and the second one
    holds the whole net and has SYN. Progressive learning moves only θ×1.0 \ θ×0.5 in the second
    round. Overwriting moves the whole net.
    """

    # Train only what the narrower net does not have. False: overwrite it too
    progressive: bool = True
    inner: float = 0.5  # Share of the narrower net, which the first client trains
    paper = "Zhu et al. 2022"
    skips_clients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, inner="(0, 1)")

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        has_turn = client.id == server.round
        return [prefix(self.fit(client.budget, world))] if has_turn else []

    @override
    def learner(self, job: Job, world: World) -> Learner:
        is_grown = job.round > 0 and self.progressive
        region = Between(self.inner, 1.0) if is_grown else Everywhere()
        phase = Phase(self.local.build_objective(), region)
        return replace(super().learner(job, world), phases=(phase,))
