"""Between host and device."""

from __future__ import annotations

import ctypes

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.process import keep_pages


def test_a_tensor_of_the_host_is_on_the_device():
    cpu = torch.device("cpu")
    assert torch.equal(to_device_async(cpu, torch.arange(3)), torch.arange(3))


def test_pages_are_kept_where_the_c_library_can_and_nothing_happens_elsewhere(monkeypatch):
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


def test_a_device_that_is_not_here_is_refused_by_whoever_takes_one(tmp_path):
    for asked in (
        lambda: fq.load_model(tmp_path / "none", torch.nn.Flatten, "gpu"),
        lambda: fq.load_state(tmp_path, "gpu"),
    ):
        with pytest.raises(ConfigError, match="device 'gpu' was asked for; this machine has cpu"):
            asked()
