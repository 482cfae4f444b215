"""docs/reports.md: its commands and its Python run, and its numbers hold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "reports.md").read_text()
SHORT = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_commands_and_the_script_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(tmp_path)
    (commands,) = blocks("sh")
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)[1:]
        assert main(words if words[0] == "report" else shortened(words, SHORT)) == 0, line
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"runs", "rolex.html", "study.html", "loss.html", "figures"}
    assert "<h3>loss over the rounds</h3>" in Path("loss.html").read_text()
    assert all(path.suffix == ".svg" for path in Path("figures").iterdir())
    before = Path("rolex.html").read_text()
    Path("rolex.html").unlink()
    (script,) = blocks("python")
    exec(compile(script, "reports.md", "exec"), {"__name__": "reports"})
    assert Path("rolex.html").read_text() == before


def test_the_bounds_are_those_of_the_page():
    pytest.importorskip("altair")
    from fedquilt.display import thinning
    from fedquilt.report import quilt, tables

    bounds = thinning.MAX_POINTS, tables.MAX_BINS, quilt.MAX_COLUMNS
    text = "At most {} points of a line, {} bars and {} columns of a quilt are drawn"
    assert text.format(*bounds) in PAGE.replace("\n", " ")
