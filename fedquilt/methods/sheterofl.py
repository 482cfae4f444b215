"""SHeteroFL: HeteroFL whose clients train every width they can afford (Hong et al., ICLR 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.methods.splitmix_settings import compared_presets
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Summed
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Cosine, Steps
from fedquilt.terms import Arch, Client, Job, Server, Submodel

_SGD = SGD(lr=0.1, momentum=0.9, weight_decay=5e-4)
# Settings of the released sweeps digits_SHeteroFL.yaml and cifar10_SHeteroFL.yaml. In training,
# layers always rescale their outputs.
_DIGITS = LocalTraining(optimizer=_SGD, schedule=Cosine(300), batch_size=32, scaler=True)
_CIFAR10 = LocalTraining(
    optimizer=_SGD,
    schedule=Steps((150, 250), 0.1),
    epochs=5,
    batch_size=128,
    scaler=True,
    masked="batch",
    crop=4,
    flip=True,
)


def _released(local: LocalTraining) -> dict[str, Any]:
    return {"local": local, "weighting": "data", "count_widths": True}


@dataclass(frozen=True)
class SHeteroFL(Method):
    """HeteroFL with slimmable local training.

    Each step sums the gradients of all widths up to the client's own.

    In the merge a client counts once for each position. The code released with Split-Mix adds a
    client's widest net once for every width that it trains. The weight of a client is then its
    number of samples times its number of widths (`count_widths`). That code also lets every client
    train on the mean number of batches of all clients, which is not reproduced here.
    """

    local: LocalTraining = LocalTraining()
    weighting: Weighting = "uniform"
    # Shares that a client trains, as far as they fit into its budget.
    widths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    # Count a client once per width it trains, as the released code does.
    count_widths: bool = False
    paper = "Hong et al. 2022"
    presets: ClassVar[Presets] = {
        **compared_presets(scaler=False),
        "released": _released(_DIGITS),
        "cifar10-released": _released(_CIFAR10),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, widths="(0, 1]")

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world))]

    @override
    def learner(self, job: Job, world: World) -> Learner:
        smaller = self._affordable(job.submodel.arch, world)
        objectives = (
            self.local.build_objective(),
            *(self.local.build_objective(share) for share in smaller),
        )
        times = len(objectives) if self.count_widths else 1
        return replace(
            super().learner(job, world), phases=(Phase(Summed(objectives)),), times=times
        )

    def _affordable(self, arch: Arch, world: World) -> tuple[float, ...]:
        """Return those shares of `widths` whose nets have fewer parameters than the client's net.

        Args:
            arch: Architecture of the client's net.
            world: World with its family.
        """
        member = world.family.member(arch)
        return tuple(share for share in self.widths if member.nested(share).count < member.count)
