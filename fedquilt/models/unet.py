"""U-Nets in two and three dimensions (Ronneberger et al. 2015; Çiçek et al. 2016)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedquilt.errors import DataError
from fedquilt.models.blocks import CONV, ConvUnit, MakeNorm, Norm, norms
from fedquilt.units import sides

Up = Literal["transpose", "upsample"]
POOL: dict[int, type[nn.MaxPool2d | nn.MaxPool3d]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
TRANSPOSE: dict[int, type[nn.ConvTranspose2d | nn.ConvTranspose3d]] = {
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}


def double_conv(in_channels: int, out_channels: int, dims: int, norm: MakeNorm) -> nn.Sequential:
    """Return two 3×3 (or 3×3×3) convolutions, each with norm and activation.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        dims: Spatial dimensions, 2 or 3.
        norm: Function that makes a norm for a number of channels.
    """
    unit = partial(ConvUnit, norm=norm, dims=dims)
    return nn.Sequential(unit(in_channels, out_channels), unit(out_channels, out_channels))


class Decoder(nn.Module):
    """A layer that doubles the resolution and joins the encoder's output of its level.

    Args:
        below: Channels of the level below, which has half the resolution.
        width: Channels of this level.
        dims: Spatial dimensions, 2 or 3.
        norm: Function that makes a norm for a number of channels.
        up: "transpose" upsamples by a transposed convolution, "upsample" by repetition and a 1×1
            convolution.
    """

    def __init__(self, below: int, width: int, dims: int, norm: MakeNorm, up: Up) -> None:
        super().__init__()
        self.up: nn.Module
        if up == "transpose":
            self.up = TRANSPOSE[dims](below, width, 2, 2)
        else:
            self.up = nn.Sequential(nn.Upsample(scale_factor=2), CONV[dims](below, width, 1))
        self.join = double_conv(2 * width, width, dims, norm)

    @override
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.join(torch.cat([skip, self.up(x)], 1))
        return joined


def check_size(size: tuple[int, ...], halvings: int) -> None:
    """Refuse images whose sides cannot be halved often enough, because levels could not be joined.

    Args:
        size: Sides of an image in pixels or voxels.
        halvings: Number of times that every side is halved.

    Raises:
        DataError: A side is not divisible by 2^halvings.
    """
    divisor = 2**halvings
    if all(side % divisor == 0 for side in size):
        return
    fitting = tuple(-(-side // divisor) * divisor for side in size)
    raise DataError(
        f"a U-Net of depth {halvings} was asked for on inputs of size {sides(size)}; every side "
        f"must divide by {divisor}. Inputs padded to {sides(fitting)} would fit (files are padded "
        f"by data.multiple_of = {divisor}), or a smaller depth."
    )


class UNet(nn.Module):
    """U-Net with `depth` halvings. Its logits are (batch, class, *size of the input).

    Every side of the input must be divisible by 2^depth. Names and shapes of the weights of a level
    do not depend on the depth. ProgFed's symmetric strategy can therefore grow the network from the
    outer levels inwards: encoder.0..s, decoder.0..s−1 and the head are a U-Net of depth s. The
    asymmetric strategy starts with the whole encoder, the innermost decoder and a temporary head.

    Args:
        dims: Spatial dimensions of the images, 2 or 3.
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the outermost level. Each level below has twice as many.
        depth: Number of halvings of the resolution.
        norm: Kind of norm: "batch", "group" or "none".
        groups: Groups of a group norm. It has no effect with other norms.
        up: Upsampling: "transpose" is a transposed convolution, "upsample" repeats pixels.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        dims: int,
        num_classes: int = 2,
        in_channels: int = 1,
        *,
        width: int = 16,
        depth: int = 4,
        norm: Norm = "group",
        groups: int = 8,
        up: Up = "transpose",
    ) -> None:
        super().__init__()
        make_norm = norms(norm, dims, groups)
        widths = [width * 2**level for level in range(depth + 1)]
        pairs = list(pairwise(widths))
        self.pool = POOL[dims](2)
        self.encoder = nn.ModuleList(
            double_conv(width_above, level_width, dims, make_norm)
            for width_above, level_width in [(in_channels, width), *pairs]
        )
        self.decoder = nn.ModuleList(
            Decoder(width_below, level_width, dims, make_norm, up)
            for level_width, width_below in pairs
        )
        self.head = CONV[dims](width, num_classes, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.forward_stage(len(self.decoder), x)

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        """Return the logits of the U-Net that halves the resolution `stage` times only.

        It has the outer encoders and decoders of this one, and its head. The logits (sample, class,
        …) have the resolution of the input `x` (sample, channel, …), whose sides must fit the whole
        depth.
        """
        check_size(tuple(x.shape[2:]), len(self.decoder))
        levels = [self.encoder[0](x)]
        for encode in self.encoder[1 : stage + 1]:
            levels.append(encode(self.pool(levels[-1])))
        x = levels.pop()
        for decode in self.decoder[:stage][::-1]:
            x = decode(x, levels.pop())
        logits: Tensor = self.head(x)
        return logits

    @property
    def stage_ends(self) -> dict[str, int | list[str]]:
        """Return the two ways in which the network can grow.

        "symmetric" adds levels from the outside inwards, by `forward_stage`. "asymmetric" adds
        decoders from the innermost outwards.
        """
        depth = len(self.decoder)
        return {
            "symmetric": depth,
            "asymmetric": [f"decoder.{level}" for level in reversed(range(depth))],
        }


unet2d = partial(UNet, 2)
# BraTS: four modalities, five labels (ProgFed, appendix B)
unet3d = partial(UNet, 3, num_classes=5, in_channels=4)
