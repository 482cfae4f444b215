"""Prediction of the next token at each position of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from fedquilt.tasks.classification import Classification


@dataclass(frozen=True)
class NextToken(Classification):
    """Prediction of the next token at each position. Targets have shape (sample, length).

    The loss is the mean cross-entropy over all tokens that count. Long texts thus weigh more than
    short ones.
    """

    usual_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "loss", "perplexity")

    @override
    def unfit(self, targets: Tensor, output_shape: Sequence[int]) -> str:
        if targets.dim() != 2:
            return (
                f"targets have shape {tuple(targets.shape[1:])} a sample; one token for each "
                "position, (length,), would fit"
            )
        return super().unfit(targets, output_shape)
