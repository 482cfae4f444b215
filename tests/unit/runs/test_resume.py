"""Runs are resumed from their folders, and damage to log and checkpoints is survived."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.errors import RecordError
from fedquilt.methods import FedAvg, LocalOnly
from fedquilt.round.server_optimizers import ServerAdam
from fedquilt.runs import checkpoint
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import read_records
from fedquilt.storage import files
from fedquilt.storage.tensor_files import NO_LIMIT, TensorFile, read_state
from tests.conftest import assert_same
from tests.unit.runs.folders import Keeping, Stop, alter_manifest, harm, lines, stop_after, timeless


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
    """A kill leaves two complete rounds after the last checkpoint, and half of a third."""
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


def test_records_survive_lost_checkpoints(start, tmp_path):
    out = tmp_path / "run"
    start(rounds=2, out=out)
    written = (out / "rounds.jsonl").read_bytes()
    for path in (out / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(RecordError, match="has rounds, but there is no checkpoint to resume from"):
        start(rounds=3, out=out, resume=True)
    assert (out / "rounds.jsonl").read_bytes() == written


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
    """Its checksum is right.

    The previous checkpoint is used, and neither threads nor the engine are changed.
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
