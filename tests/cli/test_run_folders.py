"""`fedquilt run --out` and `--resume`: what a folder has, and runs that are interrupted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from fedquilt.cli.main import main
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.saved_state import load_state
from fedquilt.runs.summary_file import read_summary
from tests.cli.commands import ENVIRONMENT, ROUND, TINY, json_of


def test_a_run_leaves_a_folder(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = own / "deep" / "run"
    summary = json_of(capsys, "run", *TINY, "--rounds", "2", "--out", str(out))
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert read_summary(out) == summary
    assert [record["round"] for record in rounds] == [1, 2]
    assert ROUND <= set(rounds[0]) <= ROUND | {"accuracy", "metrics", "main", "stacks", "check"}
    assert rounds[-1]["accuracy"] == summary["accuracy"]
    assert sum(record["bytes_up"] for record in rounds) == summary["bytes_up"]
    assert main(["run", *TINY, "--out", str(out)]) == 2
    assert "a run is there already" in capsys.readouterr().err


def test_a_finished_run_prints_its_summary_or_trains_longer(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json_of(capsys, "run", *TINY, "--rounds", "2", "--out", "d")
    assert json_of(capsys, "run", "--resume", "d") == summary
    assert main(["run", "--resume", "d", "--rounds", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == summary
    assert (
        "--rounds 1 was asked for; the run in d has 2 behind it, and this is what they came to."
        in said.err
    )
    assert main(["run", "--resume", "d", "--rounds", "2"]) == 0
    assert "was asked for" not in capsys.readouterr().err
    assert main(["run", "--resume", "d"]) == 0
    head, *rows, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["share", "accuracy", "parameters", "MACs", "a", "sample"]
    assert [row.split()[::2] for row in rows] == [
        [f"{float(share):g}", f"{member['params']:,}"]
        for share, member in summary["members"].items()
    ]
    assert last.startswith("2 rounds in ")
    longer = json_of(capsys, "run", "--resume", "d", "--rounds", "4")
    assert longer["rounds"] == 4
    assert tomllib.loads(Path("d/config.toml").read_text())["rounds"] == 4
    json_of(capsys, "run", *TINY, "--rounds", "4", "--out", "whole")
    ours, theirs = load_state("d").weights, load_state("whole").weights
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_a_resumed_run_keeps_its_own_settings(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_of(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    assert main(["run", "--resume", "d", "--seed", "3", "--set", "rounds=3"]) == 2
    assert "--resume d was asked for together with --seed, --set" in capsys.readouterr().err
    assert main(["run", "--resume", "absent"]) == 2
    assert "--resume absent was asked for; there is no such folder." in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["run", "--resume", "empty"]) == 2
    assert "--resume empty was asked for; there is no run in it." in capsys.readouterr().err
    Experiment.of(tomllib.loads(Path("d/config.toml").read_text())).prepare().save("scripted")
    assert main(["run", "--resume", "scripted"]) == 0


def started(*args: str, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fedquilt", *args]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=cwd
    )


@pytest.mark.parametrize(
    "by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_names_the_command_that_resumes_it(
    own: Path, by: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 130 and a checkpoint, and the resumed run has the same result."""
    rounds = own / "a run" / "rounds.jsonl"
    with started("run", *TINY, "--rounds", "3000", "--out", "a run", "--json", cwd=own) as process:
        until = time.monotonic() + 60
        while not (rounds.is_file() and rounds.read_text().count("\n") > 2):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(by)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    done = rounds.read_text().count("\n")
    assert (
        f"The run was stopped after round {done} of 3000. Continue with: fedquilt run "
        "--resume 'a run'" in err
    )
    assert load_state("a run").round == done
    assert (
        json_of(capsys, "run", "--resume", "a run", "--rounds", str(done + 2))["rounds"] == done + 2
    )
    json_of(capsys, "run", *TINY, "--rounds", str(done + 2), "--out", "whole")
    ours, theirs = load_state("a run").weights, load_state("whole").weights
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_without_a_folder_nothing_is_kept(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedquilt.runs.run.Run.train", interrupted)
    assert main(["run", *TINY]) == 130
    assert capsys.readouterr().err == (
        "Interrupted. The run was stopped after round 0 of 20. "
        "Nothing of it is kept; with --out DIR it could be resumed.\n"
    )


def test_a_folder_is_written_by_one_run_at_a_time(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedquilt.runs.folder import Folder

    json_of(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    with Folder.resume("d"):
        assert main(["run", "--resume", "d", "--rounds", "2"]) == 2
    assert f"the run of process {os.getpid()} is writing there" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("closed").mkdir(mode=0o500)
    assert main(["run", *TINY, "--out", "closed/d"]) == 2
    assert "cannot be written to: Permission denied" in capsys.readouterr().err


def test_a_name_the_system_does_not_take_is_refused_in_a_line(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 300 * "a"
    assert main(["run", *TINY, "--out", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(name)
    assert told.endswith(" cannot be used: File name too long.\n")


def test_a_full_disk_fails_the_run_with_a_message(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    json_of(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    Path("d/summary.json").unlink()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["run", "--resume", "d", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        "RecordError: d/summary.json could not be written: No space left on device"
    )


def test_a_finished_run_with_damaged_files_shows_its_summary_and_reports_them(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json_of(capsys, "run", *TINY, "--rounds", "2", "--out", "d")
    file = Path("d/checkpoint/00000002.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["run", "--resume", "d", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == summary
    assert said.err.startswith(
        "RecordError: the run in d is finished and its summary is intact, but other files are"
    )
    assert "checkpoint 00000002: 00000002.safetensors has" in said.err


@pytest.mark.parametrize(
    ("old", "new"), [('"members"', '"membars"'), ('"rounds": 1', '"rounds": 2'), ("{", "[")]
)
def test_a_damaged_summary_is_an_error_that_names_it(
    own: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    json_of(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    file = Path("d/summary.json")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert main(["run", "--resume", "d"]) == 1
    assert "d/summary.json is damaged" in capsys.readouterr().err
    file.unlink()
    assert json_of(capsys, "run", "--resume", "d")["rounds"] == 1


def test_a_summary_of_another_run_is_noticed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        json_of(
            capsys,
            "run",
            *TINY,
            "--rounds",
            "1",
            "--seed",
            str(len(name) + ord(name)),
            "--out",
            name,
        )
    shutil.copy("a/summary.json", "b/summary.json")
    assert main(["run", "--resume", "b"]) == 1
    assert (
        "config.toml: it is not the one that the run had when it ended" in capsys.readouterr().err
    )
