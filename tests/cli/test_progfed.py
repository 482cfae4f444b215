"""ProgFed from the command line and from files: its settings, its folders, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.config.toml import assign
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg, HeteroFL, ProgFed
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment

OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
import fedquilt as fq

@dataclass(frozen=True)
class Mine(fq.methods.HeteroFL):
    pace: int = 1

def net(num_classes):
    blocks = [nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(6, num_classes))

def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 1, 4, 4, generator=generator), torch.arange(48) % 3
    return fq.data.Pool.of((x, y), (x, y)).partition(4)
"""
TINY = [
    "--model",
    "mine.py:net",
    "--data",
    "mine.py:data",
    "--method",
    "progfed",
    "--cohort",
    "2",
    "--epochs",
    "1",
]
GROWING = [
    "--set",
    'method.stages=["1", "3"]',
    "--set",
    "method.warmup=1",
    "--set",
    "method.stage_rounds=2",
]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(**settings: Any) -> ProgFed:
    """Return the demo's method with settings by dotted path, `__` for the dot."""
    plain = demo("progfed")
    for path, value in settings.items():
        assign(plain, ["method", *path.split("__")], value)
    method = Experiment.of(plain).method
    assert isinstance(method, ProgFed)
    return method


# --- settings -----------------------------------------------------------------------------------


def test_settings_of_local_training_reach_the_method_that_trains_the_stages():
    usual = asked()
    # of the demo
    assert usual.over == FedAvg(weighting="uniform").with_local(
        optimizer=fq.optimizers.SGD(lr=0.1), batch_size=16, epochs=2
    )
    assert usual.local == usual.over.local
    found = asked(
        local__epochs=3,
        local__optimizer__name="adam",
        weighting="data",
        server_optimizer__name="server_adam",
    )
    assert found.over.local.epochs == found.local.epochs == 3
    assert found.over.local.optimizer == fq.optimizers.Adam(lr=0.1)
    assert found.over.weighting == "data"
    assert type(found.over.server_optimizer).__name__ == "ServerAdam"


def test_the_method_that_trains_the_stages_is_chosen_by_name():
    found = asked(over__name="heterofl", over__rounding="ceil", local__epochs=5)
    assert isinstance(found.over, HeteroFL)
    assert (found.over.rounding, found.over.local.epochs, found.over.local.masked) == (
        "ceil",
        5,
        "client",
    )
    assert asked(over="fedrolex").over.shift == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stages": 3}, {"stages": 3}),
        ({"stages": ["a", "b"]}, {"stages": ("a", "b")}),
        ({"stages": "symmetric"}, {"stages": "symmetric"}),
        ({"stage_rounds": [2, 3]}, {"stage_rounds": (2, 3)}),
        ({"stage_rounds": 4, "warmup": 2, "extra_warmup": True}, {"stage_rounds": 4, "warmup": 2}),
        (
            {"strategy": "random", "restart": True, "rounds": 30},
            {"strategy": "random", "restart": True, "rounds": 30},
        ),
        ({"preset": "released"}, {"warmup": 25, "extra_warmup": True}),
    ],
    ids=str,
)
def test_settings_are_read_and_survive_a_file(settings, expected):
    plain = demo("progfed")
    for name, value in settings.items():
        assign(plain, ["method", name], value)
    experiment = Experiment.of(plain)
    assert {name: getattr(experiment.method, name) for name in expected} == expected
    assert Experiment.of(tomllib.loads(experiment.to_toml())) == experiment


def test_a_preset_and_a_setting_over_it():
    found = asked(preset="released", local__epochs=7, warmup=3)
    assert (found.warmup, found.over.local.epochs) == (3, 7)
    assert (found.over.local.keep_optimizer, found.over.local.schedule) == (
        True,
        fq.schedules.Cosine(3000),
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"stages": 0}, "method.stages: 0 was asked for; at least one stage is needed"),
        (
            {"over": "progfed"},
            "method.over: ProgFed was asked for over ProgFed; a model grows once. Any other",
        ),
        (
            {"over": "hetrofl"},
            "method.over.name: there is no method named 'hetrofl'. Did you mean 'heterofl'?",
        ),
        (
            {"strategy": "layer"},
            "method.strategy: 'layer' was found; one of 'progressive', 'end_to_end'",
        ),
        ({"warmup": -1}, "method.warmup: -1 was asked for"),
        ({"local__epoch": 3}, "method.over.local.epoch"),
        ({"shift": 3}, "method.shift"),
    ],
    ids=str,
)
def test_wrong_settings_are_reported_with_their_path(settings, told):
    with pytest.raises(ConfigError) as caught:
        asked(**settings)
    assert told in str(caught.value)


