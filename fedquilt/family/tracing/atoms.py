"""Dimensions while a module is traced: row-major products of atoms.

An atom is an unknown axis. Operations split dimensions, concatenate them and unify them. Unifying
two dimensions binds atoms to what they turned out to be: another atom, a product, a sum or a plain
size. Atoms that are still unbound at the end are the axes.

Dimensions are never matched by their size. A size of one is the empty product, and plain sizes have
no identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod


@dataclass(eq=False)
class Atom:
    """An axis without a name. Once `bound`, it is the dimension that it turned out to be."""

    size: int  # Size in the whole model
    bound: Dim | None = None  # Dimension that it turned out to be. None: it is an axis so far
    # True: never cut, but it keeps a name. Heads are an example, or a vocabulary that may turn out
    # to be the classes.
    fixed: bool = False
    # True: channels influence each other, so that cutting one differs from setting it to zero.
    coupled: bool = False
    # How it was split off another atom: "groups" or "inside", "heads" or "dim"
    role: str = ""


@dataclass(frozen=True)
class Cat:
    """Dimensions that are concatenated."""

    terms: tuple[Dim, ...]  # In the order of concatenation


Factor = int | Atom | Cat
Dim = tuple[Factor, ...]  # A row-major product. The empty product has size 1.


def atom(size: int, role: str = "") -> Dim:
    """Return a new dimension about which nothing is known yet: one atom.

    A size of 0 or 1 gives a plain dimension instead.

    Args:
        size: Size in the whole model.
        role: Role of the atom, which only affects names. "": none.
    """
    return (Atom(size, role=role),) if size > 1 else plain(size)


def plain(size: int) -> Dim:
    """Return a dimension that is never cut. For size 1 it is the empty product."""
    return (size,) if size != 1 else ()


def size(dim: Dim) -> int:
    """Return the size of a dimension in the whole model."""
    return prod(_factor_size(factor) for factor in dim)


def _factor_size(factor: Factor) -> int:
    match factor:
        case int():
            return factor
        case Atom():
            return factor.size
        case Cat(terms):
            return sum(size(term) for term in terms)


def resolve(dim: Dim) -> Dim:
    """Return the dimension with every bound atom replaced by what it is bound to.

    The result has a normal form: neighbouring plain sizes are multiplied, and nested sums are
    flattened. Resolved dimensions can be compared with ==.
    """
    factors: list[Factor] = []
    for factor in dim:
        match factor:
            case int():
                parts: Dim = plain(factor)
            case Atom(bound=None):
                parts = (factor,)
            case Atom(bound=bound):
                assert bound is not None
                factor.bound = parts = resolve(bound)
            case Cat(terms):
                parts = _resolve_cat(terms)
        for part in parts:
            # Plain sizes have no identity, so neighbouring ones are multiplied.
            if isinstance(part, int) and factors and isinstance(factors[-1], int):
                factors[-1] *= part
            else:
                factors.append(part)
    return tuple(factors)


def _is_resolved_plain(dim: Dim) -> bool:
    return all(isinstance(factor, int) for factor in dim)


def _resolve_cat(terms: Sequence[Dim]) -> Dim:
    """Return the concatenation of dimensions in the normal form of `resolve`.

    Neighbouring plain terms are added, and trailing factors that all terms share are moved out of
    the sum.
    """
    flat: list[Dim] = []
    for term in map(resolve, terms):
        inner = term[0].terms if len(term) == 1 and isinstance(term[0], Cat) else (term,)
        for piece in inner:
            if flat and _is_resolved_plain(piece) and _is_resolved_plain(flat[-1]):
                flat[-1] = plain(size(flat[-1]) + size(piece))
            elif size(piece):
                flat.append(piece)
    if len(flat) <= 1:
        return flat[0] if flat else plain(0)
    # (a c + b c) is ((a + b) c), and (c + c + c) is (3 c). This form is preferred, because
    # products can be split further and sums cannot.
    shared = 0
    while (
        all(len(term) > shared for term in flat) and len({term[-1 - shared] for term in flat}) == 1
    ):
        shared += 1
    if not shared:
        return (Cat(tuple(flat)),)
    common = flat[0][-shared:]
    return resolve((Cat(tuple(term[:-shared] for term in flat)), *common))


def is_plain(dim: Dim) -> bool:
    """Return True if a dimension has no unbound atom left.

    A fixed atom is never cut either, but it keeps its name and is not plain. See `is_free`.
    """
    return all(isinstance(factor, int) for factor in resolve(dim))


def atoms_in(dim: Dim) -> Iterator[Atom]:
    """Yield the unbound atoms of a dimension, from left to right."""
    for factor in resolve(dim):
        match factor:
            case Atom():
                yield factor
            case Cat(terms):
                for term in terms:
                    yield from atoms_in(term)


Count = Counter[tuple[int, ...]]  # A polynomial, from monomials of atoms (by id) to coefficients


def count(dim: Dim) -> Count:
    """Return the size of a dimension as a polynomial of its atoms.

    Two dimensions have equal polynomials if they are equally long in every member.
    """
    total: Count = Counter({(): 1})
    for factor in resolve(dim):
        terms: Count = Counter()
        match factor:
            case int():
                terms[()] = factor
            case Atom():
                terms[id(factor),] = 1
            case Cat(branches):
                for branch in branches:
                    terms.update(count(branch))
        product: Count = Counter()
        for left, left_factor in total.items():
            for right, right_factor in terms.items():
                product[tuple(sorted((*left, *right)))] += left_factor * right_factor
        total = product
    return total


def is_free(dim: Dim) -> bool:
    """Return True if a cut may change the size of a dimension: some unbound atom is not fixed."""
    return any(not part.fixed for part in atoms_in(dim))


def pin(dim: Dim) -> None:
    """Mark a dimension as never cut, by binding all its atoms to their sizes, in-place.

    It loses its axes, so that they get no names. `fix` keeps them.
    """
    for part in list(atoms_in(dim)):
        part.bound = plain(part.size)


def fix(dim: Dim) -> None:
    """Mark a dimension as never cut in-place, but let its atoms keep their names."""
    for part in atoms_in(dim):
        part.fixed = True


def couple(dim: Dim) -> None:
    """Note that channels of a dimension influence each other: a cut differs from zeroing."""
    for part in atoms_in(dim):
        part.coupled = True


def _bind(axis_atom: Atom, dim: Dim) -> None:
    """Bind an atom to a dimension, which inherits that it is fixed or coupled.

    If the dimension is a single atom without a role, it inherits the role too.
    """
    axis_atom.bound = dim
    if len(dim) == 1 and isinstance(dim[0], Atom):
        dim[0].role = dim[0].role or axis_atom.role
    if axis_atom.fixed:
        fix(dim)
    if axis_atom.coupled:
        couple(dim)


def unify(a: Dim, b: Dim) -> None:
    """Make two dimensions one in-place, because they must be cut together.

    Atoms of one are bound to factors of the other, and split where needed. What cannot be expressed
    is pinned, which is always correct. Dimensions of unequal sizes are pinned too.
    """
    a, b = resolve(a), resolve(b)
    if a == b:
        return
    if size(a) != size(b) or is_plain(a) or is_plain(b):
        pin(a)
        pin(b)
        return
    for left, right in ((a, b), (b, a)):
        if len(left) == 1 and isinstance(left[0], Atom):
            return _bind(left[0], right)
    for left, right in ((a, b), (b, a)):
        if len(left) == 1 and isinstance(left[0], Cat):
            terms = left[0].terms
            for term, part in zip(terms, parts(right, [size(term) for term in terms]), strict=True):
                unify(term, part)
            return
    m, n = _factor_size(a[0]), _factor_size(b[0])
    if m % n and n % m:
        pin(a)
        pin(b)
        return
    first_a, *rest_a = split(a, (min(m, n), size(a) // min(m, n)))
    first_b, *rest_b = split(b, (min(m, n), size(b) // min(m, n)))
    unify(first_a, first_b)
    unify(*rest_a, *rest_b)


def split(dim: Dim, sizes: Sequence[int], roles: tuple[str, str] = ("", "")) -> tuple[Dim, ...]:
    """Split a row-major product into consecutive products.

    Atoms and sums that cross a boundary are split in-place, or pinned if that is impossible.

    Args:
        dim: The dimension.
        sizes: Sizes of the products. Their product is the size of `dim`.
        roles: Roles of the two atoms that an atom is split into, if it has to be.
    """
    return tuple(tuple(factor for _, factor in group) for group in regroup([dim], sizes, roles))


def regroup(
    dims: Sequence[Dim], shape: Sequence[int], roles: tuple[str, str] = ("", "")
) -> list[list[tuple[int, Factor]]]:
    """Return the factors of each dimension of a view's output.

    Args:
        dims: Dimensions of the view's input.
        shape: Shape of the view's output.
        roles: Roles of the two atoms that an atom is split into, if it has to be.

    Returns:
        For each output dimension, pairs of the number of an input dimension and a factor of it. The
        number is -1 for factors that are pinned, because the view does not keep channels together.
    """
    remaining = [(source, factor) for source, dim in enumerate(dims) for factor in resolve(dim)][
        ::-1
    ]
    groups: list[list[tuple[int, Factor]]] = []
    for missing in shape:
        group: list[tuple[int, Factor]] = []
        while missing != 1 and remaining:
            source, factor = remaining.pop()
            length = _factor_size(factor)
            if length and missing % length == 0:
                group.append((source, factor))
                missing //= length
            elif missing and length % missing == 0:
                outer, inner = _factorize(factor, missing, roles)
                group += [(source, part) for part in outer]
                remaining += [(source, part) for part in reversed(inner)]
                missing = 1
            else:
                # The view cuts across factors. Nothing from here on keeps its channels together.
                remaining.append((source, factor))
                for _, pinned in (*group, *remaining):
                    pin((pinned,))
                return [*groups, *([(-1, part) for part in plain(n)] for n in shape[len(groups) :])]
        groups.append(group)
    return groups


def _factorize(factor: Factor, outer_size: int, roles: tuple[str, str]) -> tuple[Dim, Dim]:
    """Split a factor into an outer part of a given size and the inner rest.

    An atom is bound to two new atoms. A sum is split in every term, if the inner size divides all
    of them. Everything else is pinned.

    Args:
        factor: Factor to split.
        outer_size: Size of the outer part, which divides the size of `factor`.
        roles: Roles of the outer and the inner atom.
    """
    inner_size = _factor_size(factor) // outer_size
    match factor:
        case Atom():
            # Groups that are split again are still groups.
            inner_role = factor.role if factor.role == roles[0] else roles[1]
            outer, inner = Atom(outer_size, role=roles[0]), Atom(inner_size, role=inner_role)
            _bind(factor, (outer, inner))
            return (outer,), (inner,)
        case Cat(terms) if all(size(term) % inner_size == 0 for term in terms):
            # Every branch is split in the same way. Inner sizes must agree, outer ones add up.
            pairs = [split(term, (size(term) // inner_size, inner_size), roles) for term in terms]
            for _, inside in pairs[1:]:
                unify(pairs[0][1], inside)
            return resolve((Cat(tuple(outside for outside, _ in pairs)),)), resolve(pairs[0][1])
        case _:
            pin((factor,))
            return plain(outer_size), plain(inner_size)


def parts(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """Split a dimension into consecutive ranges, which undoes a concatenation.

    If the outermost factor is an atom, it is bound to a concatenation of new atoms. If a range does
    not end between two entries of the outermost factor, the dimension is pinned.

    Args:
        dim: The dimension.
        sizes: Lengths of the ranges, in order. Their sum is the size of `dim`.
    """
    dim = resolve(dim)
    if len(sizes) == 1:
        return [dim]
    inner = dim[1:]
    step = size(inner)
    if is_plain(dim) or any(n % step for n in sizes):
        pin(dim)
        return [plain(n) for n in sizes]
    counts = [n // step for n in sizes]
    match dim[0]:
        case int():
            outer = [plain(n) for n in counts]
        case Atom() as whole:
            outer = [atom(n, whole.role) for n in counts]
            _bind(whole, (Cat(tuple(outer)),))
        case Cat(terms):
            outer = _cat_parts(terms, counts)
    return [resolve((*part, *inner)) for part in outer]


def _cat_parts(terms: Sequence[Dim], counts: Sequence[int]) -> list[Dim]:
    """Split concatenated dimensions into consecutive ranges.

    `counts` are the lengths of the ranges. A term that crosses the end of a range is split too.
    """
    ranges: list[list[Dim]] = [[] for _ in counts]
    number, room = 0, counts[0]
    for term in terms:
        sizes, owners, uncovered = [], [], size(term)
        while uncovered:
            while not room:
                number += 1
                room = counts[number]
            length = min(uncovered, room)
            sizes.append(length)
            owners.append(number)
            uncovered, room = uncovered - length, room - length
        for owner, part in zip(owners, parts(term, sizes), strict=True):
            ranges[owner].append(part)
    return [_resolve_cat(pieces) for pieces in ranges]


# A sum of products: factor · dimension^power · …
Terms = tuple[tuple[Fraction, tuple[tuple[Dim, int], ...]], ...]


@dataclass
class Facts:
    """Facts about dimensions, besides which are equal. They are used once all calls are known."""

    # Pieces of one dimension that a view split
    views: list[list[Dim]] = field(default_factory=list)
    # Ranges of one dimension
    slices: list[list[Dim]] = field(default_factory=list)
    # (groups, channels inside each)
    groups: list[tuple[Dim, Dim]] = field(default_factory=list)
    # Sizes that Python compared and that were unequal
    unlike: list[tuple[Terms, Terms]] = field(default_factory=list)
    # (layer, dimension that a batched product sums over)
    contracted: list[tuple[str, Dim]] = field(default_factory=list)
    # Sentences for the log
    notes: list[str] = field(default_factory=list)
