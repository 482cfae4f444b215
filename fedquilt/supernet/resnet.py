"""The ResNet-50 space of Once-for-All (Cai et al., ICLR 2020): depth, expansion and width.

The stem is that of ImageNet (7×7, stride 2, then a max-pool), because RaFL's multiply-adds are
those of such nets on 32×32 images.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from fedquilt.models.mobilenet import multiple_of_8
from fedquilt.supernet.blocks import BlockSpec, BottleneckSpec, ConvSpec, HeadSpec
from fedquilt.supernet.space import HEAD, Config, Space, StageOptions


@dataclass(frozen=True)
class ResNet50Space(Space):
    """Bottleneck blocks in four stages with elastic depth, expansion and width.

    `(3, 4, 6, 3)` blocks with expansion 0.25 and width 1 are ResNet-50. The stem has the width of
    the first stage.
    """

    stem: int = 64  # Channels of the first convolution at width 1.
    channels: tuple[int, ...] = (256, 512, 1024, 2048)  # Output channels of each stage at width 1.
    depths: tuple[int, ...] = (4, 4, 6, 4)  # Most blocks of each stage. The least are two fewer.
    expansions: tuple[float, ...] = (0.2, 0.25, 0.35)  # Hidden channels over output channels.
    widths: tuple[float, ...] = (0.65, 0.8, 1.0)  # Kept share of each stage's channels.

    name = "resnet50"

    @property
    @override
    def stages(self) -> tuple[StageOptions, ...]:
        depths = [tuple(range(max_depth - 2, max_depth + 1)) for max_depth in self.depths]
        return tuple(StageOptions(options, self.expansions, (), self.widths) for options in depths)

    @override
    def blocks(self, config: Config) -> dict[str, BlockSpec]:
        stem_channels = multiple_of_8(round(self.stem * config.widths[0]))
        stem = ConvSpec(
            self.in_channels,
            stem_channels,
            self.image_size,
            kernel=7,
            stride=2,
            pool=True,
        )
        blocks: dict[str, BlockSpec] = {"stem": stem}
        previous: BlockSpec = stem
        for stage, block_choices in enumerate(self.kept_blocks(config)):
            channels = multiple_of_8(round(self.channels[stage] * config.widths[stage]))
            for position, choice in enumerate(block_choices):
                previous = BottleneckSpec(
                    previous.out_channels,
                    channels,
                    previous.out_size,
                    hidden=multiple_of_8(round(channels * choice.expansion)),
                    stride=2 if stage > 0 and position == 0 else 1,
                    project=position == 0,
                )
                blocks[f"stage{stage + 1}.{position}"] = previous
        blocks[HEAD] = HeadSpec(previous.out_channels, self.num_classes, previous.out_size)
        return blocks
