"""Nets in float64, inputs for them, and a custom norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedquilt import noise
from fedquilt.family import Net, Pass
from fedquilt.family.scaled import Scaled

KEY = torch.tensor(noise.key(1))
TRAIN = Pass(train=True)


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(
        count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def pure(module: nn.Module, scaled: Scaled = Scaled()) -> tuple[Net, dict[str, Tensor]]:
    """Return a net of a module in float64, and its weights and statistics."""
    module = module.double()
    state = {
        n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())
    }
    return Net(module, {}, scaled), state


class NormReLU(nn.BatchNorm2d):
    """A norm and an activation in one layer, by the forward of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))
