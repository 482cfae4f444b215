"""The folder of a run: its files, its lock, and disks that are full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError, RecordError
from fedquilt.methods import FedAvg
from fedquilt.round import Grades, Record
from fedquilt.runs import folder as folders
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import ClientStates
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.summary_file import read_summary
from fedquilt.storage import files
from tests.conftest import assert_same
from tests.unit.runs.folders import Stop, lines
from tests.unit.runs.test_resume import _parts


def test_a_folder_has_settings_records_and_summary(start, tmp_path):
    run = start(out=tmp_path / "a" / "b")
    out = tmp_path / "a" / "b"
    assert {path.name for path in out.iterdir()} == {
        "config.toml",
        "rounds.jsonl",
        "summary.json",
        "checkpoint",
        "lock",
    }
    assert lines(out) == run.history
    assert [record["round"] for record in lines(out)] == [1, 2, 3, 4]
    assert ["accuracy" in record for record in lines(out)] == [False, True, False, True]
    summary = json.loads((out / "summary.json").read_text())
    assert summary.pop("check").keys() == {"config.toml", "rounds.jsonl", "summary.json"}
    assert summary == run.summary == read_summary(out)
    assert list(summary) == [
        *(
            "method",
            "model",
            "data",
            "engine",
            "precision",
            "seed",
            "rounds",
            "seconds",
            "bytes_down",
            "bytes_up",
        ),
        *(
            "accuracy",
            "metrics",
            "task",
            "main",
            "higher_is_better",
            "percent",
            "members",
            "devices",
            "note",
        ),
        "fedquilt",
    ]
    assert (summary["method"], summary["model"], summary["engine"]) == (
        "Keeping",
        "PreResNet",
        "sequential",
    )
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in lines(out))
    assert summary["accuracy"] == run.accuracy
    family = run.world.family
    assert summary["members"]["1.0"] == {
        "params": family.count(family.whole),
        "macs": family.cost(family.whole).macs,
    }
    config = tomllib.loads((out / "config.toml").read_text())["python"]
    assert (config["rounds"], config["seed"], config["engine"], config["precision"]) == (
        4,
        0,
        "sequential",
        "fp64",
    )
    assert "batch_size=4" in config["method"]
    assert start(FedAvg(), rounds=1).summary["method"] == "fedavg"


def test_a_record_of_an_earlier_version_is_read():
    """It had accuracy beside the other metrics, and did not name the main one."""
    plain = Record(3, 0.1, 4, 5, 6, 7, 0.5).to_dict()
    plain |= {"accuracy": {"1.0": 0.5}, "metrics": {"local_accuracy": {"1.0": 0.25}}}
    assert Record.from_dict(plain).grades == Grades(
        "accuracy", {"accuracy": {"1.0": 0.5}, "local_accuracy": {"1.0": 0.25}}
    )


def test_a_record_is_read_back():
    grades = Grades("rmse", {"rmse": {"1.0": 0.5}, "local_rmse": {"1.0": 0.25}})
    record = Record(3, 0.1 + 0.2, 4, 5, 6, 7, 1 / 3, grades=grades)
    assert record.to_dict()["accuracy"] == {}
    for one in (record, replace(record, grades=Grades())):
        assert Record.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_weights_can_be_loaded_without_the_run(start, tmp_path):
    run = start(out=tmp_path / "run")
    found = fq.load_state(tmp_path / "run")
    assert found.round == 4
    assert all(
        torch.equal(found.weights[name], weight) for name, weight in run.server.weights.items()
    )
    assert found.memory.keys() == run.server.memory.keys()
    with pytest.raises(RecordError, match=r"the weights in .* there is no checkpoint there"):
        fq.load_state(tmp_path / "elsewhere")


def test_a_run_can_be_saved_afterwards_and_resumed(start, tmp_path):
    whole = start(rounds=4)
    start(rounds=2).save(tmp_path / "run")
    again = start(rounds=4, out=tmp_path / "run", resume=True)
    assert_same(whole, again, atol=0)


@dataclass(frozen=True)
class Planned(FedAvg):
    """A method with a setting that depends on the number of rounds."""

    horizon: int = 0  # Rounds of the run. 0: not settled.

    def settled(self, rounds):
        return self if self.horizon else replace(self, horizon=rounds)


def test_a_saved_run_is_resumed_with_the_method_as_it_was_settled(start, tmp_path):
    method = Planned(local=fq.LocalTraining(batch_size=4))
    run = start(method, rounds=2)
    run.train(3).save(tmp_path / "run")
    again = start(method, rounds=4, out=tmp_path / "run", resume=True)
    assert again.method.horizon == run.method.horizon == 2
    assert_same(run.train(4), again, atol=0)
    again.save(tmp_path / "copy")
    assert start(method, rounds=4, out=tmp_path / "copy", resume=True).method.horizon == 2


def test_preparing_uses_a_method_as_it_is_given(start):
    run = fq.prepare(*_parts(start(Planned(), rounds=1)))
    assert (run.method.horizon, run.settled_for) == (1, None)
    unsettled = replace(run.method, horizon=0)
    assert fq.prepare(unsettled, *_parts(run)[1:]).method.horizon == 0


def test_a_folder_that_has_a_run_is_not_overwritten(start, tmp_path):
    start(rounds=1, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"a run is there already\. Resume it, or name another"):
        start(rounds=1, out=tmp_path / "run")


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="there is no run in it"):
        Folder.resume(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        Folder.resume(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"file/run was asked for; it cannot be written to: Not a directory"
    ):
        Folder.create(tmp_path / "file" / "run", "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"it cannot be written to: Permission denied"):
        Folder.create(tmp_path / "run", "")


_HOLD = """
import sys
from fedquilt.runs.folder import Folder
with Folder.create(sys.argv[1], ""):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_on_one_folder_is_refused_by_the_pid_of_the_first(tmp_path):
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "ready\n"
        for way in (
            lambda: Folder.create(tmp_path / "run", ""),
            lambda: Folder.resume(tmp_path / "run"),
        ):
            with pytest.raises(
                ConfigError, match=rf"the run of process {first.pid} is writing there"
            ):
                way()
        first.kill()  # the system releases it
    Folder.resume(tmp_path / "run").close()


