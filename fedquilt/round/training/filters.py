"""Filters: which weights of a member are sent or kept, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from fedquilt.family.member import Member


class Filter(ABC):
    """Base class of filters, which select weights of a member by name.

    Filters are frozen dataclasses, because selected names are cached by filter.
    """

    @abstractmethod
    def names(self, member: Member) -> frozenset[str]:
        """Return the names of those weights of `member` that the filter selects.

        Norm statistics count as weights here.
        """


@dataclass(frozen=True)
class All(Filter):
    """All trained weights and norm statistics."""

    @override
    def names(self, member: Member) -> frozenset[str]:
        return frozenset((*member.trainable, *member.statistics))


@dataclass(frozen=True)
class Nothing(Filter):
    """No weights."""

    @override
    def names(self, member: Member) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class PartWeights(Filter):
    """The weights of the named parts, or all other weights."""

    parts: tuple[str, ...]  # Names of parts of the model, such as `norm`. Unknown ones are empty.
    other: bool = False  # True: all weights except those of the parts.

    @override
    def names(self, member: Member) -> frozenset[str]:
        named = frozenset(name for part in self.parts for name in member.parts.get(part, ()))
        return All().names(member) - named if self.other else named


@dataclass(frozen=True)
class VariantWeights(Filter):
    """The weights of a variant, or all other weights of a member. Constants are included."""

    variant: str  # Name of the variant.
    other: bool = False  # True: all weights except those of the variant.

    @override
    def names(self, member: Member) -> frozenset[str]:
        member_names = frozenset(member.names)
        named = frozenset(member.at(self.variant).names)
        return member_names - named if self.other else member_names & named
