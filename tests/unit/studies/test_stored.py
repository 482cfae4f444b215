"""Stored results: small, whole, read as they were written, and never replaced unseen."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from fedquilt.errors import ConfigError, RecordError
from fedquilt.studies.stored import MAX_BYTES, read_config, read_stored, store, stored_name

CONFIG = 'method = "fedavg"\nrounds = 3\n'


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "results" / "paper" / "name-seed3"


def test_a_result_is_read_as_it_was_stored(result, run_folder, target):
    one = result("fedavg", 3, [0.5, 0.75, 0.25])
    one = replace(one, summary={**one.summary, "seed": 3})
    store(one, run_folder, target, {"command": "fedquilt reproduce x"})
    found = read_stored(target)
    assert (found.entry, found.seed, found.records) == ("fedavg", 3, tuple(one.records))
    assert {key: found.summary[key] for key in one.summary} == one.summary
    assert found.summary["best"] == {
        "round": 2,
        "accuracy": {"1.0": 0.75},
        "metrics": {"accuracy": {"1.0": 0.75}},
    }
    assert found.summary["about"]["command"] == "fedquilt reproduce x"
    assert set(found.summary["about"]["versions"]) == {"fedquilt", "torch", "python"}
    assert read_config(target) == {"method": "fedavg", "rounds": 3}
    assert sorted(file.name for file in target.iterdir()) == [
        "config.toml",
        "rounds.jsonl.gz",
        "summary.json",
    ]


def test_files_are_named_without_their_folders(result, run_folder, target):
    lines = (
        '[data]\nname = "/there/mine.npz"\n\n[model]\nname = "searched"\nsupernet = '
        '"/there/tiny.safetensors"\n'
    )
    (run_folder / "config.toml").write_text(lines)
    store(result("rafl", 0, [0.5]), run_folder, target, {})
    config = read_config(target)
    assert config["data"] == {"name": "mine.npz"}
    assert config["model"] == {"name": "searched", "supernet": "tiny.safetensors"}


def test_measures_without_training_have_no_rounds(result, run_folder, target):
    store(replace(result("fedavg", 0, [0.5]), records=()), run_folder, target, {})
    assert not (target / "rounds.jsonl.gz").exists()
    assert read_stored(target).records == ()


def test_the_same_run_again_is_left_alone(result, run_folder, target):
    store(result("fedavg", 0, [0.5]), run_folder, target, {})
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    store(result("fedavg", 0, [0.75]), run_folder, target, {})
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_another_run_in_the_folder_is_refused(result, run_folder, target):
    store(result("fedavg", 0, [0.5]), run_folder, target, {})
    (run_folder / "config.toml").write_text(CONFIG.replace("3", "4"))
    with pytest.raises(ConfigError, match="it holds a run with other settings"):
        store(result("fedavg", 0, [0.5]), run_folder, target, {})


def test_a_folder_that_was_not_finished_is_written_again(result, run_folder, target):
    target.mkdir(parents=True)
    (target / "config.toml").write_text("half")
    store(result("fedavg", 0, [0.5]), run_folder, target, {})
    assert read_config(target)["rounds"] == 3
    assert len(read_stored(target).records) == 1


def test_a_result_that_is_too_large_is_refused(result, run_folder, target):
    about = {"command": "x" * MAX_BYTES}
    with pytest.raises(
        ConfigError, match=r"it would take 10\d,\d\d\d bytes, and at most 100,000 are stored"
    ):
        store(result("fedavg", 0, [0.5]), run_folder, target, about)
    assert not target.exists()


def test_files_that_cannot_be_read_or_written_are_one_error(result, run_folder, target):
    target.parent.mkdir(parents=True)
    target.write_text("a file is in the way")
    with pytest.raises(RecordError, match="could not be written"):
        store(result("fedavg", 0, [0.5]), run_folder, target, {})
    (run_folder / "config.toml").unlink()
    with pytest.raises(RecordError, match=r"config\.toml cannot be read: No such file"):
        store(result("fedavg", 0, [0.5]), run_folder, target, {})


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b'{"round": 1}\n' * 99)[:-9],
        gzip.compress(b"{"),
        gzip.compress(b"3"),
        gzip.compress(b'{"what": 1}'),
        gzip.compress(b"\xff"),
    ],
    ids=["other", "cut", "half", "number", "keys", "text"],
)
def test_damaged_rounds_are_one_error(content, result, run_folder, target):
    store(result("fedavg", 0, [0.5]), run_folder, target, {})
    (target / "rounds.jsonl.gz").write_bytes(content)
    with pytest.raises(RecordError, match=r"rounds\.jsonl\.gz is damaged"):
        read_stored(target)


def test_damaged_or_missing_summaries_and_settings_are_one_error(result, run_folder, target):
    store(result("fedavg", 0, [0.5]), run_folder, target, {})
    (target / "summary.json").write_text("{")
    with pytest.raises(RecordError, match=r"summary\.json is damaged"):
        read_stored(target)
    (target / "summary.json").unlink()
    with pytest.raises(RecordError, match=r"it has no summary\.json"):
        read_stored(target)
    (target / "config.toml").write_text("=")
    with pytest.raises(RecordError, match=r"config\.toml cannot be read"):
        read_config(target)


def test_seconds_are_shortened_and_counts_are_not(result, record, run_folder, target):
    long = replace(record(1, {"1.0": 1 / 3}, macs=123456789), seconds=1 / 3, loss=2 / 3)
    store(replace(result("fedavg", 0, [0.5]), records=(long,)), run_folder, target, {})
    line = json.loads(gzip.decompress((target / "rounds.jsonl.gz").read_bytes()))
    assert (line["seconds"], line["loss"], line["macs"]) == (0.333333, 0.666667, 123456789)
    assert line["accuracy"]["1.0"] == 1 / 3


def test_names_are_plain_and_stay_inside():
    assert stored_name("table3", "FedRolex (CIFAR-10)", "short") == "table3-fedrolex-cifar-10-short"
    assert stored_name("t", "FedAvg ×0.125", "") == "t-fedavg-0.125"
    assert stored_name("..") == ""
