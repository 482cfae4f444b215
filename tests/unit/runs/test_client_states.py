"""Client states in memory and on disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from fedquilt.errors import RecordError
from fedquilt.runs import client_state_logs
from fedquilt.runs.client_state_logs import decode, encode
from fedquilt.terms import Arch, ClientState, Submodel
from tests.unit.runs.states import CPU, INDEX, remembered, same, small, value_of


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
    """Each client keeps 100 kB, a gigabyte in all, and the limit is 20 MB."""
    script = f"""
import resource, torch
from pathlib import Path
from fedquilt.runs.client_states import ClientStates
from tests.unit.runs.states import remembered, value_of
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
