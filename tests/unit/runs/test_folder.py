"""A run's folder: what is in it, who may write there, and how a run goes on from it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.errors import ConfigError, RecordError, TrainingError
from fedquilt.fleets.availability import Diurnal, Trace
from fedquilt.methods import FedAvg, FedBN, FedProx, LocalOnly
from fedquilt.round import Grades, Record
from fedquilt.round.merge import ServerAdam
from fedquilt.runs import checkpoint
from fedquilt.runs import fingerprint as fingerprints
from fedquilt.runs import folder as folders
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import ClientStates
from fedquilt.runs.damage import damage_of
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.signals import undisturbed
from fedquilt.runs.summary_file import read_summary
from fedquilt.storage import files
from fedquilt.storage.tensor_files import NO_LIMIT, TensorFile, read_state
from tests.conftest import assert_same, with_local

EVERY = Checkpointing(rounds=1)


@dataclass(frozen=True)
class Keeping(FedBN):
    """FedBN whose clients also keep their momentum."""

    def learner(self, job, world):
        return replace(super().learner(job, world), keep_slots=True)


@pytest.fixture
def data(residual, make_data):
    return make_data(residual, (5, 6, 4, 7))


@pytest.fixture
def start(residual, data, play):
    """Two of four clients a round, so that memories of some are older than of others."""

    def start(
        method=Keeping(local=fq.LocalTraining(batch_size=4, norm="per_client")), rounds=4, **options
    ):
        fleet = options.pop("fleet", None) or fq.Fleet.of((1.0, 0.5), 4, 2)
        options = {"evaluation": fq.Evaluation(every=2), "checkpoint": EVERY, **options}
        return play(
            method,
            options.pop("family", residual),
            options.pop("data", data),
            fleet=fleet,
            rounds=rounds,
            **options,
        )

    return start


def lines(out: Path) -> list[dict]:
    """Return the rounds that are written, without their checksums."""
    plain = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "check"} for record in plain]


def timeless(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


class Stop(Exception):  # noqa: N818
    """Something that has nothing to do with fedquilt."""


def stop_after(round: int, kind: type[BaseException] = Stop):
    def watch(record):
        if record.round == round:
            raise kind

    return watch


# --- what is in it ------------------------------------------------------------------------------


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
    """It had accuracy, and other metrics beside it, and did not name the main one."""
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
    """The method has a setting that depends on the number of rounds."""

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


# --- going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(server_optimizer=ServerAdam()),
        Keeping(local=fq.LocalTraining(batch_size=4, norm="per_client")),
        LocalOnly(),
        fq.methods.FedRolex(local=fq.LocalTraining(batch_size=4, norm="per_client")),
        fq.methods.SplitMix(local=fq.LocalTraining(batch_size=4, norm="per_client-all"), base=0.5),
        fq.methods.FedRolex(local=fq.LocalTraining(batch_size=4, norm="post-own")),
    ],
    ids=lambda method: f"{type(method).__name__}-{method.local.norm.name}",
)
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["spilling", "held"])
def test_an_interrupted_run_is_resumed_with_the_same_result(limit, engine, method, start, tmp_path):
    whole = start(method, rounds=5, engine=engine)
    out, options = tmp_path / "run", {"engine": engine, "client_state_memory": limit, "rounds": 5}
    for round in (1, 3):
        with pytest.raises(Stop):
            start(method, out=out, resume=True, watch=stop_after(round), **options)
    again = start(method, out=out, resume=True, **options)
    assert_same(whole, again, atol=0)
    assert [timeless(record) for record in lines(out)] == [
        timeless(record) for record in whole.history
    ]


def test_rounds_after_the_checkpoint_are_trained_again(start, tmp_path):
    """As a kill leaves it: two rounds were written down after the last checkpoint, and half of a
    third.
    """
    whole, out = start(rounds=5), tmp_path / "run"
    start(rounds=2, out=out)
    (out / "summary.json").unlink()
    with (out / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"round": 3}) + "\n" + json.dumps({"round": 4}) + '\n{"rou')
    again = start(rounds=5, out=out, resume=True)
    assert [timeless(record) for record in lines(out)][2:] == [
        timeless(record) for record in whole.history
    ][2:]
    assert_same(whole, replace(again, records=whole.records), atol=0)


def test_a_finished_run_returns_at_once_with_its_state(start, tmp_path):
    out = tmp_path / "run"
    run = start(out=out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = start(out=out, resume=True, watch=stop_after(1))
    assert_same(run, again, atol=0)
    assert again.history == run.history
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_an_incomplete_line_is_removed_even_if_no_round_is_left(start, tmp_path):
    start(out=tmp_path / "run")
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "sec')
    start(out=tmp_path / "run", resume=True)
    assert len(lines(tmp_path / "run")) == 4


def test_a_finished_run_can_be_extended(start, tmp_path):
    out = tmp_path / "run"
    start(rounds=2, out=out)
    with pytest.raises(Stop):
        start(rounds=4, out=out, resume=True, watch=stop_after(3))
    assert not (out / "summary.json").exists()  # it has not ended
    again = start(rounds=4, out=out, resume=True)
    assert json.loads((out / "summary.json").read_text())["rounds"] == 4
    assert_same(start(rounds=4), again, atol=0)


def test_resume_starts_a_run_in_an_empty_folder(start, tmp_path):
    assert_same(start(), start(out=tmp_path / "new", resume=True), atol=0)


def test_threads_and_engine_settings_are_restored(start, tmp_path, monkeypatch):
    out, asked = tmp_path / "run", []
    start(rounds=1, out=out, engine="vectorized")
    manifest = json.loads((out / "checkpoint" / "00000001.json").read_text())["about"]
    assert manifest["threads"] == torch.get_num_threads() == 1
    assert manifest["engine"]["memory"] == 256 << 20
    assert manifest["here"]["torch"] == torch.__version__
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    run = fq.prepare(
        *_parts(start(rounds=1, engine="vectorized")), engine="vectorized", precision="fp64"
    )
    run.engine.memory = 1
    with Folder.resume(out) as folder:
        assert folder.load(run) == 1
        assert folder.config.startswith("#")
    assert asked == [1]
    assert run.engine.memory == 256 << 20


def test_engine_settings_that_do_not_exist_are_refused(data):
    engine = Vectorized(data)
    assert engine.with_settings(engine.settings) is engine
    told = r"Vectorized was to have the setting 'lanes' of a checkpoint; its settings are .*memory"
    with pytest.raises(RecordError, match=told):
        engine.with_settings({**engine.settings, "lanes": 3})


def _parts(run: fq.Run):
    return run.method, run.world.family, run.data, run.fleet


def test_another_torch_version_is_reported(start, tmp_path, monkeypatch, caplog):
    start(rounds=1, out=tmp_path / "run")
    monkeypatch.setattr(torch, "__version__", "9.9")
    start(rounds=2, out=tmp_path / "run", resume=True)
    assert "continues with 9.9: last digits may differ" in caplog.text


# --- refusals -----------------------------------------------------------------------------------


def test_another_run_is_refused_with_the_differences(start, tmp_path, data, perceptron, make_data):
    out = tmp_path / "run"
    start(FedProx(mu=0.5), rounds=1, out=out)
    before = {path: path.read_bytes() for path in (out / "checkpoint").iterdir()}
    others = {
        r"method\.mu: 0\.5 there, 0\.25 here": {"method": FedProx(mu=0.25)},
        r"method: FedProx there, FedAvg here": {"method": FedAvg()},
        r"seed: 0 there, 1 here": {"seed": 1},
        r"data\.targets: int64\[22\] \w+ there, int64\[22\] \w+ here": {
            "data": replace(data, targets=data.targets.flip(0))
        },
        r"fleet\.cohort: 2 there, 3 here": {"fleet": fq.Fleet.of((1.0, 0.5), 4, 3)},
        r"fleet\.presence: None there, \w+ here": {
            "fleet": fq.Fleet.of((1.0, 0.5), 4, 2, availability=Diurnal())
        },
        r"engine: Sequential there, Vectorized here": {"engine": "vectorized"},
        r"model: \w+ there, \w+ here": {
            "family": perceptron,
            "data": make_data(perceptron, (5, 6, 4, 7)),
        },
    }
    for message, change in others.items():
        options = {"method": FedProx(mu=0.5), **change}
        with pytest.raises(
            ConfigError,
            match=rf"the run in {out} was to be resumed, but it is another one[^@]*{message}",
        ):
            start(rounds=2, out=out, resume=True, **options)
    assert {path: path.read_bytes() for path in (out / "checkpoint").iterdir()} == before
    assert start(FedProx(mu=0.5), rounds=2, out=out, resume=True).server.round == 2


def test_a_run_from_before_a_field_was_added_is_resumed(start, tmp_path, monkeypatch):
    """A field that a checkpoint does not have counts as its default."""
    out, link = tmp_path / "run", fq.Link(codec=fq.links.Codec(bits=8))
    fingerprint = fingerprints.fingerprint

    def earlier(run):
        return {
            name: value
            for name, value in fingerprint(run).items()
            if not name.endswith((".keep_optimizer", ".rotate"))
        }

    with monkeypatch.context() as patched:
        patched.setattr(folders, "fingerprint", earlier)
        start(FedAvg(), rounds=1, out=out, link=link)
    others = {
        r"method\.local\.keep_optimizer: nothing of the kind there, True here": {
            "method": FedAvg().with_local(keep_optimizer=True)
        },
        r"rotate: nothing of the kind there, True here": {
            "link": fq.Link(codec=fq.links.Codec(bits=8, rotate=True))
        },
    }
    for message, change in others.items():
        options = {"method": FedAvg(), "link": link, **change}
        with pytest.raises(ConfigError, match=message):
            start(rounds=2, out=out, resume=True, **options)
    assert start(FedAvg(), rounds=2, out=out, link=link, resume=True).server.round == 2


def test_a_default_with_more_values_is_a_difference():
    @dataclass
    class Widths:
        shares: tuple[float, ...] = (1.0, 0.5)

    saved = {leaf.name: leaf.value for leaf in fingerprints._leaves("fleet", Widths((1.0,)))}
    with pytest.raises(
        ConfigError, match=r"fleet\.shares\[1\]: nothing of the kind there, 0\.5 here"
    ):
        fingerprints.check_same_run(
            saved, list(fingerprints._leaves("fleet", Widths())), "a run was to be resumed"
        )


def test_other_initial_weights_are_noticed(start, tmp_path, residual):
    """A module that brings its own weights has the same axes with others."""
    out = tmp_path / "run"
    start(rounds=1, out=out)
    other = fq.trace(lambda: torch.manual_seed(9) and residual._factory(), residual.example_inputs)
    with pytest.raises(ConfigError, match=r"initial"):
        start(rounds=2, out=out, resume=True, family=other)


def test_another_trace_is_noticed_but_not_another_path_of_its_file(start, tmp_path):
    out = tmp_path / "run"

    def go_on(rounds, name, text):
        (tmp_path / name).write_text(text)
        fleet = fq.Fleet.of((1.0, 0.5), 4, 2, availability=Trace(str(tmp_path / name)))
        return start(rounds=rounds, out=out, resume=True, fleet=fleet)

    all_of_them, one = "client,start\n0,0\n1,0\n2,0\n3,0\n", "client,start\n0,0\n"
    go_on(1, "trace.csv", all_of_them)
    with pytest.raises(ConfigError, match=r"fleet\.presence: \w+ there, \w+ here"):
        go_on(2, "trace.csv", one)
    assert go_on(2, "moved.csv", all_of_them).server.round == 2


class Scaled(torch.nn.Sequential):
    """What it is multiplied by is no weight, and in no checkpoint."""

    def __init__(self, scale: float) -> None:
        super().__init__(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return super().forward(x * self.scale)


def test_other_constants_are_noticed(start, tmp_path, make_data):
    out = tmp_path / "run"
    one, other = (
        fq.trace(lambda scale=scale: Scaled(scale), torch.zeros(2, 6)) for scale in (1.0, 2.0)
    )
    options = {"method": FedAvg(), "data": make_data(one, (5, 6, 4, 7)), "out": out, "resume": True}
    start(rounds=1, family=one, **options)
    with pytest.raises(
        ConfigError, match=r"constants\.scale: float32\[\] \w+ there, float32\[\] \w+ here"
    ):
        start(rounds=2, family=other, **options)
    assert start(rounds=2, family=one, **options).server.round == 2


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


def test_records_survive_lost_checkpoints(start, tmp_path):
    out = tmp_path / "run"
    start(rounds=2, out=out)
    written = (out / "rounds.jsonl").read_bytes()
    for path in (out / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(RecordError, match="has rounds, but there is no checkpoint to resume from"):
        start(rounds=3, out=out, resume=True)
    assert (out / "rounds.jsonl").read_bytes() == written


def harm(out: Path, place: int, old: bytes = b'"loss": ', new: bytes = b'"loss": 9') -> None:
    """Change a line of rounds.jsonl."""
    text = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    text[place] = text[place].replace(old, new, 1)
    (out / "rounds.jsonl").write_bytes(b"".join(text))


def test_a_run_is_resumed_from_its_checkpoint_if_the_log_lacks_rounds(start, tmp_path, caplog):
    out = tmp_path / "run"
    whole = start(rounds=5)
    start(rounds=3, out=out)
    damaged = b"".join((out / "rounds.jsonl").read_bytes().splitlines(keepends=True)[1:2])
    (out / "rounds.jsonl").write_bytes(damaged)
    again = start(rounds=5, out=out, resume=True)
    assert "rounds.jsonl is damaged: rounds 1, 3 are missing from it" in caplog.text
    assert [record.round for record in again.records] == [2, 4, 5]
    assert [record["round"] for record in lines(out)] == [2, 4, 5]
    assert_same(whole, replace(again, records=whole.records), atol=0)
    assert json.loads((out / "summary.json").read_text())["missing_rounds"] == [[1, 1], [3, 3]]
    assert [record.round for record in read_records(out)] == [2, 4, 5]


def test_an_edited_line_is_noticed_and_removed_on_resume(start, tmp_path, caplog):
    out = tmp_path / "run"
    whole = start(rounds=4)
    start(rounds=3, out=out)
    harm(out, 0)
    before = (out / "rounds.jsonl").read_bytes()
    with pytest.raises(
        RecordError, match=r"rounds\.jsonl is not what was written: line 1: its checksum differs"
    ):
        read_records(out)
    again = start(rounds=4, out=out, resume=True)
    assert "round 1 is missing from it" in caplog.text
    assert [record["round"] for record in lines(out)] == [2, 3, 4]
    assert (out / "rounds.jsonl.damaged").read_bytes() == before
    assert_same(whole, replace(again, records=whole.records), atol=0)


def test_a_log_that_is_missing_or_of_another_run_does_not_affect_the_weights(
    start, tmp_path, caplog
):
    out = tmp_path / "run"
    whole = start(rounds=3)
    start(rounds=2, out=out)
    start(rounds=2, out=tmp_path / "other", seed=1)
    for swap in (
        lambda: (tmp_path / "other" / "rounds.jsonl").rename(out / "rounds.jsonl"),
        lambda: None,
    ):
        (out / "rounds.jsonl").unlink()
        swap()
        again = start(rounds=3, out=out, resume=True)
        assert_same(whole, replace(again, records=whole.records), atol=0)
    assert "rounds 1 to 2 are missing from it" in caplog.text


def test_a_log_of_an_earlier_version_is_continued_with_checksums(start, tmp_path, caplog):
    out = tmp_path / "run"
    start(rounds=2, out=out)
    file = out / "rounds.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in lines(out)))
    manifest = out / "checkpoint" / "00000002.json"
    plain = json.loads(manifest.read_text())
    del plain["about"]["check"], plain["sha256"]
    manifest.write_text(json.dumps({**plain, "sha256": checkpoint._digest(plain)}))
    start(rounds=4, out=out, resume=True)
    assert ["check" in json.loads(line) for line in file.read_text().splitlines()] == [
        False,
        False,
        True,
        True,
    ]
    start(rounds=5, out=out, resume=True)
    assert "damaged" not in caplog.text
    harm(out, 0)
    start(rounds=6, out=out, resume=True)
    assert "rounds 1 to 2 are missing from it" in caplog.text
    assert [record["round"] for record in lines(out)] == [3, 4, 5, 6]


def alter_manifest(file: Path, **about: object) -> None:
    """Change what a manifest says about its run, and correct its checksum."""
    plain = json.loads(file.read_text())
    del plain["sha256"]
    plain["about"] |= about
    file.write_text(json.dumps({**plain, "sha256": checkpoint._digest(plain)}))


@pytest.mark.parametrize(
    "about",
    [
        *(
            {"threads": "x"},
            {"threads": 0},
            {"threads": 10**6},
            {"run": None},
            {"run": [1]},
            {"here": 3},
            {"check": 3},
        ),
        *({"settled_for": -1}, {"settled_for": "x"}, {"settled_for": 2**63}),
        *(
            {"engine": {"train": "x"}},
            {"engine": {"memory": "x"}},
            {"engine": {"memory": -1}},
            {"engine": None},
        ),
        *(
            {"sample": {"shape": [10**20], "dtype": "float32", "classes": 0}},
            {"sample": {"shape": [], "dtype": "load"}},
        ),
    ],
    ids=str,
)
def test_values_of_a_manifest_that_no_run_writes_are_refused(
    start, tmp_path, about, caplog, monkeypatch
):
    """Its checksum is right. The checkpoint before is used, and neither threads nor the engine are
    changed.
    """
    out = tmp_path / "run"
    whole = start(rounds=3, engine="vectorized")
    start(rounds=2, out=out, engine="vectorized")
    alter_manifest(out / "checkpoint" / "00000002.json", **about)
    again = start(rounds=3, out=out, resume=True, engine="vectorized")
    assert "Checkpoint 00000002: " in caplog.text
    assert "Resuming from round 1 instead" in caplog.text
    assert_same(whole, again, atol=0)
    assert callable(again.engine.train)


def test_a_checkpoint_with_other_weights_than_the_model_is_skipped(start, tmp_path, caplog):
    out = tmp_path / "run"
    whole = start(rounds=3)
    start(rounds=2, out=out)
    folder = out / "checkpoint"
    with TensorFile.open(folder / "00000002.safetensors", NO_LIMIT) as file:
        state = read_state(file, torch.device("cpu"))
    name = next(iter(state.weights))
    state.weights[name] = torch.zeros(1)
    written = files.write(
        folder / "00000002.safetensors",
        files.Blob.of_state(state.weights, state.slots, state.extras).chunks(),
    )
    plain = json.loads((folder / "00000002.json").read_text())
    del plain["sha256"]
    plain["server"] = vars(written)
    (folder / "00000002.json").write_text(
        json.dumps({**plain, "sha256": checkpoint._digest(plain)})
    )
    again = start(rounds=3, out=out, resume=True)
    assert f"Checkpoint 00000002: {name} is torch.float32 [1]" in caplog.text
    assert_same(whole, again, atol=0)


def test_settings_that_differ_from_the_checkpoint_are_reported(start, tmp_path, caplog):
    out = tmp_path / "run"
    start(rounds=1, out=out)
    start(rounds=2, out=out, resume=True)
    assert "config.toml" not in caplog.text
    (out / "config.toml").write_text(
        (out / "config.toml").read_text().replace("PreResNet", "PreResNot")
    )
    start(rounds=3, out=out, resume=True)
    assert "config.toml is not the one that the checkpoint was written with" in caplog.text


def test_every_flipped_bit_of_a_summary_is_harmless_or_an_error(start, tmp_path):
    out = tmp_path / "run"
    start(rounds=1, out=out)
    file = out / "summary.json"
    intact, summary = file.read_bytes(), read_summary(out)
    found = 0
    for place in range(0, len(intact), 7):
        harmed = bytearray(intact)
        harmed[place] ^= 1 << place % 8
        file.write_bytes(harmed)
        read = None
        with suppress(RecordError):
            read = read_summary(out)
        assert read in (None, summary)
        found += read is None
    assert found > len(intact) // 7 // 2


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"rounds": None},
            {"members": 3},
            {"members": {"1.0": {}}},
            {"members": {"x": {"params": 1, "macs": 1}}},
        ),
        *(
            {"metrics": {"accuracy": {"x": 1.0}}},
            {"labels": [1]},
            {"main": 3},
            {"seconds": "x"},
            {"note": {}},
        ),
        {"bytes_up": [1]},
    ],
    ids=str,
)
def test_a_summary_without_checksums_is_checked_for_what_a_run_writes(start, tmp_path, change):
    out = tmp_path / "run"
    run = start(rounds=1, out=out)
    (out / "summary.json").write_text(json.dumps({**run.summary, **change}))
    with pytest.raises(
        RecordError, match=r"summary\.json is damaged: .* Delete it to finish the run again"
    ):
        read_summary(out)
    (out / "summary.json").write_text(json.dumps(run.summary))  # as earlier versions wrote it
    assert read_summary(out) == run.summary


def test_a_summary_that_is_nested_deeply_is_an_error(tmp_path):
    (tmp_path / "summary.json").write_text(100_000 * "[")
    with pytest.raises(RecordError, match=r"summary\.json is damaged: "):
        read_summary(tmp_path)


def test_the_log_of_another_run_in_a_finished_one_is_noticed(start, tmp_path):
    for name, seed in (("run", 0), ("other", 1)):
        start(rounds=2, out=tmp_path / name, seed=seed)
    (tmp_path / "other" / "rounds.jsonl").rename(tmp_path / "run" / "rounds.jsonl")
    assert damage_of(tmp_path / "run") == [
        "rounds.jsonl: its last line is not the one that the run wrote last"
    ]


def test_damage_of_a_finished_run_is_listed(start, tmp_path):
    out = tmp_path / "run"
    start(rounds=3, out=out)
    assert damage_of(out) == []
    harm(out, 1)
    (out / "checkpoint" / "00000002.json").unlink()
    with (out / "checkpoint" / "00000003.safetensors").open("ab") as file:
        file.write(b"x")
    (out / "config.toml").write_text("")
    told = "\n".join(damage_of(out))
    for words in (
        "config.toml: it is not the one that the run had when it ended",
        "checkpoint 00000003: 00000003.safetensors has",
        "checkpoint/00000002.safetensors: no checkpoint lists it",
        "rounds.jsonl: line 2: its checksum differs",
        "rounds.jsonl: round 2 is missing",
    ):
        assert words in told


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
    """A new entry is on disk only when its folder is. Otherwise a power cut could leave a run
    without its log.
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


