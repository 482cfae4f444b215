"""Federated Dropout (Caldas et al. 2018; FedRolex, equation 5): a fresh random set of channels."""

from __future__ import annotations

from collections import Counter

import pytest

import fedquilt as fq
from fedquilt.methods import FedDropout
from fedquilt.round.federation import World
from fedquilt.terms import Server


def sets(family, share, *, round=0, client=0, seed=0):
    world = World(family, seed=seed)
    (submodel,) = FedDropout().plan(
        Server(round, {}), fq.methods.api.Client(client, fq.Budget(share=share), 1), world
    )
    return submodel.index


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25])
def test_equation_5_floor_of_share_times_k_distinct_nodes_of_every_axis(share, residual):
    for axis, kept in sets(residual, share).items():
        size = residual.layout.sizes[axis]
        assert len(set(kept)) == len(kept) == int(share * size)
        assert set(kept) <= set(range(size))


def test_sets_are_fresh_for_every_client_round_and_seed(residual):
    drawn = [
        sets(residual, 0.5),
        sets(residual, 0.5, round=1),
        sets(residual, 0.5, client=1),
        sets(residual, 0.5, seed=1),
    ]
    assert len(set(drawn)) == 4
    assert sets(residual, 0.5) == drawn[0]


def test_every_channel_is_as_likely_but_not_trained_equally_often(perceptron):
    """Section 3.3.1: the frequencies agree only in expectation."""
    met: Counter[int] = Counter()
    for round in range(600):
        (kept,) = sets(perceptron, 0.5, round=round).values()
        met.update(kept)
    assert sum(met.values()) == 1800
    assert all(abs(count - 300) < 50 for count in met.values())  # four standard deviations of 12.2
    assert len(set(met.values())) > 1


def test_local_training_and_merge_are_heterofls():
    assert FedDropout().local == fq.methods.HeteroFL().local
    assert FedDropout().weighting == "uniform"
