"""Trackers, read back with the readers of their tools: every round once, also after a resume, and
failures do not stop a run.
"""

from __future__ import annotations

import json
import logging
import struct
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.round import Grades, Record
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.tracking import (
    TRACKERS,
    About,
    MLflow,
    TensorBoard,
    Tracker,
    Tracking,
    WandB,
    _MLflow,
    _WandB,
    flat,
    scalars,
)

# What mlflow's database layer says to sqlalchemy 2.1 is between the two of them.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FLEET = fq.Fleet.of((1.0, 0.5), 2, 2)
SHARES = {"accuracy/1.0", "accuracy/0.5", "loss/1.0", "loss/0.5"}
ROUND = {"loss", "seconds", "clients", "bytes_down", "bytes_up", "macs"}


class StopError(Exception):
    """An error that ends the process."""


@pytest.fixture
def train(perceptron, make_data, tmp_path):
    """Train four rounds in a folder, with a checkpoint every second round and evaluation at 2 and
    4. `stop` is the last round that is logged.
    """
    data = make_data(perceptron, (6, 5))

    def run(
        *trackers: Tracking, stop: int = 0, out: Path | None = tmp_path / "run", rounds: int = 4
    ) -> fq.Run:
        def watch(record: Record) -> None:
            if record.round == stop:
                raise StopError

        return fq.run(
            fq.methods.HeteroFL(),
            perceptron,
            data,
            FLEET,
            rounds=rounds,
            evaluation=fq.Evaluation(every=2, per_client=False),
            out=out,
            resume=out is not None,
            checkpoint=fq.Checkpointing(rounds=2, seconds=0),
            trackers=trackers,
            watch=watch,
        )

    return run


def killed_and_resumed(train, tracking: Tracking, tmp_path: Path, pause: float = 0) -> fq.Run:
    """Stop a run after round 3, whose state was not saved.

    It is resumed from round 2 and trains round 3 again.
    """
    with pytest.raises(StopError):
        train(tracking, stop=3)
    folder = tmp_path / "run" / "checkpoint"
    for file in folder.glob("00000003*"):  # leaving the folder saved it; a kill would not have
        file.unlink()
    time.sleep(pause)
    return train(tracking)


# --- values -------------------------------------------------------------------------------------


def test_a_record_is_logged_as_numbers_by_name():
    accuracy = {"1.0": 0.5, "0.5": float("nan")}
    grades = Grades("accuracy", {"accuracy": accuracy, "local_accuracy": {"1.0": 0.25}})
    record = Record(3, 0.5, 2, 10, 20, 30, None, grades=grades)
    assert scalars(record) == {
        "seconds": 0.5,
        "clients": 2,
        "bytes_down": 10,
        "bytes_up": 20,
        "macs": 30,
        "accuracy/1.0": 0.5,
        "local_accuracy/1.0": 0.25,
    }


def test_settings_are_hyper_parameters_by_their_paths():
    assert flat({"a": {"b": 1, "c": {"d": "x"}}, "e": [1, 2]}) == {
        "a.b": 1,
        "a.c.d": "x",
        "e": "[1, 2]",
    }


def test_trackers_are_chosen_by_name_with_options_and_written_back():
    parts = {"method": "fedavg", "model": "tiny_resnet", "data": "digits"}
    asked = [
        "tensorboard",
        {"name": "wandb", "mode": "offline"},
        {"name": "mlflow", "uri": "http://x:5000"},
    ]
    experiment = Experiment.of({**parts, "trackers": asked})
    assert experiment.trackers == (
        TensorBoard(),
        WandB(mode="offline"),
        MLflow(uri="http://x:5000"),
    )
    assert Experiment.of(tomllib.loads(experiment.to_toml())) == experiment
    assert [one["name"] for one in write(experiment)["trackers"]] == list(TRACKERS)
    with pytest.raises(ConfigError) as found:
        Experiment.of({**parts, "trackers": ["tensorbord", {"name": "wandb", "mode": "onlin"}]})
    assert (
        "trackers[0].name: there is no tracker named 'tensorbord'. Did you mean 'tensorboard'?"
        in str(found.value)
    )
    assert "trackers[1].mode: 'onlin' was found" in str(found.value)


