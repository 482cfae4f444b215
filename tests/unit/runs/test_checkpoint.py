"""Checkpoints: written, read back, and damaged."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedquilt.errors import ConfigError, RecordError
from fedquilt.runs import client_states
from fedquilt.runs.checkpoint import Checkpointing, Checkpoints, Manifest, _digest
from fedquilt.runs.client_state_logs import encode
from fedquilt.runs.client_states import ClientStates
from fedquilt.storage import files
from fedquilt.terms import Server
from tests.unit.runs.states import CPU, remembered, same, small, value_of


def server(round: int, kept: ClientStates, value: float | None = None) -> Server:
    filled = torch.full((4,), float(round if value is None else value))
    return Server(round, {"fc.weight": filled}, kept, {"momentum": {"fc.weight": -filled}})


def packs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("memory-*"))


def keys_of(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


def test_a_checkpoint_is_read_back(tmp_path):
    kept = small(1 << 20)
    kept[3, ""], kept[4, "base1/"] = remembered(3), remembered(4, scope="base1/")
    Checkpoints(tmp_path / "c").save(server(5, kept), {"hello": [1]})
    again = small(1 << 20)
    found, manifest = Checkpoints(tmp_path / "c").load(again, CPU)
    assert (found.round, manifest.round, manifest.about) == (5, 5, {"hello": [1]})
    assert torch.equal(found.weights["fc.weight"], torch.full((4,), 5.0))
    assert torch.equal(found.slots["momentum"]["fc.weight"], torch.full((4,), -5.0))
    assert found.memory is again
    assert list(again) == [(3, ""), (4, "base1/")]
    assert not again._in_memory  # read when asked for
    assert same(again[4, "base1/"], kept[4, "base1/"])
    assert Checkpoints(tmp_path / "nothing").load(again, CPU) is None


def test_only_changed_client_states_are_written(tmp_path):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    for client in range(50):
        kept[client, ""] = remembered(client)
    checkpoints.save(server(1, kept), {})
    kept[7, ""] = remembered(70)
    checkpoints.save(server(2, kept), {})
    checkpoints.save(server(3, kept), {})  # nothing changed
    assert len(keys_of(tmp_path / "memory-00000001.safetensors")) == 50
    assert keys_of(tmp_path / "memory-00000002.safetensors") == {"7:"}
    assert packs(tmp_path) == ["memory-00000001.safetensors", "memory-00000002.safetensors"]
    again = small(1 << 20)
    Checkpoints(tmp_path).load(again, CPU)
    assert [value_of(again[client, ""]) for client in range(50)] == [
        70.0 if c == 7 else c for c in range(50)
    ]


@pytest.mark.parametrize("large", [3_000, 1 << 20], ids=["full packs", "growing packs"])
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["spilling", "held"])
def test_any_history_is_read_back_and_outdated_packs_are_removed(
    limit, large, tmp_path, monkeypatch
):
    """Compare random changes, deletions and checkpoints with a plain dictionary."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and nobody pulls the plug here
    monkeypatch.setattr(client_states, "FULL_PACK_BYTES", large)
    draw = np.random.default_rng(3)
    kept, checkpoints, plain = small(limit, spill_in=tmp_path), Checkpoints(tmp_path / "c"), {}
    for round in range(1, 120):
        for _ in range(draw.integers(1, 6)):
            key = (int(draw.integers(40)), "")
            if key in plain and draw.random() < 0.25:
                del plain[key], kept[key]
            else:
                plain[key] = float(draw.integers(1000))
                kept[key] = remembered(plain[key])
        if draw.random() < 0.6:
            checkpoints.save(server(round, kept), {})
            again = small(limit)
            Checkpoints(tmp_path / "c").load(again, CPU)
            assert {key: value_of(again[key]) for key in again} == plain
            if draw.random() < 0.1:
                kept, checkpoints = again, Checkpoints(tmp_path / "c")
                checkpoints.load(kept, CPU)
        assert {key: value_of(kept[key]) for key in kept} == plain
    checkpoints.save(server(120, kept), {})
    live, on_disk = (
        sum(sizes) for sizes in zip(*((p.live, p.written.size) for p in kept._packs), strict=True)
    )
    assert len(kept._packs) <= 6 + 2 * live // large
    assert on_disk <= 3 * live
    assert {path.name for path in (tmp_path / "c").glob("memory-*")} >= {
        pack.path.name for pack in kept._packs
    }


