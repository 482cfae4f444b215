"""Folders of runs that were begun in Python, opened by the command line."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedquilt as fq
from fedquilt import names
from fedquilt.cli.main import main
from fedquilt.runs.description import describe
from fedquilt.runs.trust import trusted_file

MINE = """
from dataclasses import dataclass
import torch
from torch import nn
import fedquilt as fq

def net() -> nn.Module:
    layers = nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(512, 10))

@dataclass(frozen=True)
class Halting(fq.methods.FedRolex):
    pace: float = 1.0

@fq.data.source
def data(count: int = 60) -> fq.data.Pool:
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return fq.data.Pool.of((x, torch.arange(count) % 10), (x, torch.arange(count) % 10))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of a file in the working directory, imported as a script imports it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)
    names._read.cache_clear()
    import mine

    return mine


class Stop(Exception):  # noqa: N818
    """Something that ends a run early."""


def begin(
    rounds: int = 3,
    stop: int = 0,
    out: str = "run",
    method=None,
    factory=None,
    data=None,
    **options,
) -> fq.Run:
    """Begin or resume the run of README's ten lines, of four clients."""

    def watch(record):
        if record.round == stop:
            raise Stop

    data = data or fq.data.digits().partition(4)
    family = fq.trace(factory, data.example)
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], num_clients=4, cohort=2)
    method = method or fq.methods.FedRolex()
    return fq.run(
        method, family, data, fleet, rounds=rounds, out=out, resume=True, watch=watch, **options
    )


def check_same_weights(one: str, other: str) -> None:
    first, second = fq.load_state(one), fq.load_state(other)
    assert first.round == second.round
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())


@pytest.mark.parametrize("kind", ["ten lines", "listed model", "own method and data"])
def test_the_command_line_resumes_as_python_does(mine, kind, capsys):
    """A run that stopped after a round ends with the same weights, bit for bit, as one that Python
    resumes.
    """
    parts = {"factory": mine.net, "seed": 1}
    if kind == "listed model":
        parts = {
            "factory": partial(fq.models.MLP, in_features=64, hidden=(8,)),
            "engine": "sequential",
        }
    elif kind == "own method and data":
        parts |= {"method": mine.Halting(pace=0.5), "data": mine.data(50).partition(4, seed=3)}
    with pytest.raises(Stop):
        begin(stop=1, **parts)
    shutil.copytree("run", "other")
    listed = trusted_file().read_text() if trusted_file().exists() else ""
    assert ("mine.py:net" in listed, "mine.py:Halting" in listed) == (
        kind != "listed model",
        kind.startswith("own"),
    )

    assert main(["run", "--resume", "other", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rounds"] == 3
    run = begin(**parts)
    check_same_weights("run", "other")
    assert told["accuracy"] == run.accuracy


def test_a_run_is_exported_and_listed(mine, capsys):
    run = begin(1, factory=mine.net)
    assert main(["export", "run", "--share", "0.5", "--out", "cli.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"] == 0.5
    run.export("python.safetensors", share=0.5)
    one, other = (
        fq.load_model(file, mine.net).state_dict()
        for file in ("cli.safetensors", "python.safetensors")
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())

    assert main(["clients", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(run.per_client().to_dict()))
    assert main(["run", "run/config.toml", "--out", "again"]) == 0
    check_same_weights("run", "again")
    assert main(["list", "data", "--plot", "--config", "run/config.toml"]) == 0


def test_more_rounds_in_python_and_in_the_terminal(mine, capsys):
    """Either may ask for more, and the other goes on to them. ProgFed's stages stay those of the
    first request.
    """
    layers = partial(fq.models.MLP, in_features=64, hidden=(8, 8))
    parts = {"factory": layers, "method": fq.methods.ProgFed(stages=2)}
    begin(2, **parts)
    assert main(["run", "--resume", "run", "--rounds", "3"]) == 0
    with pytest.raises(Stop):
        begin(6, stop=4, **parts)
    assert tomllib.loads(Path("run/config.toml").read_text())["rounds"] == 6
    assert main(["run", "--resume", "run"]) == 0
    assert fq.load_state("run").round == 6
    assert begin(6, **parts).method.rounds == 2


def test_code_of_a_script_is_trusted_as_that_of_a_command(mine, capsys, monkeypatch):
    begin(1, factory=mine.net)
    # somebody else opens the folder
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path("other").resolve()))
    assert main(["clients", "run"]) == 2
    assert "mine.py:net is not in your list" in capsys.readouterr().err
    assert fq.load_run("run", trust=True).server.round == 1


COMMANDS = [
    ["run", "--resume", "run"],
    ["export", "run", "--out", "a.pt2"],
    ["clients", "run"],
    ["run", "run/config.toml"],
    ["compare", "run/config.toml"],
    ["list", "data", "--plot", "--config", "run/config.toml"],
]


def test_commands_repeat_the_reason(mine, capsys):
    begin(1, factory=lambda: mine.net())  # noqa: PLW0108
    assert begin(1, factory=lambda: mine.net()).server.round == 1  # noqa: PLW0108
    for command in COMMANDS:
        assert main(command) == 2, command
        told = capsys.readouterr().err
        assert (
            "it was begun by a script, and settings could not be written for all of it:\n  model: "
            "the lam" in told
        )
        assert (
            "Write it as a function at the top level of the file, or as functools.partial of one."
            in told
        )
        assert "fedquilt.run(…, out='run', resume=True)" in told


def test_folders_of_earlier_versions_are_explained(mine, capsys):
    run = begin(1, factory=mine.net)
    text = describe(run, 1, [])
    Path("run/config.toml").write_text(text.replace("missing = []\n", ""))
    for command in COMMANDS:
        assert main(command) == 2, command
        told = capsys.readouterr().err
        assert (
            "it was begun by a script, with a version of fedquilt that wrote no settings for "
            "scripts." in told
        )
        assert (
            "It can be resumed in Python, with the same arguments: "
            "fedquilt.run(…, out='run', resume=True)" in told
        )
