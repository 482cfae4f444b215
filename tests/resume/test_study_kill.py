"""Studies that are killed or interrupted, on one process or more, end like uninterrupted ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli.main import main
from fedquilt.cli.study import StudyProgress
from fedquilt.runs.lock import locked
from tests.unit.studies.conftest import OWN

ROOT = Path(__file__).parents[2]
METHODS = ("fedavg", "heterofl", "fedrolex")
PATIENCE = 180.0  # seconds; a busy machine takes a minute to start two jobs


def arguments(rounds: int, epochs: int) -> list[str]:
    settings = ["--model", "own.py:net", "--data", "own.py:pool", "--clients", "4", "--cohort", "2"]
    local = ["--set", "checkpoint.rounds=1", "--set", f"method.local.epochs={epochs}"]
    return [
        "compare",
        *METHODS,
        *settings,
        *local,
        "--rounds",
        str(rounds),
        "--seeds",
        "0",
        "1",
        "2",
    ]


LONG = arguments(rounds=5, epochs=20)  # long enough to be killed in the middle
TOTAL = len(METHODS) * 3 * 5  # rounds


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*args: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "fedquilt", *args]
    return subprocess.Popen(
        line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(*args: str) -> None:
    with start(*args) as process:
        said = process.communicate()[1]
    assert process.returncode == 0, said


def rounds_in(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*/seed*/rounds.jsonl"))


def until(is_so: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition, and fail if it does not become true or if the process ends before."""
    began = time.monotonic()
    while not is_so():
        assert process is None or process.poll() is None, "the study was over too early"
        assert time.monotonic() - began < PATIENCE, "nothing happened"
        time.sleep(0.001)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a study has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # It ended meanwhile.
            continue
        if int(fields[1]) == process.pid:
            found.append(int(file.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def compared(folder: Path) -> Any:
    """Return all numbers of a study but the seconds that it took."""
    return without_seconds(json.loads((folder / "compare.json").read_text()))


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(inner) for key, inner in value.items() if key != "seconds"}
    return [without_seconds(inner) for inner in value] if isinstance(value, list) else value


def test_a_study_that_is_interrupted_five_times_has_the_same_table(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = arguments(rounds=2, epochs=1)
    assert main([*short, "--out", "whole"]) == 0
    begin = StudyProgress.begin
    left = 0

    def interrupting(self: StudyProgress, *args: Any) -> Callable[[Any], None]:
        after = begin(self, *args)

        def watched(record: Any) -> None:
            nonlocal left
            after(record)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        return watched

    monkeypatch.setattr(StudyProgress, "begin", interrupting)
    for rounds in (1, 4, 2, 3, 5):
        left = rounds
        assert main([*short, "--out", "stopped"]) == 130
        assert (
            "of 9 runs finished. Continue with: fedquilt compare --resume stopped"
            in capsys.readouterr().err
        )
    assert rounds_in(own / "stopped") == 15
    assert main(["compare", "--resume", "stopped"]) == 0
    assert compared(own / "stopped") == compared(own / "whole")


@pytest.mark.slow
def test_a_study_that_is_killed_five_times_has_the_same_table(own: Path) -> None:
    finish(*LONG, "--out", "whole")
    for wanted in (3, 12, 20, 27, 35):
        with start(*LONG, "--out", "killed") as process:
            until(lambda wanted=wanted: rounds_in(own / "killed") >= wanted, process)  # type: ignore[misc]
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert rounds_in(own / "killed") < TOTAL
    finish("compare", "--resume", "killed")
    assert compared(own / "killed") == compared(own / "whole")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="asks the system which processes there are"
)
def test_several_jobs_end_with_their_parent_and_give_the_same_table(own: Path) -> None:
    finish(*LONG, "--out", "whole")
    asked = [*LONG, "--out", "jobs", "--jobs", "2"]
    for wanted, number in ((3, signal.SIGKILL), (14, signal.SIGINT), (26, signal.SIGTERM)):
        with start(*asked) as process:
            until(lambda wanted=wanted: rounds_in(own / "jobs") >= wanted, process)  # type: ignore[misc]
            workers = workers_of(process)
            assert 1 <= len(workers) <= 2
            process.send_signal(number)
            said = process.communicate()[1]
        if number == signal.SIGKILL:
            assert process.returncode == -number
            until(lambda workers=workers: not any(map(is_running, workers)))  # type: ignore[misc]
        else:
            assert process.returncode == 130
            assert "Continue with: fedquilt compare --resume jobs" in said
            assert not any(map(is_running, workers))
        assert rounds_in(own / "jobs") < TOTAL
        for file in (own / "jobs").glob("**/lock"):
            with locked(file.parent):  # which is refused if a process still writes there
                pass
    finish("compare", "--resume", "jobs", "--jobs", "2")
    assert compared(own / "jobs") == compared(own / "whole")
