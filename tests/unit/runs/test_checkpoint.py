"""ClientStates that spill, files that are whole, checkpoints that are found again or found out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedquilt.axes import Index, Positions
from fedquilt.errors import ConfigError, RecordError
from fedquilt.runs import client_state_logs, client_states
from fedquilt.runs.checkpoint import Checkpointing, Checkpoints, Manifest, _digest
from fedquilt.runs.client_state_logs import decode, encode
from fedquilt.runs.client_states import ClientStates
from fedquilt.storage import files
from fedquilt.terms import Arch, ClientState, Server, Submodel

CPU = torch.device("cpu")
INDEX = Index({"c1": Positions(((5, 8), (0, 2))), "class": Positions.prefix(3)})


def remembered(value: float, size: int = 8, scope: str = "") -> ClientState:
    submodel = Submodel(Arch((("c1", 5), ("class", 3))), INDEX, scope)
    return ClientState(
        submodel,
        {"fc.weight": torch.full((size,), float(value))},
        {"momentum": {"fc.weight": torch.ones(2)}},
        7,
    )


def value_of(one: ClientState) -> float:
    return float(one.weights["fc.weight"][0])


def same(one: ClientState, other: ClientState) -> bool:
    def equal(mine, theirs):
        return list(mine) == list(theirs) and all(
            mine[n].dtype == theirs[n].dtype and torch.equal(mine[n], theirs[n]) for n in mine
        )

    slots = list(one.slots) == list(other.slots) and all(
        equal(one.slots[s], other.slots[s]) for s in one.slots
    )
    return (
        (one.submodel, one.steps) == (other.submodel, other.steps)
        and equal(one.weights, other.weights)
        and slots
    )


# --- files --------------------------------------------------------------------------------------


def test_a_client_state_is_decoded_without_loss():
    generator = torch.Generator().manual_seed(0)
    odd = {
        "z.bias": torch.randn(3, generator=generator).bfloat16(),
        "a.mask": torch.tensor([True, False, True]),
        "b.scalar": torch.tensor(1 / 3, dtype=torch.float64),
        "c.empty": torch.zeros(0, 4),
        "d.count": torch.tensor([2**40, -1]),
        "e.strided": torch.randn(4, 6, generator=generator).t(),
    }
    one = ClientState(
        Submodel(Arch((("c1", 5),), "depth"), INDEX, "base3/"),
        odd,
        {"mean": {}, "square": dict(odd)},
        12,
    )
    again = decode(bytearray(b"".join(bytes(chunk) for chunk in encode(one).chunks())), CPU)
    assert same(one, again)
    assert encode(one).size == sum(len(chunk) for chunk in encode(one).chunks())
    assert all(
        t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
        for t in again.weights.values()
    )


def test_written_files_are_safetensors_files(tmp_path):
    tensors = {
        "b": torch.randn(3, 2),
        "a": torch.arange(4),
        "half": torch.ones(5, dtype=torch.float16),
    }
    files.write(tmp_path / "x.safetensors", files.Blob.of(tensors, {"round": 3}).chunks())
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["fedquilt"]) == {"round": 3}


def test_dtypes_that_the_format_lacks_are_named():
    with pytest.raises(
        RecordError, match=r"phase is torch\.complex128, which safetensors cannot hold"
    ):
        files.Blob.of({"phase": torch.zeros(1, dtype=torch.complex128)}, None)


def test_settled_tensors_do_not_keep_larger_ones_alive():
    stack = torch.randn(100, 4, 3)
    one = files.settled({"w": stack[7].t()})["w"]
    assert torch.equal(one, stack[7].t())
    assert one.is_contiguous()
    assert one.untyped_storage().nbytes() == one.nbytes
    # no copy where none is needed
    assert files.settled({"w": one})["w"].data_ptr() == one.data_ptr()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    files.write(tmp_path / "x", [b"old"])

    def chunks():
        yield b"new"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "x", chunks())
    assert (tmp_path / "x").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_files_are_on_disk_before_they_get_their_name(tmp_path, monkeypatch):
    """The order that makes a write atomic: the file's fsync, the rename, the folder's fsync."""
    calls = []
    fsync, rename = os.fsync, Path.replace

    def synced(handle):
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), rename(self, to))[1]
    )
    files.write(tmp_path / "x", [b"1"])
    assert calls == ["file", "rename", "folder"]


# --- memories -----------------------------------------------------------------------------------


def small(limit: int = 0, **options) -> ClientStates:
    return ClientStates(limit, **options)


def test_client_states_are_in_order_of_clients_in_memory_and_on_disk(tmp_path):
    kept = small(spill_in=tmp_path)
    assert not kept
    for client in (5, 1, 3):
        kept[client, ""] = remembered(client)
    kept[1, "base1/"] = remembered(9)
    assert list(kept) == [(1, ""), (1, "base1/"), (3, ""), (5, "")]
    assert len(kept) == 4
    assert (3, "") in kept
    assert (4, "") not in kept
    assert kept.get((4, "")) is None
    assert [value_of(kept[key]) for key in kept] == [1, 9, 3, 5]
    assert len(kept._in_memory) == 1  # one at a time fits
    del kept[3, ""]
    assert (3, "") not in kept
    assert len(kept) == 3
    with pytest.raises(KeyError):
        kept[3, ""]
    with pytest.raises(KeyError):
        del kept[3, ""]


def test_the_least_recently_used_states_are_moved_to_disk_first():
    size = client_state_logs.state_size(remembered(0))
    kept = small(3 * size)
    for client in range(3):
        kept[client, ""] = remembered(client)
    kept[0, ""]
    kept[3, ""] = remembered(3)
    assert value_of(kept[2, ""]) == 2  # the look-up makes room
    assert set(kept._in_memory) == {(0, ""), (3, ""), (2, "")}
    assert kept.bytes == 3 * size <= kept.limit
    assert same(kept[1, ""], remembered(1))


def test_a_changed_state_replaces_the_one_on_disk():
    kept = small()
    kept[0, ""], kept[1, ""] = remembered(1), remembered(2)
    assert value_of(kept[1, ""]) == 2
    assert set(kept._in_memory) == {(1, "")}
    kept[0, ""] = remembered(3)
    assert value_of(kept[1, ""]) == 2
    assert value_of(kept[0, ""]) == 3


def test_a_spill_does_not_grow_with_the_history(monkeypatch):
    monkeypatch.setattr(client_state_logs, "MAX_OUTDATED_BYTES", 10_000)
    kept = small()
    for turn in range(300):
        kept[turn % 4, ""] = remembered(turn)
        kept.get((9, ""))  # makes room
    assert [value_of(kept[client, ""]) for client in range(4)] == [296, 297, 298, 299]
    spill = kept._spill
    assert spill._end <= 2 * spill.live + 10_000 + 2_000
    assert os.fstat(spill._file.fileno()).st_size <= spill._end


def test_ten_thousand_clients_with_caches_do_not_fill_memory(tmp_path):
    """Each keeps 100 kB; the bound is 20 MB, and the whole would be a gigabyte."""
    script = f"""
