"""Odd content of a run's folder: special files, and summaries whose checksum is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedquilt.cli.main import main
from fedquilt.runs.round_log import parse
from fedquilt.runs.summary_file import summary_text
from tests.fuzz.folders import train

ODD: tuple[Any, ...] = (None, "x", -1, 1.5, True, [], [1], {}, {"a": 1}, {"round": "x"})
MORE: tuple[Any, ...] = ({"round": [1]}, {"round": 10**30}, {"round": -1}, {"round": {}})


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer."""

    def fail(number: int, frame: object) -> None:
        pytest.fail(f"it took more than {seconds} s")

    earlier = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, 2)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "command", [["run"], ["list", "data", "--plot", "--config"], ["compare", "fedavg", "--config"]]
)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_settings_of_a_run_that_are_no_plain_file_are_refused(
    folder: Path, command: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading a FIFO would wait forever."""
    file = folder / "config.toml"
    file.rename(folder.parent / "elsewhere.toml")
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(folder.parent / "elsewhere.toml")
    with at_most(seconds=20):
        assert main([*command, str(file)]) == 1
    error = capsys.readouterr().err
    assert "config.toml is " in error
    assert "Only plain files are used" in error


def test_a_link_outside_of_runs_may_lead_to_settings(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = folder.parent / "mine.toml"
    link.symlink_to(folder / "config.toml")
    assert main(["run", "--json", str(link), "--rounds", "1"]) == 0


@pytest.mark.parametrize("value", [*ODD, *MORE])
def test_an_odd_best_round_in_a_summary_is_an_error_that_names_the_file(
    folder: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "summary.json"
    summary = json.loads(file.read_text())
    summary.pop("check")
    log = parse((folder / "rounds.jsonl").read_bytes())
    config = (folder / "config.toml").read_bytes()
    file.write_text(summary_text({**summary, "best": value}, config, log.check))
    assert main(["run", "--json", "--resume", str(folder)]) == 1
    assert f"{file} is damaged: best = " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["run", "--set"], ["compare", "fedavg", "heterofl", "--grid"]])
def test_a_name_that_belongs_to_nothing_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "name=x"]) == 2
    assert "name" in capsys.readouterr().err
