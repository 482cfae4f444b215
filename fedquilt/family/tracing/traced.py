"""A layout together with the runs that it was derived from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Literal

from fedquilt.family.layout import Layout
from fedquilt.family.tracing.atoms import Atom, Cat, Dim, Terms, resolve
from fedquilt.family.tracing.run import RecordedRun

Heads = Literal["inside", "whole"]  # What is cut of attention: channels of each head, or heads


@dataclass(frozen=True)
class Traced:
    """A layout together with the runs that it was derived from."""

    layout: Layout
    runs: tuple[RecordedRun, ...]  # Runs of all variants, the whole model in evaluation first
    names: Mapping[Atom, str]  # Names of the axes
    unlike: Sequence[tuple[Terms, Terms]]  # Sizes that Python compared and that were unequal

    def predict(self, dim: Dim, widths: Mapping[str, int]) -> int:
        """Return the length that a dimension of the run has in a member.

        Args:
            dim: Dimension, as a product of atoms, sums and plain sizes.
            widths: Width of every axis in the member, by name.
        """
        total = 1
        for factor in resolve(dim):
            match factor:
                case int():
                    total *= factor
                case Atom():
                    total *= widths[self.names[factor]] if factor in self.names else factor.size
                case Cat(terms):
                    total *= sum(self.predict(term, widths) for term in terms)
        return total

    def evaluate(self, terms: Terms, widths: Mapping[str, int]) -> int:
        """Return the value of a size that Python computes in a member, rounded down.

        Args:
            terms: The size, as a sum of products of dimensions.
            widths: Width of every axis in the member, by name.
        """
        total = Fraction(0)
        for factor, powers in terms:
            for dim, power in powers:
                factor *= Fraction(self.predict(dim, widths)) ** power
            total += factor
        return floor(total)
