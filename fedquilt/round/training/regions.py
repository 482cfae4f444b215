"""Regions: the positions of a member that a phase of training may change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedquilt.family.cut import inside

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Region(Protocol):
    """Which positions of a member a phase may change. `mask` is True (all), False (none) or a boolean tensor."""

    def __hash__(self) -> int: ...

    def mask(self, member: Member, name: str) -> Tensor | bool: ...


@dataclass(frozen=True)
class Everywhere:
    def mask(self, member: Member, name: str) -> Tensor | bool:
        return True


@dataclass(frozen=True)
class Between:
    """Positions inside the sub-model of share `outer` and outside that of share `inner`; 0 leaves nothing out."""

    inner: float = 0.0
    outer: float = 1.0

    def mask(self, member: Member, name: str) -> Tensor | bool:
        outer = _inside(member, name, self.outer)
        return outer & ~_inside(member, name, self.inner) if self.inner else outer


@dataclass(frozen=True)
class Part:
    """A named part of the model, such as `norm`, or everything but it."""

    name: str
    other: bool = False

    def mask(self, member: Member, name: str) -> Tensor | bool:
        return (name in member.parts[self.name]) != self.other


@dataclass(frozen=True)
class WithinVariant:
    """The weights of one variant of the client's net."""

    variant: str

    def mask(self, member: Member, name: str) -> Tensor | bool:
        return name in member.at(self.variant).names


def _inside(member: Member, name: str, share: float) -> Tensor:
    """Which elements of a member's weight the sub-model of a smaller share has."""
    cut = member.family.cutter.rows(name, member.nested(share).index, member.index)
    return inside(cut, member.shape(name))


@lru_cache(maxsize=64)  # drawn phases have many, of the size of the net
def masks_of(member: Member, moves: Region, device: torch.device) -> dict[str, Tensor | bool]:
    masks = {name: moves.mask(member, name) for name in member.trainable}
    return {
        name: mask.to(device) if isinstance(mask, Tensor) else mask for name, mask in masks.items()
    }
