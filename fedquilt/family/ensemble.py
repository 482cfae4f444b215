"""Ensembles: several nets as one, with the mean of their logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


class Ensemble(nn.Module):
    """A plain module that returns the mean of its nets' logits.

    Args:
        nets: Modules that take the same inputs and return logits of the same shape.
    """

    def __init__(self, nets: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    @override
    def forward(self, *inputs: Any) -> Tensor:
        # Inputs are copied, because a net may begin with an in-place operation.
        return torch.stack([net(*map(torch.clone, inputs)) for net in self.nets]).mean(0)
