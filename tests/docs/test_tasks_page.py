"""docs/tasks.md: its Python and its commands run, its table is what the example prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.tasks import TASKS, MultiLabel, find_task
from tests.conftest import load_example, shortened

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's file in it, far from the package."""
    (tmp_path / "quantile.py").write_text(blocks("python file=quantile.py")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, own: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    assert main([*shortened(words, QUICK), "--out", "run"]) == 0


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(blocks("python")).replace("rounds=20", "rounds=1")
    exec(compile(code, "tasks.md", "exec", dont_inherit=True), {"__name__": "tasks"})
    assert "'0.25'" in capsys.readouterr().out


def test_the_first_table_lists_the_tasks_and_their_metrics() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", PAGE, re.MULTILINE)
    assert {name: metrics.split(", ") for name, metrics in rows} == {
        name: [metric.name for metric in kind().measured] for name, kind in TASKS.items()
    }


def test_your_own_task_is_trained_recorded_and_reopened(own: Path) -> None:
    """Options are in config.toml, metrics in the summary, and the run can be resumed."""
    quick = ["--rounds", "2", "--clients", "4", "--cohort", "2"]
    asked = ["--data", "diabetes", "--task", "quantile.py:Quantile", "--set", "task.level=0.9"]
    assert main(["run", *asked, *quick, "--out", "run", "--target", "5"]) == 0
    config = (own / "run" / "config.toml").read_text()
    assert 'name = "quantile.py:Quantile"' in config
    assert "level = 0.9" in config
    summary = json.loads((own / "run" / "summary.json").read_text())
    assert (summary["task"], summary["main"], summary["higher_is_better"]) == (
        "Quantile",
        "loss",
        False,
    )
    assert summary["accuracy"] == {}
    assert set(summary["metrics"]) == {"loss", "below", "local_loss"}
    assert main(["run", "--resume", "run", "--rounds", "3"]) == 0
    assert json.loads((own / "run" / "summary.json").read_text())["rounds"] == 3
    assert main(["export", "run", "--out", "model.safetensors"]) == 0


def test_the_example_predicts_a_quantile(own: Path) -> None:
    """A constant that descends the pinball loss ends where a share of 0.9 of the targets is below
    it.
    """
    task = find_task("quantile.py:Quantile")
    task = type(task)(level=0.9)
    pool = fq.data.diabetes()
    figures = [
        task.values(
            task.sums(pool.targets.new_full((len(pool.targets), 1), at / 100), pool.targets)
        )
        for at in range(-200, 300)
    ]
    best = min(figures, key=lambda one: one["loss"])
    assert best["below"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.slow
def test_the_tables_are_what_the_example_finds() -> None:
    example = load_example("tasks")
    for name, problem in example.PROBLEMS.items():
        central, found = example.centralized(problem, problem.epochs), example.federated(name, 20)
        for metric in problem.task.measured:
            row = re.search(
                rf"^\| {metric.name} \| (.*) \|$", PAGE.split(f"| `{name}` |")[1], re.MULTILINE
            )
            assert row is not None
            shown_values = [float(value) for value in row[1].split(" | ")]
            assert shown_values == pytest.approx(
                [central[metric.name], *found[metric.name].values()], abs=0.05
            )


def test_the_example_measures_in_one_place() -> None:
    example = load_example("tasks")
    assert example.PROBLEMS["digits-labels"].task == MultiLabel()
    problem = example.PROBLEMS["diabetes"]
    central = example.centralized(problem, problem.epochs)
    assert central["rmse"] < 0.9
    assert set(central) == {"rmse", "mae", "r2", "loss"}
