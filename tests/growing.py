"""A tiny net that grows in three stages, and data for it, for tests of growing models."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import fedquilt as fq

SIZES = (7, 4, 9, 5)  # Samples of each client; with batches of 4 the last ones have 3, 4, 1 and 1


class Block(nn.Module):
    """A convolution of 3×3, a batch norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class ThreeBlocks(nn.Module):
    """E_1, E_2 and E_3 with 4, 4 and 6 channels, then the mean over positions and a linear layer:
    G_3.
    """

    stage_ends = ("first", "second", "third")

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(1, 4)
        self.second = Block(4, 4)
        self.third = Block(4, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.third(self.second(self.first(x))).mean((2, 3)))


EXAMPLE = torch.zeros(2, 1, 4, 4)
BLOCKS = ("first.", "second.", "third.")
HEADS = ("stage_heads.stage1.", "stage_heads.stage2.", "out.")


@cache
def growing() -> fq.Family:
    """Return the net's family with its three stages."""
    return fq.trace(fq.with_stages(ThreeBlocks), EXAMPLE)


@cache
def plain() -> fq.Family:
    """Return the family of the same net without stages."""
    return fq.trace(ThreeBlocks, EXAMPLE)


def part_of(name: str) -> str:
    """Return the paper's name of the block or head of a weight: E1, E2, E3, G1, G2 or G3."""
    for letter, prefixes in (("E", BLOCKS), ("G", HEADS)):
        for place, prefix in enumerate(prefixes, start=1):
            if name.startswith(prefix):
                return f"{letter}{place}"
    raise KeyError(name)


def parts(names: Any) -> set[str]:
    """Return the blocks and heads that weights are in."""
    return {part_of(name) for name in names}


def moved(before: Any, after: Any) -> set[str]:
    """Return the blocks and heads of which some weight differs between two states."""
    return {part_of(name) for name, value in before.items() if not torch.equal(value, after[name])}
