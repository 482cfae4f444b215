"""Filters: which weights of a member are sent or kept, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Filter(Protocol):
    """Contract of a filter, which selects weights of a member by name."""

    def __hash__(self) -> int: ...

    def names(self, member: Member) -> frozenset[str]: ...


@dataclass(frozen=True)
class All:
    """All trained weights and norm statistics."""

    def names(self, member: Member) -> frozenset[str]:
        return frozenset((*member.trainable, *member.statistics))


@dataclass(frozen=True)
class Nothing:
    """No weights."""

    def names(self, member: Member) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Parts:
    """The weights of the named parts, or all other weights."""

    parts: tuple[str, ...]
    other: bool = False  # True: all weights except those of the parts.

    def names(self, member: Member) -> frozenset[str]:
        named = frozenset(name for part in self.parts for name in member.parts.get(part, ()))
        return All().names(member) - named if self.other else named


@dataclass(frozen=True)
class VariantWeights:
    """The weights of a variant, or all other weights of a member. Constants are included."""

    variant: str
    other: bool = False  # True: all weights except those of the variant.

    def names(self, member: Member) -> frozenset[str]:
        member_names = frozenset(member.names)
        named = frozenset(member.at(self.variant).names)
        return member_names - named if self.other else member_names & named
