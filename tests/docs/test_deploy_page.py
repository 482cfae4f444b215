"""docs/deploy.md: its Python and its commands run, and its tables and numbers are those of the
code.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquilt.cli.main import main
from fedquilt.deploy.comparison import BATCHES, TOLERANCE
from fedquilt.deploy.export import Exported
from fedquilt.deploy.formats import FORMATS
from fedquilt.family.norms import NORM_POLICIES
from tests.conftest import shortened
from tests.unit.deploy.test_export import HAS_ONNX

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("python")).replace("rounds=20", "rounds=1").replace("20, 10)", "20, 2)")
    names: dict[str, Any] = {}
    exec(compile(code, "deploy.md", "exec", dont_inherit=True), names)
    run, inputs = names["run"], names["data"].test_samples(torch.arange(8))
    assert sum(weight.numel() for weight in names["fast"].parameters()) <= 3_000
    assert names["logits"].shape == (8, 10)
    assert names["model"].share == 0.5
    torch.testing.assert_close(
        names["model"](inputs), names["half"](inputs).detach(), rtol=0, atol=1e-5
    )
    assert len(names["small"].nets) == 2
    assert run.server.round == 1
    assert names["longer"].best.round == 1
    assert (
        sum(value.numel() for value in names["best"].parameters())
        == names["longer"].summary["members"]["0.5"]["params"]
    )


@pytest.mark.slow
def test_commands_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line, comments=True)[1:]
        if any(word.endswith(".onnx") for word in words) and not HAS_ONNX:
            continue
        short = (
            ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
            if words[0] == "run"
            else []
        )
        assert main(shortened(words, short)) == 0, line
        printed = capsys.readouterr().out
        if "--json" in words:
            keys = PAGE.split("`--json` prints")[1].split("\n\n")[0]
            origin = {"round", "checkpoint"}
            expected = set(Exported.__annotations__) | origin
            assert set(json.loads(printed)) == set(re.findall(r"`(\w+)`", keys)) == expected


def test_the_page_is_complete() -> None:
    table = PAGE.split("### Norms")[1].split("```")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) - {"norms"} == set(
        NORM_POLICIES
    )
    *most, last = map(str, sorted(BATCHES))
    assert f"{', '.join(most)} and {last}" in PAGE
    assert f"{TOLERANCE:.0e}".replace("e-0", "e-") in PAGE
    assert all(format in PAGE for format in FORMATS)
