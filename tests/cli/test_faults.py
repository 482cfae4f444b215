"""Faults on the command line: the user's file and line, the whole trace on request, and ctrl-C
while modules load.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedquilt import names
from fedquilt.cli.main import main
from tests.cli.commands import ENVIRONMENT

CODE = """
import torch
from torch import nn
import fedquilt as fq

class Planless(fq.methods.FedAvg):
    def plan(self, server, client, world):
        raise KeyError("on purpose")  # line 8

class Wrong(fq.methods.FedAvg):
    def learner(self, job, world):
        return None

class Stackless(fq.methods.FedAvg):
    def fold(self, server, world):
        fold = super().fold(server, world)
        class Own:
            add, join, finish = fold.add, fold.join, fold.finish
        return Own()

class Diverging(fq.methods.FedAvg):
    def fold(self, server, world):
        fold = super().fold(server, world)
        finish = fold.finish
        def nan(server):
            merged = finish(server)
            weights = {name: value * torch.nan for name, value in merged.weights.items()}
            return merged._replace(weights=weights)
        fold.finish = nan
        return fold

def net(num_classes):
    raise ValueError("no net")  # line 33

def large(num_classes):
    return nn.Linear(1 << 30, 1 << 28)

def data():
    x = torch.zeros(3, 4)
    return fq.data.Pool.of((x, torch.zeros(2)), (x, torch.zeros(3)))  # line 40
"""
QUICK = ["run", "--rounds", "2", "--clients", "4", "--cohort", "2"]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    names._read.cache_clear()


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (
            ["--method", "faulty.py:Planless"],
            1,
            "KeyError: 'on purpose'\nIt was raised in faulty.py:8, in plan.",
        ),
        (
            ["--model", "faulty.py:net"],
            2,
            "faulty.py:net was called and failed: ValueError: no net (faulty.py:33, in net)",
        ),
        (["--data", "faulty.py:data"], 2, "It was raised in faulty.py:40, in data."),
    ],
)
def test_an_error_in_the_users_code_shows_its_line(
    flags: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *flags]) == status
    printed = capsys.readouterr().err
    assert told in printed
    assert "--debug shows the whole trace." in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_debug_shows_the_whole_trace(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if by == "environment":
        monkeypatch.setenv("FEDQUILT_DEBUG", "1")
    flags = ["--debug"] if by == "flag" else []
    assert main([*QUICK, *flags, "--method", "faulty.py:Planless"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert 'faulty.py", line 8, in plan' in printed
    assert "It was raised in faulty.py:8, in plan." in printed


def test_a_learner_of_the_wrong_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--method", "faulty.py:Wrong"]) == 2
    printed = capsys.readouterr().err
    assert "Wrong.learner returned nothing for client 0 (budget share 1) in round 1" in printed
    assert "it must return a Learner, such as super().learner(job, world)" in printed


def test_a_fold_that_lacks_a_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--method", "faulty.py:Stackless"]) == 2
    printed = capsys.readouterr().err
    assert "Stackless.fold returned a Own without add_stack in round 1" in printed


def test_a_fold_that_is_not_finite_is_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--method", "faulty.py:Diverging"]) == 1
    printed = capsys.readouterr().err
    assert (
        "DivergenceError: the fold of Diverging gave values that are not finite in round 1"
        in printed
    )
    assert "client 0" not in printed


def test_a_lack_of_memory_is_reported_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--model", "faulty.py:large"]) == 1
    printed = capsys.readouterr().err
    assert "NotEnoughMemoryError: there was not enough memory while" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("stage", "number"),
    [("tyro", signal.SIGINT), ("torch", signal.SIGINT), ("torch", signal.SIGTERM)],
)
def test_a_signal_while_modules_are_imported_ends_without_a_trace(
    stage: str, number: int, tmp_path: Path
) -> None:
    """A module of the same name, found first, waits in its import, so that the moment does not
    depend on time.

    It ignores errors, as extension modules do that clear them.
    """
    (tmp_path / "slow").mkdir()
    begun = tmp_path / "begun"
    (tmp_path / "slow" / f"{stage}.py").write_text(
        f"import time, pathlib\npathlib.Path({str(begun)!r}).touch()\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    path = f"{tmp_path / 'slow'}:{ENVIRONMENT['PYTHONPATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, "run"],
        env=ENVIRONMENT | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(begun)
        process.send_signal(number)
        _, printed = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert printed == "Interrupted.\n"


# The script that pip makes. Tests may run in the background, where ctrl-C is ignored unless a
# handler is set.
_SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fedquilt.__main__ import main
sys.exit(main())
"""


def _wait_for(file: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not appear"
        time.sleep(0.02)
