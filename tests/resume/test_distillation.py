"""Runs whose server trains: if they are stopped and resumed, they end bit for bit like
uninterrupted ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import METHODS
from fedquilt.methods.dsfl import PREDICTIONS
from fedquilt.round.training.server import ServerTraining
from tests.conftest import assert_same

SIZES = (7, 4, 9, 5)
NUM_PUBLIC = 10
ROUNDS = 4
LOCAL = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1))
HOW = ServerTraining(fq.optimizers.Adam(lr=0.01), batch_size=4, steps=6, check_every=2)


@pytest.fixture
def federate(perceptron, make_data, tmp_path):
    """Train or resume a run with three clients a round in its own folder."""
    data = make_data(perceptron, SIZES, labels=2, public=NUM_PUBLIC)
    fleet = fq.Fleet.of((1.0, 0.5), 4, 3, dynamic=True)

    def federate(
        name: str, folder: str, rounds: int, engine: str = "vectorized", **options
    ) -> fq.Run:
        more = {"samples": 6} if name == "dsfl" else {}
        method = METHODS[name](local=LOCAL, prototypes=(1.0, 0.5), server_training=HOW, **more)
        return fq.run(
            method,
            perceptron,
            data,
            fleet,
            engine,
            rounds,
            out=tmp_path / folder,
            resume=True,
            checkpoint=fq.Checkpointing(rounds=1),
            client_state_memory=1000,
            **options,
        )

    return federate


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["feddf", "dsfl", "fedet"])
def test_a_run_stopped_after_two_rounds_ends_like_an_uninterrupted_one(name, engine, federate):
    whole = federate(name, "whole", ROUNDS, engine)
    federate(name, "stopped", 2, engine)
    resumed = federate(name, "stopped", ROUNDS, engine)
    assert resumed.server.round == ROUNDS
    assert_same(whole, resumed, atol=0)
    for mine, theirs in zip(resumed.records, whole.records, strict=True):
        assert (mine.server_macs, mine.server_steps) == (theirs.server_macs, theirs.server_steps)
        assert (mine.server_seconds is None) == (theirs.server_seconds is None)
    assert any(record.server_steps for record in resumed.records[2:])


@pytest.mark.parametrize("name", ["feddf", "dsfl", "fedet"])
def test_a_run_over_a_link_that_loses_and_codes_is_resumed(name, federate):
    link = fq.Link(
        fq.links.ColumnLoss((0.1, 0.3), 0.4), fq.links.Codec(bits=8, feedback=True, down=True)
    )
    whole = federate(name, "whole", ROUNDS, link=link)
    federate(name, "stopped", 2, link=link)
    assert_same(whole, federate(name, "stopped", ROUNDS, link=link), atol=0)


def test_a_checkpoint_holds_the_global_predictions_and_the_clients_nets(federate, tmp_path: Path):
    run = federate("dsfl", "run", 2)
    state = fq.load_state(tmp_path / "run")
    assert PREDICTIONS in state.extras
    for name, value in run.server.extras.items():
        assert torch.equal(state.extras[name], value)
    sums = state.extras[PREDICTIONS].sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)
    assert state.memory.keys() == run.server.memory.keys()
    for key, memory in run.server.memory.items():
        assert memory.weights
        for name, value in memory.weights.items():
            assert torch.equal(state.memory[key].weights[name], value)


@pytest.mark.parametrize("name", ["feddf", "dsfl", "fedet"])
def test_a_run_is_not_resumed_with_other_settings_of_the_server(
    name, federate, perceptron, tmp_path: Path
):
    run = federate(name, "run", 1)
    other = replace(run.method, server_training=replace(HOW, steps=8))
    with pytest.raises(fq.errors.FedquiltError, match="server_training"):
        fq.run(other, perceptron, run.data, run.fleet, rounds=2, out=tmp_path / "run", resume=True)
