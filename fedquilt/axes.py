"""Named axes: which dimension of which weight belongs to which group of channels, and what a cut keeps of it.

Every dimension is an expression of axes, written as in einops: `"c2 c1 3 3"`, `"class (c2 49)"`, `"(a + b) 3 3"`,
`"(heads d) c"`. Numbers are sizes that are never cut. `Positions` says which channels of an axis are kept, and
`positions_of` carries that through an expression to the rows of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from fedquilt.devices import untransformed

_FEW = 8  # runs up to which a call for each is faster than a list of all positions
Run = tuple[int, int]  # positions start..stop-1


@dataclass(frozen=True)
class Positions:
    """An ordered set of positions as runs of neighbours, so that a window is one or two slices and not a mask."""

    runs: tuple[Run, ...]

    @staticmethod
    def prefix(count: int) -> Positions:
        return Positions(((0, count),))

    @staticmethod
    def window(start: int, count: int, size: int) -> Positions:
        """`count` neighbours of `size` from `start` on, wrapping at the end (FedRolex, equation 4)."""
        start %= size
        if count >= size:
            # A full window is the whole axis whatever its start: one order for all keeps equal members equal.
            return Positions(((0, size),))
        if start + count <= size:
            return Positions(((start, start + count),))
        return Positions(((start, size), (0, start + count - size)))

    @staticmethod
    def chosen(positions: Iterable[int]) -> Positions:
        return Positions(_merge((p, p + 1) for p in positions))

    def __reduce__(self) -> tuple[type[Positions], tuple[tuple[Run, ...]]]:
        return Positions, (self.runs,)  # what was worked out from them need not travel

    @cached_property
    def _count(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs:
            yield from range(start, stop)

    @cached_property
    def tensor(self) -> Tensor:
        """The positions as an int64 vector on the CPU."""
        with untransformed():
            if len(self.runs) > _FEW:
                return torch.tensor(list(self))
            return torch.cat(
                [torch.arange(start, stop) for start, stop in self.runs] or [torch.arange(0)]
            )

    @property
    def stop(self) -> int:
        """One more than the highest position."""
        return max((stop for _, stop in self.runs), default=0)

    def covers(self, size: int) -> bool:
        """Whether this is the whole axis in its own order."""
        return self.runs == ((0, size),)

    def take(self, inner: Positions) -> Positions:
        """The positions at `inner`'s places in this order: a sub-model of a sub-model, in global positions."""
        if inner.covers(len(self)):
            return self
        here = list(self)
        return Positions.chosen(here[place] for place in inner)

    def keep(self, wanted: Iterable[int]) -> Positions:
        """These positions, in this order, that are among `wanted`."""
        if wanted == self:
            return self
        among = set(wanted)
        return Positions.chosen(position for position in self if position in among)

    def places(self, wanted: Positions) -> Positions:
        """Where `wanted`'s positions stand in this order: the inverse of `take`."""
        at = {position: place for place, position in enumerate(self)}
        return Positions.chosen(at[position] for position in wanted)


