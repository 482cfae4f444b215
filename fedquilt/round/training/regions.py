"""Regions: the positions of a member that a phase of training may change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.family.rows import inside

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Region(ABC):
    """Base class of regions: the positions of a member that a phase may change.

    Regions are frozen dataclasses, because masks are cached by region.
    """

    @abstractmethod
    def mask(self, member: Member, name: str) -> Tensor | bool:
        """Return the positions of one weight that may change.

        The result is True (all positions), False (none), or a boolean tensor of the weight's shape.

        Args:
            member: Net that the client trains.
            name: Name of the weight in the net.
        """


@dataclass(frozen=True)
class Everywhere(Region):
    """All positions."""

    @override
    def mask(self, member: Member, name: str) -> Tensor | bool:
        return True


@dataclass(frozen=True)
class Between(Region):
    """Positions inside the sub-model of share `outer` and outside that of share `inner`."""

    inner: float = 0.0  # Share whose positions are left out. 0: none are left out.
    outer: float = 1.0  # Share whose positions are included.

    @override
    def mask(self, member: Member, name: str) -> Tensor | bool:
        outer = _inside(member, name, self.outer)
        return outer & ~_inside(member, name, self.inner) if self.inner else outer


@dataclass(frozen=True)
class Part(Region):
    """A named part of the model, such as `norm`, or everything else."""

    name: str  # Name of the part.
    other: bool = False  # True: everything except the part.

    @override
    def mask(self, member: Member, name: str) -> Tensor | bool:
        return (name in member.parts[self.name]) != self.other


@dataclass(frozen=True)
class WithinVariant(Region):
    """The weights of one variant of the client's net."""

    variant: str  # Name of the variant.

    @override
    def mask(self, member: Member, name: str) -> Tensor | bool:
        return name in member.at(self.variant).names


def _inside(member: Member, name: str, share: float) -> Tensor:
    """Return a mask of the elements of a weight that a narrower net nested in a member has.

    Args:
        member: Net that the client trains.
        name: Name of the weight.
        share: Share of the whole model that the nested net has.

    Returns:
        Boolean tensor of the weight's shape in `member`.
    """
    cut = member.family.cutter.rows(name, member.nested(share).index, member.index)
    return inside(cut, member.shape(name))


@lru_cache(maxsize=64)  # Drawn phases have many masks, each as large as the net.
def masks_of(member: Member, moves: Region, device: torch.device) -> dict[str, Tensor | bool]:
    """Return the mask of every trained weight on a device, by name. Results are cached.

    A mask is True (all positions may change), False (none), or a boolean tensor.

    Args:
        member: The client's net.
        moves: Region that may change.
        device: Device of the masks.
    """
    masks = {name: moves.mask(member, name) for name in member.trainable}
    return {
        name: mask.to(device) if isinstance(mask, Tensor) else mask for name, mask in masks.items()
    }
