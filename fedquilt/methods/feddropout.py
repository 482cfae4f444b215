"""Federated Dropout: random sub-models (Caldas et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt import noise
from fedquilt.methods.heterofl import PARTIAL
from fedquilt.methods.method import Method
from fedquilt.round.cut import scattered
from fedquilt.round.local import Local
from fedquilt.round.merge import Weighting
from fedquilt.terms import Client, Server, Submodel, World


@dataclass(frozen=True)
class FedDropout(Method):
    """A client of share r trains a fresh random floor(r·K) channels of every axis each round (FedRolex, equation 5).

    One draw an axis, so that residual sums stay aligned.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    paper = "Caldas et al. 2018"

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = world.family.fit(client.budget)
        return [scattered(member, world.family.layout.sizes, noise.key(31, world.seed, client.id, server.round))]
