"""Runs with private nets on clients: if they are stopped and resumed, they end bit for bit like
uninterrupted ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import RaFL
from fedquilt.round.training.server import ServerTraining
from tests.conftest import assert_same
from tests.pairs import SIZES, limits, plain_pairs

ROUNDS = 4
LOCAL = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1), keep_optimizer=True)
HOW = ServerTraining(fq.optimizers.Adam(lr=0.01), batch_size=4, steps=4, check_every=2)
METHODS = {
    "a": RaFL(local=LOCAL),
    "b": RaFL(local=LOCAL, distil=True, server_training=HOW),
    "c": RaFL(local=LOCAL, transfer=True),
}


@pytest.fixture
def federate(make_data, tmp_path):
    """Train or resume a run with three clients a round in its own folder, with client states that
    do not all fit into memory.
    """
    family = plain_pairs()
    data = make_data(family, SIZES, labels=2)
    fleet = fq.Fleet.of(limits(family), 4, 3)

    def federate(name: str, folder: str, rounds: int, **options) -> fq.Run:
        return fq.run(
            METHODS[name],
            family,
            data,
            fleet,
            rounds=rounds,
            out=tmp_path / folder,
            resume=True,
            checkpoint=fq.Checkpointing(rounds=1),
            client_state_memory=500,
            **options,
        )

    return federate


@pytest.mark.parametrize("name", METHODS)
def test_a_run_stopped_after_two_rounds_ends_like_an_uninterrupted_one(name, federate):
    whole = federate(name, "whole", ROUNDS)
    federate(name, "stopped", 2)
    resumed = federate(name, "stopped", ROUNDS)
    assert_same(whole, resumed, atol=0)
    assert [record.bytes_first for record in whole.records] == [
        record.bytes_first for record in resumed.records
    ]


def test_a_run_over_a_link_that_loses_and_codes_is_resumed(federate):
    link = fq.Link(fq.links.ColumnLoss(0.1, 0.3), fq.links.Codec(bits=8, feedback=True, down=True))
    whole = federate("c", "whole", ROUNDS, link=link)
    federate("c", "stopped", 2, link=link)
    assert_same(whole, federate("c", "stopped", ROUNDS, link=link), atol=0)


def test_a_checkpoint_has_the_private_nets_of_the_clients_that_have_trained(
    federate, tmp_path: Path
):
    run = federate("a", "run", 2)
    state = fq.load_state(tmp_path / "run")
    assert all(name.startswith("knowledge.") for name in state.weights)
    assert state.memory.keys() == run.server.memory.keys()
    for (client, scope), memory in run.server.memory.items():
        name = ("small", "big")[client % 2]
        private = {
            key: value for key, value in memory.weights.items() if key.startswith(f"{name}.")
        }
        assert len(private) == 4
        for key, value in private.items():
            assert torch.equal(state.memory[client, scope].weights[key], value)


def test_a_rounds_checkpoint_grows_with_the_cohort(make_data, tmp_path: Path):
    """Three clients train in a round, of six or of thirty.

    The checkpoint of a round has about the same size.
    """
    family = plain_pairs()
    sizes = []
    for count in (6, 30):
        data = make_data(family, [4] * count)
        fleet = fq.Fleet.of(limits(family), count, 3)
        out = tmp_path / str(count)
        fq.run(
            METHODS["a"],
            family,
            data,
            fleet,
            rounds=1,
            out=out,
            checkpoint=fq.Checkpointing(rounds=1),
        )
        sizes.append(sum(file.stat().st_size for file in out.rglob("*memor*") if file.is_file()))
    assert sizes[0] > 0
    assert sizes[1] < 1.5 * sizes[0]
