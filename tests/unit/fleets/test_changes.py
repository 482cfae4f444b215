"""Fleets whose clients join later, or get other budgets."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.fleets import Change
from fedquilt.fleets.availability import Diurnal, Trace
from fedquilt.fleets.fleet import Devices
from fedquilt.methods import Scaffold
from fedquilt.round.federation import World
from fedquilt.runs.experiment import Experiment

HALF, WHOLE = fq.Budget(share=0.5), fq.Budget(share=1.0)


def test_earlier_rounds_are_those_of_the_fleet_before():
    before = fq.Fleet.of([1.0, 0.5, 0.25], 10, 4)
    after = before.changed([Change(5, 10, HALF), Change(5, 0, HALF), Change(7, 11, WHOLE)])
    for round in range(5):
        assert after.draw_cohort(round, 3) == before.draw_cohort(round, 3)
        assert after.at(round) is before
        assert [after.client(id, round, 3, 5, 2) for id in range(10)] == [
            before.client(id, round, 3, 5, 2) for id in range(10)
        ]
    assert [after.at(round).num_clients for round in (4, 5, 6, 7)] == [10, 11, 11, 12]
    assert [after.budget(0, round, 3).share for round in (4, 5, 9)] == [1.0, 0.5, 0.5]
    assert after.joined == (5, 7)


def test_clients_that_have_joined_are_drawn():
    fleet = fq.Fleet.of([1.0], 4, 2).changed([Change(10, 4, HALF)])
    late = [set(fleet.draw_cohort(round, 0)) for round in range(10, 60)]
    assert any(4 in cohort for cohort in late)
    assert not any(4 in fleet.draw_cohort(round, 0) for round in range(10))
    assert fleet.draw_cohort(12, 0, online=[1, 4]) == [1, 4]
    with pytest.raises(ConfigError, match="reported client 4"):
        fleet.draw_cohort(3, 0, online=[1, 4])


def test_a_cohort_that_is_a_part_grows_and_turns_go_on():
    fleet = fq.Fleet.of([1.0], 2, 1.0).changed([Change(3, 2, HALF), Change(3, 3, HALF)], 0.5)
    assert [len(fleet.draw_cohort(round, 0)) for round in (2, 3)] == [2, 2]
    assert fleet.client(0, 3, 0, 1).turn == 6
    assert fleet.client(0, 5, 0, 1, 1).turn == 11


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([Change(2, 5, HALF)], "so that 4 would fit"),
        ([Change(2, 4, HALF), Change(1, 5, HALF)], "so that 4 would fit"),
    ],
)
def test_numbers_that_are_left_out_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        fq.Fleet.of([1.0], 4, 2).changed(changes)


def test_changes_before_earlier_ones_are_refused():
    fleet = fq.Fleet.of([1.0], 4, 2).changed([Change(5, 4, HALF)])
    with pytest.raises(ConfigError, match="already changed in round 6"):
        fleet.changed([Change(4, 0, HALF)])


def test_clients_that_join_come_and_go_as_others_do(tmp_path):
    file = tmp_path / "stays.csv"
    file.write_text("client,start,end\n0,0,\n1,0,\n2,5,\n")
    with pytest.raises(ConfigError, match="no client 2"):
        fq.Fleet.of([1.0], 2, 2, availability=Trace(str(file)))
    diurnal = fq.Fleet.of([1.0], 20, 1.0, availability=Diurnal(6, 2))
    grown = diurnal.changed([Change(3, 20, HALF)], 1.0)
    assert grown.at(3).presence is not None
    assert any(20 in grown.draw_cohort(round, 0) for round in range(3, 12))
    by_fields = fq.Fleet((WHOLE,), np.zeros(20, np.int32), 5, presence=diurnal.presence)
    with pytest.raises(ConfigError, match="not known when it is available"):
        by_fields.changed([Change(3, 20, HALF)])


def test_settings_of_a_fleet_that_changes_are_read_back():
    text = """
[fleet]
clients = 2
cohort = 1.0
budgets = { name = "uniform", shares = [1.0, 0.5] }
changes = [
    { round = 2, client = 2, budget = { share = 0.25 } },
    { round = 3, client = 0, budget = { share = 0.5 } },
]
"""
    text = f"method = 'fedavg'\ndata = 'digits'\n{text}"
    experiment = Experiment.of(tomllib.loads(text))
    devices = experiment.fleet
    assert devices.total == 3
    fleet = devices.fleet(3)
    assert (fleet.num_clients, fleet.joined) == (3, (2,))
    assert fleet.settings == replace(devices, seed=0)
    assert Experiment.of(tomllib.loads(experiment.to_toml())).fleet == devices
    with pytest.raises(ConfigError, match="3 clients were asked for"):
        devices.fleet(2)
    with pytest.raises(ConfigError, match="they need `clients`"):
        Devices(changes=devices.changes)


def test_scaffolds_mean_of_controls_counts_clients_that_have_joined(play, perceptron, make_data):
    """The server's c is the mean of all c_i, and those of clients that join are zero."""
    data = make_data(perceptron, (6, 6, 6), public=0)
    fleet = fq.Fleet.of([1.0], 2, 1.0).changed([Change(2, 2, WHOLE)], 1.0)
    run = fq.prepare(Scaffold(), perceptron, data, fleet, "sequential", precision="fp64")
    for rounds in (2, 3, 4):
        run.train(rounds)
        count = run.fleet.at(rounds - 1).num_clients
        states = [run.server.memory[client, ""].slots["client_control"] for client in range(count)]
        for name, value in run.server.slots["control"].items():
            mean = sum(state[name] for state in states) / count
            torch.testing.assert_close(value, mean, rtol=0, atol=1e-12)


def test_a_world_knows_the_clients_of_every_round(perceptron):
    world = World(perceptron, num_clients=5, joined=(2, 2, 4))
    assert [world.clients_in(round) for round in (-1, 0, 1, 2, 3, 4)] == [2, 2, 2, 4, 4, 5]