import resource, torch
from pathlib import Path
from fedquilt.runs.client_states import ClientStates
from tests.unit.runs.test_checkpoint import remembered, value_of
kept = ClientStates(20 << 20, spill_in=Path({str(tmp_path)!r}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for client in range(10_000):
    kept[client, ""] = remembered(client, 25_000)
    kept.get((0, "")) if client % 10 == 0 else None
assert len(kept) == 10_000
assert [value_of(kept[client, ""]) for client in (0, 17, 9_999, 5_000)] == [0, 17, 9_999, 5_000]
assert kept.bytes <= 20 << 20
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 120  # MiB
    assert not os.listdir(tmp_path)  # a spill has no name, so that no kill leaves one


def test_a_disk_too_full_to_spill_is_named_and_loses_nothing(tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = small(spill_in=tmp_path)
    kept[0, ""], kept[1, ""] = remembered(1), remembered(2)
    with monkeypatch.context() as patch:
        patch.setattr(client_state_logs.Spill, "_new", full)
        with pytest.raises(
            RecordError,
            match=rf"cannot be kept in {tmp_path}: No space left .* raise client_state_memory",
        ):
            kept[1, ""]
    assert (value_of(kept[0, ""]), value_of(kept[1, ""])) == (1, 2)


# --- checkpoints --------------------------------------------------------------------------------


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
    """Random sets, deletions and checkpoints against a plain dictionary."""
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
    """A hundred checkpoints of ten changed clients each, of 100 clients and of 1,000: the same
    bytes but for log.
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
    """A thousand clients saved at once, then ten a round at random: their packs turn half outdated
    together.
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
    """The disk is full at the memories, at the weights, at the manifest; with room again, nothing
    was lost.
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
