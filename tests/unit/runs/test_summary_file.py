"""`summary.json` is checked when it is read, and damage to a finished run is listed."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from fedquilt.errors import RecordError
from fedquilt.runs.damage import damage_of
from fedquilt.runs.summary_file import read_summary
from tests.unit.runs.folders import harm


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
