"""Small variants of the built-in spaces, whose nets run in milliseconds."""

from __future__ import annotations

from fedquilt.supernet import MobileNetV2Space, MobileNetV3Space, ResNet50Space, Space, TinySpace

SMALL: dict[str, Space] = {
    "resnet50": ResNet50Space(
        image_size=16, stem=16, channels=(32, 48, 64, 96), depths=(3, 3, 3, 3)
    ),
    "mobilenetv3": MobileNetV3Space(image_size=16, width_multiplier=0.25),
    "mobilenetv2": MobileNetV2Space(image_size=16, width_multiplier=0.25),
    "tiny": TinySpace(),
}
REAL: dict[str, Space] = {
    "resnet50": ResNet50Space(),
    "mobilenetv3": MobileNetV3Space(),
    "mobilenetv2": MobileNetV2Space(),
}
