"""docs/robustness.md: its Python and its commands run, its settings are read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.config import Experiment

PAGE = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "\n".join(blocks("python"))
        .replace("rounds=2", "rounds=1")
        .replace("sample=4", "sample=1")
        .replace("(0, 0.5, 1)", "(0.5,)")
    )
    scope = {"__name__": "robustness"}
    exec(compile(code, "robustness.md", "exec", dont_inherit=True), scope)
    assert "'0.25'" in capsys.readouterr().out
    samples = scope["data"].test_samples(scope["data"].test_parts[0])
    assert 0 < float((scope["attacked"] - samples).abs().max()) < 8.01 / 255


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_run(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    quick = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1", "--batch-size", "64"]
    assert main([*words, *quick, "--set", "evaluation.attack.steps=1", "--out", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert any(name.startswith("robust") for name in metrics)


def test_settings_make_an_experiment() -> None:
    (block,) = blocks("toml")
    asked = Experiment.of({**tomllib.loads(block), "data": {"name": "digits"}})
    assert asked.model.dual
    assert asked.method.attack == fq.PGD(eps=0.0314, size=0.0078)
