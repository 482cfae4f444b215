"""Supernets: many nets in one set of weights, from which each device gets one that fits it.

`SPACES` has the built-in search spaces by name. A supernet has no named axes; the reasons are in
docs/architecture.md.
"""

from __future__ import annotations

from fedquilt.supernet.blocks import BlockSpec, MemberCost
from fedquilt.supernet.mobilenet import MobileNetV2Space, MobileNetV3Space, TinySpace
from fedquilt.supernet.resnet import ResNet50Space
from fedquilt.supernet.space import Config, Space, SpaceChoice, StageOptions

SPACES: dict[str, type[Space]] = {
    space.name: space for space in (ResNet50Space, MobileNetV3Space, MobileNetV2Space, TinySpace)
}

__all__ = [
    "SPACES",
    "BlockSpec",
    "Config",
    "MemberCost",
    "MobileNetV2Space",
    "MobileNetV3Space",
    "ResNet50Space",
    "Space",
    "SpaceChoice",
    "StageOptions",
    "TinySpace",
]
