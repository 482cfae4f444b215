"""`fedquilt check`: a table or JSON, an exit status, and refused requests."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from fedquilt.cli.main import main
from fedquilt.cli.progress import check_progress
from fedquilt.cli.results import show_findings
from fedquilt.conformance.checks import CHECKS
from fedquilt.conformance.method import Finding

BROKEN_FILE = """
from dataclasses import dataclass
from fedquilt.methods.api import Method, prefix

@dataclass(frozen=True)
class Mine(Method):
    extra: int = 1  # Channels

    def plan(self, server, client, world):
        return [prefix(world.family.whole if self.extra else self.fit(client.budget, world))]
"""


def test_the_command_prints_a_table_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BROKEN_FILE)
    assert main(["check", "mine.py:Mine"]) == 1
    table, summary = capsys.readouterr().out.rsplit("\n", 2)[:2]
    lines = {line.split("  ")[0]: line for line in table.splitlines()}
    assert list(lines)[1:] == list(CHECKS)
    assert "failed   Mine planned more for client 1" in lines["budgets"]
    assert summary.startswith("mine.py:Mine: 3 passed, 4 failed, 6 skipped in ")


def test_the_command_prints_json_and_takes_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BROKEN_FILE)
    assert main(["check", "mine.py:Mine", "--set", "method.extra=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["method"] == "mine.py:Mine"
    assert {one["status"] for one in found["checks"]} == {"passed"}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["fedrolx"], "Did you mean 'fedrolex'?"),
        (["fedrolex", "--set", "rounds=3"], "only settings of the method fit"),
        (["fedrolex", "--set", "method.shft=3"], "Did you mean 'shift'?"),
        (["nowhere.py:Mine"], "there is no file 'nowhere.py'"),
    ],
)
def test_a_wrong_request_is_refused(args, told, capsys):
    assert main(["check", *args]) == 2
    assert told in capsys.readouterr().err


def test_a_terminal_shows_which_check_is_running_and_frames_the_table():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    with check_progress(console, 2) as watch:
        watch("plan")
        watch("budgets")
    assert "1/2" in screen.getvalue()
    assert "budgets" in screen.getvalue()
    show_findings(console, "mine", [Finding("plan", "failed", "it is\n  [too] large", 0.5)])
    assert "it is [too] large" in screen.getvalue()
    assert screen.getvalue().endswith("mine: 0 passed, 1 failed, 0 skipped in 0.5 s\n")
