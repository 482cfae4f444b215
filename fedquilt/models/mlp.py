"""A multi-layer perceptron for samples of any shape, which are flattened."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedquilt.models.blocks import Staged


class MLP(Staged):
    """Linear layers with ReLU. Two hidden layers of 200 units are McMahan et al.'s 2NN (2017).

    Args:
        num_classes: Number of classes.
        in_features: Number of values of one sample, after flattening.
        hidden: Widths of the hidden layers. () gives a linear model.
    """

    def __init__(
        self, num_classes: int = 10, in_features: int = 784, *, hidden: tuple[int, ...] = (200, 200)
    ) -> None:
        layers = [
            nn.Sequential(nn.Linear(in_width, out_width), nn.ReLU())
            for in_width, out_width in pairwise((in_features, *hidden))
        ]
        width = hidden[-1] if hidden else in_features
        super().__init__([nn.Flatten(1), *layers], head=nn.Linear(width, num_classes))

    @property
    def stage_ends(self) -> list[str]:
        """Return the names of the modules that end the stages, one for each hidden layer.

        The first stage flattens too.
        """
        return super().stage_ends[1:]
