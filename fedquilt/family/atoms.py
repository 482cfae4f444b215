"""Dimensions while a module is traced: row-major products of atoms, which operations split, lay end to end and unify.

An atom is an unknown axis. Unifying two dimensions binds atoms to what they turned out to be (another atom, a product,
a sum, or a plain size), so what is left unbound at the end are the axes. Dimensions are never matched by their size:
a size of one is the empty product, and plain sizes have no identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod


@dataclass(eq=False)
class Atom:
    """An axis not yet named, or, once `bound`, a part of the dimension it was found to be."""

    size: int
    bound: Dim | None = None
    fixed: bool = False  # never cut, yet worth a name: heads, a vocabulary that may turn out to be the classes
    coupled: bool = False
    role: str = ""  # how it was split off its parent: "groups" or "inside", "heads" or "dim"


@dataclass(frozen=True)
class Cat:
    """Dimensions laid end to end."""

    terms: tuple[Dim, ...]


Factor = int | Atom | Cat
Dim = tuple[Factor, ...]  # a row-major product; the empty one has size 1


def atom(size: int, role: str = "") -> Dim:
    """A dimension nothing is known about yet."""
    return (Atom(size, role=role),) if size > 1 else plain(size)


def plain(size: int) -> Dim:
    """A dimension that is never cut."""
    return (size,) if size != 1 else ()


def size(dim: Dim) -> int:
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
    """The dimension with every bound atom replaced, in one form for equal dimensions."""
    found: list[Factor] = []
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
            # Plain sizes have no identity, so neighbours are one.
            if isinstance(part, int) and found and isinstance(found[-1], int):
                found[-1] *= part
            else:
                found.append(part)
    return tuple(found)


def _is_resolved_plain(dim: Dim) -> bool:
    return all(isinstance(factor, int) for factor in dim)


def _resolve_cat(terms: Sequence[Dim]) -> Dim:
    flat: list[Dim] = []
    for term in map(resolve, terms):
        inner = term[0].terms if len(term) == 1 and isinstance(term[0], Cat) else (term,)
        for one in inner:
            if flat and _is_resolved_plain(one) and _is_resolved_plain(flat[-1]):
                flat[-1] = plain(size(flat[-1]) + size(one))
            elif size(one):
                flat.append(one)
    if len(flat) <= 1:
        return flat[0] if flat else plain(0)
    # (a c + b c) is ((a + b) c), and (c + c + c) is (3 c): products can be split further, sums cannot.
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
    """Whether the dimension is a size that no cut changes."""
    return all(isinstance(factor, int) for factor in resolve(dim))


def atoms_in(dim: Dim) -> Iterator[Atom]:
    """The unbound atoms of a dimension, left to right."""
    for factor in resolve(dim):
        match factor:
            case Atom():
                yield factor
            case Cat(terms):
                for term in terms:
                    yield from atoms_in(term)


Count = Counter[tuple[int, ...]]  # a polynomial: monomial of atoms (by id) → coefficient


def count(dim: Dim) -> Count:
    """The size in terms of atoms: equal for dimensions that are as long as each other in every member."""
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
        for one, times in total.items():
            for other, more in terms.items():
                product[tuple(sorted((*one, *other)))] += times * more
        total = product
    return total


def is_free(dim: Dim) -> bool:
    """Whether a cut may change the dimension's size."""
    return any(not one.fixed for one in atoms_in(dim))


def pin(dim: Dim) -> None:
    """Never cut this dimension."""
    for one in list(atoms_in(dim)):
        one.bound = plain(one.size)


def fix(dim: Dim) -> None:
    """Never cut this dimension, but let its atoms keep their names."""
    for one in atoms_in(dim):
        one.fixed = True


def couple(dim: Dim) -> None:
    """Note that channels of this dimension see each other, so that cutting one is not zeroing it."""
    for one in atoms_in(dim):
        one.coupled = True


def _bind(one: Atom, dim: Dim) -> None:
    one.bound = dim
    if len(dim) == 1 and isinstance(dim[0], Atom):
        dim[0].role = dim[0].role or one.role
    if one.fixed:
        fix(dim)
    if one.coupled:
        couple(dim)