# --- the three ----------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder)).Reload()


def test_tensorboard_has_every_round_once(train, tmp_path):
    pytest.importorskip("tensorboard")
    run = killed_and_resumed(train, TensorBoard(), tmp_path)
    found = events(tmp_path / "run" / "tensorboard")
    assert set(found.Tags()["scalars"]) == ROUND | SHARES
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.step for event in found.Scalars("accuracy/0.5")] == [2, 4]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx(
        [r.loss for r in run.records]
    )
    hparams = found.PluginTagToContent("hparams")
    assert b"method.local.optimizer.lr" in hparams["_hparams_/session_start_info"]
    assert b"accuracy/0.5" in hparams["_hparams_/experiment"]
    assert hparams.keys() >= {"_hparams_/experiment", "_hparams_/session_start_info"}


def test_tensorboard_without_a_folder_of_the_run(train, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    train(TensorBoard(), out=None, rounds=1)
    train(TensorBoard(), TensorBoard(dir="curves"), out=None, rounds=1)
    assert len(list(Path("tensorboard").glob("heterofl-*"))) == 2  # each has one of its own
    (own,) = Path("curves").glob("heterofl-*")
    assert [event.step for event in events(own).Scalars("loss")] == [1]


def test_names_of_domains_are_converted_for_mlflow():
    pytest.importorskip("mlflow.entities")
    grades = Grades(
        "accuracy", {"accuracy": {"1.0": 0.5}, "accuracy/rotated (30°), left": {"1.0": 0.25}}
    )
    sent = []
    client = SimpleNamespace(log_batch=lambda id, metrics: sent.extend(metrics))
    _MLflow(client, "id").log(Record(1, 1.0, 2, 3, 4, 5, 0.5, grades=grades))
    names = {one.key: one.value for one in sent}
    assert names["accuracy/rotated _30___ left/1.0"] == 0.25
    assert names["accuracy/1.0"] == 0.5


@quiet
def test_mlflow_has_every_round_once(train, tmp_path, monkeypatch):
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = killed_and_resumed(train, MLflow(uri, experiment="tests"), tmp_path)
    store = client(uri)
    (found,) = store.search_runs([store.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "FINISHED"
    assert set(found.data.metrics) == ROUND | SHARES
    history = store.get_metric_history(found.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert [metric.value for metric in history] == pytest.approx([r.loss for r in run.records])
    assert found.data.params["method.local.optimizer.lr"] == str(run.method.local.optimizer.lr)


def test_wandb_offline_has_every_round(train, tmp_path):
    pytest.importorskip("wandb")
    run = train(WandB(mode="offline"))
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    id = json.loads((tmp_path / "run" / "tracking.json").read_text())["id"]
    assert file.name == f"run-{id}.wandb"
    deadline = time.monotonic() + 30
    while len((found := logged(file))[0]) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)  # a process of wandb's own writes it, and may be a moment behind
    history, config = found
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    assert [row["loss"] for row in history] == pytest.approx([r.loss for r in run.records])
    assert [set(row) & SHARES for row in history] == [set(), SHARES, set(), SHARES]
    assert config["method.local.optimizer.lr"] == run.method.local.optimizer.lr


def test_wandb_offline_continues_in_another_folder_of_the_same_run(train, tmp_path):
    """As the page on tracking states, the round that was trained twice is in both folders."""
    pytest.importorskip("wandb")
    # folders are named by the second
    killed_and_resumed(train, WandB(mode="offline"), tmp_path, pause=1.1)
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    files = [file for folder in folders for file in folder.glob("run-*.wandb")]
    assert len({file.name for file in files}) == 1
    deadline = time.monotonic() + 30
    steps: list[list[int]] = []
    while sum(map(len, steps)) < 5 and time.monotonic() < deadline:
        steps = sorted([row["_step"] for row in logged(file)[0]] for file in files)
    assert steps == [[1, 2, 3], [3, 4]]


def test_wandb_gets_no_round_twice():
    """Online, a resumed run has the number of its next step. A list replaces the site."""
    steps: list[int] = []

    class Site:
        def log(self, row: Mapping[str, float], step: int, commit: bool) -> None:
            steps.append(step)

    tracker = _WandB(Site(), first=4)
    for round in (3, 4, 5):
        tracker.log(Record(round, 0.5, 2, 10, 20, 30, 1.0))
    assert steps == [4, 5]


def logged(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of an offline file's history, and its configuration."""
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    history, config = [], {}
    for data in entries(file.read_bytes()):
        entry = Entry.FromString(data)
        if entry.WhichOneof("record_type") == "history":
            items = entry.history.item
            history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
        elif entry.WhichOneof("record_type") == "run":
            config |= {item.key: json.loads(item.value_json) for item in entry.run.config.update}
    return history, config


def entries(log: bytes) -> Iterator[bytes]:
    """Yield the entries of a file in LevelDB's log format, which follows seven bytes of wandb's:
    pieces of (checksum, length, kind) in blocks of 32 KiB.
    """
    place, held = 7, b""
    while place + 7 <= len(log):
        if (left := -place % 32768) and left < 7:  # no room for a piece: padding
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        held += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield held
            held = b""


# --- trouble ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frail(Tracking):
    """A tracker that fails when it logs a round."""

    fails: int = 2

    def open(self, about: About) -> Tracker:
        return Collecting(self.fails)


class Collecting:
    """A tracker that collects the rounds it was called with."""

    all: ClassVar[list[Any]] = []

    def __init__(self, fails: int) -> None:
        self.fails = fails

    def log(self, record: Record) -> None:
        if record.round == self.fails:
            raise OSError("no space left")
        self.all.append(record.round)

    def finish(self, summary: Mapping[str, Any], is_complete: bool) -> None:
        self.all.append((summary["rounds"], is_complete))


@pytest.fixture(autouse=True)
def _clear_collected():
    Collecting.all.clear()


def test_a_failing_tracker_gives_one_warning_and_the_run_continues(train, caplog):
    with caplog.at_level(logging.WARNING, "fedquilt"):
        run = train(Frail(fails=2), Frail(fails=0))
    assert run.server.round == 4
    assert Collecting.all == [1, 1, 2, 3, 4, (4, True)]  # The other tracker continues.
    (line,) = caplog.messages
    assert line.startswith(
        "Tracking with Frail failed in round 2, and the run continues without it. OSError: no "
        "space left"
    )
    assert "test_tracking.py:" in line  # The place in the user's own code.


def test_a_stopped_run_is_tracked_as_stopped(train):
    with pytest.raises(StopError):
        train(Frail(fails=0), stop=3)
    assert Collecting.all == [1, 2, 3, (3, False)]


@pytest.mark.parametrize(("name", "kind"), TRACKERS.items())
def test_a_missing_package_is_reported_before_anything_is_done(
    name, kind, train, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(kind, "package", "nowhere_to_be_found")
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{name}\]'"):
        train(kind())
    assert not (tmp_path / "run").exists()
    assert main(["run", "--track", name, "--out", str(tmp_path / "run")]) == 2
    assert "which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_be_opened_is_reported_before_the_first_round(train, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "taken").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"tracking with TensorBoard was asked for; it could not be opened\. \w+Error",
    ):
        train(Frail(fails=0), TensorBoard(dir=str(tmp_path / "taken")))
    assert Collecting.all == [(0, False)]  # what had been opened is closed


# --- the command line ---------------------------------------------------------------------------


def test_methods_that_are_compared_are_tracked_side_by_side(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    quick = ["--rounds", "2", "--clients", "4", "--cohort", "1", "--epochs", "1"]
    assert (
        main(["compare", "fedavg", "heterofl", *quick, "--track", "tensorboard", "--out", "c"]) == 0
    )
    for method in ("fedavg", "heterofl"):
        found = events(Path("c", method, "seed0", "tensorboard"))
        assert [event.step for event in found.Scalars("bytes_up")] == [1, 2]
        assert (
            b"fleet.cohort" in found.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        )


def test_a_resumed_run_continues_its_tracking(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    quick = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
    assert main(["run", *quick, "--track", "tensorboard", "--out", "d"]) == 0
    assert main(["run", "--resume", "d", "--rounds", "3"]) == 0
    assert [event.step for event in events(Path("d", "tensorboard")).Scalars("loss")] == [1, 2, 3]
