"""Residual networks.

- ResNet (He et al. 2016a)
- PreResNet (He et al. 2016b)
- WideResNet (Zagoruyko & Komodakis 2016)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, cast

from torch import Tensor, nn
from typing_extensions import override

from fedquilt.models.blocks import ConvUnit, MakeNorm, Norm, Residual, Staged, norms, pooled

Block = Literal["basic", "bottleneck"]
Stem = Literal["cifar", "imagenet"]
EXPANSION: dict[Block, int] = {"basic": 1, "bottleneck": 4}


def residual_block(
    kind: Block, in_channels: int, width: int, stride: int, norm: MakeNorm
) -> Residual:
    """Return a residual block: two 3×3 convolutions, or one between two 1×1 convolutions.

    The shortcut is a 1×1 convolution if the shape changes, and the identity if it does not.

    Args:
        kind: "basic" has two convolutions, "bottleneck" has three.
        in_channels: Channels of the input.
        width: Channels inside the block. A bottleneck's output has four times as many.
        stride: Stride of the block. 1 keeps the resolution.
        norm: Function that makes a norm for a number of channels.
    """
    out_channels = width * EXPANSION[kind]
    unit = partial(ConvUnit, norm=norm)
    last = partial(unit, act=nn.Identity)
    if kind == "basic":
        body = nn.Sequential(unit(in_channels, width, 3, stride), last(width, out_channels, 3))
    else:
        body = nn.Sequential(
            unit(in_channels, width, 1), unit(width, width, 3, stride), last(width, out_channels, 1)
        )
    same = stride == 1 and in_channels == out_channels
    return Residual(body, None if same else last(in_channels, out_channels, 1, stride), nn.ReLU)


def residual_stages(
    block: Callable[[int, int, int], nn.Module],
    blocks: Sequence[int],
    widths: Sequence[int],
    in_channels: int,
    expansion: int = 1,
) -> Iterator[nn.Sequential]:
    """Yield the stages of a residual network. Each stage but the first halves the resolution.

    Args:
        block: Function that makes a block from (in_channels, width, stride).
        blocks: Number of blocks of each stage.
        widths: Width of each stage.
        in_channels: Channels that the first stage gets.
        expansion: Output channels of a block, as a multiple of its width.
    """
    for stage, (depth, width) in enumerate(zip(blocks, widths, strict=True)):
        layers = []
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            layers.append(block(in_channels, width, stride))
            in_channels = width * expansion
        yield nn.Sequential(*layers)


class ResNet(Staged):
    """ResNet. The stem belongs to the first stage, ProgFed's E_1 (conv1 + conv2_x).

    ProgFed uses group norms, with two groups as in Reddi et al. (2021).

    Args:
        block: "basic" has two convolutions in a block, "bottleneck" has three.
        blocks: Number of blocks of each stage.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        widths: Width of each stage.
        stem: First layers: "cifar" keeps the resolution, "imagenet" divides it by 4.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        block: Block,
        blocks: Sequence[int],
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        widths: Sequence[int] = (64, 128, 256, 512),
        stem: Stem = "cifar",
        norm: Norm = "batch",
        groups: int = 2,
    ) -> None:
        make_norm, expansion = norms(norm, groups=groups), EXPANSION[block]
        opening: list[nn.Module]
        if stem == "imagenet":
            unit = ConvUnit(in_channels, widths[0], 7, 2, norm=make_norm)
            opening = [unit, nn.MaxPool2d(3, 2, 1)]
        else:
            opening = [ConvUnit(in_channels, widths[0], norm=make_norm)]
        make_block = partial(residual_block, block, norm=make_norm)
        first, *later = residual_stages(make_block, blocks, widths, widths[0], expansion)
        super().__init__(
            [nn.Sequential(*opening, *first), *later],
            nn.Sequential(pooled(widths[-1] * expansion, num_classes)),
        )