# --- trouble on the way -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stop])
def test_the_state_is_saved_however_a_run_stops(kind, start, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(kind):
        start(out=out, checkpoint=Checkpointing(), watch=stop_after(3, kind))
    assert fq.load_state(out).round == 3
    assert len(lines(out)) == 3
    assert_same(start(), start(out=out, resume=True), atol=0)


def test_a_failed_round_leaves_the_state_before_it(start, tmp_path):
    class Exploding:
        def __call__(self, round):
            return 1.0 if round < 2 else 1e200

    out, method = (
        tmp_path / "run",
        with_local(FedAvg(), batch_size=2, norm="tracked", schedule=Exploding()),
    )
    with pytest.raises(TrainingError) as e:
        start(method, out=out, checkpoint=Checkpointing())
    assert e.value.run.server.round == fq.load_state(out).round == len(lines(out)) == 2


def test_a_failed_evaluation_leaves_the_client_states_before_it(start, monkeypatch):
    from fedquilt.engines import Sequential

    def broken(self, federation, exams, batch_size, by_domain=False):
        raise Stop

    run = start(rounds=1, evaluation=fq.Evaluation(every=2))
    before = dict(run.server.memory)
    monkeypatch.setattr(Sequential, "evaluate", broken)
    with pytest.raises(Stop):
        run.train(3)
    assert dict(run.server.memory) == before
    assert run.server.round == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_delayed_until_a_round_is_recorded(number):
    seen = []
    before = signal.signal(number, signal.default_int_handler)

    def work():
        with undisturbed():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            seen.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["whole"]
    with pytest.raises(KeyboardInterrupt):  # and afterwards it is as before
        signal.raise_signal(number)
    signal.signal(number, before)


def test_ctrl_c_while_a_round_is_written_stops_after_it(start, tmp_path):
    seen = []

    def watch(record):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        seen.append(record.round)

    with pytest.raises(KeyboardInterrupt):
        start(out=tmp_path / "run", watch=watch)
    assert seen == [1]
    assert fq.load_state(tmp_path / "run").round == len(lines(tmp_path / "run")) == 1


def test_runs_in_another_thread_are_left_alone(start, tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(start(rounds=1, out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert done[0].server.round == 1


_FULL = """
import resource, sys, torch
import fedquilt as fq
from torch import nn
family = fq.trace(lambda: nn.Sequential(nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 3)), torch.zeros(2, 4))
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
    """A real refusal of the system to write on: EFBIG where a full disk says ENOSPC."""
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
    """A file system of 256 kB, where the machine lets us mount one."""
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


# --- cost ---------------------------------------------------------------------------------------


def test_state_is_kept_as_it_is_read_back(start):
    """Contiguous and alone in its memory: strides and alignment change the last bits of a product."""
    run = start(engine="vectorized")
    kept = [*run.server.weights.values()]
    for one in run.server.memory.values():
        kept += [
            *one.weights.values(),
            *(value for values in one.slots.values() for value in values.values()),
        ]
    assert len(kept) > 50
    again = files.settled(dict(enumerate(kept)))
    assert all(again[place].data_ptr() == value.data_ptr() for place, value in enumerate(kept))
    assert isinstance(run.server.memory, ClientStates)


def test_large_arrays_are_compared_by_some_of_their_rows(monkeypatch):
    monkeypatch.setattr(fingerprints, "MAX_HASHED_BYTES", 64)
    one = torch.arange(1000)
    other = one.clone()
    other[1] = 7
    first = one.clone()
    first[0] = 7
    assert fingerprints._digest(one) == fingerprints._digest(other) != fingerprints._digest(first)
