"""Blocks of a searched net, described without being built.

A description (`BlockSpec`) lists the block's layers with their sizes. Multiply-adds and parameters
are closed formulas over these layers, so that a search can count a configuration without building
it. The same description builds the block as a plain module of ordinary layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from torch import nn
from typing_extensions import override

from fedquilt.models.blocks import ConvUnit, Residual
from fedquilt.models.mobilenet import SqueezeExcite, multiple_of_8

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "none": nn.Identity,
}
MAX_CACHED_BLOCKS = 65_536  # Distinct block descriptions whose cost is cached.


class MemberCost(NamedTuple):
    """The size of one configuration, or of one of its blocks."""

    macs: int  # Multiply-adds of one sample's forward pass.
    params: int  # Number of parameters. Norm statistics are not counted.


class ChannelAxis(NamedTuple):
    """One axis of a tensor, and the group of channels that it carries."""

    tensor: str  # Name of the tensor inside its block.
    dim: int  # Dimension of the tensor.
    group: str  # "in", "out", or a group inside the block such as "hidden".


@dataclass(frozen=True)
class LayerSpec:
    """A convolution or linear layer, with the norm behind it.

    A linear layer is a 1×1 convolution of one position.
    """

    name: str  # Module with the weight, inside the block.
    in_channels: int  # Channels that the layer reads.
    out_channels: int  # Channels that the layer writes.
    out_size: int  # Height and width of the output.
    reads: str  # Group of the channels that the layer reads.
    writes: str  # Group of the channels that the layer writes.
    kernel: int = 1  # Height and width of the kernel.
    depthwise: bool = False  # True if every channel is filtered by itself.
    bias: bool = False  # True if the layer has a bias.
    norm: str = ""  # Module with the batch norm, inside the block. Empty if there is none.

    @property
    def cost(self) -> MemberCost:
        """Return the multiply-adds and parameters of the layer and its norm."""
        inputs = 1 if self.depthwise else self.in_channels
        weights = self.out_channels * inputs * self.kernel**2
        vectors = int(self.bias) + 2 * int(bool(self.norm))
        return MemberCost(self.out_size**2 * weights, weights + vectors * self.out_channels)

    def axes(self) -> Iterator[ChannelAxis]:
        """Yield every axis of the tensors of the layer and its norm that carries channels."""
        yield ChannelAxis(f"{self.name}.weight", 0, self.writes)
        if not self.depthwise:
            yield ChannelAxis(f"{self.name}.weight", 1, self.reads)
        if self.bias:
            yield ChannelAxis(f"{self.name}.bias", 0, self.writes)
        if self.norm:
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                yield ChannelAxis(f"{self.norm}.{tensor}", 0, self.writes)


@dataclass(frozen=True)
class BlockSpec(ABC):
    """A block of a net: its sizes, its layers, and how it is built.

    Two equal descriptions are the same computation, so that a description can be the key of a table
    of measured times. A subclass adds fields, lists its layers and builds the module.
    """

    in_channels: int  # Channels of the input.
    out_channels: int  # Channels of the output.
    size: int  # Height and width of the input.

    @property
    @abstractmethod
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return all layers that have weights, each with the norm behind it."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the block as a plain module with fresh weights."""

    @property
    def out_size(self) -> int:
        """Return the height and width of the output."""
        return self.size

    @property
    def keeps_channels(self) -> bool:
        """Return True if the block adds its input to its output, channel by channel.

        Input and output channels then have the same order.
        """
        return False

    @property
    def elastic_kernel(self) -> str:
        """Return the name, inside the block, of the weight whose kernel a space may crop.

        It is empty if there is none.
        """
        return ""

    @property
    def cost(self) -> MemberCost:
        """Return the multiply-adds of one sample and the parameters, summed over all layers."""
        return _block_cost(self)


@lru_cache(MAX_CACHED_BLOCKS)
def _block_cost(block: BlockSpec) -> MemberCost:
    costs = [layer.cost for layer in block.layers]
    return MemberCost(sum(cost.macs for cost in costs), sum(cost.params for cost in costs))


