"""A perceptron for samples that are rows of numbers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedquilt.models.blocks import Staged


class MLP(Staged):
    """Linear layers of whatever a sample is, flattened; two of 200 units are the 2NN of McMahan et al. (2017)."""

    def __init__(
        self, num_classes: int = 10, in_features: int = 784, *, hidden: tuple[int, ...] = (200, 200)
    ) -> None:
        layers = [
            nn.Sequential(nn.Linear(one, other), nn.ReLU())
            for one, other in pairwise((in_features, *hidden))
        ]
        width = hidden[-1] if hidden else in_features
        super().__init__([nn.Flatten(1), *layers], head=nn.Linear(width, num_classes))

    @property
    def stage_ends(self) -> list[str]:
        """Return the names of the modules that end the stages. The flattening belongs to the first."""
        return super().stage_ends[1:]
