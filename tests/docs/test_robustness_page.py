"""docs/robustness.md: its Python and its commands run, its settings are read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "\n".join(blocks("python"))
        .replace("rounds=60", "rounds=1")
        .replace("cohort=10", "cohort=1")
        .replace("epochs=2", "epochs=1")
        .replace("(0, 0.5, 1)", "(1,)")
    )
    scope = {"__name__": "robustness"}
    exec(compile(code, "robustness.md", "exec", dont_inherit=True), scope)
    assert "'0.25'" in capsys.readouterr().out
    samples = scope["data"].test_samples(scope["data"].test_parts[0])
    assert 0 < float((scope["attacked"] - samples).abs().max()) < 0.2001


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_run(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    quick = [
        "--rounds",
        "1",
        "--clients",
        "4",
        "--cohort",
        "1",
        "--epochs",
        "1",
        "--batch-size",
        "64",
    ]
    assert (
        main(
            [
                *shortened(words, quick),
                "--set",
                "evaluation.attack.steps=1",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert any(name.startswith("robust") for name in metrics)


@pytest.mark.slow
def test_the_table_is_what_the_command_prints(tmp_path: Path) -> None:
    """More robustness costs accuracy, at every share."""
    words = shlex.split(blocks("sh")[0].splitlines()[0])[1:]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    table = re.findall(
        r"^\| `(\w+/[\d.]+)` \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", PAGE, re.MULTILINE
    )
    assert len(table) == 6
    for metric, *values in table:
        shown_values = [100 * found[metric][share] for share in ("1.0", "0.5", "0.25")]
        # Sixty rounds under attack enlarge last bits that differ between processors to six points.
        assert shown_values == pytest.approx(list(map(float, values)), abs=8)
    for share in ("1.0", "0.5", "0.25"):
        assert found["standard/0.0"][share] > found["standard/1.0"][share]
        assert found["robust/0.0"][share] < found["robust/1.0"][share]


@pytest.mark.slow
def test_the_file_runs_and_is_the_command(tmp_path: Path) -> None:
    (block,) = blocks("toml")
    (tmp_path / "robust.toml").write_text(block)
    quick = [
        "--rounds",
        "1",
        "--clients",
        "4",
        "--cohort",
        "1",
        "--set",
        "evaluation.attack.steps=1",
    ]
    assert (
        main(["run", str(tmp_path / "robust.toml"), *quick, "--out", str(tmp_path / "file")]) == 0
    )
    words = shlex.split(blocks("sh")[0].splitlines()[0])[1:]
    assert main([*shortened(words, quick), "--out", str(tmp_path / "flags")]) == 0
    file, flags = (
        tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in ("file", "flags")
    )
    assert file == flags
