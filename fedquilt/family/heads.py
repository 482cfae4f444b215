"""Temporary heads of training stages (ProgFed, equation 2).

A head fits the shape of the features and of the model's output.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from fedquilt.errors import TraceError

HeadKind = Literal["flat", "pooled", "mean", "dense", "tokens"]
POOLS: dict[int, type[nn.Module]] = {
    1: nn.AdaptiveAvgPool1d,
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}
CONVS: dict[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class MeanOver(nn.Module):
    """A mean over some dimensions, such as the tokens of a sequence.

    Args:
        dims: Dimensions that the mean is taken over.
    """

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)

    @override
    def extra_repr(self) -> str:
        return f"dims={self.dims}"


@dataclass(frozen=True)
class Head:
    """The plan of a temporary head, from which any number of heads can be made.

    Args:
        kind: "flat" is linear. "pooled" and "mean" take the mean over positions first. "tokens" is
            linear at each position. "dense" is a 1×1 convolution and upsampling.
        in_features: Channels of the features.
        num_outputs: Size of the output's class dimension.
        dims: Dimensions of the features that are positions.
        scale: Factors by which "dense" upsamples, if they are whole numbers.
        size: Positions of the output that "dense" upsamples to, if the factors are no whole
            numbers.
    """

    kind: HeadKind
    in_features: int
    num_outputs: int
    dims: tuple[int, ...] = ()
    scale: tuple[int, ...] = ()
    size: tuple[int, ...] = ()

    def make(self) -> nn.Sequential:
        """Return a new head, whose weights are drawn from torch's global generator."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.kind == "dense":
            layers["conv"] = CONVS[len(self.dims)](self.in_features, self.num_outputs, 1)
            if self.size:
                layers["upsample"] = nn.Upsample(self.size)
            elif any(factor > 1 for factor in self.scale):
                layers["upsample"] = nn.Upsample(scale_factor=self.scale)
            return nn.Sequential(layers)
        if self.kind == "pooled":
            layers["pool"] = POOLS[len(self.dims)](1)
            layers["flatten"] = nn.Flatten(1)
        elif self.kind == "mean":
            layers["mean"] = MeanOver(self.dims)
        layers["linear"] = nn.Linear(self.in_features, self.num_outputs)
        return nn.Sequential(layers)


def fit_head(
    features: tuple[int, ...],
    channel_dim: int,
    output: tuple[int, ...],
    class_dim: int,
    end_name: str,
) -> Head:
    """Plan the head that turns features into an output of the model's shape.

    Args:
        features: Shape of the features, (batch, …).
        channel_dim: Dimension of the features that has the channels.
        output: Shape of the model's output, (batch, …).
        class_dim: Dimension of the output that has the classes.
        end_name: Name of the module that ends the stage, for messages.

    Raises:
        TraceError: No kind of head gives this output.
    """
    positions = tuple(dim for dim in range(1, len(features)) if dim != channel_dim)
    in_features = features[channel_dim]
    num_outputs = output[class_dim]
    last = len(features) - 1
    if class_dim and len(output) == 2:
        if not positions:
            return Head("flat", in_features, num_outputs)
        if channel_dim == 1 and len(positions) in POOLS:
            return Head("pooled", in_features, num_outputs, positions)
        return Head("mean", in_features, num_outputs, positions)
    if class_dim and len(output) == len(features):
        if channel_dim == last and class_dim == last and features[:-1] == output[:-1]:
            return Head("tokens", in_features, num_outputs, positions)
        if channel_dim == 1 and class_dim == 1 and len(positions) in CONVS:
            return _dense(in_features, num_outputs, positions, features[2:], output[2:])
    raise TraceError(
        f"a temporary head was asked for that turns the output of {end_name}, of shape {features} "
        f"with the channels in dimension {channel_dim}, into the model's output, of shape {output} "
        f"with the classes in dimension {class_dim}; none can be made. Heads give (batch, class) "
        "from any features, (batch, length, class) from (batch, length, channel), and (batch, "
        "class, *size) from (batch, channel, *size). End the stage where the features have such a "
        "shape, or let the module run its stages itself (`forward_stage`)."
    )


def _dense(
    in_features: int,
    num_outputs: int,
    positions: tuple[int, ...],
    size: tuple[int, ...],
    output_size: tuple[int, ...],
) -> Head:
    """Plan a head that returns logits at each position of the output, by a 1×1 convolution.

    It upsamples by whole factors where every side of the output is a multiple of the features'.
    Other outputs fix the size to upsample to.

    Args:
        in_features: Channels of the features.
        num_outputs: Size of the output's class dimension.
        positions: Dimensions of the features that are positions.
        size: Sides of the features.
        output_size: Sides of the output.
    """
    # With factors instead of sizes, the head runs on samples of other sizes than the example's.
    if all(goal % side == 0 for side, goal in zip(size, output_size, strict=True)):
        scale = tuple(goal // side for side, goal in zip(size, output_size, strict=True))
        return Head("dense", in_features, num_outputs, positions, scale)
    return Head("dense", in_features, num_outputs, positions, size=output_size)
