"""docs/segmentation.md: Python and commands run, and the table is what the first run finds."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from fedquilt.runs.load import load_run
from fedquilt.tasks import Segmentation
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "segmentation.md").read_text()
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--set", "data.images=30"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files in it, far from the package."""
    (tmp_path / "shapes.py").write_text(blocks("python file=shapes.py")[0])
    (tmp_path / "shapes.toml").write_text(blocks("toml file=shapes.toml")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, own: Path) -> None:
    words = shlex.split(line, comments=True)[1:]
    assert main([*shortened(words, QUICK), "--out", "run"]) == 0


def test_python_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile("\n".join(blocks("python")), "segmentation.md", "exec", dont_inherit=True), names)
    run = names["run"]
    assert run.metrics["dice"]["1.0"] > 0.5
    assert "'1.0'" in capsys.readouterr().out


def test_a_run_is_reported_and_resumed_by_dice(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "run",
                "shapes.toml",
                *shortened(QUICK, ["--rounds", "2"]),
                "--out",
                "run",
                "--target",
                "0.01",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert re.search(r"^share +dice +to 1%", shown, re.MULTILINE)
    summary = json.loads((own / "run" / "summary.json").read_text())
    assert (summary["task"], summary["main"], summary["percent"]) == ("segmentation", "dice", True)
    assert summary["higher_is_better"]
    assert summary["accuracy"] == {}
    assert set(summary["metrics"]) == {*Segmentation().settled((1, 3, 4, 4)).metrics, "local_dice"}
    assert main(["run", "--resume", "run", "--rounds", "3"]) == 0
    assert json.loads((own / "run" / "summary.json").read_text())["rounds"] == 3


def test_a_run_is_reopened_without_its_data(own: Path) -> None:
    """The model has an output for each class, and none for the label that is ignored."""
    text = (own / "shapes.py").read_text()
    (own / "shapes.py").write_text(
        text.replace("    noise = ", "    masks[:, 0] = 255\n    noise = ")
    )
    assert main(["run", "shapes.toml", *QUICK, "--set", "task.ignore=255", "--out", "run"]) == 0
    (own / "shapes.py").unlink()
    run = load_run("run")
    assert run.absent
    assert run.world.family.num_outputs == 3
    assert run.world.task.metrics == Segmentation().settled((1, 3, 4, 4)).metrics
    assert main(["export", "run", "--out", "model.safetensors"]) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "task.loss=mse"], "'mse' was found"),
        (
            ["--set", 'task.metrics=["dice_3"]'],
            "the output has 3 classes, so that dice_0 to dice_2 would fit",
        ),
        (["--set", "data.side=18"], "a U-Net of depth 2 was asked for on inputs of size 18×18"),
        (["--set", "method.local.crop=16"], "crop = 16 was asked for; images are 16×16"),
        (["--set", "method.local.flip_axes=[0]"], "[0] was asked for without flip = true"),
        (["--set", "method.local.intensity.scale=2"], "2.0 was asked for; it must lie in [0, 1]"),
        (["--set", "task.ignore=2", "--set", "model.num_classes=2"], ""),
        (["--set", "model.num_classes=2"], "shapes has 3 classes; the model's output has 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    args: list[str], said: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["run", "shapes.toml", *QUICK, *args, "--out", "run"])
    assert status == (2 if said else 0)
    assert said in capsys.readouterr().err
    assert (own / "run" / "rounds.jsonl").exists() == (not said)


@pytest.mark.slow
def test_the_table_is_what_the_first_run_finds(own: Path) -> None:
    assert main(["run", "shapes.toml", "--out", "run"]) == 0
    metrics = json.loads((own / "run" / "summary.json").read_text())["metrics"]
    names = re.findall(r"\w+", PAGE.split("| share |")[1].split("\n")[0])
    for share in ("1.0", "0.5", "0.25"):
        row = re.search(rf"^\| {float(share):g} \| (.*) \|$", PAGE, re.MULTILINE)
        assert row is not None
        shown_values = [float(value) for value in row[1].split(" | ")]
        assert shown_values == pytest.approx([metrics[name][share] for name in names], abs=0.05)