def strided(size: int, stride: int) -> int:
    """Return the output size of a convolution or pool with padding (kernel − 1) / 2.

    The kernel is odd, and has no effect on the result.

    Args:
        size: Height or width of the input.
        stride: Stride of the layer.
    """
    return (size - 1) // stride + 1


@dataclass(frozen=True)
class ConvSpec(BlockSpec):
    """A convolution with norm and activation, optionally followed by a 3×3 max-pool of stride 2."""

    kernel: int = 3  # Height and width of the kernel.
    stride: int = 1  # Stride of the convolution.
    act: str = "relu"  # Activation, a name of `ACTIVATIONS`.
    pool: bool = False  # True if a max-pool halves the output, as in the stem of ResNets.

    @property
    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        size = strided(self.size, self.stride)
        channels = (self.in_channels, self.out_channels)
        return (LayerSpec("conv", *channels, size, "in", "out", kernel=self.kernel, norm="norm"),)

    @property
    @override
    def out_size(self) -> int:
        size = strided(self.size, self.stride)
        return strided(size, 2) if self.pool else size

    @override
    def build(self) -> nn.Module:
        unit = _unit(self.in_channels, self.out_channels, self.kernel, self.stride, act=self.act)
        if self.pool:
            unit.add_module("pool", nn.MaxPool2d(3, 2, 1))
        return unit


