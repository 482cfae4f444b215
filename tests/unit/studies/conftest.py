"""Runs made by hand, with numbers that can be worked out on paper."""

from __future__ import annotations

import pytest

from fedquilt.round import Grades, Record
from fedquilt.studies.result import Result


def make_record(number, figures=None, main="accuracy", macs=1000, **metrics):
    """Return a round with 100 bytes down and 10 up, evaluated if it has figures by share."""
    grades = Grades()
    if figures is not None:
        grades = Grades(main, {main: figures, **metrics})
    return Record(number, 0.5, 2, bytes_down=100, bytes_up=10, macs=macs, loss=1.0, grades=grades)


def make_result(entry, seed, curve, main="accuracy", **summary):
    """Return a run whose share 1.0 has the figures of `curve`, one evaluated round for each."""
    records = [make_record(n, {"1.0": figure}, main) for n, figure in enumerate(curve, 1)]
    plain = {
        "method": entry,
        "data": "digits",
        "task": "classification",
        "rounds": len(records),
        "seconds": 0.5 * len(records),
        "bytes_down": 100 * len(records),
        "bytes_up": 10 * len(records),
        "accuracy": {},
        "metrics": {main: {"1.0": curve[-1]}},
        "main": main,
        "higher_is_better": True,
        "percent": True,
        "members": {"1.0": {"params": 1234, "macs": 56}},
        "note": "",
    }
    return Result(entry, seed, {**plain, **summary}, records)


@pytest.fixture
def record():
    return make_record


@pytest.fixture
def result():
    return make_result


OWN = """
import torch
from torch import nn
import fedquilt as fq

print("a module may print")

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, num_classes))

def _samples(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 3
    inputs[:, 0, 0, :3] += 2 * nn.functional.one_hot(targets, 3)  # can be learnt
    return inputs, targets

def pool():
    return fq.data.Pool.of(_samples(0, 60), _samples(1, 30))

def other_tests():
    inputs, targets = _samples(1, 30)
    return fq.data.Pool.of(_samples(0, 60), (0 * inputs, targets.flip(0)))

def broken():
    raise ValueError("on purpose")
"""


def make_settings(method="fedavg", rounds=2, **more):
    """Return settings of a run that takes a few hundredths of a second."""
    named = {"name": method, "local": {"epochs": 1, "batch_size": 8}}
    small = {"clients": 4, "cohort": 2}
    return {
        "method": named,
        "data": "own.py:pool",
        "model": "own.py:net",
        "fleet": small,
        "rounds": rounds,
        **more,
    }


@pytest.fixture
def settings():
    return make_settings


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Work in a folder with `own.py`, which has a small net and data for `make_settings`."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class CountingWatch:
    """A `Watch` that notes which runs begin, and raises after some rounds if it is asked to."""

    def __init__(self, rounds=None, error=KeyboardInterrupt):
        self.begun = []
        self.ended = []
        self.rounds_left = rounds
        self.error = error

    def begin(self, planned, display):
        self.begun.append((planned.folder, display.done))
        return self._after

    def _after(self, record):
        if self.rounds_left is not None:
            self.rounds_left -= 1
            if self.rounds_left == 0:
                raise self.error

    def end(self, planned, result):
        self.ended.append(planned.folder)


@pytest.fixture
def counting():
    return CountingWatch
