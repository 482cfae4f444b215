"""docs/watch.md: its options and its Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedquilt.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()


def test_the_options_are_those_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["watch", "--help"])
    flags = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help", "--out"}
    assert set(re.findall(r"^\| `(--[a-z]+)", PAGE, re.MULTILINE)) == flags


def test_the_script_runs_as_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("altair")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "watch.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "20 clients, 2 a round, 3 budgets" in printed
    assert re.search(r"^class\.?\w*|^\S+\.weight  ", printed, re.MULTILINE)
    assert str(names["run"]) in printed
    assert "vega" in (tmp_path / "run.html").read_text()
