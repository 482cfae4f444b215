"""docs/tracking.md: commands run, settings are read, and the table is complete."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.tracking import TRACKERS, MLflow, TensorBoard
from tests.conftest import shortened

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tracking.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow) if "wandb" in line else line
        for line in blocks("sh")[0].splitlines()
    ],
)
def test_commands_run_as_written(line, tmp_path, monkeypatch):
    pytest.importorskip("wandb" if "wandb" in line else "tensorboard")
    monkeypatch.chdir(tmp_path)
    short = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
    assert main(shortened(shlex.split(line, comments=True)[1:], short)) == 0
    assert list(tmp_path.rglob("*.wandb" if "wandb" in line else "events.out.tfevents.*"))


def test_settings_are_read():
    (block,) = blocks("toml")
    parts = {"method": "fedavg", "model": "tiny_resnet", "data": "digits"}
    experiment = Experiment.of({**parts, **tomllib.loads(block)})
    assert experiment.trackers == (TensorBoard(), MLflow("http://localhost:5000", "quilts"))


def test_python_runs(tmp_path, monkeypatch, perceptron, make_data):
    """As written, but with a shorter run and without a login."""
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    data = make_data(perceptron, (4, 4))
    names = {
        "fq": fq,
        "method": fq.methods.FedAvg(),
        "family": perceptron,
        "data": data,
        "fleet": fq.Fleet.of((1.0,), 2),
    }
    (code,) = blocks("python")
    exec(
        code.replace("rounds=500", "rounds=1").replace(
            'WandB("quilts")', 'WandB("quilts", mode="offline")'
        ),
        names,
    )
    assert names["run"].server.round == 1
    assert {path.name for path in Path("runs/one").iterdir()} >= {
        "tensorboard",
        "wandb",
        "tracking.json",
    }


def test_the_table_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|.*\| `(\w+)` \| [^|]* \|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(TRACKERS)
    for name, options, extra in rows:
        kind = TRACKERS[name]
        assert re.findall(r"`(\w+)`", options) == [field.name for field in fields(kind)]
        assert extra == kind.extra
        assert (
            extra
            in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
        )
