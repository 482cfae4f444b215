"""docs/growing.md: its commands and its Python run, the commands for fewer rounds and clients."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "growing.md").read_text()
SHORT = ["--rounds", "4", "--clients", "4", "--cohort", "1", "--epochs", "1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_commands_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block, _, _ = blocks("sh")
    first, composed, listed = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert main(shortened(first, SHORT)) == 0
    assert "(stage 2 of 2)" in capsys.readouterr().out
    assert main(shortened(composed, SHORT)) == 0
    capsys.readouterr()
    assert main(listed) == 0
    assert "stages.3" in capsys.readouterr().out


def test_the_released_preset_runs_as_written(tmp_path, monkeypatch, capsys):
    """Stage 1 has T/2S = 4 of T = 18 rounds, and the cosine ends with the last of them."""
    monkeypatch.chdir(tmp_path)
    _, block, _ = blocks("sh")
    few = ["--clients", "4", "--cohort", "1", "--out", "run"]
    assert main(shortened(shlex.split(block, comments=True)[1:], few)) == 0
    shown = capsys.readouterr().out
    assert "round  4/20 (stage 1 of 2)" in shown
    assert "round  6/20 (stage 2 of 2, warm-up)" in shown
    assert "round  8/20 (stage 2 of 2)" in shown
    method = tomllib.loads(Path("run/config.toml").read_text())["method"]
    assert method["over"]["local"]["schedule"] == {"name": "cosine", "rounds": 18}


def test_commands_on_your_own_module_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = blocks("python")[0].split("pool =")[0]
    Path("mine.py").write_text(f"{source}net = Net\n")
    *_, block = blocks("sh")
    for line in block.splitlines():
        assert main(shortened(shlex.split(line, comments=True)[1:], SHORT)) == 0
        assert "(stage 3 of 3)" in capsys.readouterr().out


def test_python_runs_as_written(capsys):
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, names)
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    stem, body, top = 8 * 9 + 8, 16 * 8 * 9 + 16, 32 * 16 * 9 + 32
    assert printed == [
        ["whole", str(stem + body + top + 330)],
        ["stage1", str(stem + 90)],
        ["stage2", str(stem + body + 170)],
    ]
