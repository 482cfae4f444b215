"""Federated Dropout: random sub-models (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedquilt import noise
from fedquilt.family.cut import prefix, scattered
from fedquilt.family.family import Rounding
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLE_12, TABLES_10_AND_11, released_settings
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.local import LocalTraining
from fedquilt.terms import Budget, Client, Job, Server, Submodel, Submodels


@dataclass(frozen=True)
class FedDropout(Method):
    """Each round, a client of share r trains floor(r·K) random channels of every axis.

    This is equation 5 of FedRolex. Channels are drawn once per axis, so that residual sums stay
    aligned. The code released with FedRolex draws ceil(r·K) channels for every layer separately.
    That misaligns residual sums and gives no sub-model of the network, so it is not offered here.
    That code also merges norms and the output layer by growing counts (see `FedRolex`). The presets
    `released-settings` (a few classes per client) and `released-settings-iid` have its local
    training and its rounding.
    """

    local: LocalTraining = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # Rounding of a share of an axis to a whole number of channels.
    paper = "Caldas et al. 2018"
    presets: ClassVar[Presets] = {
        **TABLE_8,
        **TABLES_10_AND_11,
        **TABLE_12,
        **released_settings(),
    }

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = self.fit(client.budget, world, self.rounding)
        return [
            scattered(
                member,
                world.family.layout.sizes,
                noise.key(noise.Stream.FEDERATED_DROPOUT, world.seed, client.id, server.round),
            )
        ]

    @override
    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        return (prefix(world.family.fit(budget, self.rounding)),)
