"""Supernets: many nets in one set of weights, from which each device gets one that fits it.

`SPACES` has the built-in search spaces by name. A supernet has no named axes; the reasons are in
docs/internals/supernets.md.
"""

from __future__ import annotations

from fedquilt.supernet.blocks import BlockSpec, MemberCost
from fedquilt.supernet.checks import check_space
from fedquilt.supernet.elastic import Supernet, recalibrate
from fedquilt.supernet.mobilenet import MobileNetV2Space, MobileNetV3Space, TinySpace
from fedquilt.supernet.resnet import ResNet50Space
from fedquilt.supernet.space import Config, Space, SpaceChoice, StageOptions
from fedquilt.supernet.spaces import SPACES
from fedquilt.supernet.store import import_weights, load_supernet, save_supernet, space_by_name
from fedquilt.supernet.training import (
    SupernetData,
    SupernetProgress,
    SupernetTraining,
    accuracy,
    member_accuracy,
    rotations,
    train_supernet,
)

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
    "Supernet",
    "SupernetData",
    "SupernetProgress",
    "SupernetTraining",
    "TinySpace",
    "accuracy",
    "check_space",
    "import_weights",
    "load_supernet",
    "member_accuracy",
    "recalibrate",
    "rotations",
    "save_supernet",
    "space_by_name",
    "train_supernet",
]