class PreActBlock(nn.Module):
    """A residual block with norm and activation before each convolution.

    If the shape changes, the shortcut is a convolution that starts after the first norm and
    activation.

    Args:
        in_channels: Channels of the input.
        width: Channels of the output.
        stride: Stride of the block. 1 keeps the resolution.
        norm: Function that makes a norm for a number of channels.
        dropout: Probability of dropout between the convolutions. 0 has no effect.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, norm: MakeNorm, dropout: float = 0.0
    ) -> None:
        super().__init__()
        same = stride == 1 and in_channels == width
        self.open = nn.Sequential(norm(in_channels), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Dropout(dropout) if dropout else nn.Identity(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )
        self.shortcut = None if same else nn.Conv2d(in_channels, width, 1, stride, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        opened = self.open(x)
        out: Tensor = self.body(opened) + (x if self.shortcut is None else self.shortcut(opened))
        return out


class PreResNet(Staged):
    """Pre-activation ResNet of HeteroFL and FedRolex.

    With 18 layers and 10 classes it has 11,172,170 parameters.

    Args:
        blocks: Number of blocks of each stage.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        widths: Width of each stage.
        stem_width: Channels of the first convolution. None: the width of the first stage.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
        dropout: Probability of dropout inside the blocks. 0 has no effect.
        zero_output_bias: True: the output layer starts with a bias of 0, as in the code of
            HeteroFL, FedRolex and Split-Mix. False: it starts at random, as torch has it.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        widths: Sequence[int] = (64, 128, 256, 512),
        stem_width: int | None = None,
        norm: Norm = "batch",
        groups: int = 2,
        dropout: float = 0.0,
        zero_output_bias: bool = False,
    ) -> None:
        stem_width = stem_width or widths[0]
        make_norm = norms(norm, groups=groups)
        make_block = partial(PreActBlock, norm=make_norm, dropout=dropout)
        first, *later = residual_stages(make_block, blocks, widths, stem_width)
        stem = nn.Conv2d(in_channels, stem_width, 3, 1, 1, bias=False)
        close = OrderedDict[str, nn.Module](norm=make_norm(widths[-1]), act=nn.ReLU())
        classifier = pooled(widths[-1], num_classes)
        if zero_output_bias:
            nn.init.zeros_(cast(nn.Linear, classifier["linear"]).bias)
        super().__init__([nn.Sequential(stem, *first), *later], nn.Sequential(close | classifier))


class WideResNet(PreResNet):
    """WideResNet-`depth`-`widen`: a PreResNet of three wide stages.

    FedResCuE uses one for CIFAR-100 and does not state its depth.

    Args:
        depth: Number of layers, 6n + 4.
        widen: Factor of all widths but the stem's. 1 gives a thin PreResNet.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
        dropout: Probability of dropout inside the blocks. 0 has no effect.
    """

    def __init__(
        self,
        depth: int = 16,
        widen: int = 4,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        norm: Norm = "batch",
        groups: int = 2,
        dropout: float = 0.0,
    ) -> None:
        if depth % 6 != 4:
            raise ValueError(
                f"depth {depth} does not make a WideResNet; 6n + 4 does: 10, 16, 22, 28, 40 …"
            )
        super().__init__(
            ((depth - 4) // 6,) * 3,
            num_classes,
            in_channels,
            widths=(16 * widen, 32 * widen, 64 * widen),
            stem_width=16,
            norm=norm,
            groups=groups,
            dropout=dropout,
        )


resnet18 = partial(ResNet, "basic", (2, 2, 2, 2))
resnet34 = partial(ResNet, "basic", (3, 4, 6, 3))
resnet50 = partial(ResNet, "bottleneck", (3, 4, 6, 3))
resnet152 = partial(ResNet, "bottleneck", (3, 8, 36, 3))
rescue_resnet = partial(ResNet, "bottleneck", (1, 1, 1, 1), stem="imagenet")  # FedResCuE, Table 15
preresnet18 = partial(PreResNet, (2, 2, 2, 2))
# Network of the demo, for 8×8 digits
tiny_resnet = partial(ResNet, "basic", (1, 1), in_channels=1, widths=(12, 24))
