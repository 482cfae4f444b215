"""Several nets as one: the mean of their logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """Answers with the mean of its nets' logits; a plain module otherwise."""

    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *inputs: Any) -> Tensor:
        # Copies: a net may begin with an operation in place, and the next one gets the same samples.
        return torch.stack([net(*map(torch.clone, inputs)) for net in self.nets]).mean(0)
