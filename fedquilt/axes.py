"""Named axes: the groups of channels that the dimensions of weights belong to.

Every dimension is an expression of axes, written as in einops: `"c2 c1 3 3"`, `"class (c2 49)"`,
`"(a + b) 3 3"`, `"(heads d) c"`. Numbers are sizes that are never cut. `Positions` has the channels
of an axis that a cut keeps. `positions_of` computes the rows of a weight from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from fedquilt.hardware.torch_internals import outside_functorch

MAX_RANGES = 8  # Runs up to which one call per run is faster than a list of all positions
Run = tuple[int, int]  # Positions from start to stop - 1.


@dataclass(frozen=True)
class Positions:
    """An ordered set of positions, stored as runs of consecutive positions.

    A window is then one or two slices instead of a mask.
    """

    runs: tuple[Run, ...]  # (start, stop) of each run, in order

    @staticmethod
    def prefix(count: int) -> Positions:
        """Return the first `count` positions."""
        return Positions(((0, count),))

    @staticmethod
    def window(start: int, count: int, size: int) -> Positions:
        """Return a window of consecutive positions, wrapping at the end (FedRolex, equation 4).

        A window of all positions begins at 0, whatever its start.

        Args:
            start: First position. It is taken modulo `size`.
            count: Number of positions. At most `size` are returned.
            size: Size of the axis.
        """
        start %= size
        if count >= size:
            # A full window is the whole axis, whatever its start. It always has the same order, so
            # that equal members compare equal.
            return Positions(((0, size),))
        if start + count <= size:
            return Positions(((start, start + count),))
        return Positions(((start, size), (0, start + count - size)))

    @staticmethod
    def chosen(positions: Iterable[int]) -> Positions:
        """Return a set of positions, in the order in which they are listed."""
        return Positions(_merge((p, p + 1) for p in positions))

    def __reduce__(self) -> tuple[type[Positions], tuple[tuple[Run, ...]]]:
        return Positions, (self.runs,)  # Cached values are not pickled.

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
        """Return the positions as an int64 vector on the CPU, in their order. It is cached."""
        with outside_functorch():
            if len(self.runs) > MAX_RANGES:
                return torch.tensor(list(self))
            return torch.cat(
                [torch.arange(start, stop) for start, stop in self.runs] or [torch.arange(0)]
            )

    @property
    def stop(self) -> int:
        """Return the highest position plus one, or 0 if there are no positions."""
        return max((stop for _, stop in self.runs), default=0)

    def covers(self, size: int) -> bool:
        """Return True if these are all positions of an axis of this size, in ascending order."""
        return self.runs == ((0, size),)

    def take(self, inner: Positions) -> Positions:
        """Return the positions at the indices `inner` of this order.

        If these are the positions of a sub-model in the whole model, and `inner` those of a smaller
        one within it, the result has the positions of the smaller one in the whole model.
        """
        if inner.covers(len(self)):
            return self
        positions = list(self)
        return Positions.chosen(positions[index] for index in inner)

    def keep(self, positions: Iterable[int]) -> Positions:
        """Return the positions that are also in `positions`, in this order."""
        if positions == self:
            return self
        common = set(positions)
        return Positions.chosen(position for position in self if position in common)

    def places(self, positions: Positions) -> Positions:
        """Return the index at which each of `positions` is found in this order.

        All of them must be among these positions. The result has the order of `positions`. This
        inverts `take`: of the positions 4, 7, 9, the places of 7 and 9 are 1 and 2.
        """
        index_of = {position: index for index, position in enumerate(self)}
        return Positions.chosen(index_of[position] for position in positions)


def _merge(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join each run that starts where the run before it stops, and drop empty runs.

    Runs keep their order and are not sorted.
    """
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged)


class Index(Mapping[str, Positions]):
    """Kept positions by axis. An axis that is not named is kept completely.

    An index is hashable, so that it can be the key of a dictionary.

    Args:
        items: Positions by the name of their axis, as a mapping or as pairs. Empty: every axis is
            kept completely.
    """

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
        return Index, (self._items,)  # Hashes differ between processes.


