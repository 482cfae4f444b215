"""How Python used the sizes it read: which attributes hold the size of which dimensions, and which must stay equal.

Sizes that `forward` reads from shapes or attributes are integers that remember where they came from (`Size`), so that
`x.view(B, N, self.heads, C // self.heads)` tells which attribute and which dimension the view depends on.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fedquilt.family.atoms import (
    Dim,
    Factor,
    Facts,
    Terms,
    count,
    couple,
    is_free,
    is_plain,
    pin,
    plain,
    resolve,
    size,
    split,
    unify,
)
from fedquilt.family.record import Value

Leaf = tuple[Value, int] | str  # a dimension of a tensor, or the path of an attribute
Powers = tuple[tuple[Leaf, int], ...]  # a monomial, in the order of `_rank`
Poly = Mapping[Powers, Fraction]


@dataclass(frozen=True)
class Equation:
    """A size that Python computed is the length of this dimension (or of what comes before a slice)."""

    size: Poly
    value: Value
    mark: object  # a dimension's number, or a key of `value.marks`

    @property
    def dim(self) -> Dim | None:
        if not self.value.known:
            return None
        return (
            self.value.dims[self.mark]
            if isinstance(self.mark, int)
            else self.value.marks.get(self.mark)
        )


class Size(int):
    """An int that remembers which dimensions and attributes it was computed from."""

    poly: Poly
    trail: Trail

    @staticmethod
    def of(value: int, poly: Poly, trail: Trail) -> Size:
        self = Size(value)
        self.poly, self.trail = poly, trail
        return self

    def _with(self, value: int, poly: Poly) -> Size:
        return Size.of(
            value, {powers: factor for powers, factor in poly.items() if factor}, self.trail
        )

    def __add__(self, other: int) -> int:
        total = int(self).__add__(other)
        if not isinstance(total, int):
            return total
        poly = dict(self.poly)
        for powers, factor in _poly(other).items():
            poly[powers] = poly.get(powers, Fraction(0)) + factor
        return self._with(total, poly)

    __radd__ = __add__

    def __neg__(self) -> int:
        return self._with(-int(self), {powers: -factor for powers, factor in self.poly.items()})

    def __sub__(self, other: int) -> int:
        return self + -other

    def __rsub__(self, other: int) -> int:
        return -self + other

    def __mul__(self, other: int) -> int:
        total = int(self).__mul__(other)
        if not isinstance(total, int):
            return total
        poly: dict[Powers, Fraction] = {}
        for one, a in self.poly.items():
            for two, b in _poly(other).items():
                powers = _times(one, two)
                poly[powers] = poly.get(powers, Fraction(0)) + a * b
        return self._with(total, poly)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        result = int(self).__floordiv__(other)
        if not isinstance(result, int) or int(self) % other or len(_poly(other)) != 1:
            return result
        ((two, b),) = _poly(other).items()
        inverse = tuple((leaf, -power) for leaf, power in two)
        return self._with(result, {_times(one, inverse): a / b for one, a in self.poly.items()})

    # A size that becomes a number in the computation (an attention scale, a hand-written mean): cutting changes it.
    def __float__(self) -> float:
        self.trail.numbers.append(self.poly)
        return float(int(self))

    def __truediv__(self, other: float) -> float:
        return float(self) / other

    def __rtruediv__(self, other: float) -> float:
        return other / float(self)

    def __pow__(self, other: Any, mod: Any = None) -> Any:
        self.trail.numbers.append(self.poly)
        return pow(int(self), other, mod)

    # A comparison chose a branch. What came out equal must be equal in members too; what did not, is to be checked.
    def __eq__(self, other: object) -> bool:
        same = int(self) == (int(other) if isinstance(other, Size) else other)
        if isinstance(other, int) and other > 1 and self.trail.hashed != _instruction():
            if not same:
                self.trail.unequal.append((self.poly, _poly(other)))
            elif isinstance(other, Size):
                self.trail.equal.append((self.poly, other.poly))
        return same

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self.trail.hashed = _instruction()  # a look-up in a cache compares too, but decides nothing
        return hash(int(self))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _instruction() -> tuple[int, int]:
    """Where the caller's caller stands."""
    frame = sys._getframe(2)
    return id(frame), frame.f_lasti


