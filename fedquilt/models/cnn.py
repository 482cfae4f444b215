"""Small convolutional networks of the papers, for EMNIST, CIFAR-10, Digits and DomainNet."""

from __future__ import annotations

from functools import partial

from torch import nn

from fedquilt.models.blocks import ConvUnit, LinearUnit, Norm, Staged, norms


class ConvNet(Staged):
    """The EMNIST network: two convolutions and two linear layers.

    It is from Reddi et al. (2021), and ProgFed uses it (appendix B).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Side of the images in pixels.
    """

    def __init__(
        self, num_classes: int = 62, in_channels: int = 1, *, image_size: int = 28
    ) -> None:
        side = (image_size - 4) // 2
        super().__init__(
            [
                nn.Sequential(nn.Conv2d(in_channels, 32, 3), nn.ReLU()),
                nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
                nn.Sequential(
                    nn.Flatten(1), nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Dropout(0.5)
                ),
            ],
            head=nn.Linear(128, num_classes),
        )


class ProgFedCNN(Staged):
    """The CIFAR-10 network of ProgFed (appendix B): three convolutions and two linear layers.

    It has 122,570 parameters.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Side of the images in pixels.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, *, image_size: int = 32
    ) -> None:
        side = ((image_size - 2) // 2 - 2) // 2 - 2
        super().__init__(
            [
                nn.Sequential(nn.Conv2d(in_channels, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
                nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
                nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()),
                nn.Sequential(nn.Flatten(1), nn.Linear(64 * side * side, 64), nn.ReLU()),
            ],
            head=nn.Linear(64, num_classes),
        )


class DigitsCNN(Staged):
    """The Digits network of FedBN, which FedResCuE uses (Table 16).

    Split-Mix uses it with norms after the first two linear layers (Table 2).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        norm_fc: True: the first two linear layers have batch norms.
        image_size: Side of the images in pixels.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        norm_fc: bool = False,
        image_size: int = 28,
    ) -> None:
        conv = partial(ConvUnit, kernel=5, norm=norms("batch"), bias=True)
        linear = partial(LinearUnit, norm=norms("batch" if norm_fc else "none", dims=1))
        side = image_size // 4
        super().__init__(
            [
                nn.Sequential(conv(in_channels, 64), nn.MaxPool2d(2)),
                nn.Sequential(conv(64, 64), nn.MaxPool2d(2)),
                conv(64, 128),
                nn.Sequential(nn.Flatten(1), linear(128 * side * side, 2048)),
                linear(2048, 512),
            ],
            head=nn.Linear(512, num_classes),
        )


class AlexNet(Staged):
    """AlexNet with a norm after each convolution and hidden linear layer.

    FedBN introduced these norms. Split-Mix trains the network on DomainNet (Table 3).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        norm: Kind of norm: "batch", "group" or "none".
        hidden: Width of the two hidden linear layers.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        norm: Norm = "batch",
        hidden: int = 4096,
    ) -> None:
        conv = partial(ConvUnit, norm=norms(norm), bias=True)
        linear = partial(LinearUnit, norm=norms(norm, dims=1))
        pool = partial(nn.MaxPool2d, 3, 2)
        stem = nn.Conv2d(in_channels, 64, 11, 4, 2)
        super().__init__(
            [
                nn.Sequential(stem, norms(norm)(64), nn.ReLU(), pool()),
                nn.Sequential(conv(64, 192, 5), pool()),
                conv(192, 384),
                conv(384, 256),
                nn.Sequential(conv(256, 256), pool(), nn.AdaptiveAvgPool2d(6)),
                nn.Sequential(nn.Flatten(1), linear(256 * 6 * 6, hidden)),
                linear(hidden, hidden),
            ],
            head=nn.Linear(hidden, num_classes),
        )


digits_cnn = partial(DigitsCNN, norm_fc=False)
digits_cnn_norm = partial(DigitsCNN, norm_fc=True)
