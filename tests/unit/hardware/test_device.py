"""Devices by name, transfers to a device, and memory that the process keeps."""

from __future__ import annotations

import ctypes

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.process import keep_pages


def test_a_tensor_is_copied_to_the_device():
    cpu = torch.device("cpu")
    assert torch.equal(to_device_async(cpu, torch.arange(3)), torch.arange(3))


def test_pages_are_kept_if_the_c_library_supports_it(monkeypatch):
    asked = []

    class Library:
        @staticmethod
        def mallopt(which: int, value: int) -> int:
            asked.append((which, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Library)
    keep_pages()
    assert asked == [(-3, 32 << 20), (-1, (1 << 31) - 1)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    keep_pages()


def test_devices_that_the_machine_lacks_are_refused(tmp_path):
    for asked in (
        lambda: fq.load_model(tmp_path / "none", torch.nn.Flatten, "gpu"),
        lambda: fq.load_state(tmp_path, "gpu"),
    ):
        with pytest.raises(ConfigError, match="device 'gpu' was asked for; this machine has cpu"):
            asked()
