"""MobileNetV2 (Sandler et al. 2018) and MobileNetV3 (Howard et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from fedquilt.models.blocks import ConvUnit, Layer, MakeNorm, Norm, Residual, Staged, norms
from fedquilt.models.resnet import Stem


class BlockRow(NamedTuple):
    """One row of the papers' tables, which describes an inverted residual block."""

    kernel: int  # Side of the kernel of the depth-wise convolution
    expanded: int  # Channels inside the block
    out: int  # Channels of the output
    squeeze: bool  # True: the block has squeeze-and-excite
    act: Layer  # Function that makes the activation
    stride: int  # 2 halves the resolution


def multiple_of_8(channels: int) -> int:
    """Round a number of channels to the nearest multiple of 8 that is at least nine tenths of it.

    The result is at least 8. The authors' code rounds like this.
    """
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


class SqueezeExcite(nn.Module):
    """A layer that scales each channel by a gate, computed from the means of all channels.

    Args:
        channels: Channels of the input and the output. A quarter of them is the hidden width.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = multiple_of_8(channels // 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.gate(x)
        return out


def inverted_residual(in_channels: int, row: BlockRow, norm: MakeNorm) -> nn.Module:
    """Return a block that expands the channels, filters each one and projects them to fewer.

    Expansion and projection are 1×1 convolutions. The first is left out if it would not change the
    number of channels. The block has a skip connection if input and output have the same shape.

    Args:
        in_channels: Channels of the input.
        row: Row of the paper's table.
        norm: Function that makes a norm for a number of channels.
    """
    unit = partial(ConvUnit, norm=norm)
    layers: list[nn.Module] = []
    if row.expanded != in_channels:
        layers.append(unit(in_channels, row.expanded, 1, act=row.act))
    layers.append(
        unit(row.expanded, row.expanded, row.kernel, row.stride, act=row.act, groups=row.expanded)
    )
    if row.squeeze:
        layers.append(SqueezeExcite(row.expanded))
    layers.append(unit(row.expanded, row.out, 1, act=nn.Identity))
    body = nn.Sequential(*layers)
    return Residual(body) if row.stride == 1 and row.out == in_channels else body


class MobileNet(Staged):
    """A MobileNet that is built from a table. A stage ends where the resolution halves.

    Args:
        rows: Rows of the paper's table, one for each block.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem_width: Channels of the first convolution.
        last: Width of the final 1×1 convolution.
        hidden: Width of the linear layer after it. 0: there is none, as in V2.
        act: Function that makes the activation of the first and the last layers.
        stem: "cifar" leaves out the first two halvings, so that 32×32 images end at 4×4.
            "imagenet" is the network of the paper.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
        dropout: Probability of dropout before the classifier. 0 has no effect.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        rows: Sequence[BlockRow],
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        stem_width: int,
        last: int,
        hidden: int = 0,
        act: Layer = nn.Hardswish,
        stem: Stem = "cifar",
        norm: Norm = "batch",
        groups: int = 2,
        dropout: float = 0.2,
    ) -> None:
        make_norm = norms(norm, groups=groups)
        if stem == "cifar":
            first = next(i for i, row in enumerate(rows) if row.stride == 2)
            rows = [*rows[:first], rows[first]._replace(stride=1), *rows[first + 1 :]]
        stem_stride = 1 if stem == "cifar" else 2
        opening = ConvUnit(in_channels, stem_width, 3, stem_stride, norm=make_norm, act=act)
        stages: list[list[nn.Module]] = [[opening]]
        channels = stem_width
        for row in rows:
            if row.stride == 2:
                stages.append([])
            stages[-1].append(inverted_residual(channels, row, make_norm))
            channels = row.out
        stages[-1].append(ConvUnit(channels, last, 1, norm=make_norm, act=act))
        head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1)]
        if hidden:
            head += [nn.Linear(last, hidden), act()]
        head += [nn.Dropout(dropout), nn.Linear(hidden or last, num_classes)]
        super().__init__([nn.Sequential(*stage) for stage in stages], nn.Sequential(*head))


def _rows_v2() -> list[BlockRow]:
    """Return a row for each block of MobileNetV2, in order (Table 2 of its paper)."""
    rows, channels = [], 32
    for expansion, out, depth, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(depth):
            rows.append(
                BlockRow(3, channels * expansion, out, False, nn.ReLU6, stride if i == 0 else 1)
            )
            channels = out
    return rows


RE, HS = nn.ReLU, nn.Hardswish
_ROWS_V3_LARGE = [
    BlockRow(3, 16, 16, False, RE, 1),
    BlockRow(3, 64, 24, False, RE, 2),
    BlockRow(3, 72, 24, False, RE, 1),
    BlockRow(5, 72, 40, True, RE, 2),
    BlockRow(5, 120, 40, True, RE, 1),
    BlockRow(5, 120, 40, True, RE, 1),
    BlockRow(3, 240, 80, False, HS, 2),
    BlockRow(3, 200, 80, False, HS, 1),
    BlockRow(3, 184, 80, False, HS, 1),
    BlockRow(3, 184, 80, False, HS, 1),
    BlockRow(3, 480, 112, True, HS, 1),
    BlockRow(3, 672, 112, True, HS, 1),
    BlockRow(5, 672, 160, True, HS, 2),
    BlockRow(5, 960, 160, True, HS, 1),
    BlockRow(5, 960, 160, True, HS, 1),
]
_ROWS_V3_SMALL = [
    BlockRow(3, 16, 16, True, RE, 2),
    BlockRow(3, 72, 24, False, RE, 2),
    BlockRow(3, 88, 24, False, RE, 1),
    BlockRow(5, 96, 40, True, HS, 2),
    BlockRow(5, 240, 40, True, HS, 1),
    BlockRow(5, 240, 40, True, HS, 1),
    BlockRow(5, 120, 48, True, HS, 1),
    BlockRow(5, 144, 48, True, HS, 1),
    BlockRow(5, 288, 96, True, HS, 2),
    BlockRow(5, 576, 96, True, HS, 1),
    BlockRow(5, 576, 96, True, HS, 1),
]

mobilenet_v2 = partial(MobileNet, _rows_v2(), stem_width=32, last=1280, act=nn.ReLU6)
mobilenet_v3_small = partial(MobileNet, _ROWS_V3_SMALL, stem_width=16, last=576, hidden=1024)
mobilenet_v3_large = partial(MobileNet, _ROWS_V3_LARGE, stem_width=16, last=960, hidden=1280)
