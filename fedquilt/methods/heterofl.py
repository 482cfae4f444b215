"""HeteroFL: static nested sub-models (Diao et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedquilt.family.cut import prefix
from fedquilt.family.family import Rounding
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.nested import WITHOUT_RATIOS
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLES_10_AND_11
from fedquilt.methods.splitmix_settings import compared_presets
from fedquilt.round.federation import World
from fedquilt.round.merge import Weighting
from fedquilt.round.training.local import Local
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Steps
from fedquilt.terms import Budget, Client, Job, Mix, Server, Submodel


def _released(*milestones: int) -> Local:
    return replace(
        PARTIAL,
        optimiser=SGD(lr=0.1, momentum=0.9, decay=5e-4, clip=1.0),
        schedule=Steps(milestones, 0.1),
        epochs=5,
        batch_size=10,
        crop=4,
        flip=True,
    )


@dataclass(frozen=True)
class HeteroFL(Method):
    """A client of share r trains the first floor(r·K) channels of every axis; positions average over their holders.

    With masked loss only the rows of classes a client holds count in the output layer.

    The preset `released` is the authors' code on CIFAR-10 with a few classes a client, `released-iid` on iid data. It
    measures static norms over batches of 10 (`Evaluation(batch_size=10)`). There they are of cropped and flipped
    images, here of the images as they are.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # of a share of an axis, to whole channels
    paper = "Diao et al. 2021"
    presets: ClassVar[Presets] = {
        **TABLE_8,
        **TABLES_10_AND_11,
        **compared_presets(scaler=True),
        **WITHOUT_RATIOS,
        "released": {"local": _released(300, 500), "rounding": "ceil"},
        "released-iid": {"local": _released(150, 250), "rounding": "ceil"},
    }

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world, self.rounding))]

    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        return (prefix(world.family.fit(budget, self.rounding)),)
