"""HeteroFL: static nested sub-models (Diao et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from fedquilt.family.cut import prefix
from fedquilt.family.family import Rounding
from fedquilt.methods.nested import WITHOUT_RATIOS
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLES_10_AND_11
from fedquilt.methods.splitmix_settings import compared_presets
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Steps
from fedquilt.terms import Budget, Client, Job, Server, Submodel, Submodels


def _released(*milestones: int) -> LocalTraining:
    return replace(
        PARTIAL,
        optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=5e-4, clip=1.0),
        schedule=Steps(milestones, 0.1),
        epochs=5,
        batch_size=10,
        crop=4,
        flip=True,
    )


@dataclass(frozen=True)
class HeteroFL(Method):
    """A client of share r trains the first floor(r·K) channels of every axis.

    Each position is averaged over the clients that hold it. With masked loss, a client contributes
    only the rows of its own classes to the output layer.

    The presets are the settings of the authors' code on CIFAR-10: `released` with a few classes per
    client, `released-iid` on iid data. That code measures static norms over batches of 10
    (`Evaluation(batch_size=10)`), on cropped and flipped images. Here they are measured on images
    without augmentation.
    """

    local: LocalTraining = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # Rounding of a share of an axis to a whole number of channels.
    paper = "Diao et al. 2021"
    presets: ClassVar[Presets] = {
        **TABLE_8,
        **TABLES_10_AND_11,
        **compared_presets(scaler=True),
        **WITHOUT_RATIOS,
        "released": {"local": _released(300, 500), "rounding": "ceil"},
        "released-iid": {"local": _released(150, 250), "rounding": "ceil"},
    }

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world, self.rounding))]

    @override
    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        return (prefix(world.family.fit(budget, self.rounding)),)
