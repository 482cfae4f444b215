"""Sizes that Python reads in `forward`: which dimensions and attributes they depend on.

Sizes that `forward` reads from shapes or attributes are integers that remember their origin
(`Size`). `x.view(B, N, self.heads, C // self.heads)` therefore shows which attribute and which
dimension the view depends on. Some attributes hold the size of a dimension, and some sizes must
stay equal in every member.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedquilt.family.tracing.atoms import Dim
from fedquilt.family.tracing.attributes import attributes
from fedquilt.family.tracing.run import Value
from fedquilt.hardware.torch_internals import tree_leaves

Leaf = tuple[Value, int] | str  # A dimension of a tensor, or the path of an attribute
Powers = tuple[tuple[Leaf, int], ...]  # A monomial, in the order of `_rank`
Poly = Mapping[Powers, Fraction]


@dataclass(frozen=True)
class Equation:
    """A statement that a size which Python computed is the length of a dimension.

    For a slice, it may be the length of what comes before the slice.
    """

    size: Poly  # The size, as a polynomial of dimensions and attributes
    value: Value  # The tensor that has the dimension
    mark: object  # Number of a dimension, or a key of `value.marks`

    @property
    def dim(self) -> Dim | None:
        """Return the dimension that the equation is about.

        It is None if no rule has described the tensor, or if the tensor lacks the mark.
        """
        if not self.value.described:
            return None
        if isinstance(self.mark, int):
            return self.value.dims[self.mark]
        return self.value.marks.get(self.mark)


class Size(int):
    """An int that remembers which dimensions and attributes it was computed from."""

    poly: Poly
    trail: Trail

    @staticmethod
    def of(value: int, poly: Poly, trail: Trail) -> Size:
        """Return a size.

        Args:
            value: The number.
            poly: The number as a polynomial of dimensions and attributes.
            trail: Notes how Python uses the size.
        """
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
        for left, a in self.poly.items():
            for right, b in _poly(other).items():
                powers = _times(left, right)
                poly[powers] = poly.get(powers, Fraction(0)) + a * b
        return self._with(total, poly)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        result = int(self).__floordiv__(other)
        if not isinstance(result, int) or int(self) % other or len(_poly(other)) != 1:
            return result
        ((divisor, b),) = _poly(other).items()
        inverse = tuple((leaf, -power) for leaf, power in divisor)
        return self._with(
            result, {_times(monomial, inverse): a / b for monomial, a in self.poly.items()}
        )

    # The methods below note that a size becomes a number of the computation, such as an attention
    # scale or the divisor of a mean. Cutting changes that number.
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

    # A comparison may choose a branch. Sizes that are equal here must be equal in members too.
    # Widths at which unequal sizes become equal are checked later.
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
        self.trail.hashed = _instruction()  # A cache look-up compares without branching.
        return hash(int(self))

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _instruction() -> tuple[int, int]:
    """Return the bytecode instruction that the caller's caller executes.

    It is identified by the id of the frame and the offset in its code.
    """
    frame = sys._getframe(2)
    return id(frame), frame.f_lasti


class SizeScale(float):
    """A float attribute that remembers its path, because it may be the root of a size."""

    path: str


def _poly(value: int) -> Poly:
    """Return a number as a polynomial. A number without an origin is a constant."""
    return value.poly if isinstance(value, Size) else {(): Fraction(value)}


def _times(a: Powers, b: Powers) -> Powers:
    """Return the product of two monomials, sorted by `_rank` and without powers of zero."""
    powers = dict(a)
    for leaf, power in b:
        powers[leaf] = powers.get(leaf, 0) + power
    return tuple(sorted(((leaf, power) for leaf, power in powers.items() if power), key=_rank))


def _rank(item: tuple[Leaf, int]) -> tuple[int, int, str]:
    """Return a sort key for a leaf with its power. The power has no effect.

    The key does not depend on addresses or hash seeds, so that tracing a module twice gives the
    same layout.
    """
    leaf, _ = item
    return (0, 0, leaf) if isinstance(leaf, str) else (leaf[0].number, leaf[1], "")


class Trail(TorchFunctionMode):
    """A context that follows sizes from where Python reads them to where it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.equations: list[Equation] = []
        self.equal: list[tuple[Poly, Poly]] = []
        self.unequal: list[tuple[Poly, Poly]] = []
        self.numbers: list[Poly] = []
        self.scales: list[SizeScale] = []
        self.hashed = (0, 0)  # Instruction that last hashed a size
        self._inside: set[object] = set()  # Python functions of torch that are running

    def attach(self, module: nn.Module, value: Callable[[Tensor], Value]) -> None:
        """Replace every number in the module's attributes by one that remembers its path, in-place.

        Floats become `SizeScale`, integers above 1 become `Size`. Lists and tuples of integers are
        replaced entry by entry.

        Args:
            module: Copy of the module that will run.
            value: Returns the Value of a tensor of the run.
        """
        self.value = value
        for path, holder, key, number_or_sizes in list(attributes(module)):
            if isinstance(number_or_sizes, float):
                holder[key] = SizeScale(number_or_sizes)
                holder[key].path = path
            elif isinstance(number_or_sizes, int):
                holder[key] = self.size(number_or_sizes, path)
            else:
                holder[key] = type(number_or_sizes)(
                    self.size(n, f"{path}.{position}") for position, n in enumerate(number_or_sizes)
                )

    def size(self, value: int, leaf: Leaf) -> int:
        """Return a number as a `Size` that remembers its origin.

        Numbers below 2 are returned unchanged.

        Args:
            value: The number.
            leaf: Its origin: a dimension of a tensor, or the path of an attribute.
        """
        return Size.of(value, {((leaf, 1),): Fraction(1)}, self) if value > 1 else value

    def shape(self, tensor: Tensor) -> torch.Size:
        """Return the shape of a tensor, with sizes that remember their origin."""
        value = self.value(tensor)
        return torch.Size([self.size(n, (value, dim)) for dim, n in enumerate(value.shape)])

    def equate(self, size: object, tensor: Tensor, mark: object) -> None:
        """Note that a size which Python computed is the length of a dimension.

        Args:
            size: The size. Numbers that are no `Size` have no effect.
            tensor: The tensor that has the dimension.
            mark: Number of the dimension, or a key of `Value.marks`.
        """
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
                elif isinstance(operand, SizeScale):
                    self.scales.append(operand)
        return func(*args, **kwargs)


