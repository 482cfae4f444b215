"""Supernets: many nets in one set of weights, from which each device gets one that fits it.

`SPACES` has the built-in search spaces by name. A supernet has no named axes. The reasons are in
docs/internals/supernets.md.

space.py, spaces.py       search spaces, and the built-in ones by name
mobilenet.py, resnet.py   the papers' spaces
blocks.py                 kinds of blocks, with their cost and layers
elastic.py                a supernet as a module, and the members that are cut from it
images.py, phases.py      images and phases of pre-training
training.py               pre-training by progressive shrinking
evaluate.py               accuracy of a supernet's members
store.py                  files of supernets, and import of weights
checks.py                 checks of a user's space
limits.py, meter.py       limits of devices, and the cost of members
memory.py, latency.py     training memory, and inference time from timed blocks
predictor.py, scoring.py  predicted accuracy of members
genome.py, search.py      search for the best member within limits
service.py, nets.py       members for the devices of a fleet
model.py                  members as the nets of a run (RaFL)
"""

from __future__ import annotations

from fedquilt.supernet.blocks import BlockSpec, MemberCost
from fedquilt.supernet.checks import check_space
from fedquilt.supernet.elastic import Supernet, recalibrate
from fedquilt.supernet.evaluate import accuracy, member_accuracy
from fedquilt.supernet.images import SupernetData, rotations
from fedquilt.supernet.mobilenet import MobileNetV2Space, MobileNetV3Space, TinySpace
from fedquilt.supernet.resnet import ResNet50Space
from fedquilt.supernet.space import Config, Space, SpaceChoice, StageOptions
from fedquilt.supernet.spaces import SPACES
from fedquilt.supernet.store import import_weights, load_supernet, save_supernet, space_by_name
from fedquilt.supernet.training import SupernetProgress, SupernetTraining, train_supernet

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
