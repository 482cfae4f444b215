"""FedResCuE: progressive self-distillation of nested nets (Zhu et al., ICML 2022), its ablations, and FedSlim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.checks import one_of, within
from fedquilt.methods.method import Presets
from fedquilt.methods.nested import GRIDS, Drawn, Nested, Slimming
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Freeze, Learner, Phase
from fedquilt.round.training.objectives import Distilled, Summed
from fedquilt.round.training.regions import Between, Everywhere
from fedquilt.terms import Job


@dataclass(frozen=True)
class Progressive(Drawn):
    """Algorithm 1: of every drawn net in turn what the one before it does not have; last, the whole net."""

    alpha: float = 1.0  # of the KL term (equation 3)
    freeze: Freeze = "update"
    overwrite: bool = False  # each net moves all of itself (algorithm 6)

    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]:
        own = self.local.build_objective()
        if self.count < 0:  # S = 0
            return (Phase(own),)
        phases, inner = [], 0.0
        for ratio in ratios:  # lines 6 to 9; θ×0 is empty
            objective = self.local.build_objective(ratio)
            if self.alpha:
                objective = Summed((objective, Distilled(ratio, self.alpha)))
            phases.append(
                Phase(objective, Between(0.0 if self.overwrite else inner, ratio), self.freeze)
            )
            inner = ratio
        # At ratio 1 there is nothing to distil (equation 3's α_i); then line 10.
        rest = Between(inner, 1.0) if inner and not self.overwrite else Everywhere()
        return (*phases, Phase(own, rest, self.freeze), Phase(own))


@dataclass(frozen=True)
class FedResCuE(Nested):
    """Nested nets learn each batch in turn, each only what lies outside of the one before it (algorithm 1).

    S nets learn from the labels and from the client's largest net as it was before the batch. The whole net is last.
    What is uploaded is averaged over those whose upload covers it (equation 4); what a link lost of a download comes
    from the client's own last round (equation 5), which every method has under a lossy link.
    """

    alpha: float = 1.0  # weight of the KL term in equation 3; 0 gives FedSeq
    freeze: Freeze = (
        "update"  # "gradient": as in A.6.2, where momentum and decay still move what is frozen
    )
    paper = "Zhu et al. 2022"
    presets: ClassVar[Presets] = {**GRIDS, "masked-gradient": {"freeze": "gradient"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, alpha="[0, inf)")
        one_of(self, freeze=Freeze)

    def learner(self, job: Job, world: World) -> Learner:
        return progressive(self, job, world, self.alpha, self.freeze)


@dataclass(frozen=True)
class FedSeq(Nested):
    """FedResCuE without distillation (algorithm 5)."""

    paper = "Zhu et al. 2022"

    def learner(self, job: Job, world: World) -> Learner:
        return progressive(self, job, world, alpha=0.0)


@dataclass(frozen=True)
class FedRush(Nested):
    """FedResCuE that overwrites: every drawn net moves all of itself (algorithm 6)."""

    paper = "Zhu et al. 2022"

    def learner(self, job: Job, world: World) -> Learner:
        return progressive(self, job, world, overwrite=True)


def progressive(
    method: Nested,
    job: Job,
    world: World,
    alpha: float = 1.0,
    freeze: Freeze = "update",
    overwrite: bool = False,
) -> Learner:
    """S ratios, the last of them the client's own."""
    own = {"alpha": alpha, "freeze": freeze, "overwrite": overwrite}
    return method.drawing(Progressive, method.samples - 1, bool(alpha), job, world, **own)


@dataclass(frozen=True)
class FedSlim(Nested):
    """Slimmable training in a federation: drawn nets follow the whole net's predictions (algorithm 3)."""

    paper = "Zhu et al. 2022"

    def learner(self, job: Job, world: World) -> Learner:
        return self.drawing(Slimming, self.samples, True, job, world)
