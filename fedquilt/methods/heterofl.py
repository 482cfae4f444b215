"""HeteroFL: static nested sub-models (Diao et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedquilt.family.family import Rounding
from fedquilt.methods.method import Method
from fedquilt.round.cut import prefix
from fedquilt.round.local import Local
from fedquilt.round.merge import Weighting
from fedquilt.terms import Budget, Client, Server, Submodel, World

# The setting shared by the partial-training papers: static norms, a scaler, and a loss over the client's own classes.
PARTIAL = Local(norm="post", scaler=True, masked="client")


@dataclass(frozen=True)
class HeteroFL(Method):
    """A client of share r trains the first floor(r·K) channels of every axis; positions average over their holders.

    With masked loss only the rows of classes a client holds count in the output layer.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    rounding: Rounding = "floor"  # of a share of an axis, to whole channels
    paper = "Diao et al. 2021"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"released": {"rounding": "ceil"}}

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(world.family.fit(client.budget, self.rounding))]

    def deploy(self, server: Server, budget: Budget, world: World) -> Submodel:
        return prefix(world.family.fit(budget, self.rounding))
