"""docs/add-a-method.md: its files run from outside of the package, and the methods do what their
papers say.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.conformance.checks import CHECKS
from fedquilt.conformance.method import check_method
from fedquilt.family.cut import prefix
from fedquilt.methods import HeteroFL, Method
from fedquilt.names import find
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Job, Payload, Server, Update
from tests.conftest import assert_same, shortened, with_local

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text()
EXAMPLE = ROOT / "examples" / "clipped.py"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
METHODS = {"clipped.py": "Clipped", "fedcm.py": "FedCM", "largest.py": "Largest"}
SHORT = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the package with the files of the page."""
    path = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def load(folder: Path, file: str) -> ModuleType:
    return sys.modules[find({}, f"{folder / file}:{METHODS[file]}", "method").__module__]


@pytest.fixture
def clipped(folder: Path) -> ModuleType:
    return load(folder, "clipped.py")


@pytest.fixture
def fedcm(folder: Path) -> ModuleType:
    return load(folder, "fedcm.py")


@pytest.fixture
def largest(folder: Path) -> ModuleType:
    return load(folder, "largest.py")


# --- the page -----------------------------------------------------------------------------------


def test_all_code_is_in_complete_files():
    assert set(FILES) == {*METHODS, "run.py"}
    assert len(FILES) == PAGE.count("```python")


def test_files_import_nothing_of_the_package_but_the_interface():
    for name, text in FILES.items():
        modules = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module)
            elif isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
        own = {module for module in modules if module.startswith("fedquilt")}
        assert own <= {"fedquilt", "fedquilt.methods.api"}, name


def test_the_example_has_the_method_of_the_page():
    """Only line breaks may differ, because the example is formatted and the page is laid out by
    hand.
    """

    def definitions(text: str) -> dict[str, str]:
        nodes = [
            node
            for node in ast.parse(text).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        ]
        return {node.name: ast.dump(node) for node in nodes}

    page = definitions(FILES["clipped.py"])
    assert len(page) == 3
    assert page.items() <= definitions(EXAMPLE.read_text()).items()


def test_the_table_has_every_step():
    steps = re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE, re.MULTILINE)
    order = [
        "settled",
        "init",
        "plan",
        "learner",
        "fold",
        "candidates",
        "ranked",
        "figures",
        "deploy",
        "label",
    ]
    assert [step for step, _ in steps] == order
    for step, arguments in steps:
        code = getattr(Method, step).__code__
        assert ["self", *arguments.split(", ")] == list(code.co_varnames[: code.co_argcount])


def first_column(title: str) -> list[str]:
    """Return the code words in the first column of the table below a title."""
    table = PAGE.split(f"## {title}\n")[1].split("|---|\n")[1].split("\n\n")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines()]
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def test_the_tables_name_fields_and_checks_that_exist():
    named = first_column("What a learner is")
    assert set(named) <= {field.name for field in fields(Learner)}
    assert {"phases", "send", "keep", "state"} <= set(named)
    assert first_column("Check it") == list(CHECKS)