def test_what_a_checkpoint_writes_does_not_grow_with_the_clients_or_the_history(
    tmp_path, monkeypatch
):
    """A hundred checkpoints with ten changed clients each write the same bytes for 100 and 1,000
    clients, up to a logarithm.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def written(clients: int) -> float:
        kept, checkpoints, total = ClientStates(), Checkpoints(tmp_path / str(clients)), 0
        for client in range(clients):
            kept[client, ""] = remembered(client, 250)
        checkpoints.save(server(0, kept), {})
        for round in range(1, 101):
            for client in range(10):
                kept[(10 * round + client) % clients, ""] = remembered(round, 250)
            checkpoints.save(server(round, kept), {})
            newest = tmp_path / str(clients) / f"memory-{round:08}.safetensors"
            total += newest.stat().st_size
        manifest = (tmp_path / str(clients) / "00000100.json").stat().st_size
        assert manifest < 2_000
        return total / 100

    few, many, changed = written(100), written(1000), 10 * encode(remembered(0, 250)).size
    assert few < 6 * changed
    assert many < 6 * changed


def test_no_checkpoint_writes_much_more_than_changed_even_when_everything_is_outdated_at_once(
    tmp_path, monkeypatch
):
    """A thousand clients are saved at once, then ten random ones a round, so that all packs become
    half outdated together.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    one = encode(remembered(0, 250)).size
    monkeypatch.setattr(client_states, "FULL_PACK_BYTES", 20 * one)
    draw, kept, checkpoints = np.random.default_rng(0), ClientStates(), Checkpoints(tmp_path)
    for client in range(1000):
        kept[client, ""] = remembered(client, 250)
    checkpoints.save(server(0, kept), {})
    assert len(packs(tmp_path)) == 50
    most = 0
    for round in range(1, 150):
        for client in draw.choice(1000, 10, replace=False).tolist():
            kept[client, ""] = remembered(round, 250)
        checkpoints.save(server(round, kept), {})
        most = max(most, sum(path.stat().st_size for path in tmp_path.glob(f"memory-{round:08}*")))
    assert most <= 60 * one  # ten that changed, a large pack, and what is no larger than both
    assert sum(pack.written.size for pack in kept._packs) <= 3 * 1000 * one


def test_old_checkpoints_and_leftovers_are_removed(tmp_path):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    (tmp_path / "00000009.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "memory-00000009.safetensors").write_bytes(b"of a checkpoint that never was")
    (tmp_path / "notes.txt").write_text("the user's own")
    for round in range(1, 6):
        kept[0, ""] = remembered(round)
        checkpoints.save(server(round, kept), {})
    of = [
        f"{kind}{round:08}{end}"
        for round in (4, 5)
        for kind, end in (("", ".json"), ("", ".safetensors"), ("memory-", ".safetensors"))
    ]
    assert {path.name for path in tmp_path.iterdir()} == {*of, "notes.txt"}


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "harm", [cut_short, flip, empty, Path.unlink], ids=["short", "flipped", "empty", "gone"]
)
@pytest.mark.parametrize("kind", ["{:08}.json", "{:08}.safetensors", "memory-{:08}.safetensors"])
def test_a_damaged_file_is_noticed_and_the_previous_checkpoint_used(kind, harm, tmp_path, caplog):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    for round in (1, 2):
        # the first pack is large enough to be left alone
        for client in range(9 if round == 1 else 2):
            kept[client, ""] = remembered(round)
        checkpoints.save(server(round, kept), {})
    harm(tmp_path / kind.format(2))
    again = small(1 << 20)
    found, _ = Checkpoints(tmp_path).load(again, CPU)
    assert found.round == 1
    assert {value_of(again[key]) for key in again} == {1.0}
    if harm is not Path.unlink or kind != "{:08}.json":  # without a manifest it is not a checkpoint
        assert "Checkpoint 00000002: " in caplog.text
        assert "Resuming from round 1 instead" in caplog.text
    # and going on from there, the damaged one is replaced
    again[0, ""] = remembered(2)
    resumed = Checkpoints(tmp_path)
    resumed.load(again, CPU)
    resumed.save(server(2, again), {})
    assert Checkpoints(tmp_path).load(small(), CPU)[0].round == 2