@dataclass(frozen=True)
class BottleneckSpec(BlockSpec):
    """A bottleneck block of ResNet-50: 1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    hidden: int = 8  # Channels between the convolutions.
    stride: int = 1  # Stride of the middle convolution and of the shortcut.
    project: bool = False  # True if the shortcut is a 1×1 convolution, False if it is the identity.

    @property
    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        size, out_size = self.size, self.out_size
        hidden, out = self.hidden, self.out_channels
        reduce = LayerSpec(
            "body.reduce.conv",
            self.in_channels,
            hidden,
            size,
            "in",
            "reduced",
            norm="body.reduce.norm",
        )
        filtered = LayerSpec(
            "body.filter.conv",
            hidden,
            hidden,
            out_size,
            "reduced",
            "filtered",
            kernel=3,
            norm="body.filter.norm",
        )
        expand = LayerSpec(
            "body.expand.conv",
            hidden,
            out,
            out_size,
            "filtered",
            "out",
            norm="body.expand.norm",
        )
        if not self.project:
            return reduce, filtered, expand
        shortcut = LayerSpec(
            "shortcut.conv",
            self.in_channels,
            out,
            out_size,
            "in",
            "out",
            norm="shortcut.norm",
        )
        return reduce, filtered, expand, shortcut

    @property
    @override
    def out_size(self) -> int:
        return strided(self.size, self.stride)

    @property
    @override
    def keeps_channels(self) -> bool:
        return not self.project

    @override
    def build(self) -> nn.Module:
        body = OrderedDict[str, nn.Module](
            reduce=_unit(self.in_channels, self.hidden, 1),
            filter=_unit(self.hidden, self.hidden, 3, self.stride),
            expand=_unit(self.hidden, self.out_channels, 1, act="none"),
        )
        # Each block begins as its shortcut (Goyal et al. 2017). Otherwise the outputs of fresh nets
        # are so large that the first steps at common learning rates diverge.
        nn.init.zeros_(body["expand"].get_submodule("norm").get_parameter("weight"))
        shortcut = None
        if self.project:
            shortcut = _unit(self.in_channels, self.out_channels, 1, self.stride, act="none")
        return Residual(nn.Sequential(body), shortcut, nn.ReLU)


@dataclass(frozen=True)
class InvertedSpec(BlockSpec):
    """An inverted residual block of MobileNets: expand, filter each channel by itself, project."""

    hidden: int = 8  # Channels of the depthwise convolution.
    kernel: int = 3  # Height and width of the depthwise kernel.
    stride: int = 1  # Stride of the depthwise convolution.
    act: str = "relu"  # Activation, a name of `ACTIVATIONS`.
    squeeze: bool = False  # True if a squeeze-and-excite gate scales the hidden channels.
    expand: bool = True  # False leaves out the first 1×1 convolution: `hidden` is `in_channels`.
    skip: bool = False  # True if the input is added to the output.

    @property
    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        hidden, out_size = self.hidden, self.out_size
        group = "hidden" if self.expand else "in"
        layers = []
        if self.expand:
            layers.append(
                LayerSpec(
                    "body.expand.conv",
                    self.in_channels,
                    hidden,
                    self.size,
                    "in",
                    group,
                    norm="body.expand.norm",
                ),
            )
        layers.append(
            LayerSpec(
                "body.filter.conv",
                hidden,
                hidden,
                out_size,
                group,
                group,
                kernel=self.kernel,
                depthwise=True,
                norm="body.filter.norm",
            ),
        )
        if self.squeeze:
            squeezed = multiple_of_8(hidden // 4)
            gate = "body.squeeze.gate"
            layers.append(LayerSpec(f"{gate}.1", hidden, squeezed, 1, group, "squeezed", bias=True))
            layers.append(LayerSpec(f"{gate}.3", squeezed, hidden, 1, "squeezed", group, bias=True))
        layers.append(
            LayerSpec(
                "body.project.conv",
                hidden,
                self.out_channels,
                out_size,
                group,
                "out",
                norm="body.project.norm",
            ),
        )
        return tuple(layers)

    @property
    @override
    def out_size(self) -> int:
        return strided(self.size, self.stride)

    @property
    @override
    def keeps_channels(self) -> bool:
        return self.skip

    @property
    @override
    def elastic_kernel(self) -> str:
        return "body.filter.conv.weight"

    @override
    def build(self) -> nn.Module:
        body = OrderedDict[str, nn.Module]()
        if self.expand:
            body["expand"] = _unit(self.in_channels, self.hidden, 1, act=self.act)
        body["filter"] = _unit(
            self.hidden,
            self.hidden,
            self.kernel,
            self.stride,
            act=self.act,
            groups=self.hidden,
        )
        if self.squeeze:
            body["squeeze"] = SqueezeExcite(self.hidden)
        body["project"] = _unit(self.hidden, self.out_channels, 1, act="none")
        if self.skip:
            return Residual(nn.Sequential(body))
        return nn.Sequential(OrderedDict(body=nn.Sequential(body)))


@dataclass(frozen=True)
class HeadSpec(BlockSpec):
    """The classifier: mean over positions, an optional hidden linear layer, a linear layer.

    `out_channels` is the number of classes.
    """

    hidden: int = 0  # Outputs of the hidden linear layer. 0 if there is none.
    act: str = "hardswish"  # Activation behind the hidden layer, a name of `ACTIVATIONS`.

    @property
    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        if not self.hidden:
            channels = (self.in_channels, self.out_channels)
            return (LayerSpec("classifier", *channels, 1, "in", "class", bias=True),)
        return (
            LayerSpec("hidden", self.in_channels, self.hidden, 1, "in", "hidden", bias=True),
            LayerSpec(
                "classifier",
                self.hidden,
                self.out_channels,
                1,
                "hidden",
                "class",
                bias=True,
            ),
        )

    @property
    @override
    def out_size(self) -> int:
        return 1

    @override
    def build(self) -> nn.Module:
        layers = OrderedDict[str, nn.Module](pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(1))
        if self.hidden:
            layers["hidden"] = nn.Linear(self.in_channels, self.hidden)
            layers["act"] = ACTIVATIONS[self.act]()
        layers["classifier"] = nn.Linear(self.hidden or self.in_channels, self.out_channels)
        return nn.Sequential(layers)


def _unit(
    in_channels: int,
    out_channels: int,
    kernel: int,
    stride: int = 1,
    *,
    act: str = "relu",
    groups: int = 1,
) -> ConvUnit:
    make = partial(ConvUnit, norm=nn.BatchNorm2d, act=ACTIVATIONS[act], groups=groups)
    return make(in_channels, out_channels, kernel, stride)