@cache
def _unguarded(func: types.FunctionType) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that does not look for overriding modes.

    Its body then runs at once, so that `Trail` can follow the operations inside it. Results are
    cached by function.
    """
    checks = {name for name in func.__globals__ if name.startswith("has_torch_function")}
    namespace = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = types.FunctionType(
        func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# Arithmetic functions and operators of torch: a size among their arguments becomes a number.
_ARITHMETIC_NAMES = (
    "mul div true_divide divide multiply add sub pow rsub mul_ div_ add_ sub_ "
    "__mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __imul__ __itruediv__ "
    "__add__ __radd__ __sub__ __rsub__ __pow__ __rpow__ softmax baddbmm clamp"
)
_ARITHMETIC = frozenset(_ARITHMETIC_NAMES.split())
_Use = Callable[..., None]  # (trail, result, *args, **kwargs) of a call
# Functions that note which arguments are lengths of the result, by the name of torch's function
_USES: dict[str, _Use] = {}


def _use(*names: str) -> Callable[[_Use], _Use]:
    """Return a decorator that registers how functions or methods of torch use sizes.

    The decorated function is called after torch's, with the trail, the result and all arguments.

    Args:
        names: Names of torch's functions or methods, such as "view".
    """

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
    shape_args = args[:1] if args and isinstance(args[0], (tuple, list)) else args
    sizes = tree_leaves((shape_args, kwargs.get("size"), kwargs.get("shape")))
    for dim, length in enumerate(sizes[: out.ndim]):
        trail.equate(length, out, dim)


@_use("unflatten")
def _unflattened(trail: Trail, out: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
    for offset, length in enumerate(sizes):
        trail.equate(length, out, dim % x.ndim + offset)


@_use("split", "split_with_sizes", "tensor_split")
def _split(
    trail: Trail, out: Sequence[Tensor], x: Tensor, *args: Any, dim: int = 0, **kwargs: Any
) -> None:
    sizes, *positional = (*args, *kwargs.values())
    dim = (positional[0] if positional else dim) % x.ndim
    for piece, length in zip(
        out, sizes if isinstance(sizes, (tuple, list)) else [sizes], strict=False
    ):
        trail.equate(length, piece, dim)


@_use("narrow")
def _narrowed(trail: Trail, out: Tensor, x: Tensor, dim: int, start: int, length: int) -> None:
    trail.equate(length, out, dim % x.ndim)
    trail.equate(start, out, ("start", dim % x.ndim))


@_use("__getitem__")
def _indexed(trail: Trail, out: Tensor, x: Tensor, index: Any) -> None:
    entries = list(index) if isinstance(index, tuple) else [index]
    slices = [entry for entry in entries if isinstance(entry, slice)]
    if not any(isinstance(end, Size) for entry in slices for end in (entry.start, entry.stop)):
        return
    if any(isinstance(entry, (Tensor, list)) for entry in entries):
        return  # Advanced indexing moves dimensions. The later check covers its result.
    if Ellipsis in entries:
        position = entries.index(Ellipsis)
        num_indexed = sum(entry is not None for entry in entries) - 1
        entries[position : position + 1] = [slice(None)] * (x.ndim - num_indexed)
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
def _normalized(
    trail: Trail, out: Tensor, _: Tensor, normalized_shape: Sequence[int], *__: Any, **___: Any
) -> None:
    for dim, length in zip(range(-len(normalized_shape), 0), normalized_shape, strict=True):
        trail.equate(length, out, out.ndim + dim)


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
    if isinstance(scale, SizeScale):
        trail.scales.append(scale)
    elif scale is None:
        value = trail.value(query)
        trail.numbers.append({(((value, query.ndim - 1), 1),): Fraction(1)})