def test_if_all_are_damaged_the_error_says_what_is_wrong_with_each(tmp_path):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(server(round, kept), {})
    cut_short(tmp_path / "00000001.safetensors")
    flip(tmp_path / "00000002.json")
    with pytest.raises(RecordError, match=r"no checkpoint in .* is intact:") as e:
        Checkpoints(tmp_path).load(small(), CPU)
    assert "00000001: 00000001.safetensors has" in str(e.value)
    assert "00000002: 00000002.json is not what was written" in str(e.value)


def test_another_format_is_refused_by_name():
    plain = json.loads(Manifest(1, files.Written("a", 1, ""), (), {}).to_json())
    plain["format"] = 99
    del plain["sha256"]
    with pytest.raises(ValueError, match="another version of fedquilt"):
        Manifest.from_json(json.dumps({**plain, "sha256": _digest(plain)}))


def altered(path: Path, **changes: object) -> None:
    """Change values of a manifest, and correct its checksum."""
    plain = {**json.loads(path.read_text()), **changes}
    del plain["sha256"]
    path.write_text(json.dumps({**plain, "sha256": _digest(plain)}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/tmp/outside.safetensors",
        "",
        ".",
        "..",
        "lock",
        "x\x00.safetensors",
        3,
        None,
    ],
)
def test_a_manifest_cannot_name_a_file_outside_of_its_folder(tmp_path, name, caplog):
    checkpoints = Checkpoints(tmp_path / "c")
    for round in (1, 2):
        checkpoints.save(server(round, small()), {})
    newest = tmp_path / "c" / "00000002.safetensors"
    (tmp_path / "outside.safetensors").write_bytes(newest.read_bytes())
    listed = json.loads((tmp_path / "c" / "00000002.json").read_text())["server"]
    altered(tmp_path / "c" / "00000002.json", server={**listed, "name": name})
    assert Checkpoints(tmp_path / "c").load(small(), CPU)[0].round == 1
    assert "which no file of a checkpoint is" in caplog.text


@pytest.mark.parametrize("text", [100_000 * "[", 100_000 * '{"a":', "[]", "3", "", "\x00"])
def test_a_malformed_manifest_is_named_and_the_previous_one_is_used(tmp_path, text, caplog):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(server(1, small()), {})
    (tmp_path / "99999999.json").write_text(text)
    assert Checkpoints(tmp_path).load(small(), CPU)[0].round == 1
    assert "99999999.json is not what was written" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"round": "x"},
        {"round": -1},
        {"round": True},
        {"round": 7},
        {"memory": {}},
        {"memory": [3]},
        {"server": None},
    ],
)
def test_values_of_a_manifest_are_checked_although_its_checksum_is_right(tmp_path, changes, caplog):
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(server(round, small()), {})
    altered(tmp_path / "00000002.json", **changes)
    assert Checkpoints(tmp_path).load(small(), CPU)[0].round == 1
    assert "00000002.json is not what was written" in caplog.text


