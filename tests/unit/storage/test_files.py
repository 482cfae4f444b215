"""Files are written completely or not at all, and tensors without loss."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedquilt.errors import RecordError
from fedquilt.storage import files


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
    one = files.compact({"w": stack[7].t()})["w"]
    assert torch.equal(one, stack[7].t())
    assert one.is_contiguous()
    assert one.untyped_storage().nbytes() == one.nbytes
    # no copy where none is needed
    assert files.compact({"w": one})["w"].data_ptr() == one.data_ptr()


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
    """A write is atomic because of its order: fsync of the file, rename, fsync of the folder."""
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
