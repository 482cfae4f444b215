"""The commands, run as a user runs them: what they print, write and exit with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli import main
from fedquilt.methods import METHODS
from fedquilt.models import MODELS

ROOT = Path(__file__).parents[2]
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1"]
SUMMARY = {
    "method",
    "model",
    "data",
    "engine",
    "seed",
    "rounds",
    "seconds",
    "bytes_down",
    "bytes_up",
    "accuracy",
    "metrics",
    "fedquilt",
}
ROUND = {"round", "seconds", "clients", "bytes_down", "bytes_up", "macs", "loss"}

OWN = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
import fedquilt as fq
print("a module may talk")

@dataclass(frozen=True)
class Mine(fq.methods.Method):
    pace: int = 1

def method():
    return Mine(local=fq.Local(optimiser=fq.SGD(lr=0.03), batch_size=5))

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))

def data():
    x, y = torch.randn(60, 1, 8, 8), torch.arange(60) % 3
    return fq.FederatedData.of((x, y), (x, y), [range(10 * i, 10 * i + 10) for i in range(6)])

def nothing():
    return 3

def broken():
    raise ValueError("on purpose")
"""


def command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "fedquilt.cli", *args]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False, **options)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    from fedquilt import config

    config._read.cache_clear()


# --- run --------------------------------------------------------------------------------------------------------


def test_the_demo_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--rounds", "8", "--json"]) == 0
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert accuracy["1.0"] > 0.9
    assert accuracy["0.5"] > 0.7
    assert accuracy["0.25"] > 0.4


def test_output_that_is_no_terminal_is_plain_text() -> None:
    done = command("run", *QUICK)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "│" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "heterofl on digits: tiny_resnet for 4 clients, 2 a round, vectorised on cpu"
    assert lines[1].startswith("round 1/1  loss ")
    assert lines[2].split() == ["share", "accuracy", "parameters", "MACs", "a", "sample"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "0.5", "0.25"]
    assert lines[3].split()[2] == "11,230"
    assert lines[6].startswith("1 round in ")


def test_a_terminal_gets_a_bar_and_a_frame() -> None:
    parent, child = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    line = [sys.executable, "-m", "fedquilt.cli", "run", *QUICK]
    with subprocess.Popen(line, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 4096):
                shown += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0
    text = shown.decode()
    assert "rounds/s" in text
    assert "╭" in text


def test_json_is_all_there_is_on_standard_output(own: None, capfd: pytest.CaptureFixture[str]) -> None:
    parts = ["--model", "mine.py:net", "--method", "mine.py:method", "--data", "mine.py:data"]
    assert main(["run", *parts, "--rounds", "2", "--json"]) == 0
    said = capfd.readouterr()
    summary = json.loads(said.out)
    assert set(summary) == SUMMARY
    assert set(summary["accuracy"]) == {"1.0", "0.5", "0.25"}
    assert summary["rounds"] == 2
    assert summary["method"] == "mine.py:method"
    assert summary["bytes_down"] > 0
    assert said.err.count("a module may talk") == 1


def test_a_run_leaves_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "run"
    assert main(["run", *QUICK, "--rounds", "2", "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert set(summary) == SUMMARY
    assert [record["round"] for record in rounds] == [1, 2]
    assert ROUND <= set(rounds[0]) <= ROUND | {"accuracy", "metrics"}
    assert rounds[-1]["accuracy"] == summary["accuracy"]
    assert sum(record["bytes_up"] for record in rounds) == summary["bytes_up"]
    capsys.readouterr()
    assert main(["run", *QUICK, "--out", str(out)]) == 2
    assert "a run is there already" in capsys.readouterr().err


def test_a_seed_repeats_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("3", "3", "4"):
        assert main(["run", *QUICK, "--seed", seed, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["accuracy"])
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_by_its_name_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", name, *QUICK, "--labels", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == name


def test_settings_reach_the_method(own: None) -> None:
    from fedquilt.cli import RunRequest

    assert RunRequest().make_method().local.optimiser.lr == 0.1
    assert RunRequest(lr=0.5, epochs=3).make_method().local.optimiser.lr == 0.5
    kept = RunRequest(method="mine.py:method", epochs=4).make_method().local
    assert (kept.optimiser.lr, kept.batch_size, kept.epochs) == (0.03, 5, 4)


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "fedrolx"], "Did you mean 'fedrolex'?"),
        (["--model", "tiny_resnt"], "Did you mean 'tiny_resnet'?"),
        (["--data", "digit"], "Did you mean 'digits'?"),
        (["--engine", "vectorized"], "Did you mean 'vectorised'?"),
        (["--rounds", "0", "--lr", "-1"], "--rounds 0 was asked for; it must be at least 1.\n  --lr -1.0 was asked"),
        (["--cohort", "50"], "a cohort of 50 was asked for; the fleet has 20 clients"),
        (["--clients", "5000"], "5000 clients were asked for"),
        (["--labels", "11"], "11 labels a client were asked for; there are 10 classes"),
        (["--device", "nonsense"], "--device nonsense was asked for"),
        (["--out", "/dev/null/x", *QUICK], "cannot be written to"),
        (["--model", "vgg16"], "VGG does not run on"),
        (["--model", "absent.py:net"], "there is no file absent.py"),
        (["--model", "mine.py"], "Write mine.py:factory"),
        (["--model", "mine.py:nt"], "Did you mean 'net'?"),
        (["--model", "mine.py:nothing"], "mine.py:nothing was called for a Module; it returned an int"),
        (["--data", "mine.py:broken"], "mine.py:broken was called and failed: ValueError: on purpose"),
    ],
)
def test_a_wrong_request_exits_with_2(
    own: None, args: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *args]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["rn"], ["run", "--ronds", "3"], ["run", "--precision", "fp16"]])
def test_arguments_nobody_knows_exit_with_2(args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_run_that_fails_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["run", *QUICK, "--rounds", "3", "--lr", "1e30", "--json", "--out", str(tmp_path)]
    assert main(wild) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("TrainingError: client ")
    assert main(wild) == 1  # nothing was learnt, so the folder is free


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedquilt.experiment.Run.train", interrupted)
    assert main(["run", *QUICK]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


# --- list -------------------------------------------------------------------------------------------------------


def test_methods_are_listed_with_paper_options_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(METHODS)
    rolex = listed["fedrolex"]
    assert rolex["paper"] == "Alam et al. 2022"
    assert rolex["options"]["shift"] == "int"
    assert rolex["defaults"]["shift"] == 1
    assert rolex["defaults"]["local"]["optimiser"]["name"] == "sgd"
    assert rolex["presets"] == ["paper", "released"]
    for name, entry in listed.items():
        assert entry["paper"], name
        assert entry["summary"], name
        assert set(entry["defaults"]) == set(entry["options"]), name


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == ["methods", "models", "data", "engines"]
    assert list(listed["models"]) == list(MODELS)
    assert listed["models"]["preresnet18"]["parameters"] == 11_172_170
    assert listed["data"]["digits"]["defaults"]["num_clients"] == 20
    assert main(["list", "engines"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "sequential"
    assert main(["list", "method"]) == 2
    assert "Did you mean 'methods'?" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedquilt 0.")


# --- start-up ---------------------------------------------------------------------------------------------------


def test_importing_the_library_needs_nothing_of_the_command_line() -> None:
    code = "import sys, fedquilt; print([m for m in ('rich', 'tyro', 'sklearn', 'torchvision') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[]"
