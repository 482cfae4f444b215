"""docs/distillation.md: its commands and its Python run, and its tables, outputs and errors are
those of the code.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.methods.api import ServerTraining
from tests.conftest import shortened

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distillation.md").read_text()
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
FEW_STEPS = "method.server_training.steps=2"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder outside the package that holds the page's files."""
    for name in ("join.py", "warm.py"):
        (tmp_path / name).write_text(blocks(f"python file={name}")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quick(line: str) -> list[str]:
    """Return the words of a command with fewer rounds, clients and steps."""
    words = shortened(shlex.split(line, comments=True)[1:], QUICK)
    words = [FEW_STEPS if "server_training.steps" in word else word for word in words]
    if FEW_STEPS in words:
        return words
    return [*words, "--set", f"feddf:{FEW_STEPS}" if words[0] == "compare" else FEW_STEPS]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, own: Path) -> None:
    assert main([*quick(line), "--out", "run"]) == 0


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(compile(code, "distillation.md", "exec", dont_inherit=True), {})
    assert "'0.5'" in capsys.readouterr().out


def test_public_images_of_a_file_are_used(own: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (80, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(80) % 10
    np.savez("cifar10.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    np.savez("public.npz", x=images[:30])
    exec(compile((own / "join.py").read_text(), "join.py", "exec"), {})
    words = [
        "run",
        "--method",
        "dsfl",
        "--data",
        "cifar10-public.npz",
        "--model",
        "tiny_resnet",
        "--set",
        FEW_STEPS,
    ]
    assert main([*words, *QUICK, "--out", "run"]) == 0
    record = json.loads(Path("run/rounds.jsonl").read_text().splitlines()[-1])
    # Rows, classes and bytes of a number.
    assert record["bytes_up"] == record["bytes_down"] == 30 * 10 * 4


def test_the_cost_of_the_server_is_recorded_as_the_page_says(own: Path) -> None:
    assert main([*quick(COMMANDS[0]), "--out", "run"]) == 0
    record = json.loads(Path("run/rounds.jsonl").read_text().splitlines()[-1])
    listed = re.findall(r"^\| `(server_\w+)` \|", PAGE, re.MULTILINE)
    assert listed == [key for key in record if key.startswith("server_")]
    assert set(listed) <= set(json.loads(Path("run/summary.json").read_text()))


def test_the_tables_name_existing_settings() -> None:
    section = PAGE.split("## Settings")[1].split("\n## ")[0]
    names = re.findall(r"^\| `server_training\.(\w+)` \|", section, re.MULTILINE)
    assert set(names) == {field.name for field in fields(ServerTraining)}
    kinds = {"feddf": fq.methods.FedDF, "dsfl": fq.methods.DSFL, "fedet": fq.methods.FedET}
    common = {field.name for field in fields(fq.methods.FedDF)}
    for method, kind in kinds.items():
        listed = re.findall(rf"^\| `(\w+)` of `{method}` \|", section, re.MULTILINE)
        assert set(listed) == {field.name for field in fields(kind)} - common
    presets = re.findall(r'^\| `preset = "(\w+)"` of `feddf` \|', section, re.MULTILINE)
    assert presets == list(fq.methods.FedDF.presets)


def test_errors_are_those_of_the_page() -> None:
    section = " ".join(PAGE.split("## What is refused")[1].split("\n## ")[0].split())
    digits = fq.data.digits()
    family = fq.trace(fq.models.tiny_resnet, digits.example)
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], num_clients=6, cohort=2)

    def refused(method: fq.methods.Method, public: torch.Tensor | None) -> str:
        train, test = (digits.inputs, digits.targets), (digits.test_inputs, digits.test_targets)
        pool = digits if public is None else fq.data.Pool.of(train, test, public=public)
        with pytest.raises(fq.FedquiltError) as caught:
            fq.run(method, family, pool.partition(6), fleet, rounds=1)
        return f"{type(caught.value).__name__}: {caught.value}"

    feddf = fq.methods.FedDF()
    assert refused(feddf, None) in section
    assert refused(feddf, torch.zeros(4, 1, 9, 9)) in section
    assert refused(feddf, torch.full((4, 1, 8, 8), 78.0)) in section
    few = refused(fq.methods.FedDF(prototypes=(1, 1 / 2)), digits.inputs[:40])
    assert few.partition("the budget")[2] in section
    diabetes = fq.data.diabetes(public=0.2)
    with pytest.raises(fq.FedquiltError) as caught:
        fq.run(
            fq.methods.DSFL(),
            fq.trace(lambda: torch.nn.Linear(10, 1), diabetes.example),
            diabetes.partition(6),
            fq.Fleet.of([1], num_clients=6, cohort=2),
            rounds=1,
        )
    assert str(caught.value) in section


@pytest.mark.slow
def test_the_first_run_prints_what_the_page_shows(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(COMMANDS[0])[1:]) == 0
    shown = PAGE.split("The run prints:\n\n```\n")[1].split("```")[0]
    number = re.compile(r"\d[\d,.]*")
    printed = capsys.readouterr().out
    assert number.sub("#", printed).split() == number.sub("#", shown).split()
    table = [re.findall(r"([\d.]+)%", text.split("MACs a sample")[1]) for text in (printed, shown)]
    assert [float(one) for one in table[0]] == pytest.approx(
        [float(one) for one in table[1]], abs=6
    )
