"""Federated Dropout: random sub-models (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt import noise
from fedquilt.family.family import Rounding
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.partial import PARTIAL, TABLE_8
from fedquilt.round.cut import prefix, scattered
from fedquilt.round.local import Local
from fedquilt.round.merge import Weighting
from fedquilt.terms import Budget, Client, Job, Mix, Server, Submodel, World


@dataclass(frozen=True)
class FedDropout(Method):
    """A client of share r trains a fresh random floor(r·K) channels of every axis each round (FedRolex, equation 5).

    One draw an axis, so that residual sums stay aligned. The code released with FedRolex draws once a layer, so that
    they are not; that is no sub-model of any network, and not offered: its preset only rounds as that code does.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # of a share of an axis, to whole channels
    paper = "Caldas et al. 2018"
    presets: ClassVar[Presets] = {**TABLE_8, "released": {"rounding": "ceil"}}

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = world.family.fit(client.budget, self.rounding)
        return [scattered(member, world.family.layout.sizes, noise.key(31, world.seed, client.id, server.round))]

    def divisor(self, job: Job, world: World) -> float:
        return world.family.share(job.client.budget, self.rounding)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        return (prefix(world.family.fit(budget, self.rounding)),)
