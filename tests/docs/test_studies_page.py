"""docs/studies.md: its commands and its Python run, only for fewer rounds and clients."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli.main import COMMANDS, main
from fedquilt.studies.papers import papers, read_preset
from fedquilt.studies.reproduce import chosen_rows
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
SHORT = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def lines(block: int) -> list[list[str]]:
    return [shlex.split(line, comments=True)[1:] for line in blocks("sh")[block].splitlines()]


@pytest.mark.slow
def test_comparisons_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, again, tuned, resumed = lines(0)
    assert main(shortened(first, SHORT)) == 0
    assert main(shortened(again, SHORT)) == 0
    assert "| method | 1 |" in capsys.readouterr().out
    # Processes take seconds to start, and have tests of their own.
    one_job = tuned[: tuned.index("--jobs")]
    assert main(shortened(one_job, [*SHORT, "--tuning-rounds", "1"])) == 0
    assert main(resumed) == 0
    assert (tmp_path / "runs/three/fedrolex/seed0/summary.json").exists()
    assert json.loads((tmp_path / "runs/tuned/compare.json").read_text())["tuned"]


def test_python_runs_as_written(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    names = {}
    short = {'"rounds": 20': '"rounds": 1', '"cohort": 0.5': '"cohort": 1', "(0, 1, 2)": "(0, 1)"}
    for text, shorter in short.items():
        assert text in code
        code = code.replace(text, shorter)
    exec(code, names)
    assert len(names["frame"]) == len(names["curves"]) == 2 * 2 * 5
    assert len(fq.Study.read("runs/from-python").results) == 4


def test_tables_of_papers_are_named_as_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in lines(1):
        if words[0] == "list":
            assert main(words) == 0
            continue
        if words[1] in papers():
            continue  # All tables of a paper: tests/papers/test_reproduce.py
        preset = read_preset(words[1])
        scale = words[words.index("--scale") + 1] if "--scale" in words else "full"
        assert preset.rows_at(scale)
        if "--rows" in words:
            assert chosen_rows(preset, [words[words.index("--rows") + 1]])
    assert "FedRolex, 5 %" in capsys.readouterr().out
    options = {name.replace("_", "-") for name in COMMANDS["reproduce"].__dataclass_fields__}
    named = {
        word.removeprefix("--") for words in lines(1) for word in words if word.startswith("--")
    }
    assert named <= options
