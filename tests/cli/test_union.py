"""Several models on the command line and in files: their settings, and refused requests."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from fedquilt.config.toml import assign
from fedquilt.errors import ConfigError
from fedquilt.runs.demo import defaults
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import choose

OWN = """
import torch
from torch import nn
import fedquilt as fq

def narrow(num_classes, hidden=3):
    layers = nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)

def deep(num_classes):
    layers = [nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(6, num_classes))

def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 1, 4, 4, generator=generator), torch.arange(48) % 3
    return fq.data.Pool.of((x, y), (x, y), public=x[:12]).partition(4)
"""
TINY = [
    "--data",
    "mine.py:data",
    "--cohort",
    "2",
    "--epochs",
    "1",
    "--set",
    "method.server_training.steps=2",
]
TWO = ["--method", "feddf", "--model", "mine.py:deep", "mine.py:narrow"]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_with_two_models_is_written_and_resumed(own, capsys):
    assert main(["run", *TWO, *TINY, "--rounds", "1", "--out", "run"]) == 0
    assert "mine.py:deep + mine.py:narrow" in capsys.readouterr().out
    settings = tomllib.loads((own / "run" / "config.toml").read_text())
    assert [model["name"] for model in settings["model"]] == ["mine.py:deep", "mine.py:narrow"]
    assert settings["fleet"]["budgets"]["name"] == "by_net"
    assert main(["run", "--resume", "run", "--rounds", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert sorted(summary["labels"].values()) == ["deep", "narrow"]


def test_models_of_one_name_are_numbered_and_keep_their_settings():
    settings = assign(defaults("feddf"), ["data"], {"name": "mine.py:data"})
    models = [
        "mine.py:deep",
        {"name": "mine.py:narrow", "hidden": 2},
        {"name": "mine.py:narrow", "hidden": 4},
    ]
    experiment = Experiment.of(assign(settings, ["model"], models))
    family = experiment.ground().family
    assert family.layout.nets == ("deep", "narrow_1", "narrow_2")
    assert [list(family.at(net).whole.sizes.values()) for net in ("narrow_1", "narrow_2")] == [
        [2],
        [4],
    ]
    assert Experiment.of(tomllib.loads(experiment.to_toml())) == experiment


def test_a_list_of_one_model_is_that_model():
    settings = assign(
        assign(defaults("fedavg"), ["data"], "mine.py:data"), ["model"], ["mine.py:deep"]
    )
    assert Experiment.of(settings).ground().family.layout.nets == ()


def test_a_model_by_its_name_replaces_a_list():
    settings = assign(defaults("fedavg"), ["model"], ["mlp", "convnet"])
    assert choose(settings, ["model"], "vgg11")["model"] == {"name": "vgg11"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--set", "model.hidden=3"], "model.hidden was asked for; model is a list of 2 there"),
        (
            ["--set", "fleet.budgets.name=uniform"],
            "have no common share. Bounds on macs, params or memory would work",
        ),
        (["--init", "weights.safetensors"], "init"),
        (["--set", "model=mlp"], "--set model=mlp was asked for together with --model"),
    ],
)
def test_settings_that_do_not_fit_several_models_are_refused(flags, told, own, capsys):
    (own / "weights.safetensors").write_bytes(b"")
    assert main(["run", *TWO, *TINY, *flags]) == 2
    assert told in capsys.readouterr().err


def test_unknown_models_and_empty_lists_are_refused():
    with pytest.raises(ConfigError, match=r"model\[1\]"):
        Experiment.of(assign(defaults("fedavg"), ["model"], ["mlp", "mpl"]))
    with pytest.raises(
        ConfigError, match="an empty list was asked for; one model or more would work"
    ):
        Experiment.of(assign(defaults("fedavg"), ["model"], []))