def make_link(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(outside)


def make_fifo(path: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_link, make_fifo])
@pytest.mark.parametrize(
    "name",
    [
        *("config.toml", "rounds.jsonl", "summary.json", "lock", "summary.json.tmp"),
        *(
            "checkpoint/00000001.json",
            "checkpoint/00000002.json.tmp",
            "checkpoint/00000001.safetensors",
        ),
    ],
)
def test_links_and_fifos_in_a_folder_are_refused_and_not_followed(start, tmp_path, name, make):
    out, outside = tmp_path / "run", tmp_path / "outside"
    start(rounds=1, out=out)
    outside.write_text("of somebody else")
    make(out / name, outside)
    for way in (
        lambda: start(rounds=2, out=out, resume=True),
        lambda: fq.load_state(out),
        lambda: read_records(out),
        lambda: read_summary(out),
        lambda: Folder.create(out, ""),
    ):
        with pytest.raises(
            RecordError,
            match=rf"the folder .*run was asked for; {Path(name).name} is (a symb|no pla)",
        ):
            way()
    assert outside.read_text() == "of somebody else"


def test_a_checkpoint_folder_elsewhere_is_refused_and_a_link_to_a_run_is_not(start, tmp_path):
    start(rounds=1, out=tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert fq.load_state(tmp_path / "latest").round == 1
    (tmp_path / "run" / "checkpoint").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="checkpoint is a symbolic link"):
        fq.load_state(tmp_path / "run")


