"""Commands of tests, and what they print. Tests of commands share them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli.main import main

ROOT = Path(__file__).parents[2]
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1"]
SUMMARY = {
    "method",
    "model",
    "data",
    "engine",
    "precision",
    "seed",
    "rounds",
    "seconds",
    "bytes_down",
    "bytes_up",
    "accuracy",
    "metrics",
    "task",
    "main",
    "higher_is_better",
    "percent",
    "members",
    "devices",
    "note",
    "fedquilt",
}
ROUND = {"round", "seconds", "clients", "bytes_down", "bytes_up", "macs", "loss"}


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    line = [sys.executable, "-m", "fedquilt", *args]
    return subprocess.run(
        line, capture_output=True, text=True, env=ENVIRONMENT, check=False, **options
    )


THREE = ["--set", "fleet.budgets.shares=[1.0,0.5,0.25]"]
TINY = ["--model", "mine.py:net", "--data", "mine.py:data", "--method", "fedavg", "--cohort", "3"]


def json_of(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    """Run a command with --json, and return what it prints on standard output."""
    assert main([*args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def on_a_terminal(*args: str, cwd: Path | None = None) -> str:
    """Run a command in a terminal of 100 columns, and return what it shows."""
    parent, child = pty.openpty()
    environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "100"}
    line = [sys.executable, "-m", "fedquilt", *args]
    with subprocess.Popen(line, stdout=child, stderr=child, env=environment, cwd=cwd) as process:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 4096):
                shown += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def values(
    training: str = "lr 0.1, 2 epochs, batch 16",
    clients: str = "10 of 20",
    shares: str = "1, 0.5, 0.25",
) -> str:
    """Return the values in the first line of a run of one round."""
    return f"({training}, {clients} clients, shares {shares}, 1 round, seed 0)"