def _merge(runs: Iterable[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


class Index(Mapping[str, Positions]):
    """Axis → kept positions; an axis that is not named is kept whole. Hashable, so that equal cuts are found."""

    __slots__ = ("_hash", "_items")

    def __init__(
        self, items: Mapping[str, Positions] | Iterable[tuple[str, Positions]] = ()
    ) -> None:
        self._items: dict[str, Positions] = dict(items)
        self._hash: int | None = None

    def __getitem__(self, axis: str) -> Positions:
        return self._items[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self._items == other._items

    def __repr__(self) -> str:
        return f"Index({self._items!r})"

    def __reduce__(self) -> tuple[type[Index], tuple[dict[str, Positions]]]:
        return Index, (self._items,)  # without the hash: another process has another


@dataclass(frozen=True)
class Axis:
    """A group of channels that are cut together in every weight that carries them."""

    name: str
    size: int
    fixed: bool = False  # inputs, classes and what the user pinned: never cut by a budget
    coupled: bool = (
        False  # reduced by a layer or group norm, softmax or mean: a cut is not the same as zeroing
    )
    inner: tuple[str, ...] = ()  # for an axis of groups: the axes inside it
    least: int = 1  # channels that every member has; 2 where the module fails with one


@dataclass(frozen=True)
class Sum:
    """Dimensions laid end to end, as a concatenation leaves them."""

    terms: tuple[Expr, ...]


@dataclass(frozen=True)
class Product:
    """Dimensions nested row-major, as a flatten leaves them: the last factor moves fastest."""

    factors: tuple[Expr, ...]


Expr = str | int | Sum | Product  # an axis' name, a size that is never cut, or a compound of them
Dims = tuple[Expr, ...]

_TOKEN = re.compile(r"\s*([()+]|[^\s()+]+)")


def parse(text: str) -> Dims:
    """Read the dimensions of a weight: `parse("(a + b) c 3 3")` has four."""
    tokens = _TOKEN.findall(text)
    at = 0

    def factors() -> list[Expr]:
        nonlocal at
        found: list[Expr] = []
        while at < len(tokens) and tokens[at] not in ")+":
            token = tokens[at]
            at += 1
            if token == "(":
                found.append(group())
            else:
                found.append(int(token) if token.isdecimal() else token)
        return found

    def group() -> Expr:
        nonlocal at
        terms = [_product(factors())]
        while at < len(tokens) and tokens[at] == "+":
            at += 1
            terms.append(_product(factors()))
        if at >= len(tokens) or tokens[at] != ")":
            raise ValueError(f"unbalanced parentheses in {text!r}")
        at += 1
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    dims = tuple(factors())
    if at != len(tokens):
        raise ValueError(
            f"unexpected {tokens[at]!r} in {text!r}; a sum needs parentheses: '(a + b)'"
        )
    return dims


def _product(factors: list[Expr]) -> Expr:
    return factors[0] if len(factors) == 1 else Product(tuple(factors))


def write(dims: Dims) -> str:
    """The text `parse` reads back."""
    return " ".join(_write(dim) for dim in dims)


def _write(expr: Expr) -> str:
    match expr:
        case Sum(terms):
            inside = (_write(t)[1:-1] if isinstance(t, Product) else _write(t) for t in terms)
            return "(" + " + ".join(inside) + ")"
        case Product(factors):
            return "(" + " ".join(_write(f) for f in factors) + ")"
        case _:
            return str(expr)


def axes_in(expr: Expr) -> Iterator[str]:
    """The axes an expression names, left to right."""
    match expr:
        case str():
            yield expr
        case Sum(parts) | Product(parts):
            for part in parts:
                yield from axes_in(part)


def renamed(dims: Dims, names: Mapping[str, str]) -> Dims:
    """Return dimensions with other names of their axes; an axis that has no other name keeps its own."""
    return tuple(_renamed(dim, names) for dim in dims)


def _renamed(expr: Expr, names: Mapping[str, str]) -> Expr:
    match expr:
        case str():
            return names.get(expr, expr)
        case Sum(terms):
            return Sum(renamed(terms, names))
        case Product(factors):
            return Product(renamed(factors, names))
        case _:
            return expr


def size_of(expr: Expr, sizes: Mapping[str, int]) -> int:
    """How long a dimension is when its axes have these sizes."""
    match expr:
        case int():
            return expr
        case str():
            return sizes[expr]
        case Sum(terms):
            return sum(size_of(term, sizes) for term in terms)
        case Product(factors):
            return reduce(lambda total, factor: total * size_of(factor, sizes), factors, 1)


def positions_of(expr: Expr, index: Mapping[str, Positions], sizes: Mapping[str, int]) -> Positions:
    """The rows of a dimension that a cut keeps, in the order the member has them."""
    match expr:
        case int():
            return Positions.prefix(expr)
        case str():
            return index[expr] if expr in index else Positions.prefix(sizes[expr])
        case Sum(terms):
            runs: list[Run] = []
            offset = 0
            for term in terms:
                runs += [
                    (start + offset, stop + offset)
                    for start, stop in positions_of(term, index, sizes).runs
                ]
                offset += size_of(term, sizes)
            return Positions(_merge(runs))
        case Product(factors):
            kept, size = Positions.prefix(1), 1
            for factor in factors:
                inner, length = positions_of(factor, index, sizes), size_of(factor, sizes)
                kept, size = _nest(kept, inner, length), size * length
            return kept


def _nest(outer: Positions, inner: Positions, length: int) -> Positions:
    if inner.covers(length):
        return Positions(tuple((start * length, stop * length) for start, stop in outer.runs))
    return Positions(_merge((p * length + a, p * length + b) for p in outer for a, b in inner.runs))
