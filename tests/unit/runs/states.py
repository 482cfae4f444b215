"""Small client states for the tests on checkpoints."""

from __future__ import annotations

import torch

from fedquilt.axes import Index, Positions
from fedquilt.runs.client_states import ClientStates
from fedquilt.terms import Arch, ClientState, Submodel

CPU = torch.device("cpu")

INDEX = Index({"c1": Positions(((5, 8), (0, 2))), "class": Positions.prefix(3)})


def remembered(value: float, size: int = 8, scope: str = "") -> ClientState:
    submodel = Submodel(Arch((("c1", 5), ("class", 3))), INDEX, scope)
    return ClientState(
        submodel,
        {"fc.weight": torch.full((size,), float(value))},
        {"momentum": {"fc.weight": torch.ones(2)}},
        7,
    )


def value_of(one: ClientState) -> float:
    return float(one.weights["fc.weight"][0])


def same(one: ClientState, other: ClientState) -> bool:
    def equal(mine, theirs):
        return list(mine) == list(theirs) and all(
            mine[n].dtype == theirs[n].dtype and torch.equal(mine[n], theirs[n]) for n in mine
        )

    slots = list(one.slots) == list(other.slots) and all(
        equal(one.slots[s], other.slots[s]) for s in one.slots
    )
    return (
        (one.submodel, one.steps) == (other.submodel, other.steps)
        and equal(one.weights, other.weights)
        and slots
    )


def small(limit: int = 0, **options) -> ClientStates:
    return ClientStates(limit, **options)
