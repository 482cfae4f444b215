"""Runs that are killed at random moments, also while a checkpoint is written, end like
uninterrupted ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.storage.files import TEMPORARY
from tests.resume.federation import METHODS, federate

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Script:
    """A run from Python."""

    method: str
    rounds: int

    def command(self, out: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "tests.resume.federation",
            self.method,
            str(out),
            str(self.rounds),
        ]


@dataclass(frozen=True)
class Terminal:
    """A run from the command line, whose clients keep their norms."""

    rounds: int

    def command(self, out: Path) -> list[str]:
        asked = [
            "--method",
            "fedbn",
            "--rounds",
            str(self.rounds),
            "--set",
            "checkpoint.rounds=1",
            "--out",
            str(out),
        ]
        resumed = ["--resume", str(out)]
        return [
            sys.executable,
            "-m",
            "fedquilt",
            "run",
            "--json",
            *(resumed if out.exists() else asked),
        ]


def rounds(out: Path) -> int:
    file = out / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def writing(out: Path) -> bool:
    return any((out / "checkpoint").glob(f"*{TEMPORARY}"))


def kill(command: list[str], out: Path, draw: random.Random, in_a_checkpoint: bool) -> None:
    """Start or resume a run, and kill it some rounds later or while it writes a checkpoint."""
    begun = None if out.exists() else 0
    wanted, delay = draw.randrange(1, 4), draw.random() * 0.05
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if begun is None and (out / "lock").read_text() == str(process.pid):
                begun = rounds(out)
            if begun is not None and rounds(out) >= begun + wanted:
                if not in_a_checkpoint:
                    time.sleep(delay)
                if not in_a_checkpoint or is_stopped_while_writing(process, out):
                    process.kill()
                    break
            time.sleep(0.0002)
    assert process.returncode == -9  # not done before


def is_stopped_while_writing(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Stop a process that writes a checkpoint, and return True if the file is incomplete then.

    If the file was finished before, the process continues.
    """
    if not writing(out):
        return False
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    if writing(out):
        return True
    process.send_signal(signal.SIGCONT)
    return False


def survive(run: Script | Terminal, folder: Path, kills: int, seed: int) -> None:
    draw, out, half_written = random.Random(seed), folder / "killed", 0
    for turn in range(kills):
        kill(run.command(out), out, draw, in_a_checkpoint=turn % 2 == 0)
        half_written += writing(out)
    subprocess.run(run.command(out), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(run.command(folder / "whole"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert half_written  # the point of it
    assert not writing(out)  # leftovers are cleared away
    assert_same(out, folder / "whole", run.rounds)


def untimed(record: dict[str, object]) -> dict[str, object]:
    """Return a record without times, which differ between runs, and without the checksum, which
    covers them.
    """
    return {
        name: value
        for name, value in record.items()
        if name not in ("seconds", "server_seconds", "check")
    }


def assert_same(killed: Path, whole: Path, total: int) -> None:
    """Check that weights, slots and client states are equal bit for bit, and records up to their
    times.
    """
    mine, theirs = fq.load_state(killed), fq.load_state(whole)
    assert mine.round == theirs.round == total
    assert_equal(mine.weights, theirs.weights)
    assert_equal(mine.slots, theirs.slots)
    assert_same_memories(mine, theirs)
    written, expected = (
        [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        for out in (killed, whole)
    )
    assert list(map(untimed, written)) == list(map(untimed, expected))
    ended, summary = (json.loads((out / "summary.json").read_text()) for out in (killed, whole))
    assert untimed(ended) == untimed(summary)


def assert_same_memories(mine, theirs) -> None:
    assert list(mine.memory) == list(theirs.memory)
    for one, other in zip(mine.memory.values(), theirs.memory.values(), strict=True):
        assert (one.submodel, one.steps) == (other.submodel, other.steps)
        assert_equal(one.weights, other.weights)
        assert_equal(one.slots, other.slots)


def assert_equal(mine, theirs) -> None:
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine[name], value)
        else:
            assert_equal(mine[name], value)


# Five kills; the others are slow.
@pytest.mark.parametrize(
    ("run", "kills"),
    [
        pytest.param(Script("keeping", 12), 1, marks=pytest.mark.slow),
        (Script("heterofl", 8), 1),
        pytest.param(Terminal(5), 1, marks=pytest.mark.slow),
    ],
    ids=["memories", "heterofl", "terminal"],
)
def test_killed_runs_end_like_an_uninterrupted_one(run, kills, tmp_path):
    survive(run, tmp_path, kills, seed=1)


def test_a_run_over_a_lossy_coding_link_ends_as_if_it_had_not_been_stopped(tmp_path):
    """What clients keep for the link is in the checkpoint: padding, error feedback and received
    weights.
    """
    for rounds in (1, 4, 5):
        federate("lossy", tmp_path / "stopped", rounds)
    federate("lossy", tmp_path / "whole", 5)
    whole = fq.load_state(tmp_path / "whole")
    assert all({"residual", "received"} <= memory.slots.keys() for memory in whole.memory.values())
    assert_equal(fq.load_state(tmp_path / "stopped").weights, whole.weights)
    theirs = fq.load_state(tmp_path / "stopped").memory
    assert list(theirs) == list(whole.memory)
    for key, memory in whole.memory.items():
        assert_equal(theirs[key].weights, memory.weights)
        assert_equal(theirs[key].slots, memory.slots)


def test_a_run_weighted_by_updates_ends_as_if_it_had_not_been_stopped(tmp_path):
    """The optimizer steps of every client so far are in the checkpoint."""
    for rounds in (1, 3, 4):
        federate("updates", tmp_path / "stopped", rounds)
    federate("updates", tmp_path / "whole", 4)
    stopped, whole = fq.load_state(tmp_path / "stopped"), fq.load_state(tmp_path / "whole")
    assert_equal(stopped.weights, whole.weights)
    steps = {key: memory.steps for key, memory in whole.memory.items()}
    assert sum(steps.values()) == 4 * 4 * 2  # rounds, clients, batches
    assert {key: memory.steps for key, memory in stopped.memory.items()} == steps


def test_a_growing_run_that_is_stopped_after_every_round_ends_as_if_it_had_not_been(tmp_path):
    """Blocks, heads, windows and momentum of clients are in the checkpoints of all stages."""
    for rounds in range(1, 7):
        federate("growing", tmp_path / "stopped", rounds)
    federate("growing", tmp_path / "whole", 6)
    stopped, whole = fq.load_state(tmp_path / "stopped"), fq.load_state(tmp_path / "whole")
    assert_equal(stopped.weights, whole.weights)
    assert_same_memories(stopped, whole)
    assert any(memory.slots for memory in whole.memory.values())


@pytest.mark.slow
def test_a_run_killed_in_each_stage_ends_like_an_uninterrupted_one(tmp_path):
    run, out = Script("growing", 7), tmp_path / "killed"
    # rounds: in stage 1, after the warm-up of stage 2 and after that of stage 3
    for behind in (
        1,
        3,
        5,
    ):
        with subprocess.Popen(run.command(out), cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and rounds(out) < behind:
                time.sleep(0.0002)
            process.kill()
        assert process.returncode == -9  # not done before
    subprocess.run(run.command(out), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(run.command(tmp_path / "whole"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert_same(out, tmp_path / "whole", run.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_twenty_killed_runs_end_like_an_uninterrupted_one(method, tmp_path):
    survive(Script(method, 25), tmp_path, 5, seed=2)
