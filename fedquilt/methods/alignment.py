"""Alignment factor and norm discrepancy of a stage's gradient (ProgFed, theorem 1, equation 11)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from fedquilt.terms import Weights


class Alignment(NamedTuple):
    """Agreement between a stage's gradient and the gradient of the whole model."""

    stage: int  # Number of the stage, from 1. The paper's s.
    # Alignment factor. 1 is as good as training the whole model. NaN if the stage's gradient is 0.
    alpha: float
    q: float  # Norm discrepancy. 1 in the last stage. Infinite if alpha is 0 or below.


def align(stage: int, stage_gradient: Weights, whole_gradient: Weights) -> Alignment:
    """Return alpha_t and q_t of a stage (equation 11).

        alpha_t = min{1, <∇f|E_s, ∇f^s|E_s> / ‖∇f^s|E_s‖²}
        q_t = ‖∇f‖ / (alpha_t · ‖∇f^s|E_s‖)

    |E_s is the projection on the weights of the blocks E_1..E_s. These are the weights that f^s
    and f share, because f has no temporary head and f^s has no later block.

    In the last phase f^S is f, which shares all weights with itself. There the projection also
    contains the head G_S, although the paper's notation leaves heads out. Without it, ‖∇f‖ in q_t
    would contain a head that ‖∇f^S|E_S‖ lacks, and q_t would exceed the 1 that the paper notes.
    The proof needs the head too: the last phase moves G_S, so that lemma 2 counts its gradient.

    Args:
        stage: Number of the stage, from 1. The paper's s.
        stage_gradient: Gradient of the stage's mean loss, ∇f^s, by weight name.
        whole_gradient: Gradient of the whole model's mean loss, ∇f, by weight name. Blocks that
            have not grown have their initial weights.
    """
    shared = [name for name in stage_gradient if name in whole_gradient]
    squared = _dot(stage_gradient, stage_gradient, shared)
    if not squared:
        return Alignment(stage, math.nan, math.nan)
    alpha = min(1.0, _dot(whole_gradient, stage_gradient, shared) / squared)
    if alpha <= 0:
        return Alignment(stage, alpha, math.inf)
    whole_norm = math.sqrt(_dot(whole_gradient, whole_gradient, whole_gradient))
    return Alignment(stage, alpha, whole_norm / (alpha * math.sqrt(squared)))


def _dot(first: Weights, second: Weights, names: Iterable[str]) -> float:
    """Return the inner product of two gradients over named weights, computed in float64.

    Args:
        first: Gradient by weight name.
        second: Another gradient by weight name.
        names: Names of weights that both gradients have.
    """
    return sum(_product(first[name], second[name]) for name in names)


def _product(first: Tensor, second: Tensor) -> float:
    """Return the inner product of two tensors, computed in float64."""
    return float((first.double() * second.double()).sum())
