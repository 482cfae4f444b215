"""Spaces of inverted residual blocks: MobileNetV3, MobileNetV2 and a tiny one for 8×8 digits.

Stages, strides and options follow Once-for-All (Cai et al., ICLR 2020). The strides are those for
ImageNet, because RaFL's multiply-adds are those of such nets on 32×32 images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from typing_extensions import override

from fedquilt.models.mobilenet import multiple_of_8
from fedquilt.supernet.blocks import BlockSpec, ConvSpec, HeadSpec, InvertedSpec
from fedquilt.supernet.space import HEAD, Config, Space, StageOptions


class InvertedStage(NamedTuple):
    """The fixed part of a stage: what no configuration changes."""

    channels: int  # Output channels of every block, before `width_multiplier`.
    stride: int  # Stride of the first block.
    act: str  # Activation of every block.
    squeeze: bool = False  # True if blocks have a squeeze-and-excite gate.


@dataclass(frozen=True)
class InvertedSpace(Space):
    """Stages of inverted residual blocks with elastic depth, expansion and kernel."""

    width_multiplier: float = 1.0  # Factor of all fixed numbers of channels. 1 is the paper's net.

    rows: ClassVar[tuple[InvertedStage, ...]]  # stages with choices
    options: ClassVar[tuple[StageOptions, ...]]  # their options
    stem: ClassVar[int]  # channels of the first convolution
    stem_stride: ClassVar[int] = 2
    act: ClassVar[str]  # activation of the first and the last convolution
    first: ClassVar[InvertedStage | None] = None  # fixed block behind the stem, without expansion
    final: ClassVar[InvertedStage | None] = None  # fixed last block, with expansion 6
    last: ClassVar[int]  # channels of the last convolution
    hidden: ClassVar[int] = 0  # outputs of the hidden linear layer; 0 if there is none

    @property
    @override
    def stages(self) -> tuple[StageOptions, ...]:
        return self.options

    @override
    def blocks(self, config: Config) -> dict[str, BlockSpec]:
        stem = ConvSpec(
            self.in_channels,
            self._channels(self.stem),
            self.image_size,
            stride=self.stem_stride,
            act=self.act,
        )
        blocks: dict[str, BlockSpec] = {"stem": stem}
        previous: BlockSpec = stem

        def add(
            name: str,
            row: InvertedStage,
            position: int,
            expansion: float,
            kernel: int,
        ) -> None:
            nonlocal previous
            channels = previous.out_channels
            out_channels = self._channels(row.channels)
            stride = row.stride if position == 0 else 1
            expand = expansion != 1
            previous = InvertedSpec(
                channels,
                out_channels,
                previous.out_size,
                hidden=self._rounded(channels * expansion) if expand else channels,
                kernel=kernel,
                stride=stride,
                act=row.act,
                squeeze=row.squeeze,
                expand=expand,
                skip=stride == 1 and channels == out_channels,
            )
            blocks[name] = previous

        if self.first:
            add("first", self.first, 0, 1, 3)
        for stage, (row, block_choices) in enumerate(
            zip(self.rows, self.kept_blocks(config), strict=True),
            start=1,
        ):
            for position, choice in enumerate(block_choices):
                add(f"stage{stage}.{position}", row, position, choice.expansion, choice.kernel)
        if self.final:
            add("final", self.final, 0, 6, 3)

        channels, size = previous.out_channels, previous.out_size
        last = self._channels(self.last)
        hidden = self._channels(self.hidden) if self.hidden else 0
        blocks["last"] = ConvSpec(channels, last, size, kernel=1, act=self.act)
        blocks[HEAD] = HeadSpec(last, self.num_classes, size, hidden=hidden, act=self.act)
        return blocks

    def _channels(self, count: int) -> int:
        return self._rounded(count * self.width_multiplier)

    def _rounded(self, count: float) -> int:
        return multiple_of_8(round(count))


_KERNELS = (3, 5, 7)
_EXPANSIONS = (3, 4, 6)
_DEPTHS = (2, 3, 4)


@dataclass(frozen=True)
class MobileNetV3Space(InvertedSpace):
    """MobileNetV3: five stages of 2–4 blocks, expansion 3, 4 or 6, kernel 3, 5 or 7."""

    width_multiplier: float = 1.2  # Factor of all fixed numbers of channels. 1 is the paper's net.

    name = "mobilenetv3"
    rows = (
        InvertedStage(24, 2, "relu"),
        InvertedStage(40, 2, "relu", squeeze=True),
        InvertedStage(80, 2, "hardswish"),
        InvertedStage(112, 1, "hardswish", squeeze=True),
        InvertedStage(160, 2, "hardswish", squeeze=True),
    )
    options = (StageOptions(_DEPTHS, _EXPANSIONS, _KERNELS),) * 5
    stem = 16
    act = "hardswish"
    first = InvertedStage(16, 1, "relu")
    last = 960
    hidden = 1280


@dataclass(frozen=True)
class MobileNetV2Space(InvertedSpace):
    """MobileNetV2: five stages of 2–4 blocks, expansion 3, 4 or 6, kernel 3, 5 or 7."""

    name = "mobilenetv2"
    rows = (
        InvertedStage(24, 2, "relu6"),
        InvertedStage(32, 2, "relu6"),
        InvertedStage(64, 2, "relu6"),
        InvertedStage(96, 1, "relu6"),
        InvertedStage(160, 2, "relu6"),
    )
    options = (StageOptions(_DEPTHS, _EXPANSIONS, _KERNELS),) * 5
    stem = 32
    act = "relu6"
    first = InvertedStage(16, 1, "relu6")
    final = InvertedStage(320, 1, "relu6")
    last = 1280


@dataclass(frozen=True)
class TinySpace(InvertedSpace):
    """A space of 400 nets for 8×8 images, small enough to enumerate: two stages of 1–2 blocks."""

    image_size: int = 8  # Height and width of the images.
    in_channels: int = 1  # Channels of the images.

    name = "tiny"
    rows = (InvertedStage(8, 1, "relu"), InvertedStage(16, 2, "relu"))
    options = (StageOptions((1, 2), (2, 4), (3, 5)),) * 2
    stem = 8
    stem_stride = 1
    act = "relu"
    last = 32
