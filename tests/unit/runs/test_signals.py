"""Ctrl-C and failures during a run: rounds are recorded completely or not at all."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import fedquilt as fq
from fedquilt.errors import TrainingError
from fedquilt.methods import FedAvg
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.signals import undisturbed
from tests.conftest import assert_same, with_local
from tests.unit.runs.folders import Stop, lines, stop_after


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stop])
def test_the_state_is_saved_however_a_run_stops(kind, start, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(kind):
        start(out=out, checkpoint=Checkpointing(), watch=stop_after(3, kind))
    assert fq.load_state(out).round == 3
    assert len(lines(out)) == 3
    assert_same(start(), start(out=out, resume=True), atol=0)


def test_a_failed_round_leaves_the_state_before_it(start, tmp_path):
    class Exploding:
        def __call__(self, round):
            return 1.0 if round < 2 else 1e200

    out, method = (
        tmp_path / "run",
        with_local(FedAvg(), batch_size=2, norm="tracked", schedule=Exploding()),
    )
    with pytest.raises(TrainingError) as e:
        start(method, out=out, checkpoint=Checkpointing())
    assert e.value.run.server.round == fq.load_state(out).round == len(lines(out)) == 2


def test_a_failed_evaluation_leaves_the_client_states_before_it(start, monkeypatch):
    from fedquilt.engines import Sequential

    def broken(self, federation, eval_jobs, batch_size, by_domain=False):
        raise Stop

    run = start(rounds=1, evaluation=fq.Evaluation(every=2))
    before = dict(run.server.memory)
    monkeypatch.setattr(Sequential, "evaluate", broken)
    with pytest.raises(Stop):
        run.train(3)
    assert dict(run.server.memory) == before
    assert run.server.round == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_delayed_until_a_round_is_recorded(number):
    seen = []
    before = signal.signal(number, signal.default_int_handler)

    def work():
        with undisturbed():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["whole"]
    with pytest.raises(KeyboardInterrupt):  # and afterwards it is as before
        signal.raise_signal(number)
    signal.signal(number, before)


def test_ctrl_c_while_a_round_is_written_stops_after_it(start, tmp_path):
    seen = []

    def watch(record):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        seen.append(record.round)

    with pytest.raises(KeyboardInterrupt):
        start(out=tmp_path / "run", watch=watch)
    assert seen == [1]
    assert fq.load_state(tmp_path / "run").round == len(lines(tmp_path / "run")) == 1


def test_runs_in_another_thread_are_left_alone(start, tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(start(rounds=1, out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert done[0].server.round == 1
