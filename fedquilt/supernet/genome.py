"""Configurations of a space as tuples of integers, which a search changes and compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from fedquilt.supernet.space import KINDS, Config, Space, SpaceChoice

Genes = tuple[int, ...]  # A configuration, as the index of each choice's option.


class Genome:
    """Conversion between configurations of a space and genes, which are tuples of integers.

    A gene is the index of a choice's option. A higher index is a larger option, which costs more.
    Choices of blocks that are not kept are 0.
    """

    def __init__(self, space: Space) -> None:
        self.choices: tuple[SpaceChoice, ...] = space.choices
        self.sizes = tuple(len(choice.options) for choice in self.choices)
        self._kinds = {
            kind: [i for i, choice in enumerate(self.choices) if choice.kind == kind]
            for kind in KINDS
        }
        self._depths = {self.choices[i].stage: i for i in self._kinds["depths"]}

    def config(self, genes: Genes) -> Config:
        """Return the configuration whose choices have the options at these indices.

        The genes must be canonical, because they are not checked.
        """
        values = [choice.options[gene] for choice, gene in zip(self.choices, genes, strict=True)]
        fields: dict[str, Any] = {
            kind: tuple(values[i] for i in indices) for kind, indices in self._kinds.items()
        }
        return Config(**fields)

    def is_kept(self, index: int, genes: Sequence[int]) -> bool:
        """Return True if a choice has an effect.

        Choices of a whole stage always have one. Those of a block have one if the block is kept.

        Args:
            index: Index of the choice.
            genes: All genes, of which the depth of the choice's stage is read.
        """
        choice = self.choices[index]
        if choice.block is None:
            return True
        depth = self._depths[choice.stage]
        return choice.block < self.choices[depth].options[genes[depth]]

    def canonical(self, genes: Sequence[int]) -> Genes:
        """Return the genes with 0 for choices that have no effect. Equal nets have equal genes."""
        return tuple(
            int(gene) if self.is_kept(index, genes) else 0 for index, gene in enumerate(genes)
        )

    def random(self, random: np.random.Generator) -> Genes:
        """Draw every choice uniformly from its options, and return the canonical genes."""
        return self.canonical([int(random.integers(count)) for count in self.sizes])

    def smaller(self, genes: Genes) -> list[int]:
        """Return the indices of the choices that can take a smaller option."""
        return [index for index, gene in enumerate(genes) if gene > 0]

    def larger(self, genes: Genes) -> list[int]:
        """Return the indices of the choices that have an effect and can take a larger option."""
        genes_and_sizes = enumerate(zip(genes, self.sizes, strict=True))
        return [
            index
            for index, (gene, count) in genes_and_sizes
            if gene + 1 < count and self.is_kept(index, genes)
        ]

    def moved(self, genes: Genes, index: int, steps: int) -> Genes:
        """Return canonical genes with one choice moved to another option.

        Args:
            genes: Canonical genes.
            index: Index of the choice.
            steps: Number of options by which it moves, negative towards smaller ones. The result
                must be an option, which is not checked.
        """
        return self.canonical(
            [gene + steps if i == index else gene for i, gene in enumerate(genes)]
        )

    def __iter__(self) -> Iterator[Genes]:
        """Iterate over the canonical genes of all configurations, each once."""
        depths = [
            range(self.sizes[index]) if self.choices[index].kind == "depths" else (0,)
            for index in self._indices
        ]
        for depth_genes in product(*depths):
            ranges = [
                (depth_genes[index],)
                if self.choices[index].kind == "depths"
                else range(self.sizes[index] if self.is_kept(index, depth_genes) else 1)
                for index in self._indices
            ]
            yield from product(*ranges)

    @property
    def _indices(self) -> range:
        return range(len(self.choices))