def test_folders_are_synced_once_something_was_made_in_them(tmp_path, monkeypatch, start):
    """A new entry is on disk only when its folder is.

    Without this, a power cut could leave a run without its log.
    """
    synced: list[tuple[Path, set[str]]] = []
    sync = files.sync_folder

    def noting(folder: Path) -> None:
        synced.append((folder, {path.name for path in folder.iterdir()}))
        sync(folder)

    for module in (files, folders):
        monkeypatch.setattr(module, "sync_folder", noting)
    out = tmp_path / "a" / "run"
    start(rounds=1, out=out)
    for folder, name in (
        (tmp_path, "a"),
        (out.parent, "run"),
        (out, "rounds.jsonl"),
        (out, "checkpoint"),
    ):
        first = next(names for path, names in synced if path == folder and name in names)
        assert "00000001.json" not in first
        assert "summary.json" not in first


_FULL = """
import resource, sys, torch
import fedquilt as fq
from torch import nn
def net():
    return nn.Sequential(nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 3))
family = fq.trace(net, torch.zeros(2, 4))
x, y = torch.randn(12, 4), torch.arange(12) % 3
data = fq.FederatedData.of((x, y), (x, y), [range(6), range(6, 12)])
def watch(record):
    if record.round == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    fq.run(fq.methods.FedAvg(), family, data, fq.Fleet.of((1.0,), 2, 2), rounds=4, out=sys.argv[1],
           checkpoint=fq.Checkpointing(rounds=1), watch=watch)
except fq.FedquiltError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("bound", "what"),
    [
        (4000, "checkpoint of round 3"),
        pytest.param(200, "round 3 could not be written", marks=pytest.mark.slow),
    ],
)
def test_files_that_may_not_grow_end_the_run_and_leave_the_last_checkpoint(bound, what, tmp_path):
    """The system itself refuses to write, with EFBIG in place of the ENOSPC of a full disk."""
    script = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)" + _FULL,
    ]
    out = tmp_path / "run"
    found = subprocess.run(
        [*script, str(out), str(bound)], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("RecordError")
    assert what in found.stdout
    assert "File too large" in found.stdout
    assert fq.load_state(out).round == 2
    assert [record["round"] for record in lines(out)][:2] == [1, 2]
    assert not list((out / "checkpoint").glob("*.tmp"))


@pytest.fixture
def tiny_disk(tmp_path):
    """Mount a file system of 256 kB, if the machine allows it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tiny_disk, start):
    out, whole = tiny_disk / "run", start()

    def fill(record):
        if record.round == 2:
            with suppress(OSError), (tiny_disk / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    with pytest.raises(RecordError, match="No space left on device") as e:
        start(out=out, watch=fill)
    assert e.value.run.server.round == 3  # what was learnt is not lost
    assert fq.load_state(out).round == 2
    (tiny_disk / "ballast").unlink()
    assert_same(whole, start(out=out, resume=True), atol=0)


def test_a_second_failure_does_not_hide_the_first(start, tmp_path, monkeypatch):
    def full(path, chunks):
        raise OSError(errno.ENOSPC, "No space left on device")

    def watch(record):
        monkeypatch.setattr("fedquilt.runs.checkpoint.write", full)
        raise Stop

    with pytest.raises(Stop) as e:
        start(out=tmp_path / "run", checkpoint=Checkpointing(), watch=watch)
    assert "the checkpoint of round 1 could not be written" in e.value.__notes__[0]


def test_state_is_kept_as_it_is_read_back(start):
    """Tensors are contiguous and have their own memory, because strides and alignment change the
    last bits of a product.
    """
    run = start(engine="vectorized")
    kept = [*run.server.weights.values()]
    for one in run.server.memory.values():
        kept += [
            *one.weights.values(),
            *(value for values in one.slots.values() for value in values.values()),
        ]
    assert len(kept) > 50
    again = files.compact({str(place): value for place, value in enumerate(kept)})
    assert all(again[str(place)].data_ptr() == value.data_ptr() for place, value in enumerate(kept))
    assert isinstance(run.server.memory, ClientStates)
