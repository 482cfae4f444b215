"""Nets of users for the tests on runs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Theirs(nn.Module):
    """A user's net, written without fedquilt in mind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))
