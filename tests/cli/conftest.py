"""A file of the user's own with a model, data and a method, which tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = """
from __future__ import annotations
from dataclasses import dataclass, replace
import torch
from torch import nn
import fedquilt as fq
print("a module may talk")

@dataclass(frozen=True)
class Mine(fq.methods.Method):
    pace: int = 1

def method():
    return Mine(local=fq.LocalTraining(optimizer=fq.optimizers.SGD(lr=0.03), batch_size=5))

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))

def pool():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 3
    return fq.data.Pool.of((x, y), (x, y))

def data():
    return pool().partition(6)

def homes():
    domains = torch.arange(60) % 2
    return replace(pool(), test_domains=domains, domain_names=("mnist", "syn")).partition(6)

def nothing():
    return 3

def broken():
    raise ValueError("on purpose")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, the working directory of the test, with `mine.py` in it."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path
