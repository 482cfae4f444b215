"""Fixtures of the tests on runs: a run on four clients, a user's files, and a user's net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedquilt as fq
from tests.unit.runs.experiments import OWN
from tests.unit.runs.folders import EVERY, Keeping
from tests.unit.runs.nets import Theirs


@pytest.fixture
def data(residual, make_data):
    return make_data(residual, (5, 6, 4, 7))


@pytest.fixture
def start(residual, data, play):
    """Return a function that trains with two of four clients a round, so that client states have
    different ages.
    """

    def start(
        method=Keeping(local=fq.LocalTraining(batch_size=4, norm="per_client")), rounds=4, **options
    ):
        fleet = options.pop("fleet", None) or fq.Fleet.of((1.0, 0.5), 4, 2)
        options = {"evaluation": fq.Evaluation(every=2), "checkpoint": EVERY, **options}
        return play(
            method,
            options.pop("family", residual),
            options.pop("data", data),
            fleet=fleet,
            rounds=rounds,
            **options,
        )

    return start


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def theirs() -> fq.Family:
    return fq.trace(Theirs, torch.zeros(2, 1, 8, 8))