class Scale(float):
    """A float attribute that remembers its path, since it may hold the root of a size."""

    path: str


def _poly(value: int) -> Poly:
    return value.poly if isinstance(value, Size) else {(): Fraction(value)}


def _times(one: Powers, two: Powers) -> Powers:
    powers = dict(one)
    for leaf, power in two:
        powers[leaf] = powers.get(leaf, 0) + power
    return tuple(sorted(((leaf, power) for leaf, power in powers.items() if power), key=_rank))


def _rank(item: tuple[Leaf, int]) -> tuple[int, int, str]:
    """An order that does not depend on addresses or hash seeds: tracing twice gives the same layout."""
    leaf, _ = item
    return (0, 0, leaf) if isinstance(leaf, str) else (leaf[0].number, leaf[1], "")


class Trail(TorchFunctionMode):
    """Follows sizes from where Python reads them to where it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.equations: list[Equation] = []
        self.equal: list[tuple[Poly, Poly]] = []
        self.unequal: list[tuple[Poly, Poly]] = []
        self.numbers: list[Poly] = []
        self.scales: list[Scale] = []
        self.hashed = (0, 0)  # the instruction that last hashed a size
        self._inside: set[object] = set()  # torch's Python functions at work

    def attach(self, module: nn.Module, value: Callable[[Tensor], Value]) -> None:
        """Let every number the module keeps remember its path."""
        self.value = value
        for path, holder, key, held in list(attributes(module)):
            if isinstance(held, float):
                holder[key] = Scale(held)
                holder[key].path = path
            elif isinstance(held, int):
                holder[key] = self.size(held, path)
            else:
                holder[key] = type(held)(self.size(n, f"{path}.{at}") for at, n in enumerate(held))

    def size(self, value: int, leaf: Leaf) -> int:
        return Size.of(value, {((leaf, 1),): Fraction(1)}, self) if value > 1 else value

    def shape(self, tensor: Tensor) -> torch.Size:
        value = self.value(tensor)
        return torch.Size([self.size(n, (value, dim)) for dim, n in enumerate(value.shape)])

    def equate(self, size: object, tensor: Tensor, mark: object) -> None:
        """Note that a size Python computed is the length of this dimension."""
        if isinstance(size, Size):
            self.equations.append(Equation(size.poly, self.value(tensor), mark))

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is Tensor.shape:
            return self.shape(args[0])
        name = getattr(func, "__name__", "")
        if name == "size":
            shape = self.shape(args[0])
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        if name == "numel":
            return prod(self.shape(args[0]))
        if name in _USES:
            result = func(*args, **kwargs)
            _USES[name](self, result, *args, **kwargs)
            return result
        if isinstance(func, types.FunctionType) and func not in self._inside:
            self._inside.add(func)
            try:
                with self:
                    return _unguarded(func)(*args, **kwargs)
            finally:
                self._inside.discard(func)
        if name in _ARITHMETIC:
            for operand in (*args, *kwargs.values()):
                if isinstance(operand, Size):
                    self.numbers.append(operand.poly)
                elif isinstance(operand, Scale):
                    self.scales.append(operand)
        return func(*args, **kwargs)


@cache
def _unguarded(func: types.FunctionType) -> Callable[..., Any]:
    """A function of torch's written in Python, without its own hand-over to modes: we want to see inside it."""
    checks = {name for name in func.__globals__ if name.startswith("has_torch_function")}
    around = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = types.FunctionType(
        func.__code__, around, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_ARITHMETIC = {
    *(
        "mul",
        "div",
        "true_divide",
        "divide",
        "multiply",
        "add",
        "sub",
        "pow",
        "rsub",
        "mul_",
        "div_",
        "add_",
        "sub_",
    ),
    *(
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__rtruediv__",
        "__div__",
        "__rdiv__",
        "__imul__",
        "__itruediv__",
    ),
    *(
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__pow__",
        "__rpow__",
        "softmax",
        "baddbmm",
        "clamp",
    ),
}
_Use = Callable[..., None]
_USES: dict[
    str, _Use
] = {}  # by the name of torch's function or method: which arguments are lengths of the result


def _use(*names: str) -> Callable[[_Use], _Use]:
    def register(use: _Use) -> _Use:
        _USES.update(dict.fromkeys(names, use))
        return use

    return register


@_use(
    "view",
    "reshape",
    "expand",
    "view_copy",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "broadcast_to",
)
def _resized(trail: Trail, out: Tensor, _: Tensor, *args: Any, **kwargs: Any) -> None:
    _created(trail, out, *args, **kwargs)


@_use("zeros", "ones", "empty", "full", "rand", "randn")
def _created(trail: Trail, out: Tensor, *args: Any, **kwargs: Any) -> None:
    given = args[:1] if args and isinstance(args[0], (tuple, list)) else args
    sizes = pytree.tree_leaves((given, kwargs.get("size"), kwargs.get("shape")))
    for dim, asked in enumerate(sizes[: out.ndim]):
        trail.equate(asked, out, dim)


@_use("unflatten")
def _unflattened(trail: Trail, out: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
    for offset, asked in enumerate(sizes):
        trail.equate(asked, out, dim % x.ndim + offset)


@_use("split", "split_with_sizes", "tensor_split")
def _split(
    trail: Trail, out: Sequence[Tensor], x: Tensor, *args: Any, dim: int = 0, **kwargs: Any
) -> None:
    sizes, *rest = (*args, *kwargs.values())
    dim = (rest[0] if rest else dim) % x.ndim
    for piece, asked in zip(
        out, sizes if isinstance(sizes, (tuple, list)) else [sizes], strict=False
    ):
        trail.equate(asked, piece, dim)


@_use("narrow")
def _narrowed(trail: Trail, out: Tensor, x: Tensor, dim: int, start: int, length: int) -> None:
    trail.equate(length, out, dim % x.ndim)
    trail.equate(start, out, ("start", dim % x.ndim))


@_use("__getitem__")
def _indexed(trail: Trail, out: Tensor, x: Tensor, index: Any) -> None:
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(
        isinstance(e, slice) and any(isinstance(n, Size) for n in (e.start, e.stop))
        for e in entries
    ):
        return
    if any(isinstance(entry, (Tensor, list)) for entry in entries):
        return  # advanced indexing moves dimensions; the check still sees what it did
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        taken = sum(entry is not None for entry in entries) - 1
        entries[at : at + 1] = [slice(None)] * (x.ndim - taken)
    source = target = 0
    shape = trail.shape(x)
    for entry in entries:
        if isinstance(entry, slice):
            start, stop = entry.start or 0, shape[source] if entry.stop is None else entry.stop
            start, stop = (n + shape[source] if n < 0 else n for n in (start, stop))
            if entry.step in (None, 1):
                trail.equate(stop - start, out, target)
                trail.equate(start, out, ("start", target))
        source += entry is not None
        target += entry is None or isinstance(entry, slice)


@_use("layer_norm", "rms_norm")
def _normalised(
    trail: Trail, out: Tensor, _: Tensor, normalized_shape: Sequence[int], *__: Any, **___: Any
) -> None:
    for dim, asked in zip(range(-len(normalized_shape), 0), normalized_shape, strict=True):
        trail.equate(asked, out, out.ndim + dim)


@_use("group_norm")
def _grouped(trail: Trail, out: Tensor, _: Tensor, num_groups: int, *__: Any, **___: Any) -> None:
    trail.equate(num_groups, out, "groups")


@_use("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolved(trail: Trail, out: Tensor, *args: Any, **kwargs: Any) -> None:
    trail.equate(args[6] if len(args) > 6 else kwargs.get("groups"), out, "groups")


@_use("scaled_dot_product_attention")
def _attended(
    trail: Trail, _: Tensor, query: Tensor, *args: Any, scale: float | None = None, **__: Any
) -> None:
    if isinstance(scale, Scale):
        trail.scales.append(scale)
    elif scale is None:
        value = trail.value(query)
        trail.numbers.append({(((value, query.ndim - 1), 1),): Fraction(1)})


_MACHINERY = set(vars(nn.Module()))  # weights, hooks, layers: not the module's own attributes


def attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every number a module keeps, as (path, what holds it, its key there, its value)."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for name, held in list(vars(layer).items()):
            if name not in _MACHINERY:
                yield from _numbers(
                    f"{path}.{name}" if path else name, vars(layer), name, held, seen
                )


def _numbers(
    path: str, holder: Any, key: Any, held: Any, seen: set[int]
) -> Iterator[tuple[str, Any, Any, Any]]:
    sizes = type(held) in (tuple, list) and all(type(item) is int for item in held)
    if sizes or type(held) in (int, float):
        yield path, holder, key, held
        return
    settings = _settings(held)
    if settings is not None and id(held) not in seen:
        seen.add(id(held))  # shared by many layers, it is still one place: it keeps its first path
        for name, item in list(settings.items()):
            yield from _numbers(f"{path}.{name}", settings, name, item, seen)


def _settings(held: Any) -> dict[str, Any] | None:
    """The entries of a configuration: a dictionary of names, or an object that does nothing but hold attributes."""
    if type(held) is dict:
        return held if all(isinstance(key, str) and key.isidentifier() for key in held) else None
    passive = not isinstance(held, (nn.Module, Tensor, type, types.ModuleType)) and not callable(
        held
    )
    return vars(held) if passive and hasattr(held, "__dict__") else None


# --- what follows from it ------------------------------------------------------------------------------------------


def solve_sizes(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], trail: Trail, facts: Facts
) -> dict[str, Dim]:
    """Unify what Python made depend on each other, and tell which attributes hold the size of which dimension."""
    values: dict[str, int] = {}
    for path, _, _, held in attributes(module):
        values.update(
            {f"{path}.{at}": n for at, n in enumerate(held)}
            if isinstance(held, (tuple, list))
            else {path: held}
        )
    solver = _Solver(values, dict(_layer_sizes(module, weights)))
    # An equation may need what a later one finds out; three rounds reach what is written in real modules.
    for _ in range(3):
        for equation in trail.equations:
            dim = equation.dim
            if dim is not None:
                solver.solve(equation.size, dim)
        for one, other in trail.equal:
            known = solver.evaluate(other)
            if known is not None:
                solver.solve(one, known)
            elif (known := solver.evaluate(one)) is not None:
                solver.solve(other, known)
    for poly in trail.numbers:
        for leaf, _ in (item for powers in poly for item in powers):
            couple(solver.dim_of(leaf) or ())
    facts.unlike += [(solver.terms(one), solver.terms(other)) for one, other in trail.unequal]
    for scale in trail.scales:
        layer = scale.path.rpartition(".")[0]
        for where, dim in facts.contracted:
            if (
                where == layer
                and is_free(dim)
                and any(isclose(scale, size(dim) ** power) for power in (-0.5, 0.5))
            ):
                solver.found[scale.path] = dim
                couple(dim)
    return solver.found


def _layer_sizes(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]]
) -> Iterator[tuple[str, Dim]]:
    """The sizes that torch's own layers keep of their weights; a member's layers have their own."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            names = ["out_features", "in_features"]
        elif isinstance(layer, _ConvNd) and layer.groups == 1:
            names = (
                ["in_channels", "out_channels"]
                if layer.transposed
                else ["out_channels", "in_channels"]
            )
        else:
            continue
        prefix = f"{path}." if path else ""
        for name, dim in zip(names, weights.get(f"{prefix}weight", ()), strict=False):
            yield prefix + name, dim


@dataclass
class _Solver:
    """Equations between sizes, solved for one unknown at a time; the check sees what is left out."""

    values: Mapping[str, int]
    given: Mapping[str, Dim]  # attributes whose dimension needs no finding
    found: dict[str, Dim] = field(
        default_factory=dict
    )  # attribute → the dimension whose size it holds

    def dim_of(self, leaf: Leaf) -> Dim | None:
        if isinstance(leaf, str):
            return self.given.get(leaf) or self.found.get(leaf)
        value, dim = leaf
        return resolve(value.dims[dim]) if value.known else None

    def evaluate(self, poly: Poly) -> Dim | None:
        """The dimension a size is, where it is that and nothing else."""
        match [(powers, factor) for powers, factor in poly.items()]:
            case [(((leaf, 1),), factor)] if factor == 1:
                return self.dim_of(leaf)
            case [((), factor)]:
                return plain(int(factor))
        return None

    def terms(self, poly: Poly) -> Terms:
        """Return a size as a sum of products of dimensions.

        Members keep the number in an attribute that follows no axis, so it counts as a constant.
        Without that, the width at which another attribute equals it would never be tried.
        """
        return tuple(
            (factor, tuple((self._dim_or_constant(leaf), power) for leaf, power in powers))
            for powers, factor in poly.items()
        )

    def _dim_or_constant(self, leaf: Leaf) -> Dim:
        dim = self.dim_of(leaf)
        if dim is not None:
            return dim
        return plain(self.values[leaf] if isinstance(leaf, str) else leaf[0].shape[leaf[1]])

    def solve(self, poly: Poly, dim: Dim) -> None:
        """Make `poly` the size of `dim`: for 2·a·b⁻¹ that is a = (b dim) / 2."""
        if len(poly) != 1:
            return
        ((powers, factor),) = poly.items()
        whole = resolve(dim)
        open_: list[tuple[Leaf, Dim | None]] = []
        for leaf, power in powers:
            known = self.dim_of(leaf)
            if known is None and power < 0 and isinstance(leaf, str):
                known = plain(self.values[leaf])
            if known is not None and is_plain(known):
                factor *= Fraction(size(known)) ** power
            elif known is not None and power == -1:
                whole = (*known, *whole)
            elif power == 1:
                open_.append((leaf, known))
            else:
                return
        rest = _divide((*plain(factor.denominator), *whole), plain(factor.numerator))
        for leaf, known in open_[:]:
            if rest is not None and known is not None and len(open_) > 1:
                rest = _divide(rest, known)
                open_.remove((leaf, known))
        if rest is None or len(open_) != 1:
            return
        ((leaf, known),) = open_
        if known is None:
            if isinstance(leaf, str) and size(rest) == self.values[leaf]:
                self.found[leaf] = rest
        elif count(known) != count(rest):  # being as many as each other is all that a size asks for
            unify(*_cancel(known, rest))


def _cancel(one: Dim, other: Dim) -> tuple[Dim, Dim]:
    """Two products without the factors they share: of (c 2) and (2 d) it is c and d that must be as many."""
    left: list[Factor] = []
    right = list(resolve(other))
    for factor in resolve(one):
        if factor in right:
            right.remove(factor)
        else:
            left.append(factor)
    return tuple(left), tuple(right)


def _divide(dim: Dim, factor: Dim) -> Dim | None:
    """The rest of a product without a factor of it, or nothing if it is none."""
    dim, factor = resolve(dim), resolve(factor)
    if not is_plain(factor):
        for at in range(len(dim) - len(factor) + 1):
            if dim[at : at + len(factor)] == factor:
                return resolve((*dim[:at], *dim[at + len(factor) :]))
        return None
    n = size(factor)
    for at, part in enumerate(dim):
        if isinstance(part, int) and part % n == 0:
            return resolve((*dim[:at], part // n, *dim[at + 1 :]))
    if n == 1 or size(dim) % n:
        return dim if n == 1 else None
    outer, inner = split(dim, (n, size(dim) // n))
    pin(outer)  # a number of pieces written in the code
    return resolve(inner)
