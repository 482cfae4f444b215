"""SHeteroFL: HeteroFL whose clients train every width they can afford (Hong et al., ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedquilt.checks import within
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.splitmix_settings import compared_presets
from fedquilt.round.cut import prefix
from fedquilt.round.local import Learner, Local, Phase, Summed
from fedquilt.round.merge import Weighting
from fedquilt.terms import Arch, Client, Job, Server, Submodel, World


@dataclass(frozen=True)
class SHeteroFL(Method):
    """Slimmable local training: one step on the summed gradients of all prototype widths up to the client's own.

    In the merge a client counts once for each position; the released code counts it once a width.
    """

    local: Local = Local()
    weighting: Weighting = "uniform"
    widths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)  # the shares a client trains, as far as it can hold them
    count_widths: bool = False  # in the merge a client counts once for every width, as in the released code
    paper = "Hong et al. 2022"
    presets: ClassVar[Presets] = {
        **compared_presets(scaler=False),
        "released": {"count_widths": True},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, widths="(0, 1]")

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(world.family.fit(client.budget))]

    def learner(self, job: Job, world: World) -> Learner:
        smaller = self._affordable(job.submodel.arch, world)
        objectives = (self.local.objective, *(self.local.objective_at(share) for share in smaller))
        learner = replace(super().learner(job, world), phases=(Phase(Summed(objectives)),))
        return replace(learner, count_widths=smaller) if self.count_widths else learner

    def _affordable(self, arch: Arch, world: World) -> tuple[float, ...]:
        """The prototypes narrower than the client's net."""
        own = world.family.count(arch)
        return tuple(share for share in self.widths if world.family.count(world.family.nested(arch, share).arch) < own)
