"""The engine `auto`: the fastest engine of a short trial trains the run, and is written to the
settings.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedquilt.data.parts import Parts
from fedquilt.errors import ConfigError
from fedquilt.runs import auto as trial
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.machine import Machine
from tests.conftest import assert_same


@pytest.fixture
def asked(monkeypatch) -> Experiment:
    """Return a short demo on two cores, and restore the number of threads afterwards."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(trial.os, "sched_getaffinity", lambda _pid: {0, 1}, raising=False)
    yield Experiment.of({**demo(), "engine": {"name": "auto"}, "rounds": 2})
    torch.set_num_threads(threads)


def names(ways) -> list[tuple[str, int]]:
    return [(way.name, way.threads) for way in ways]


def test_one_thread_all_threads_and_processes_are_tried(asked, monkeypatch):
    monkeypatch.setattr(trial.Ray, "check", lambda: None)
    assert names(trial._candidates(asked.engine)) == [
        ("vectorized", 1),
        ("vectorized", 2),
        ("ray", 1),
    ]
    monkeypatch.setattr(trial.Ray, "check", lambda: (_ for _ in ()).throw(ConfigError("no ray")))
    assert names(trial._candidates(asked.engine)) == [("vectorized", 1), ("vectorized", 2)]


@pytest.mark.parametrize(("fast", "slow"), [(1, 2), (2, 1)])
def test_the_fastest_engine_is_used_and_written_to_the_settings(asked, monkeypatch, fast, slow):
    seconds = {fast: 0.1, slow: 0.2}
    monkeypatch.setattr(
        trial, "_seconds", lambda experiment, short: seconds[experiment.engine.threads]
    )
    ground = asked.ground()
    run = asked.prepare(ground)
    assert torch.get_num_threads() == fast
    settled = asked.settled(run, ground)
    assert (settled.engine.name, settled.engine.threads) == ("vectorized", fast)
    assert Experiment.of(trial_free(settled)) == settled
    assert_same(run.train(1), settled.prepare(ground).train(1), atol=0)


def trial_free(settled: Experiment) -> dict:
    import tomllib

    return tomllib.loads(settled.to_toml())


def test_processes_are_tried_for_long_runs_only(asked, monkeypatch):
    monkeypatch.setattr(trial.Ray, "check", lambda: None)
    tried = []

    def seconds(experiment: Experiment, short: object) -> float:
        tried.append(experiment.engine.name)
        return 0.1 if experiment.engine.name == "ray" else 0.3

    monkeypatch.setattr(trial, "_seconds", seconds)
    ground = asked.ground()
    assert trial.quickest(asked, ground).name == "vectorized"
    assert "ray" not in tried
    long = Experiment.of({**demo(), "engine": {"name": "auto"}, "rounds": 10_000})
    found = trial.quickest(long, ground)
    assert (found.name, found.workers, found.threads) == ("ray", 2, 1)


def test_a_trial_trains_short_rounds_and_does_not_change_the_data(asked):
    ground = asked.ground()
    before = ground.data.parts.order.clone()
    run = asked.prepare(ground)
    assert torch.equal(run.data.parts.order, before)
    assert run.server.round == 0


def test_a_trial_trains_the_last_round_in_which_a_model_is_complete(asked, monkeypatch):
    played = []
    monkeypatch.setattr(
        trial, "run_round", lambda federation, server, *rest: played.append((server.round, rest[2]))
    )
    trial._seconds(replace(asked, engine=Machine("vectorized")), asked.ground())
    assert played == [(1, 3), (1, 3)]  # of three rounds in all, so that the second is not evaluated


def test_the_head_of_every_part():
    parts = Parts.of([[5, 1, 2], [], [7], [3, 4]]).head(2)
    assert [part.tolist() for part in parts] == [[5, 1], [], [7], [3, 4]]
