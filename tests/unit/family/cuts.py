"""Random cuts of a small layout, and a reference by plain indexing.

The layout has sums, products and repeated axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedquilt.axes import Index, Positions, parse, positions_of
from fedquilt.family.cut import Cutter
from fedquilt.terms import Arch, Submodel

SIZES = {"a": 4, "b": 3, "head": 2, "d": 3, "class": 5}
DIMS = {
    name: parse(text)
    for name, text in {
        "square": "a a",
        "cat": "(a + b) 2",
        "flat": "class (b 2)",
        "heads": "(head d) a",
        "bias": "class",
        "scale": "",
    }.items()
}
ONE_NET = tuple(DIMS)


def cutter(flat: bool | None = None, memory: int = 256) -> Cutter:
    return Cutter(DIMS, SIZES, memory, flat)


@st.composite
def positions(draw: st.DrawFn, size: int) -> Positions:
    """A prefix, a window that may wrap, a random set, or the whole."""
    count = draw(st.integers(1, size))
    match draw(st.sampled_from(["prefix", "window", "set"])):
        case "prefix":
            return Positions.prefix(count)
        case "window":
            return Positions.window(draw(st.integers(0, size - 1)), count, size)
    return Positions.chosen(sorted(draw(st.permutations(range(size)))[:count]))


@st.composite
def submodels(draw: st.DrawFn, scopes: tuple[str, ...] = ("",)) -> Submodel:
    """Positions of some axes; the class axis is whole, as no budget cuts it."""
    index = {
        axis: draw(positions(size))
        for axis, size in SIZES.items()
        if axis != "class" and draw(st.booleans())
    }
    arch = Arch(tuple((axis, len(index[axis]) if axis in index else SIZES[axis]) for axis in SIZES))
    return Submodel(arch, Index(index), draw(st.sampled_from(scopes)))


def state(seed: int, scope: str = "") -> dict[str, Tensor]:
    """Random weights of the whole layout, float64."""
    generator = torch.Generator().manual_seed(seed)
    layout = cutter()
    shapes = {name: [size(dim) for dim in dims] for name, dims in layout.dims.items()}
    return {
        scope + n: torch.randn(shape, generator=generator, dtype=torch.float64)
        for n, shape in shapes.items()
    }


def size(dim: object) -> int:
    return len(positions_of(dim, {}, SIZES))  # type: ignore[arg-type]


def mask(name: str, index: Mapping[str, Positions]) -> Tensor:
    """Which elements of a whole weight a cut keeps: the outer product of its rows' masks."""
    kept = torch.ones([], dtype=torch.bool)
    for dim in DIMS[name]:
        row = torch.zeros(size(dim), dtype=torch.bool)
        row[list(positions_of(dim, index, SIZES))] = True
        kept = kept[..., None] & row
    return kept


def pick(weight: Tensor, name: str, index: Mapping[str, Positions]) -> Tensor:
    """The part of a whole weight that a cut keeps, in the cut's order, by plain indexing."""
    for place, dim in enumerate(DIMS[name]):
        weight = weight[(slice(None),) * place + (list(positions_of(dim, index, SIZES)),)]
    return weight