# --- commands -----------------------------------------------------------------------------------


def bytes_up(folder: str) -> list[int]:
    return [
        json.loads(line)["bytes_up"]
        for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()
    ]


def test_a_run_that_is_resumed_for_longer_grows_at_the_same_rounds(own, capsys):
    assert main(["run", *TINY, *GROWING, "--lr", "0.02", "--rounds", "5", "--out", "d"]) == 0
    settings = tomllib.loads((own / "d" / "config.toml").read_text())["method"]
    assert (settings["rounds"], settings["over"]["local"]["optimizer"]["lr"]) == (5, 0.02)
    assert main(["run", "--resume", "d", "--rounds", "7"]) == 0
    spent = bytes_up("d")
    assert len(set(spent[:2])) == 1
    assert spent[2] < spent[3]  # a warm-up
    assert set(spent[3:]) == {spent[3]}
    assert tomllib.loads((own / "d" / "config.toml").read_text())["method"]["rounds"] == 5


def test_the_terminal_names_both_methods_and_shows_alpha_and_q(own, capsys):
    """Without `alignment` there are no such figures, and lines end with the last share."""
    asked = ["run", *TINY, *GROWING, "--rounds", "5"]
    assert main([*asked, "--set", "method.over.name=heterofl"]) == 0
    _, title, first, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("progfed over heterofl on mine.py:data: ")
    assert first.endswith("%")
    assert main([*asked, "--set", "method.alignment=16", "--out", "e"]) == 0
    _, title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("progfed over fedavg on mine.py:data: ")
    metrics = json.loads((own / "e" / "rounds.jsonl").read_text().splitlines()[0])["metrics"]
    alpha, q = metrics["alignment"]["1.0"], metrics.get("norm_discrepancy", {}).get("1.0")
    assert lines[0].startswith("round 1/5 (stage 1 of 2)  loss ")
    assert lines[0].endswith(
        f"%  alignment: {alpha:.3g}  norm_discrepancy: {'–' if q is None else f'{q:.3g}'}"
    )
    assert lines[4].endswith("%  alignment: 1  norm_discrepancy: 1")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("stage_rounds = 2", "stage_rounds = 1", "method.stage_rounds: 2 there, 1 here"),
        ("warmup = 1", "warmup = 0", "method.warmup: 1 there, 0 here"),
        ('"1",', '"2",', "method.stages[0]: 1 there, 2 here"),
    ],
)
def test_a_resume_with_other_stages_is_refused(before, after, told, own, capsys):
    assert main(["run", *TINY, *GROWING, "--rounds", "5", "--out", "d"]) == 0
    config = own / "d" / "config.toml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))
    capsys.readouterr()
    assert main(["run", "--resume", "d", "--rounds", "6"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Ask for what it was, or name another folder." in err


def test_a_method_in_a_file_trains_the_stages(own, capsys):
    own_method = ["--set", "method.over.name=mine.py:Mine", "--set", "method.over.pace=4"]
    assert main(["run", *TINY, *GROWING, *own_method, "--rounds", "5", "--out", "d"]) == 0
    settings = tomllib.loads((own / "d" / "config.toml").read_text())["method"]
    assert (settings["name"], settings["over"]["pace"]) == ("progfed", 4)
    assert main(["run", "--resume", "d", "--rounds", "6"]) == 0


@pytest.mark.parametrize(
    ("settings", "rounds", "told"),
    [
        (
            {"stage_rounds": 2},
            2,
            "ProgFed was asked for with 2 rounds, of which 2 are for the first 1 of 2 stages",
        ),
        ({"stage_rounds": 2, "warmup": 3}, 5, "warmup = 3, and a stage has 3 rounds"),
        ({"stage_rounds": [1, 2, 2]}, 5, "rounds of 3 stages; the model has 2"),
        (
            {"stages": '["1", "9"]'},
            5,
            "a stage of Sequential that ends with '9' was asked for; there is no such module",
        ),
    ],
    ids=str,
)
def test_stages_that_cannot_be_are_refused_before_the_first_round(
    settings, rounds, told, own, capsys
):
    chosen = {"stages": '["1", "3"]', **settings}
    words = [word for name, value in chosen.items() for word in ("--set", f"method.{name}={value}")]
    assert main(["run", *TINY, *words, "--rounds", str(rounds), "--out", "d"]) == 2
    assert told in capsys.readouterr().err
    assert not (own / "d" / "rounds.jsonl").exists()
