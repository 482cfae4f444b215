"""Building blocks of the models: norms by name, layers with norm and activation, stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import gcd
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

Norm = Literal["batch", "group", "none"]
Layer = Callable[[], nn.Module]
MakeNorm = Callable[[int], nn.Module]  # channels → norm

CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORM: dict[int, type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]] = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm2d,
    3: nn.BatchNorm3d,
}


def norms(kind: Norm, dims: int = 2, groups: int = 2) -> MakeNorm:
    """Return a function that makes a norm for a number of channels.

    Args:
        kind: "batch", "group" or "none".
        dims: Spatial dimensions of the activations. It matters for batch norm alone.
        groups: Number of groups of a group norm. If it does not divide the channels, their greatest
            common divisor is used.
    """
    match kind:
        case "batch":
            return BATCH_NORM[dims]
        case "group":
            return lambda channels: nn.GroupNorm(gcd(groups, channels), channels)
        case "none":
            return lambda channels: nn.Identity()
    raise ValueError(f"norm {kind!r} is unknown; batch, group or none would fit")


class ConvUnit(nn.Sequential):
    """A convolution, a norm and an activation. Only the stride changes the resolution.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel: Side of the kernel.
        stride: Stride. 1 keeps the resolution.
        norm: Function that makes a norm for a number of channels.
        act: Function that makes the activation. nn.Identity has no effect.
        bias: True: the convolution has a bias.
        groups: Groups of the convolution. 1 has no effect.
        dims: Spatial dimensions, 2 or 3.
    """

    def __init__(  # noqa: PLR0913  The arguments are those of nn.Conv2d, norm and activation.
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        norm: MakeNorm,
        act: Layer = nn.ReLU,
        bias: bool = False,
        groups: int = 1,
        dims: int = 2,
    ) -> None:
        conv = CONV[dims](
            in_channels, out_channels, kernel, stride, (kernel - 1) // 2, groups=groups, bias=bias
        )
        super().__init__(OrderedDict(conv=conv, norm=norm(out_channels), act=act()))


class LinearUnit(nn.Sequential):
    """A linear layer, a norm and an activation.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        norm: Function that makes a norm for a number of features.
        act: Function that makes the activation. nn.Identity has no effect.
    """

    def __init__(
        self, in_features: int, out_features: int, *, norm: MakeNorm, act: Layer = nn.ReLU
    ) -> None:
        super().__init__(
            OrderedDict(
                linear=nn.Linear(in_features, out_features), norm=norm(out_features), act=act()
            )
        )


class Residual(nn.Module):
    """The sum act(body(x) + shortcut(x)).

    Args:
        body: Layers whose output is added to the shortcut's.
        shortcut: Layers beside the body. None: x itself is added.
        act: Function that makes the activation after the sum. nn.Identity has no effect.
    """

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: Layer = nn.Identity
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.act = act()

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(x) + self.shortcut(x))
        return out


class Staged(nn.Module):
    """A classifier that is a chain of stages and a head: ProgFed's E_1..E_S and G_S.

    Args:
        stages: Modules that run one after another.
        head: Module that returns the logits (sample, class) from the output of the last stage.
    """

    def __init__(self, stages: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.head = head

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x))
        return logits

    @property
    def stage_ends(self) -> list[str]:
        """Return the names of the modules that end the stages, such as "stages.0", in order."""
        return [f"stages.{stage}" for stage in range(len(self.stages))]


def pooled(channels: int, num_classes: int) -> OrderedDict[str, nn.Module]:
    """Return the layers of a head, by name: mean over positions, flattening and a linear layer.

    Args:
        channels: Channels of the input (sample, channel, height, width).
        num_classes: Number of classes.
    """
    return OrderedDict(
        pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(1), linear=nn.Linear(channels, num_classes)
    )
