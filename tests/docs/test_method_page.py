"""docs/add-a-method.md: its code is that of the example, its commands run, and the method does what its paper says."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.family.cut import prefix
from fedquilt.methods import HeteroFL, Method
from fedquilt.names import find
from fedquilt.round.federation import World
from fedquilt.terms import Job, Payload, Server, Update
from tests.conftest import assert_same, shortened, with_local

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text()
EXAMPLE = ROOT / "examples" / "clipped.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return sys.modules[find({}, f"{EXAMPLE}:Clipped", "method").__module__]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_what_the_file_has():
    assert len(blocks("python")) == 2
    for block in blocks("python"):
        assert block in EXAMPLE.read_text()


def test_the_table_has_every_step():
    steps = re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE, re.MULTILINE)
    assert [step for step, _ in steps] == ["init", "plan", "learner", "fold", "deploy"]
    for step, arguments in steps:
        code = getattr(Method, step).__code__
        assert ["self", *arguments.split(", ")] == list(code.co_varnames[: code.co_argcount])


def test_files_the_page_points_to_are_there():
    for path in re.findall(r"\]\(((?!http)[^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for name in re.findall(r"`(\w+\.py)`", PAGE.split("## Other hooks")[1]):
        assert (ROOT / "fedquilt" / "methods" / name).exists(), name


def test_the_example_prints_what_the_page_says(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    numbers = [
        [float(number) for number in re.findall(r"([\d.]+)%", text)]
        for text in (capsys.readouterr().out, PAGE.split("prints")[1].split("## Test it")[0])
    ]
    assert len(numbers[0]) == 6
    assert numbers[0] == pytest.approx(numbers[1], abs=5)  # float32, and another processor
    assert max(numbers[0][:3]) < 20
    assert min(numbers[0][3:]) > 65


def test_the_commands_run_as_written(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    lines = [line for line in blocks("sh")[0].splitlines() if line.startswith("fedquilt")]
    assert len(lines) == 2
    for line in lines:
        short = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
        assert main(shortened(shlex.split(line)[1:], short)) == 0, line
    assert "examples/clipped.py:Clipped" in capsys.readouterr().out


# --- the three kinds of test ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "arrives"), [(5.0, 1.0), (0.5, 0.5)])
def test_flat_clip_by_hand(length, arrives, example, perceptron):
    """Every weight of the half model moves alike, so that the change has the length; positions not held stay."""
    world, submodel = World(perceptron), prefix(perceptron.fit(fq.Budget(share=0.5)))
    server = Server(0, {name: torch.zeros_like(value) for name, value in perceptron.init().items()})
    cut = perceptron.cutter.gather(server.weights, submodel, perceptron.trainable)
    each = length / sum(weight.numel() for weight in cut.values()) ** 0.5
    sent = Payload(submodel, {name: torch.full_like(weight, each) for name, weight in cut.items()})
    fold = example.Clipped(clip=1.0).fold(server, world)
    fold.add(Update(Job(fq.Client(0, fq.Budget(share=0.5), 1), submodel, 0), (sent,), steps=1))
    weights = fold.finish(server).weights
    moved = torch.cat([weight.flatten() for weight in weights.values()])
    assert float(moved.norm()) == pytest.approx(arrives, rel=1e-5)
    assert weights["first.weight"][3:].abs().max() == 0


def test_with_a_large_bound_it_is_heterofl(example, residual, make_data, play):
    data = make_data(residual, (7, 4, 9), labels=2)
    methods = [with_local(method, batch_size=4) for method in (HeteroFL(), example.Clipped(clip=1e9))]
    assert_same(*(play(method, residual, data, (1.0, 0.5, 0.25)) for method in methods))


@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_every_engine_gives_the_same(example, family, make_data, play):
    data = make_data(family, (7, 4, 9, 5), labels=2)
    method = with_local(example.Clipped(clip=0.05), batch_size=4, optimiser=fq.SGD(lr=0.1))
    one, other = (play(method, family, data, (1.0, 0.5), engine=name) for name in ("sequential", "vectorised"))
    assert_same(one, other)
    loose = play(
        with_local(example.Clipped(clip=1e9), batch_size=4, optimiser=fq.SGD(lr=0.1)), family, data, (1.0, 0.5)
    )
    assert not torch.allclose(
        torch.cat([w.flatten() for w in one.server.weights.values()]),
        torch.cat([w.flatten() for w in loose.server.weights.values()]),
    )  # the bound was felt
