"""FedResCuE: progressive self-distillation of nested nets (Zhu et al., ICML 2022).

Its ablations FedSeq and FedRush and the baseline FedSlim are here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedquilt.checks import one_of, within
from fedquilt.methods.nested import GRIDS, Nested, SampledWidths, Slimming
from fedquilt.round.federation import World
from fedquilt.round.method import Presets
from fedquilt.round.training.distillation import Distilled
from fedquilt.round.training.learner import Freeze, Learner, Phase
from fedquilt.round.training.objectives import Summed
from fedquilt.round.training.regions import Between, Everywhere
from fedquilt.terms import Job


@dataclass(frozen=True)
class Progressive(SampledWidths):
    """A learner that trains drawn nets from the smallest to the largest (algorithm 1).

    Each net trains only the weights that the previous net does not have. The whole net is last.
    """

    alpha: float = 1.0  # Weight of the KL term (equation 3). 0: no distillation.
    freeze: Freeze = "update"  # How the weights of the previous nets are frozen.
    overwrite: bool = False  # True lets each net train all of its weights (algorithm 6).

    @override
    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]:
        whole_objective = self.local.build_objective()
        if self.count < 0:  # S = 0
            return (Phase(whole_objective),)
        phases = []
        inner = 0.0
        for ratio in ratios:  # Lines 6 to 9. The net θ×0 before the first one is empty.
            objective = self.local.build_objective(ratio)
            if self.alpha:
                objective = Summed((objective, Distilled(ratio, self.alpha)))
            phases.append(
                Phase(objective, Between(0.0 if self.overwrite else inner, ratio), self.freeze)
            )
            inner = ratio
        # The net of ratio 1 is its own teacher, so that it is not distilled (equation 3's α_i).
        # The last phase is line 10.
        last_region = Between(inner, 1.0) if inner and not self.overwrite else Everywhere()
        return (*phases, Phase(whole_objective, last_region, self.freeze), Phase(whole_objective))


@dataclass(frozen=True)
class FedResCuE(Nested):
    """Nested nets train on each batch, each only the weights outside of the previous net.

    This is algorithm 1. S nets learn from the labels and from the client's largest net as it was
    before the batch. The whole net is last. Each weight is averaged over the clients whose upload
    covers it (equation 4). Weights that a link lost in a download are taken from the client's last
    round (equation 5). Every method does this under a lossy link.
    """

    alpha: float = 1.0  # Weight of the KL term in equation 3. 0 gives FedSeq.
    # How weights are frozen. update: they do not change. gradient: their gradient is 0, but
    # momentum and weight decay still change them (A.6.2).
    freeze: Freeze = "update"
    paper = "Zhu et al. 2022"
    presets: ClassVar[Presets] = {**GRIDS, "masked-gradient": {"freeze": "gradient"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, alpha="[0, inf)")
        one_of(self, freeze=Freeze)

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return progressive(self, job, world, self.alpha, self.freeze)


@dataclass(frozen=True)
class FedSeq(Nested):
    """FedResCuE without distillation (algorithm 5)."""

    paper = "Zhu et al. 2022"

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return progressive(self, job, world, alpha=0.0)


@dataclass(frozen=True)
class FedRush(Nested):
    """FedResCuE in which every drawn net trains all of its weights (algorithm 6)."""

    paper = "Zhu et al. 2022"

    @override
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
    """Return a progressive learner with S ratios, of which the last is the client's share.

    Args:
        method: Method whose ratios and number of samples are used.
        job: Client, sub-model and round.
        world: Family, task and random seed.
        alpha: Weight of the KL term. 0: no distillation.
        freeze: How the weights of the previous nets are frozen.
        overwrite: True lets each net train all of its weights. False freezes the previous nets.
    """
    settings = {"alpha": alpha, "freeze": freeze, "overwrite": overwrite}
    return method.drawing(Progressive, method.samples - 1, bool(alpha), job, world, **settings)


@dataclass(frozen=True)
class FedSlim(Nested):
    """Federated slimmable training: drawn nets imitate the whole net (algorithm 3)."""

    paper = "Zhu et al. 2022"

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return self.drawing(Slimming, self.samples, True, job, world)
