"""Initial weights of nets that are cut from larger ones."""

from __future__ import annotations

import math

from fedquilt.family.family import Family
from fedquilt.terms import Weights


def own_range(cut: Weights, whole_weights: Weights, family: Family) -> dict[str, float]:
    """Return factors that scale initial weights to the range of the cut net, by name.

    Kaiming's method draws from a range that falls with the square root of a layer's fan-in, which
    is smaller in the cut net. Torch draws the layer's bias from the same range. Norms, embeddings
    and parameters outside of layers have no factor.

    Args:
        cut: Weights that were cut from the whole net, by name.
        whole_weights: Weights of the whole net, by name.
        family: Family of the net, which names its norms and embeddings.
    """
    same = {*family.parts.get("norm", ()), *family.embeddings}
    gains: dict[str, float] = {}
    for name, value in cut.items():
        path, dot, leaf = name.rpartition(".")
        if name in same or value.dim() < 2 or "weight" not in leaf:
            continue
        bias = f"{path}{dot}{leaf.replace('weight', 'bias')}"
        gains[name] = gains[bias] = math.sqrt(whole_weights[name][0].numel() / value[0].numel())
    return gains
