"""The README's blocks, run as written, and the example it points to."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli.main import main
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS
from fedquilt.runs.experiment import Experiment
from fedquilt.tasks import TASKS
from tests.conftest import shortened

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_ten_lines_of_python_train_a_federation(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    accuracy = names["run"].accuracy
    assert str(accuracy) in capsys.readouterr().out
    assert accuracy["1.0"] > 0.9
    assert accuracy["0.25"] > 0.8


def test_limitations_name_every_task() -> None:
    """The section names each task in words. A task that is added has to be added there."""
    words = {
        "classification": "classification",
        "next_token": "next-token prediction",
        "regression": "regression",
        "multilabel": "several labels per sample",
        "segmentation": "segmentation",
    }
    section = README.partition("## Limitations")[2].partition("\n## ")[0]
    assert set(words) == set(TASKS)
    for text in (
        *words.values(),
        "Real devices",
        "one input tensor",
        "in memory",
        "no secure aggregation",
    ):
        assert text in section


def test_commands_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every `fedquilt` line, only for fewer rounds, and with one client a round that has a
    twentieth of the samples.
    """
    (tmp_path / "mine.py").write_text(
        "import torch, fedquilt as fq\n"
        "method = fq.methods.HeteroFL\n"
        "net = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), "
        "torch.nn.Linear(8, 10))\n"
        "data = fq.data.digits\n"
    )
    monkeypatch.chdir(tmp_path)
    lines = [
        line for block in blocks("sh") for line in block.splitlines() if line.startswith("fedquilt")
    ]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        trains = words[0] in ("run", "compare") and "--resume" not in words
        rounds = "2" if "progfed" in words else "1"  # one for each of its stages
        short = (
            ["--rounds", rounds, "--clients", "20", "--cohort", "1", "--epochs", "1"]
            if trains
            else []
        )
        assert main(shortened(words, short)) == 0, line
        printed = capsys.readouterr().out
        if "--json" in words:
            json.loads(printed)
    assert (tmp_path / "runs" / "one" / "summary.json").exists()


def test_the_excerpt_is_what_the_demo_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and bytes to the last digit, accuracies nearly: float32 differs between processors."""
    assert main(["run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    excerpt = README.split("$ fedquilt run\n")[1].split("```")[0]
    assert printed[0] in excerpt
    rows = {cells[0]: cells[1:] for line in printed if len(cells := line.split()) == 4}
    shown = {
        row[0]: row[1:] for row in re.findall(r"│ (\S+) +│ +(\S+) │ +(\S+) │ +(\S+) │", excerpt)
    }
    assert len(shown) == 3
    for share, (accuracy, *sizes) in shown.items():
        assert sizes == rows[share][1:]
        assert float(accuracy.rstrip("%")) == pytest.approx(
            float(rows[share][0].rstrip("%")), abs=4
        )
    assert printed[-1].split("; ")[1] in excerpt


def test_the_file_of_settings_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command below it, as written, but for fewer rounds."""
    (settings,) = blocks("toml")
    command = re.search(r"`(fedquilt run fedrolex\.toml [^`]*)`", README)
    assert command
    monkeypatch.chdir(tmp_path)
    Path("fedrolex.toml").write_text(settings)
    assert main(shortened(shlex.split(command[1])[1:], ["--rounds", "1"])) == 0
    capsys.readouterr()
    assert main(["run", "runs/two/config.toml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    first = json.loads(Path("runs/two/summary.json").read_text())
    del first["check"]  # The file has checksums, and what is printed has none.
    assert {**again, "seconds": 0} == {**first, "seconds": 0}


def test_a_file_names_a_method_and_data_and_nothing_else() -> None:
    named = {"method": "fedavg", "data": "digits"}
    assert Experiment.of(named).rounds > 0
    for missing in named:
        with pytest.raises(ConfigError, match=rf"{missing}: nothing was found"):
            Experiment.of({key: value for key, value in named.items() if key != missing})


def test_make_has_the_targets() -> None:
    rules = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\S+)", "".join(blocks("sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert "`make wheel`" in README
    assert "`make docs`" in README
    for target in (*targets, "wheel", "docs"):
        assert re.search(rf"^{target}:", rules, re.MULTILINE), target


def test_the_tables_are_complete() -> None:
    named = re.findall(r"^\| `(\w+)` \|.*?\| `(\w+\.py)` \|", README, re.MULTILINE)
    assert [name for name, _ in named] == list(METHODS)
    assert f"fedquilt has {len(METHODS)} methods" in README
    for name, file in named:
        assert METHODS[name].__module__ == f"fedquilt.methods.{file.removesuffix('.py')}"
    for file in re.findall(r"[├└]── (\w+\.py)", README.split("## The tree")[1]):
        assert list((ROOT / "fedquilt").rglob(file)), file
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (users,) = (
        re.fullmatch(r"fedquilt\[(.*)\]", one)
        for one in extras["dev"]
        if one.startswith("fedquilt[")
    )
    assert users
    start = README.split("## Start")[1].split("## ")[0]
    assert {name for name in re.findall(r"`(\w+)`", start) if name in extras} == set(
        users[1].split(",")
    )


def test_the_example_with_your_own_model_runs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    assert not caplog.text  # no share is exceeded
    accuracies = [
        float(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()[1:]
    ]
    assert len(accuracies) == 3
    assert min(accuracies) > 80
