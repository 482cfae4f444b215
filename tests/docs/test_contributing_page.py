"""docs/contributing.md: every file is complete, and works from outside of the package.

Files are written to an empty folder. Commands are run there as written, only for fewer rounds and
clients. Files that fill a registry run in a process of their own, so that other tests do not see
it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.methods.api import Method
from fedquilt.names import find
from tests.conftest import shortened

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
FILES = dict(re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
RUNS = [line for line in COMMANDS if line.startswith("fedquilt run")]
SHORT = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files of the page, in which a user would work."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed_by(folder: Path, *words: str) -> list[str]:
    """Run Python in the folder, and return the lines that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- the page -----------------------------------------------------------------------------------


def test_all_code_is_in_complete_files() -> None:
    assert len(FILES) == PAGE.count("```python")
    for name, text in FILES.items():
        compile(text, name, "exec")


def test_the_table_has_every_section_and_paths_that_exist() -> None:
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\) \|(.*)", PAGE, re.MULTILINE)
    titles = re.findall(r"^## (.*)", PAGE, re.MULTILINE)
    assert sorted(title.lower() for title in titles) == sorted(what.lower() for what, _, _ in rows)
    for _, anchor, cells in rows:
        assert anchor in {title.lower().replace(" ", "-") for title in titles}
        for path in re.findall(r"`((?:tests|fedquilt)/[\w/.]+)`", cells):
            assert (ROOT / path).exists(), path


def test_registries_of_the_table_are_there() -> None:
    names = re.findall(r"`((?:fq|fedquilt)\.[\w.]+\.[A-Z_]{4,})`", PAGE)
    assert len(names) >= 9
    for name in names:
        module, _, registry = name.replace("fq.", "fedquilt.").rpartition(".")
        assert isinstance(getattr(__import__(module, fromlist=[registry]), registry), dict)


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line[13:60])
def test_commands_train_as_written(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[1:]
    assert main([*shortened(words, SHORT), "--out", "run", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 1
    file = next(word for word in re.split(r"[= \"]", line) if ".py:" in word)
    assert file in (folder / "run" / "config.toml").read_text() or "--track" in line


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("fedquilt check")])
def test_methods_pass_their_check(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().out


# --- what each file does ------------------------------------------------------------------------


def trained(method: Method, **options: object) -> fq.Run:
    data = fq.data.digits().partition(6)
    family = fq.trace(lambda: fq.models.MLP(10, 64), data.example)
    fleet = fq.Fleet.of([1, 1 / 2], num_clients=6, cohort=3)
    return fq.run(method, family, data, fleet, rounds=2, precision="fp64", **options)  # type: ignore[arg-type]


def assert_close(actual: fq.Run, expected: fq.Run) -> None:
    """Compare the weights of two runs."""
    actual_weights, expected_weights = dict(actual.server.weights), dict(expected.server.weights)
    torch.testing.assert_close(actual_weights, expected_weights, rtol=0, atol=1e-9)


def test_a_method_without_a_cap_is_the_default(folder: Path) -> None:
    kind = find({}, "narrow_first.py:NarrowFirst", "method")
    expected = trained(Method())
    assert_close(trained(kind(until=0)), expected)
    assert_close(trained(kind(cap=1.0)), expected)


def test_the_drift_of_clients_reaches_the_server(folder: Path) -> None:
    kind = find({}, "drift.py:WithDrift", "method")
    run = trained(kind())
    assert_close(run, trained(Method()))
    assert run.server.extras["drift"] > 0


def test_a_partition_divides_all_samples(folder: Path) -> None:
    sizes = json.loads(printed_by(folder, "use_halves.py")[0])
    assert len(sizes) == 10
    assert sum(sizes[:5]) == pytest.approx(3 * sum(sizes[5:]), rel=0.02)
    kind = find({}, "halves.py:Halves", "partition")
    parts = fq.data.digits().partition(4, kind(), seed=1).parts
    positions = torch.cat(list(parts))
    assert sorted(positions.tolist()) == list(range(len(positions)))


def test_a_source_remembers_how_it_was_made(folder: Path) -> None:
    moons = find({}, "moons.py:moons", "data set")
    pool = moons(count=40, noise=0.0)
    assert pool.origin is not None
    assert pool.inputs.shape[1:] == (2,)


def test_an_objective_without_weight_has_no_effect(folder: Path) -> None:
    kind = find({}, "confident.py:Penalized", "objective")
    plain = trained(Method())
    none = trained(Method().with_local(objective=kind(beta=0.0)))
    some = trained(Method().with_local(objective=kind(beta=0.5)))
    assert_close(none, plain)
    assert any((some.server.weights[name] != w).any() for name, w in plain.server.weights.items())


def test_a_task_has_the_poisson_loss(folder: Path) -> None:
    task = find({}, "counts.py:Counts", "task")()
    losses = task.losses(torch.tensor([[0.0], [1.0]]), torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(losses, torch.tensor([1.0, torch.e - 3.0]))


def test_a_metric_counts_samples(folder: Path) -> None:
    metric = find({}, "top3.py:Top3", "metric")()
    outputs = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]])
    assert metric.value(metric.sums(outputs, torch.tensor([2, 3]))) == 0.5


def test_an_engine_gives_the_numbers_of_sequential(folder: Path) -> None:
    first, second = printed_by(folder, "use_backwards.py")
    assert first == second


def test_a_codec_sends_one_size(folder: Path) -> None:
    codec = find({}, "signs.py:Signs", "codec")()
    spec = fq.links.ChangeSpec({"w": torch.Size([3])}, torch.float64, torch.device("cpu"))
    change = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    message = codec.encode(change, spec, (0, 0))
    assert len(message) == 8 + 3
    assert codec.decode(message, spec).tolist() == [2.0, -2.0, 2.0]


def test_a_norm_policy_is_personal(folder: Path) -> None:
    policy = fq.LocalTraining(norm="own_norms.py:OwnNorms").norm
    assert (policy.measures, policy.personal, policy.affine) == (True, True, "local")


def test_a_rule_lets_channels_be_cut(folder: Path) -> None:
    assert printed_by(folder, "use_running_max.py") == ["class conv {'conv': 4}"]
    without = (folder / "use_running_max.py").read_text().replace("import running_max\n", "")
    (folder / "without.py").write_text(without)
    assert printed_by(folder, "without.py") == ["class 8 {}"]


def test_a_layer_is_traced(folder: Path) -> None:
    printed = "\n".join(printed_by(folder, "gate.py"))
    assert "gate.excite.weight   conv gate.squeeze\n" in printed
    assert "(conv): Conv2d(1, 4" in printed


def test_a_command_is_one_of_the_commands(folder: Path) -> None:
    (line,) = [line for line in COMMANDS if line.startswith("python")]
    assert printed_by(folder, *shlex.split(line)[1:]) == ["1: 11,230", "0.5: 2,956"]
    assert "sizes" in "\n".join(printed_by(folder, "sizes.py", "--help"))


def test_a_tracker_logs_every_round(folder: Path) -> None:
    kind = find({}, "lines.py:Lines", "tracker")
    trained(Method(), trackers=[kind("here.txt")])
    assert [line.split()[0] for line in (folder / "here.txt").read_text().splitlines()] == [
        "1",
        "2",
    ]
