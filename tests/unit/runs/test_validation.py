"""Runs that are evaluated on validation samples: from Python, from settings, from their folders."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.errors import ConfigError, DataError
from fedquilt.methods import METHODS, FedAvg, HeteroFL
from fedquilt.runs.data_settings import Source
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.fingerprint import fingerprint
from fedquilt.runs.load import load_run
from tests.conftest import assert_same, with_local

ON_VALIDATION = fq.Evaluation(every=0, on="validation")
OWN = """
import torch
from torch import nn
from fedquilt.data import Pool

def net(num_classes):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_classes))

def pool(test_shift: int = 0):
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return Pool.of((x, y), (x, (y + test_shift) % 3))

def data():
    return pool().partition(6)

def split():
    return data().with_validation(0.3)
"""
SETTINGS = {
    "method": {"name": "fedavg", "local": {"batch_size": 4}},
    "model": "mine.py:net",
    "fleet": {"clients": 6},
    "rounds": 2,
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment(
    validation: float = 0.2, on: str = "validation", data: str = "pool", **options: Any
) -> Experiment:
    source = {"name": f"mine.py:{data}", "validation": validation, **options}
    return Experiment.of({**SETTINGS, "data": source, "evaluation": {"on": on}})


# --- from Python --------------------------------------------------------------------------------


def test_accuracy_is_that_on_the_pooled_validation_samples(residual, make_data, play):
    data = make_data(residual, (8, 6, 9)).with_validation(0.3)
    run = play(
        with_local(FedAvg(), batch_size=4, norm="post"), residual, data, evaluation=ON_VALIDATION
    )
    rows = data.validation_parts.order
    outputs = run.deploy(fq.Budget(share=1.0))(data.inputs[rows])
    hits = (outputs.argmax(1) == data.targets[rows]).double()
    assert run.accuracy["1.0"] == pytest.approx(float(hits.mean()), abs=1e-12)
    means = [own.mean() for own in hits.split(data.validation_parts.sizes.tolist())]
    assert run.metrics["local_accuracy"]["1.0"] == pytest.approx(
        float(torch.stack(means).mean()), abs=1e-12
    )
    own_size = [device.accuracy_own_size for device in run.per_client().devices]
    assert own_size == pytest.approx([float(mean) for mean in means], abs=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "local", "splitmix"])
def test_nothing_of_the_test_set_is_seen_and_training_is_unchanged(name, residual, make_data, play):
    """A test set that is not even finite changes no number."""
    data = make_data(residual, (8, 6, 9)).with_validation(0.3)
    spoiled = replace(data, test_inputs=torch.full_like(data.test_inputs, torch.nan))
    method = with_local(METHODS[name](), batch_size=4)
    one, other = (
        play(method, residual, some, evaluation=ON_VALIDATION) for some in (data, spoiled)
    )
    assert_same(one, other, atol=0)
    tested = play(method, residual, data)
    assert all(
        torch.equal(tested.server.weights[name], value)
        for name, value in one.server.weights.items()
    )
    assert tested.metrics != one.metrics


def test_clients_do_not_train_on_what_they_hold_back(residual, make_data, play):
    """Norms are not measured on these samples either, and they do not count for the weight of a
    client.
    """
    data = make_data(residual, (8, 6, 9)).with_validation(0.3)
    inputs = data.inputs.clone()
    inputs[data.validation_parts.order] = torch.nan
    method = with_local(HeteroFL(), batch_size=4, norm="post")
    runs = [play(method, residual, some) for some in (data, replace(data, inputs=inputs))]
    assert_same(*runs, atol=0)
    fewer = replace(data, validation_parts=None)
    assert_same(runs[0], play(method, residual, fewer), atol=0)


def test_data_without_validation_samples_is_refused_with_what_would_work(residual, make_data):
    data, fleet = make_data(residual, (8, 6)), fq.Fleet.of((1.0,), 2)
    with pytest.raises(
        ConfigError, match=r'evaluation\.on = "validation".*data\.with_validation\(0\.1\) in Python'
    ):
        fq.prepare(FedAvg(), residual, data, fleet, evaluation=ON_VALIDATION)
    with pytest.raises(
        ConfigError, match="on = 'train' was asked for; it may be 'test', 'validation'"
    ):
        fq.Evaluation(on="train")


def test_an_engine_keeps_validation_samples_it_has(residual, make_data):
    data, fleet = make_data(residual, (8, 6)).with_validation(0.3), fq.Fleet.of((1.0,), 2)
    first = fq.prepare(FedAvg(), residual, data, fleet, evaluation=ON_VALIDATION)
    again = fq.prepare(HeteroFL(), residual, data, fleet, first.engine, evaluation=ON_VALIDATION)
    tested = fq.prepare(FedAvg(), residual, data, fleet, first.engine)
    assert again.engine is first.engine
    assert tested.engine is not first.engine
    assert len(tested.data.test_targets) == 24
    assert len(first.data.test_targets) == 4


# --- as settings --------------------------------------------------------------------------------


def test_settings_hold_back_samples_of_partitioned_data(own):
    data, _ = Source("mine.py:pool", validation=0.2).federate(6, 0)
    assert data.parts.sizes.tolist() == [8] * 6
    assert data.validation_parts.sizes.tolist() == [2] * 6
    mine, partition = Source("mine.py:data", validation=0.2).federate(None, 0)
    assert partition is None
    assert mine.validation_parts.sizes.tolist() == [2] * 6
    as_it_came, _ = Source("mine.py:split").federate(None, 0)
    assert as_it_came.validation_parts.sizes.tolist() == [3] * 6
    with pytest.raises(DataError, match="hold back 18 samples already"):
        Source("mine.py:split", validation=0.2).federate(None, 0)


def test_a_run_from_settings_is_that_from_python(own):
    run = experiment().prepare().train(2)
    ground = experiment(validation=0.0, on="test").ground()
    data = ground.data.with_validation(0.2)
    how = replace(ON_VALIDATION, every=run.evaluation.every)
    by_hand = fq.run(run.method, ground.family, data, ground.fleet, rounds=2, evaluation=how)
    assert_same(run, by_hand, atol=0)
    spoiled = experiment(test_shift=1).prepare().train(2)  # other test targets
    assert_same(run, spoiled, atol=0)
    assert run.note.endswith("; evaluated on validation samples")


def test_one_ground_serves_runs_on_both_sets(own):
    validation, test = experiment(), experiment(on="test")
    ground = validation.ground()
    runs = [one.prepare(ground).train(1) for one in (validation, test, validation)]
    assert [len(run.data.test_targets) for run in runs] == [12, 60, 12]
    assert runs[0].metrics == runs[2].metrics != runs[1].metrics


def test_wrong_settings_are_reported(own):
    with pytest.raises(
        ConfigError, match=r"data\.validation: 1\.5 was asked for; it must lie in \[0, 1\)"
    ):
        experiment(validation=1.5)
    with pytest.raises(ConfigError, match="2 problems") as caught:
        experiment(validation=-1, on="train")
    assert "data.validation: -1.0 was asked for" in str(caught.value)
    assert "evaluation.on: 'train' was found" in str(caught.value)
    with pytest.raises(ConfigError, match="2 problems") as caught:
        experiment(validation=-1, test_shift="far")
    assert "data.validation: -1.0 was asked for" in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.validation = 0\.1 in a file"):
        experiment(validation=0.0).prepare()


def test_the_resolved_file_is_read_back_and_older_files_are_on_the_test_set(own):
    asked = experiment()
    ground = asked.ground()
    settled = asked.settled(asked.prepare(ground), ground)
    plain = tomllib.loads(settled.to_toml())
    assert (plain["data"]["validation"], plain["evaluation"]["on"]) == (0.2, "validation")
    assert Experiment.of(plain) == settled
    del plain["data"]["validation"], plain["evaluation"]["on"]
    older = Experiment.of(plain)
    assert (older.data.validation, older.evaluation.on) == (0.0, "test")


# --- folders ------------------------------------------------------------------------------------


def test_a_run_cannot_be_resumed_with_other_samples(residual, make_data, play, tmp_path):
    data, out = make_data(residual, (8, 6)).with_validation(0.3), tmp_path / "run"
    method = with_local(FedAvg(), batch_size=4)
    how = fq.Evaluation(on="validation")
    whole = play(method, residual, data, rounds=2, evaluation=how)
    play(method, residual, data, rounds=1, evaluation=how, out=out)
    with pytest.raises(ConfigError, match="evaluated_on: validation there, nothing here"):
        play(method, residual, data, rounds=2, out=out, resume=True)
    other = make_data(residual, (8, 6)).with_validation(0.5)
    with pytest.raises(ConfigError, match=r"data\.validation_parts"):
        play(method, residual, other, rounds=2, evaluation=how, out=out, resume=True)
    resumed = play(method, residual, data, rounds=2, evaluation=how, out=out, resume=True)
    assert_same(whole, resumed, atol=0)
    assert json.loads((out / "summary.json").read_text())["evaluated_on"] == "validation"


def test_a_run_on_the_test_set_is_identified_as_before(residual, make_data, play):
    """Checkpoints of earlier versions have nothing about validation samples, and can be resumed."""
    run = play(FedAvg(), residual, make_data(residual, (8, 6)), rounds=1)
    added = {
        name: value
        for name, value in fingerprint(run).items()
        if "validation" in name or "evaluated" in name
    }
    assert added == {"data.validation_parts": None}
    assert "evaluated_on" not in run.summary
    assert "validation" not in run.note


@pytest.mark.parametrize("has_data", [True, False])
def test_commands_work_on_a_folder(has_data, own, capsys):
    """Try `run`, `clients` and `export`, also without the data of the run."""
    flags = [
        "--set",
        "data.validation=0.2",
        "--set",
        "evaluation.on=validation",
        "--rounds",
        "1",
        "--out",
        "kept",
    ]
    np.savez(
        "mine.npz",
        x_train=np.eye(60, 4),
        y_train=np.arange(60) % 3,
        x_test=np.eye(2, 4),
        y_test=[0, 1],
    )
    source = [
        "--data",
        "mine.npz",
        "--model",
        "mine.py:net",
        "--method",
        "fedavg",
        "--clients",
        "6",
    ]
    assert main(["run", *source, *flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["evaluated_on"] == "validation"
    assert main(["run", "--resume", "kept", "--rounds", "2", "--json"]) == 0
    further = json.loads(capsys.readouterr().out)
    assert further["rounds"] == 2
    if not has_data:
        (own / "mine.npz").unlink()
        assert load_run("kept").absent
        return
    run = load_run("kept")
    assert len(run.data.test_targets) == 12
    assert run.accuracy == further["accuracy"]
    assert main(["clients", "kept", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["clients"]
    assert len(devices) == 6
    # of two samples each
    assert all(device["accuracy_own_size"] in (0.0, 0.5, 1.0) for device in devices)
    exported = run.export("net.pt2", fq.Budget(share=1.0))
    assert exported.compared.endswith("validation samples")
