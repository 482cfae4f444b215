"""Regions: the positions of a member that a phase of training may change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedquilt.family.rows import inside

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Region(Protocol):
    """Contract of a region: the positions of a member that a phase may change.

    `mask` returns True (all positions of a weight), False (none), or a boolean tensor.
    """

    def __hash__(self) -> int: ...

    def mask(self, member: Member, name: str) -> Tensor | bool: ...


@dataclass(frozen=True)
class Everywhere:
    """All positions."""

    def mask(self, member: Member, name: str) -> Tensor | bool:
        return True


@dataclass(frozen=True)
class Between:
    """Positions inside the sub-model of share `outer` and outside that of share `inner`."""

    inner: float = 0.0  # Share whose positions are left out. 0: none are left out.
    outer: float = 1.0  # Share whose positions are included.

    def mask(self, member: Member, name: str) -> Tensor | bool:
        outer = _inside(member, name, self.outer)
        return outer & ~_inside(member, name, self.inner) if self.inner else outer


@dataclass(frozen=True)
class Part:
    """A named part of the model, such as `norm`, or everything else."""

    name: str
    other: bool = False  # True: everything except the part.

    def mask(self, member: Member, name: str) -> Tensor | bool:
        return (name in member.parts[self.name]) != self.other


@dataclass(frozen=True)
class WithinVariant:
    """The weights of one variant of the client's net."""

    variant: str

    def mask(self, member: Member, name: str) -> Tensor | bool:
        return name in member.at(self.variant).names


def _inside(member: Member, name: str, share: float) -> Tensor:
    """Return a mask of the elements of a member's weight that a smaller share has."""
    cut = member.family.cutter.rows(name, member.nested(share).index, member.index)
    return inside(cut, member.shape(name))


@lru_cache(maxsize=64)  # Drawn phases have many masks, each as large as the net.
def masks_of(member: Member, moves: Region, device: torch.device) -> dict[str, Tensor | bool]:
    """Return the mask of every trained weight on a device, by name.

    Args:
        member: The client's net.
        moves: Region that may change.
        device: Device of the masks.
    """
    masks = {name: moves.mask(member, name) for name in member.trainable}
    return {
        name: mask.to(device) if isinstance(mask, Tensor) else mask for name, mask in masks.items()
    }
