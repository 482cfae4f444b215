"""Each method at its neutral value is the simpler method: float64, two rounds, every engine
(methods.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import (
    FedAvg,
    FedAvgM,
    FedNova,
    FedProx,
    FedResCuE,
    FedRolex,
    FedSeq,
    HeteroFL,
    SplitMix,
)
from fedquilt.round.server_optimizers import ServerMomentum
from tests.conftest import LOCAL, assert_same, with_local

PLAIN = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
ROLLING = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
RAGGED = (7, 4, 9, 5, 8, 4)

REDUCTIONS = {
    "fedrolex(shift 0) = heterofl": (FedRolex(shift=0), HeteroFL(), (1.0, 0.5, 0.25), RAGGED, 0.0),
    "heterofl(all shares 1) = fedavg": (
        HeteroFL(local=PLAIN, weighting="data"),
        FedAvg(local=PLAIN),
        (1.0,),
        RAGGED,
        0.0,
    ),
    "fedrolex(all shares 1) = fedavg": (
        FedRolex(local=PLAIN),
        FedAvg(local=PLAIN, weighting="uniform"),
        (1.0,),
        RAGGED,
        0.0,
    ),
    "fedrescue(S 0) = heterofl": (
        FedResCuE(samples=0),
        HeteroFL(local=FedResCuE().local),
        (1.0, 0.5, 0.25),
        RAGGED,
        0.0,
    ),
    "fedrescue(KL weight 0) = fedseq": (
        FedResCuE(alpha=0.0),
        FedSeq(),
        (1.0, 0.5, 0.25),
        RAGGED,
        0.0,
    ),
    "splitmix(one base, share 1) = fedavg": (
        SplitMix(local=PLAIN, base=1.0),
        FedAvg(local=PLAIN),
        (1.0,),
        RAGGED,
        0.0,
    ),
    "fedprox(mu 0) = fedavg": (FedProx(mu=0.0), FedAvg(), (1.0,), RAGGED, 0.0),
    "fednova(equal steps, no momentum) = fedavg": (
        FedNova(local=PLAIN),
        FedAvg(local=PLAIN),
        (1.0,),
        (8, 7, 6, 8, 7, 6),  # two batches each, unequal data
        1e-12,
    ),
}


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, family, engine, play, make_data):
    special, general, shares, sizes, atol = REDUCTIONS[name]
    if "no momentum" not in name:
        special, general = (
            with_local(m, optimizer=ROLLING, batch_size=4) for m in (special, general)
        )
    data = make_data(family, sizes, labels=2)
    runs = [play(method, family, data, shares, engine=engine) for method in (special, general)]
    if isinstance(special, FedNova):  # charged twice for the same journey (RaFL, Table 1)
        runs[1].records[:] = [
            replace(r, bytes_down=2 * r.bytes_down, bytes_up=2 * r.bytes_up)
            for r in runs[1].records
        ]
    if isinstance(special, SplitMix):  # its only net has a scope
        named = {
            name.removeprefix("base0/"): value for name, value in runs[0].server.weights.items()
        }
        runs[0].server = replace(runs[0].server, weights=named)
    assert_same(*runs, atol=atol)


def test_fedavgm_with_rate_1_and_without_momentum_is_fedavg(perceptron, play, make_data):
    data = make_data(perceptron, RAGGED)
    momentum_run, mean_run = (
        play(with_local(method, batch_size=4), perceptron, data, (1.0,))
        for method in (FedAvgM(server_optimizer=ServerMomentum(lr=1.0, momentum=0.0)), FedAvg())
    )
    weights = [dict(run.server.weights) for run in (momentum_run, mean_run)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)
    assert set(momentum_run.server.slots) == {"momentum"}


@pytest.mark.parametrize(
    ("special", "general", "shares"),
    [
        (FedRolex(shift=1), HeteroFL(), (1.0, 0.5)),
        (HeteroFL(local=PLAIN), FedAvg(local=PLAIN), (0.5,)),
        (FedProx(mu=1.0), FedAvg(), (1.0,)),
        (FedResCuE(), FedSeq(), (1.0, 0.5)),
        (FedNova(), FedAvg(), (1.0,)),
    ],
)
def test_away_from_their_neutral_values_they_differ(
    special, general, shares, residual, play, make_data
):
    data = make_data(residual, RAGGED)
    runs = [play(with_local(m, batch_size=4), residual, data, shares) for m in (special, general)]
    with pytest.raises(AssertionError):
        assert_same(*runs)
