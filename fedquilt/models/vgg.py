"""VGG: plain stacks of convolutions between poolings (Simonyan & Zisserman 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import nn

from fedquilt.models.blocks import ConvUnit, Norm, Staged, norms


class VGG(Staged):
    """VGG in ProgFed's four stages, which end at the poolings.

    The first two poolings share a stage.

    Args:
        depths: Numbers of convolutions between poolings, five in all.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
        pool: Side of the pooled map before the classifier: 1 for CIFAR, 7 for ImageNet.
        hidden: Width of the two hidden layers of the classifier. 0: it is a single linear layer.
        dropout: Probability of dropout after the hidden layers. 0 has no effect.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        depths: Sequence[int],
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        norm: Norm = "batch",
        groups: int = 2,
        pool: int = 1,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        unit = partial(ConvUnit, norm=norms(norm, groups=groups), bias=True)
        stacks = []
        for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
            units = [unit(in_channels if i == 0 else width, width) for i in range(depth)]
            stacks.append(nn.Sequential(*units, nn.MaxPool2d(2)))
            in_channels = width
        sizes = [in_channels * pool * pool] + [hidden] * 2 * bool(hidden)
        head: list[nn.Module] = [nn.AdaptiveAvgPool2d(pool), nn.Flatten(1)]
        for size, following in pairwise(sizes):
            head += [nn.Linear(size, following), nn.ReLU(), nn.Dropout(dropout)]
        head += [nn.Linear(sizes[-1], num_classes)]
        super().__init__([nn.Sequential(*stacks[:2]), *stacks[2:]], nn.Sequential(*head))


vgg11 = partial(VGG, (1, 1, 2, 2, 2))
vgg16 = partial(VGG, (2, 2, 3, 3, 3))
vgg19 = partial(VGG, (2, 2, 4, 4, 4))
