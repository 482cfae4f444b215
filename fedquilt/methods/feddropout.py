"""Federated Dropout: random sub-models (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt import noise
from fedquilt.family.cut import prefix, scattered
from fedquilt.family.family import Rounding
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLE_12, TABLES_10_AND_11, released_settings
from fedquilt.round.federation import World
from fedquilt.round.merge import Weighting
from fedquilt.round.training.local import Local
from fedquilt.terms import Budget, Client, Job, Mix, Server, Submodel


@dataclass(frozen=True)
class FedDropout(Method):
    """A client of share r trains a fresh random floor(r·K) channels of every axis each round (FedRolex, equation 5).

    One draw an axis, so that residual sums stay aligned. The code released with FedRolex draws ceil(r·K) channels anew
    for every layer, so that they are not: that is no sub-model of any network, and not offered. It also merges norms
    and the output layer by growing counts (see `FedRolex`). The presets `released-settings` (a few classes a client)
    and `released-settings-iid` have its local training and its rounding.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # of a share of an axis, to whole channels
    paper = "Caldas et al. 2018"
    presets: ClassVar[Presets] = {
        **TABLE_8,
        **TABLES_10_AND_11,
        **TABLE_12,
        **released_settings(),
    }

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = self.fit(client.budget, world, self.rounding)
        return [
            scattered(
                member,
                world.family.layout.sizes,
                noise.key(31, world.seed, client.id, server.round),
            )
        ]

    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        return (prefix(world.family.fit(budget, self.rounding)),)
