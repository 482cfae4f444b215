"""Filters: which weights of a member are sent or kept, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Filter(Protocol):
    """Which of the weights are meant, by name."""

    def __hash__(self) -> int: ...

    def names(self, member: Member) -> frozenset[str]: ...


@dataclass(frozen=True)
class All:
    def names(self, member: Member) -> frozenset[str]:
        return frozenset((*member.trainable, *member.statistics))


@dataclass(frozen=True)
class Nothing:
    def names(self, member: Member) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Parts:
    """The weights of the named parts, or all others."""

    parts: tuple[str, ...]
    other: bool = False

    def names(self, member: Member) -> frozenset[str]:
        named = frozenset(name for part in self.parts for name in member.parts.get(part, ()))
        return All().names(member) - named if self.other else named


@dataclass(frozen=True)
class VariantWeights:
    """The weights of a variant that a member has, or all its others. Constants are among them."""

    variant: str
    other: bool = False

    def names(self, member: Member) -> frozenset[str]:
        own = frozenset(member.names)
        named = frozenset(member.at(self.variant).names)
        return own - named if self.other else own & named