@dataclass(frozen=True)
class Axis:
    """A group of channels that are cut together in every weight that carries them."""

    name: str  # Name, made from that of a layer
    size: int  # Number of channels in the whole model
    fixed: bool = False  # True: never cut by a budget, such as inputs, classes and pinned axes.
    # True: a layer norm, group norm, softmax or mean reduces the axis. Cutting channels then
    # differs from setting them to zero.
    coupled: bool = False
    inner: tuple[str, ...] = ()  # Axes inside an axis of groups.
    least: int = 1  # Fewest channels of any member. 2 if the module fails with one channel.


@dataclass(frozen=True)
class Sum:
    """Concatenated dimensions."""

    terms: tuple[Expr, ...]  # In the order of concatenation


@dataclass(frozen=True)
class Product:
    """Flattened dimensions in row-major order, so that the last factor changes fastest."""

    factors: tuple[Expr, ...]  # From the slowest to the fastest


Expr = str | int | Sum | Product  # Name of an axis, size that is never cut, or a compound.
Dims = tuple[Expr, ...]

_TOKEN = re.compile(r"\s*([()+]|[^\s()+]+)")


def parse(text: str) -> Dims:
    """Parse the dimensions of a weight, such as `"(a + b) c 3 3"`, which has four.

    A name becomes a string, and a number becomes an integer. `(a + b)` becomes a `Sum`, and `(a b)`
    a `Product`.

    Raises:
        ValueError: Parentheses are unbalanced, or missing around a sum.
    """
    tokens = _TOKEN.findall(text)
    cursor = 0

    def factors() -> list[Expr]:
        nonlocal cursor
        exprs: list[Expr] = []
        while cursor < len(tokens) and tokens[cursor] not in ")+":
            token = tokens[cursor]
            cursor += 1
            if token == "(":
                exprs.append(group())
            else:
                exprs.append(int(token) if token.isdecimal() else token)
        return exprs

    def group() -> Expr:
        nonlocal cursor
        terms = [_product(factors())]
        while cursor < len(tokens) and tokens[cursor] == "+":
            cursor += 1
            terms.append(_product(factors()))
        if cursor >= len(tokens) or tokens[cursor] != ")":
            raise ValueError(f"unbalanced parentheses in {text!r}")
        cursor += 1
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    dims = tuple(factors())
    if cursor != len(tokens):
        raise ValueError(
            f"unexpected {tokens[cursor]!r} in {text!r}; a sum needs parentheses: '(a + b)'"
        )
    return dims


def _product(factors: list[Expr]) -> Expr:
    return factors[0] if len(factors) == 1 else Product(tuple(factors))


def write(dims: Dims) -> str:
    """Return dimensions as text that `parse` reads."""
    return " ".join(_write(dim) for dim in dims)


def _write(expr: Expr) -> str:
    match expr:
        case Sum(terms):
            texts = (_write(t)[1:-1] if isinstance(t, Product) else _write(t) for t in terms)
            return "(" + " + ".join(texts) + ")"
        case Product(factors):
            return "(" + " ".join(_write(f) for f in factors) + ")"
        case _:
            return str(expr)


def axes_in(expr: Expr) -> Iterator[str]:
    """Yield the names of the axes in an expression, from left to right, repeated ones again."""
    match expr:
        case str():
            yield expr
        case Sum(parts) | Product(parts):
            for part in parts:
                yield from axes_in(part)


def renamed(dims: Dims, names: Mapping[str, str]) -> Dims:
    """Return dimensions with renamed axes. An axis that is not in `names` keeps its name."""
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
    """Return the length of a dimension. `sizes` has the size of every axis in the expression."""
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
    """Return the rows of a dimension that a cut keeps, in the member's order.

    Args:
        expr: Expression of the dimension.
        index: Kept positions by axis. Other axes are kept completely.
        sizes: Full size of every axis.
    """
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
            positions, size = Positions.prefix(1), 1
            for factor in factors:
                inner, length = positions_of(factor, index, sizes), size_of(factor, sizes)
                positions, size = _nest(positions, inner, length), size * length
            return positions


def _nest(outer: Positions, inner: Positions, length: int) -> Positions:
    """Return the kept rows of a dimension that is the product of two others, in row-major order.

    Args:
        outer: Kept positions of the factor that changes more slowly.
        inner: Kept positions of the factor that changes faster.
        length: Full size of the inner factor. Row `p * length + q` has the positions p and q.
    """
    if inner.covers(length):
        return Positions(tuple((start * length, stop * length) for start, stop in outer.runs))
    return Positions(_merge((p * length + a, p * length + b) for p in outer for a, b in inner.runs))
