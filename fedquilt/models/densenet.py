"""DenseNet-BC: every layer reads all earlier outputs of its block (Huang et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedquilt.models.blocks import ConvUnit, MakeNorm, Norm, Staged, norms, pooled
from fedquilt.models.resnet import Stem


def pre_unit(in_channels: int, out_channels: int, kernel: int, norm: MakeNorm) -> nn.Sequential:
    """Return a norm, an activation and a convolution that keeps the size.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel: Side of the convolution's kernel.
        norm: Function that makes a norm for a number of channels.
    """
    conv = nn.Conv2d(in_channels, out_channels, kernel, padding=(kernel - 1) // 2, bias=False)
    return nn.Sequential(norm(in_channels), nn.ReLU(), conv)


class DenseLayer(nn.Module):
    """A layer that appends channels, computed through a bottleneck four times as wide.

    Args:
        in_channels: Channels of the input.
        growth: Number of channels that are appended.
        norm: Function that makes a norm for a number of channels.
    """

    def __init__(self, in_channels: int, growth: int, norm: MakeNorm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            pre_unit(in_channels, 4 * growth, 1, norm), pre_unit(4 * growth, growth, 3, norm)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class DenseNet(Staged):
    """DenseNet-BC. A stage is a dense block with the transition before it.

    The transition halves the resolution and the number of channels.

    Args:
        blocks: Number of layers of each dense block.
        growth: Channels that each layer appends.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        stem: First layers: "cifar" keeps the resolution, "imagenet" divides it by 4.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (6, 6, 6),
        growth: int = 12,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        stem: Stem = "cifar",
        norm: Norm = "batch",
        groups: int = 2,
    ) -> None:
        make_norm, channels = norms(norm, groups=groups), 2 * growth
        opening: list[nn.Module]
        if stem == "imagenet":
            opening = [ConvUnit(in_channels, channels, 7, 2, norm=make_norm), nn.MaxPool2d(3, 2, 1)]
        else:
            opening = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        stages = []
        for depth in blocks:
            layers = [DenseLayer(channels + i * growth, growth, make_norm) for i in range(depth)]
            stages.append(nn.Sequential(*opening, *layers))
            channels += depth * growth
            opening = [pre_unit(channels, channels // 2, 1, make_norm), nn.AvgPool2d(2)]
            out_channels, channels = channels, channels // 2
        classifier = pooled(out_channels, num_classes)
        head = nn.Sequential(make_norm(out_channels), nn.ReLU(), *classifier.values())
        super().__init__(stages, head)


densenet40_12 = partial(DenseNet, (6, 6, 6), 12)
densenet100_12 = partial(DenseNet, (16, 16, 16), 12)
densenet121 = partial(DenseNet, (6, 12, 24, 16), 32, stem="imagenet")
