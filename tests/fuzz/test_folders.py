"""Run folders that are killed, damaged or hostile: no stack trace, no silent damage, and no file
outside is touched.

Everything comes from seeds, so that a failure can be repeated: the trial is in its message. Few
trials run with the quick tests, and all of them with the slow ones.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.errors import RecordError
from fedquilt.runs.summary_file import read_summary
from tests.fuzz.folders import (
    BEGUN,
    RUN,
    TOTAL,
    best_of,
    damage,
    hostile_manifests,
    killed_at,
    rounds_of,
    state_of,
    train,
    warnings_of_fedquilt,
)

QUICK, SLOW = 12, 300  # damaged folders
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, one of another seed, and the run as it would have gone on."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "begun", BEGUN)
    train(folder / "other", BEGUN, seed=1)
    train(folder / "whole", TOTAL)
    return folder


def few_and_many(few: int, many: int) -> list[object]:
    """Return numbers of trials, of which the larger one is slow."""
    return [few, pytest.param(many, marks=pytest.mark.slow)]


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", few_and_many(QUICK, SLOW))
def test_a_damaged_run_goes_on_to_the_same_weights_or_is_refused_in_words(
    runs: Path, tmp_path: Path, capsys: Capture, count: int
) -> None:
    expected = state_of(runs / "whole")
    recorded = rounds_of(runs / "whole")
    outcomes = {"equal": 0, "said": 0, "refused": 0}
    for trial in range(count):
        folder = tmp_path / str(trial)
        shutil.copytree(runs / "begun", folder)
        harm = f"trial {trial}: {damage(folder, random.Random(trial), runs / 'other')}"
        with warnings_of_fedquilt() as warnings:
            status = main(["run", "--json", "--resume", str(folder), "--rounds", str(TOTAL)])
        error = capsys.readouterr().err
        if status:
            assert status in (1, 2), harm
            assert str(folder) in error, f"{harm}: {error}"
            outcomes["refused"] += 1
        else:
            assert state_of(folder) == expected, harm
            is_equal = rounds_of(folder) == recorded
            assert is_equal or warnings, f"{harm}: the damage was silent"
            outcomes["equal" if is_equal else "said"] += 1
        shutil.rmtree(folder)
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("count", few_and_many(QUICK, SLOW))
def test_a_damaged_run_that_is_finished_is_said_to_be(
    runs: Path, tmp_path: Path, capsys: Capture, count: int
) -> None:
    summary = read_summary(runs / "begun")
    for trial in range(count):
        folder = tmp_path / str(trial)
        shutil.copytree(runs / "begun", folder)
        harm = f"trial {trial}: {damage(folder, random.Random(10_000 + trial), runs / 'other')}"
        with warnings_of_fedquilt() as warnings:
            status = main(["run", "--json", "--resume", str(folder)])
        told = capsys.readouterr()
        if status:
            assert status in (1, 2), harm
            assert str(folder) in told.err, f"{harm}: {told.err}"
        else:
            assert json.loads(told.out) | {"seconds": 0} == summary | {"seconds": 0}, harm
            assert warnings or same_files(runs / "begun", folder), f"{harm}: the damage was silent"
        shutil.rmtree(folder)


def same_files(first: Path, second: Path) -> bool:
    """Return True if two folders hold the same, but for the layout of JSON and for who held the
    lock.
    """
    names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (first, second)]
    if names[0] != names[1]:
        return False
    files = [name for name in names[0] if (first / name).is_file() and name.name != "lock"]
    return all(content(first / name) == content(second / name) for name in files)


def content(file: Path) -> object:
    return json.loads(file.read_bytes()) if file.suffix == ".json" else file.read_bytes()


# --- hostile manifests --------------------------------------------------------------------------


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 24])
def test_hostile_manifests_are_passed_over(
    runs: Path, tmp_path: Path, capsys: Capture, step: int
) -> None:
    """Their checksums are right. The checkpoint before is used, and the engine has the settings
    that it had.
    """
    expected = state_of(runs / "whole")
    newest = f"{BEGUN:08}.json"
    manifest = json.loads((runs / "begun" / "checkpoint" / newest).read_text())
    manifests = hostile_manifests(manifest)
    assert len(manifests) > 50
    passed_over = 0
    for number, (name, text) in enumerate(manifests[::step]):
        folder = tmp_path / str(number)
        shutil.copytree(runs / "begun", folder)
        (folder / "checkpoint" / newest).write_bytes(text)
        with warnings_of_fedquilt() as warnings:
            status = main(["run", "--json", "--resume", str(folder), "--rounds", str(TOTAL)])
        error = capsys.readouterr().err
        if status:
            assert status in (1, 2), name
            assert str(folder) in error, f"{name}: {error}"
        else:
            assert state_of(folder) == expected, name
            passed_over += any(newest in warning and "instead" in warning for warning in warnings)
        (folder / "checkpoint" / newest).write_bytes(text)
        with warnings_of_fedquilt(), suppress(RecordError):
            fq.load_state(folder)
        shutil.rmtree(folder)
    assert passed_over > len(manifests[::step]) // 2


# --- kills --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", few_and_many(2, 60))
def test_runs_that_are_killed_at_any_operation_on_files_end_alike(
    runs: Path, tmp_path: Path, count: int
) -> None:
    expected = state_of(runs / "whole"), rounds_of(runs / "whole"), best_of(runs / "whole")
    draw = random.Random(count)
    kills = 0
    for trial in range(count):
        folder = tmp_path / str(trial)
        for _ in range(draw.randint(1, 3)):
            kills += killed_at(draw.randrange(90), folder, command_for(folder)) is None
        assert main(command_for(folder)) == 0, trial
        assert (state_of(folder), rounds_of(folder), best_of(folder)) == expected, trial
        shutil.rmtree(folder)
    assert kills >= count  # some runs end before


def command_for(folder: Path) -> list[str]:
    """Return the command that begins a run, or resumes it if there is something to resume."""
    if (folder / "config.toml").exists():
        return ["run", "--json", "--resume", str(folder)]
    return [*RUN, "--rounds", str(TOTAL), "--out", str(folder)]


@pytest.mark.parametrize("count", few_and_many(1, 40))
def test_a_comparison_that_is_killed_runs_all_that_was_asked(
    tmp_path: Path, capsys: Capture, count: int
) -> None:
    methods = ["fedavg", "heterofl", "fedprox"]
    settings = [
        "--data",
        "diabetes",
        "--model",
        "mlp",
        "--clients",
        "4",
        "--cohort",
        "2",
        "--rounds",
        "1",
    ]
    draw = random.Random(100 + count)
    kills = 0
    for trial in range(count):
        folder = tmp_path / str(trial)
        asked = ["compare", *methods, *settings, "--json", "--out", str(folder)]
        kills += killed_at(draw.randrange(10, 120), folder, asked) is None
        is_written = (folder / "study.toml").exists()
        assert main(["compare", "--json", "--resume", str(folder)] if is_written else asked) == 0, (
            trial
        )
        capsys.readouterr()
        compared = json.loads((folder / "compare.json").read_text())
        assert all(read_summary(folder / method / "seed0") for method in methods), trial
        assert all(method in json.dumps(compared) for method in methods), trial
        shutil.rmtree(folder)
    assert kills >= count // 2