def unify(a: Dim, b: Dim) -> None:
    """Make two dimensions one; what cannot be expressed is pinned, which is always sound."""
    a, b = resolve(a), resolve(b)
    if a == b:
        return
    if size(a) != size(b) or is_plain(a) or is_plain(b):
        pin(a)
        pin(b)
        return
    for one, other in ((a, b), (b, a)):
        if len(one) == 1 and isinstance(one[0], Atom):
            return _bind(one[0], other)
    for one, other in ((a, b), (b, a)):
        if len(one) == 1 and isinstance(one[0], Cat):
            terms = one[0].terms
            for term, part in zip(terms, parts(other, [size(term) for term in terms]), strict=True):
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
    """Cut a row-major product into consecutive products of these sizes."""
    return tuple(tuple(factor for _, factor in group) for group in regroup([dim], sizes, roles))


def regroup(
    dims: Sequence[Dim], shape: Sequence[int], roles: tuple[str, str] = ("", "")
) -> list[list[tuple[int, Factor]]]:
    """The factors of a view's output dimensions, each with the number of the input dimension it comes from."""
    left = [(source, factor) for source, dim in enumerate(dims) for factor in resolve(dim)][::-1]
    groups: list[list[tuple[int, Factor]]] = []
    for wanted in shape:
        group: list[tuple[int, Factor]] = []
        while wanted != 1 and left:
            source, factor = left.pop()
            length = _factor_size(factor)
            if length and wanted % length == 0:
                group.append((source, factor))
                wanted //= length
            elif wanted and length % wanted == 0:
                outer, inner = _factorise(factor, wanted, roles)
                group += [(source, part) for part in outer]
                left += [(source, part) for part in reversed(inner)]
                wanted = 1
            else:
                # A view that cuts across factors: nothing from here on keeps its channels together.
                left.append((source, factor))
                for _, lost in (*group, *left):
                    pin((lost,))
                return [*groups, *([(-1, part) for part in plain(n)] for n in shape[len(groups) :])]
        groups.append(group)
    return groups


def _factorise(factor: Factor, outer_size: int, roles: tuple[str, str]) -> tuple[Dim, Dim]:
    inner_size = _factor_size(factor) // outer_size
    match factor:
        case Atom():
            # Groups taken apart again are still groups, whatever is inside them.
            inner_role = factor.role if factor.role == roles[0] else roles[1]
            outer, inner = Atom(outer_size, role=roles[0]), Atom(inner_size, role=inner_role)
            _bind(factor, (outer, inner))
            return (outer,), (inner,)
        case Cat(terms) if all(size(term) % inner_size == 0 for term in terms):
            # Every branch is split alike: the counts inside must agree, those outside still add up.
            pairs = [split(term, (size(term) // inner_size, inner_size), roles) for term in terms]
            for _, inside in pairs[1:]:
                unify(pairs[0][1], inside)
            return resolve((Cat(tuple(outside for outside, _ in pairs)),)), resolve(pairs[0][1])
        case _:
            pin((factor,))
            return plain(outer_size), plain(inner_size)


def parts(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """Cut a dimension into consecutive ranges of these sizes: the inverse of laying them end to end."""
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
    ranges: list[list[Dim]] = [[] for _ in counts]
    at, room = 0, counts[0]
    for term in terms:
        sizes, owners, rest = [], [], size(term)
        while rest:
            while not room:
                at += 1
                room = counts[at]
            taken = min(rest, room)
            sizes.append(taken)
            owners.append(at)
            rest, room = rest - taken, room - taken
        for owner, part in zip(owners, parts(term, sizes), strict=True):
            ranges[owner].append(part)
    return [_resolve_cat(found) for found in ranges]


Terms = tuple[
    tuple[Fraction, tuple[tuple[Dim, int], ...]], ...
]  # a sum of factor · dimension^power · …


@dataclass
class Facts:
    """What operations say about dimensions beyond which are equal; settled once the whole graph is known."""

    views: list[list[Dim]] = field(
        default_factory=list
    )  # pieces of one dimension that a view took apart
    slices: list[list[Dim]] = field(default_factory=list)  # ranges of one dimension
    groups: list[tuple[Dim, Dim]] = field(default_factory=list)  # (groups, channels inside each)
    unlike: list[tuple[Terms, Terms]] = field(
        default_factory=list
    )  # sizes compared and found different
    contracted: list[tuple[str, Dim]] = field(
        default_factory=list
    )  # (layer, dimension summed in a batched product)
    notes: list[str] = field(default_factory=list)
