"""A small experiment on a user's model and data, for the tests on settings."""

from __future__ import annotations

from typing import Any

import pytest

from fedquilt.errors import ConfigError
from fedquilt.runs.experiment import Experiment

OWN = """
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
import torch
from torch import nn
import fedquilt as fq
from fedquilt.data import Pool

if TYPE_CHECKING:
    from somewhere import Unseen

@dataclass(frozen=True)
class Mine(fq.methods.Method):
    pace: int = 1  # of the walk
    seen: Unseen | None = None

def method(lr: float = 0.03):
    return Mine(local=fq.LocalTraining(optimizer=fq.optimizers.SGD(lr=lr), batch_size=5), pace=7)

def released():
    return fq.methods.HeteroFL.preset("released")

def hidden():
    @dataclass(frozen=True)
    class Inner(fq.methods.Method):
        pass
    return Inner()

def net(num_classes, width: int = 8, seen: Unseen | None = None):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, num_classes))

def pool(samples: int = 60):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(samples) % 3
    return Pool.of((x, y), (x, y))

def partitioned():
    return pool().partition(6)

def nothing():
    return 3

def broken():
    raise ValueError("on purpose")
"""


def small(**settings: Any) -> Experiment:
    """Return an experiment on the user's tiny model and data."""
    plain = {
        "method": "fedavg",
        "model": "mine.py:net",
        "data": "mine.py:pool",
        "fleet": {"clients": 6},
        **settings,
    }
    return Experiment.of(plain)


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        small(**settings)
    return str(caught.value)