def test_linked_files_exist():
    for path in re.findall(r"\]\(((?!http|#)[^)#]+)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
    for name in re.findall(r"`(\w+\.py)`", PAGE.split("## Other hooks")[1]):
        assert (ROOT / "fedquilt" / "methods" / name).exists(), name
    titles = re.findall(r"^## (.*)", PAGE, re.MULTILINE)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


def test_the_example_prints_what_the_page_says(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    numbers = [
        [float(number) for number in re.findall(r"([\d.]+)%", text)]
        for text in (
            capsys.readouterr().out,
            PAGE.split("prints")[1].split("## What a learner is")[0],
        )
    ]
    assert len(numbers[0]) == 6
    assert numbers[0] == pytest.approx(numbers[1], abs=5)  # float32, and another processor
    assert max(numbers[0][:3]) < 20
    assert min(numbers[0][3:]) > 65


@pytest.mark.slow
def test_the_commands_run_as_written(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    lines = re.findall(
        r"^fedquilt .*", "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE
    )
    assert [line.split()[1] for line in lines] == ["run", "compare", "check"]
    for line in lines:
        words = shlex.split(line)[1:]
        assert main(words if words[0] == "check" else shortened(words, SHORT)) == 0, line
        assert "clipped.py:Clipped" in capsys.readouterr().out


def test_the_script_runs_as_written(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    run = runpy.run_path("run.py")["run"]
    assert f"{run.accuracy}\n" == capsys.readouterr().out
    assert set(run.accuracy) == {"1.0", "0.5", "0.25"}


@pytest.mark.parametrize("file", ["fedcm.py", "largest.py"])
def test_the_other_files_run_from_the_command_line(file, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    name = f"{file}:{METHODS[file]}"
    assert main(["run", "--method", name, *SHORT]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("file", ["fedcm.py", pytest.param("largest.py", marks=pytest.mark.slow)])
def test_the_other_files_pass_their_checks(file, folder):
    method = getattr(load(folder, file), METHODS[file])()
    assert [(one.check, one.detail) for one in check_method(method) if one.status != "passed"] == []


# --- clipped averaging --------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "arrives"), [(5.0, 1.0), (0.5, 0.5)])
def test_flat_clip_by_hand(length, arrives, clipped, perceptron):
    """Every weight of the half model moves alike, so that the change has the length; positions not
    held stay.
    """
    world, submodel = World(perceptron), prefix(perceptron.fit(fq.Budget(share=0.5)))
    server = Server(0, {name: torch.zeros_like(value) for name, value in perceptron.init().items()})
    cut = perceptron.cutter.gather(server.weights, submodel, perceptron.trainable)
    each = length / sum(weight.numel() for weight in cut.values()) ** 0.5
    sent = Payload(submodel, {name: torch.full_like(weight, each) for name, weight in cut.items()})
    fold = clipped.Clipped(clip=1.0).fold(server, world)
    fold.add(
        Update(
            Job(fq.methods.api.Client(0, fq.Budget(share=0.5), 1), submodel, 0), (sent,), steps=1
        )
    )
    weights = fold.finish(server)[0]
    moved = torch.cat([weight.flatten() for weight in weights.values()])
    assert float(moved.norm()) == pytest.approx(arrives, rel=1e-5)
    assert weights["first.weight"][3:].abs().max() == 0


def test_with_a_large_bound_it_is_heterofl(clipped, residual, make_data, play):
    data = make_data(residual, (7, 4, 9), labels=2)
    methods = [
        with_local(method, batch_size=4) for method in (HeteroFL(), clipped.Clipped(clip=1e9))
    ]
    assert_same(*(play(method, residual, data, (1.0, 0.5, 0.25)) for method in methods))


@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_every_engine_gives_the_same(clipped, family, make_data, play):
    data = make_data(family, (7, 4, 9, 5), labels=2)
    method = with_local(
        clipped.Clipped(clip=0.05), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1)
    )
    one, other = (
        play(method, family, data, (1.0, 0.5), engine=name) for name in ("sequential", "vectorized")
    )
    assert_same(one, other)
    loose = play(
        with_local(clipped.Clipped(clip=1e9), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1)),
        family,
        data,
        (1.0, 0.5),
    )
    # the bound was felt
    assert not torch.allclose(
        torch.cat([w.flatten() for w in one.server.weights.values()]),
        torch.cat([w.flatten() for w in loose.server.weights.values()]),
    )


def test_a_preset_has_its_settings(clipped):
    assert clipped.Clipped.preset("tight") == clipped.Clipped(clip=0.1)


# --- FedCM --------------------------------------------------------------------------------------


def test_fedcm_is_a_plain_loop(fedcm, perceptron, make_data, play):
    """One client with the whole model and one batch a round: w ← w − η·v and Δ ← v, with v = α·g +
    (1 − α)·Δ.
    """
    data, alpha, lr = make_data(perceptron, (6,)), 0.3, 0.2
    local = fq.LocalTraining(optimizer=fq.optimizers.SGD(lr=lr, momentum=0.0), batch_size=6)
    run = play(fedcm.FedCM(local=local, alpha=alpha), perceptron, data, rounds=4)

    weights = perceptron.init(0, dtype=torch.float64)
    direction = {name: torch.zeros_like(value) for name, value in weights.items()}
    for _ in range(4):
        now = {name: value.clone().requires_grad_() for name, value in weights.items()}
        hidden = torch.relu(data.inputs @ now["first.weight"].T + now["first.bias"])
        loss = F.cross_entropy(hidden @ now["last.weight"].T + now["last.bias"], data.targets)
        slopes = dict(zip(now, torch.autograd.grad(loss, list(now.values())), strict=True))
        direction = {name: alpha * slopes[name] + (1 - alpha) * direction[name] for name in weights}
        weights = {name: weights[name] - lr * direction[name] for name in weights}
    torch.testing.assert_close(dict(run.server.weights), weights, rtol=0, atol=1e-9)
    torch.testing.assert_close(dict(run.server.slots["direction"]), direction, rtol=0, atol=1e-9)


def test_fedcm_without_direction_is_the_mean(fedcm, residual, make_data, play):
    data = make_data(residual, (7, 4, 9), labels=2)
    local = fq.LocalTraining(optimizer=fq.optimizers.SGD(momentum=0.0), batch_size=4)
    one = play(fedcm.FedCM(local=local, alpha=1.0), residual, data, (1.0, 0.5, 0.25))
    other = play(Method(local=local, weighting="uniform"), residual, data, (1.0, 0.5, 0.25))
    torch.testing.assert_close(
        dict(one.server.weights), dict(other.server.weights), rtol=0, atol=1e-9
    )
    # It is charged for the direction both ways, which is as large as the weights.
    assert one.records[0].bytes_down == 2 * other.records[0].bytes_down
    assert one.records[0].bytes_up == 2 * other.records[0].bytes_up


# --- the largest channels -----------------------------------------------------------------------


def test_a_client_gets_the_channels_with_the_largest_weights(largest, perceptron):
    """Channels 1, 4 and 5 of six are large in the input layer, so that half of them are these."""
    weights = {name: torch.ones_like(value) for name, value in perceptron.init().items()}
    weights["first.weight"][[1, 4, 5]] = 3.0
    server = Server(2, weights)
    world, client = World(perceptron), fq.methods.api.Client(0, fq.Budget(share=0.5), 1)
    (plan,) = largest.Largest(warm_up=2).plan(server, client, world)
    (positions,) = plan.index.values()
    assert list(positions) == [1, 4, 5]
    assert largest.Largest(warm_up=2).deploy(server, client.budget, world) == (plan,)
    (early,) = largest.Largest(warm_up=3).plan(server, client, world)
    assert early == prefix(plan.arch)


def test_with_a_long_warm_up_it_is_heterofl(largest, residual, make_data, play):
    data = make_data(residual, (7, 4, 9), labels=2)
    methods = [
        with_local(method, batch_size=4) for method in (HeteroFL(), largest.Largest(warm_up=99))
    ]
    assert_same(*(play(method, residual, data, (1.0, 0.5, 0.25)) for method in methods))