def test_files_with_other_content_and_the_right_checksum_are_passed_over(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(server(round, small()), {})
    written = files.write(
        tmp_path / "00000002.safetensors", [b"\x05\x00\x00\x00\x00\x00\x00\x00[[[[["]
    )
    altered(tmp_path / "00000002.json", server=vars(written))
    assert Checkpoints(tmp_path).load(small(), CPU)[0].round == 1
    assert "its header cannot be read: it nests deeper than 3 levels" in caplog.text


def test_a_pack_that_lists_other_sizes_than_it_has_is_passed_over(tmp_path, caplog):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    checkpoints.save(server(1, kept), {})
    kept[0, ""] = remembered(2)
    checkpoints.save(server(2, kept), {})
    head = files.header({"0:": ("U8", (10**15,), 10**15)}, None)
    written = files.write(tmp_path / "memory-00000002.safetensors", [head])
    altered(tmp_path / "00000002.json", memory=[vars(written)])
    assert Checkpoints(tmp_path).load(small(), CPU)[0].round == 1
    assert "its tensors need 1,000,000,000,000,000 bytes of data, and the file has 0" in caplog.text


def test_a_malformed_client_state_names_the_client(tmp_path):
    kept, checkpoints = small(1 << 20), Checkpoints(tmp_path)
    kept[7, ""] = remembered(1)
    checkpoints.save(server(1, kept), {})
    head = files.header({"7:": ("U8", (4,), 4)}, None)
    written = files.write(tmp_path / "memory-00000001.safetensors", [head, b"oops"])
    altered(tmp_path / "00000001.json", memory=[vars(written)])
    again = small()
    Checkpoints(tmp_path).load(again, CPU)
    with pytest.raises(RecordError, match="the state of client 7 on disk is not what was written"):
        again[7, ""]


@pytest.mark.parametrize("part", range(3))
def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one(part, tmp_path, monkeypatch):
    """The disk is full at the client states, the weights or the manifest.

    When there is space again, nothing was lost.
    """
    kept, checkpoints = small(spill_in=tmp_path), Checkpoints(tmp_path / "c")
    kept[0, ""], kept[1, ""] = remembered(1), remembered(1)
    checkpoints.save(server(1, kept), {})
    kept[0, ""] = remembered(2)
    real, calls = os.fsync, iter(range(99))

    def full(handle):
        if next(calls) == 2 * part:  # a file's, then a folder's
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            RecordError,
            match=r"of round 2 could not .*: No space left .*; the one of round 1 is intact",
        ):
            checkpoints.save(server(2, kept), {})
    again = small()
    assert Checkpoints(tmp_path / "c").load(again, CPU)[0].round == 1
    assert value_of(again[0, ""]) == 1
    # nothing is left in the way of those who make room
    assert not list((tmp_path / "c").glob("*00000002*"))
    checkpoints.save(server(2, kept), {})
    assert Checkpoints(tmp_path / "c").load(again, CPU)[0].round == 2
    assert value_of(again[0, ""]) == 2


def test_all_client_states_are_saved_into_a_second_folder(tmp_path):
    kept = small(1 << 20)
    one, two = Checkpoints(tmp_path / "1"), Checkpoints(tmp_path / "2")
    for round, checkpoints in enumerate((one, two, one), 1):
        kept[round, ""] = remembered(round)
        checkpoints.save(server(round, kept), {})
    for folder, rounds in (("1", 3), ("2", 2)):
        again = small()
        assert Checkpoints(tmp_path / folder).load(again, CPU)[0].round == rounds
        assert [value_of(again[key]) for key in again] == list(range(1, rounds + 1))


def test_checkpoints_are_due_by_rounds_or_seconds():
    assert not Checkpointing().due(1000, 59, 0)
    assert Checkpointing().due(1, 60, 0)
    assert not Checkpointing().due(1, 60, 10)  # it took ten seconds: not before 200
    assert Checkpointing().due(1, 200, 10)
    assert [n for n in range(1, 5) if Checkpointing(rounds=3, seconds=0).due(n, 999, 0)] == [3, 4]
    assert not Checkpointing(rounds=0, seconds=0).due(999, 999, 0)
    with pytest.raises(ConfigError, match="keep"):  # one to fall back on, always
        Checkpointing(keep=1)
