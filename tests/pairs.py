"""Small unions of a knowledge net and private nets, and data for them."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.family.variants import joined
from fedquilt.terms import WHOLE
from tests.conftest import Perceptron

SIZES = (7, 4, 9, 5)  # Samples of each client; with batches of 4 the last ones have 3, 4, 1 and 1
PRIVATE = {"small": 5, "big": 8}  # Hidden channels of the private nets; the knowledge net has 3


class Convolution(nn.Module):
    """A convolution of 3×3, a batch norm, a ReLU, the mean over positions and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.out = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def perceptrons(brought: bool = False, **hidden: int) -> fq.Family:
    """Return a union of perceptrons: a knowledge net with 3 hidden channels, and private nets.

    Args:
        brought: True: every net is a module that brings its weights. False: weights are drawn from
            the seed.
        hidden: Hidden channels of each private net by name. Nothing: `PRIVATE`.
    """
    nets = {"knowledge": 3, **(hidden or PRIVATE)}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = {
            name: Perceptron(count) if brought else partial(Perceptron, count)
            for name, count in nets.items()
        }
        return fq.union(
            {name: fq.trace(module, torch.zeros(2, 4)) for name, module in made.items()}
        )


@cache
def plain_pairs() -> fq.Family:
    return perceptrons()


@cache
def trained_pairs() -> fq.Family:
    """Return a union whose modules bring their weights, as those of a supernet do."""
    return perceptrons(brought=True)


@cache
def normed_pairs() -> fq.Family:
    """Return a union of convolutions with batch norms."""
    nets = {"knowledge": 2, "small": 3, "big": 4}
    example = torch.zeros(2, 1, 4, 4)
    return fq.union(
        {name: fq.trace(partial(Convolution, count), example) for name, count in nets.items()}
    )


def pair(family: fq.Family, private: str) -> fq.methods.api.Arch:
    """Return the pair of the knowledge net and a private net."""
    return family.at(joined(WHOLE, private)).whole


def limits(family: fq.Family, *private: str) -> list[fq.Budget]:
    """Return for each private net the least multiply-adds that allow its pair."""
    return [
        fq.Budget(macs=family.cost(pair(family, name)).macs) for name in private or ("small", "big")
    ]


def of_net(state: dict[str, Tensor], net: str) -> dict[str, Tensor]:
    """Return the weights of one net by the names that its module has."""
    return {
        name.removeprefix(f"{net}."): value
        for name, value in state.items()
        if name.startswith(f"{net}.")
    }
