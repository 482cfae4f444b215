"""The built-in search spaces by name."""

from __future__ import annotations

from fedquilt.supernet.mobilenet import MobileNetV2Space, MobileNetV3Space, TinySpace
from fedquilt.supernet.resnet import ResNet50Space
from fedquilt.supernet.space import Space

SPACES: dict[str, type[Space]] = {
    space.name: space for space in (ResNet50Space, MobileNetV3Space, MobileNetV2Space, TinySpace)
}
