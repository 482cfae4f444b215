"""One run of a module on tensors without data: its ATen calls in order, and how Python used the sizes it read.

Sizes that `forward` reads from shapes or attributes are integers that remember where they came from (`Size`), so that
`x.view(B, N, self.heads, C // self.heads)` tells which attribute and which dimension the view depends on.
"""

from __future__ import annotations

import logging
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from fractions import Fraction
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.family.atoms import Dim, plain
from fedquilt.family.build import blueprint

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)


@dataclass(eq=False)
class Value:
    """A tensor of the run: its sizes, and what is known about its dimensions."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...] = ()
    weight: str | None = None
    number: int = 0  # by first appearance
    storage: int = 0
    marks: dict[object, Dim] = field(default_factory=dict)  # "groups", or ("start", dim) of a slice
    known: bool = True  # whether a rule described it; by-products no one reads are not

    def __post_init__(self) -> None:
        self.dims = self.dims or tuple(plain(n) for n in self.shape)


@dataclass(eq=False)
class Call:
    """One ATen operation of the run."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value, ...]
    layer: str  # the innermost module at work
    where: str  # the user's line
    live: bool = False  # whether the module's output depends on it

    @property
    def inputs(self) -> list[Value]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    def __str__(self) -> str:
        return f"{self.op.overloadpacket.__name__} in {layer_name(self.layer)} ({self.where})"


def layer_name(path: str) -> str:
    return f"layer {path!r}" if path else "the module itself"


Leaf = tuple[Value, int] | str  # a dimension of a tensor, or the path of an attribute
Powers = tuple[tuple[Leaf, int], ...]  # a monomial, in the order of `_rank`
Poly = Mapping[Powers, Fraction]


@dataclass(frozen=True)
class Equation:
    """A size that Python computed is the length of this dimension (or of what comes before a slice)."""

    size: Poly
    value: Value
    mark: object  # a dimension's number, or a key of `value.marks`


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
        return Size.of(value, {powers: factor for powers, factor in poly.items() if factor}, self.trail)

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

    # A comparison that came out equal chose a branch; members must come out equal too.
    def __eq__(self, other: object) -> bool:
        same = int(self) == (int(other) if isinstance(other, Size) else other)
        if same and isinstance(other, Size) and other.trail is self.trail and self.trail.hashed != _instruction():
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


@dataclass
class Run:
    """What one run of a module left behind."""

    calls: list[Call]
    output: Any  # Values in place of tensors
    trail: Trail


class RunError(Exception):
    """A module did not run; says how far it came, and where it stopped."""

    def __init__(self, calls: list[Call], layer: str, where: str) -> None:
        super().__init__(layer, where)
        self.calls, self.layer, self.where = calls, layer, where


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every ATen call that has a rule, and takes the others apart."""

    def __init__(self, known: Callable[[OpOverload], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.calls: list[Call] = []
        self.layers: list[str] = [""]
        self.failed: str | None = None  # the innermost layer an exception came through
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # ids are names only while the tensors live

    def value(self, tensor: Tensor) -> Value:
        """The value a tensor stands for; one the run did not make is a constant, whose sizes never change."""
        if id(tensor) not in self._values:
            self.name(tensor, Value(tuple(tensor.shape)))
        return self._values[id(tensor)]

    def name(self, tensor: Tensor, value: Value) -> None:
        value.storage = tensor.untyped_storage()._cdata
        value.number = len(self._values) + 1
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "prim":
            return op(*args, **kwargs)  # asks for a device, say: no tensors come of it
        if not self.known(op):
            for take_apart in (_decompositions().get(op), getattr(op, "decompose", None)):
                if take_apart is not None:
                    with self:
                        out = take_apart(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
        out = op(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if tensors:
            swap = self._swap
            given = tuple(pytree.tree_map(swap, args)), pytree.tree_map(swap, kwargs)
            outs = []
            for tensor in tensors:
                # An in-place operation returns its argument: the same tensor, still the same dimensions.
                if id(tensor) not in self._values:
                    self.name(tensor, Value(tuple(tensor.shape), known=False))
                outs.append(self._values[id(tensor)])
            self.calls.append(Call(op, *given, tuple(outs), self.layers[-1], _where()))
        return out

    def _swap(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, Tensor) else leaf


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def _where() -> str:
    """The innermost line of the user's own code, else of torch's."""
    frame: types.FrameType | None = sys._getframe(2)
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(HERE) and not file.endswith("record.py"):
            break
        if file.startswith(TORCH):
            if not inner and "/nn/" in file:
                inner = f"{file}:{frame.f_lineno}"
        elif not file.startswith((HERE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return inner or "torch"


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception came through."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in lines if not file.startswith((TORCH, HERE, "<"))]
    file, line = (own or lines)[-1]
    return f"{file}:{line}"


class Trail(TorchFunctionMode):
    """Follows sizes from where Python reads them to where it uses them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.equations: list[Equation] = []
        self.equal: list[tuple[Poly, Poly]] = []
        self.numbers: list[Poly] = []
        self.scales: list[Scale] = []
        self.hashed = (0, 0)  # the instruction that last hashed a size
        self._active: set[object] = set()

    def size(self, value: int, leaf: Leaf) -> Size:
        return Size.of(value, {((leaf, 1),): Fraction(1)}, self)

    def shape(self, tensor: Tensor) -> torch.Size:
        value = self.recorder.value(tensor)
        return torch.Size([self.size(n, (value, dim)) if n > 1 else n for dim, n in enumerate(value.shape)])

    def equate(self, size: object, tensor: Tensor, mark: object) -> None:
        """Note that a size Python computed is the length of this dimension."""
        if isinstance(size, Size):
            self.equations.append(Equation(size.poly, self.recorder.value(tensor), mark))

    def __torch_function__(self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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
        if isinstance(func, types.FunctionType) and func not in self._active:
            self._active.add(func)
            try:
                with self:
                    return _unguarded(func)(*args, **kwargs)
            finally:
                self._active.discard(func)
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
    copy = types.FunctionType(func.__code__, around, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_ARITHMETIC = {
    *("mul", "div", "true_divide", "divide", "multiply", "add", "sub", "pow", "rsub", "mul_", "div_", "add_", "sub_"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "__imul__", "__itruediv__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__pow__", "__rpow__", "softmax", "baddbmm", "clamp"),
}
_Use = Callable[..., None]
_USES: dict[str, _Use] = {}  # by the name of torch's function or method: which arguments are lengths of the result


def _use(*names: str) -> Callable[[_Use], _Use]:
    def register(use: _Use) -> _Use:
        _USES.update(dict.fromkeys(names, use))
        return use

    return register


@_use("view", "reshape", "expand", "view_copy", "new_zeros", "new_ones", "new_empty", "new_full", "broadcast_to")
def _resized(trail: Trail, out: Tensor, _: Tensor, *args: Any, **kwargs: Any) -> None:
    _created(trail, out, *args, **kwargs)


@_use("zeros", "ones", "empty", "full", "rand", "randn")
def _created(trail: Trail, out: Tensor, *args: Any, **kwargs: Any) -> None:
    given = args[:1] if args and isinstance(args[0], (tuple, list)) else args
    sizes = pytree.tree_leaves((given, kwargs.get("size"), kwargs.get("shape")))
    for dim, size in enumerate(sizes[: out.ndim]):
        trail.equate(size, out, dim)


@_use("unflatten")
def _unflattened(trail: Trail, out: Tensor, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
    for offset, size in enumerate(sizes):
        trail.equate(size, out, dim % x.ndim + offset)


@_use("split", "split_with_sizes", "tensor_split")
def _split(trail: Trail, out: Sequence[Tensor], x: Tensor, *args: Any, dim: int = 0, **kwargs: Any) -> None:
    sizes, *rest = (*args, *kwargs.values())
    dim = (rest[0] if rest else dim) % x.ndim
    for piece, size in zip(out, sizes if isinstance(sizes, (tuple, list)) else [sizes], strict=False):
        trail.equate(size, piece, dim)


@_use("narrow")
def _narrowed(trail: Trail, out: Tensor, x: Tensor, dim: int, start: int, length: int) -> None:
    trail.equate(length, out, dim % x.ndim)
    trail.equate(start, out, ("start", dim % x.ndim))


@_use("__getitem__")
def _indexed(trail: Trail, out: Tensor, x: Tensor, index: Any) -> None:
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(isinstance(e, slice) and any(isinstance(n, Size) for n in (e.start, e.stop)) for e in entries):
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
def _normalised(trail: Trail, out: Tensor, _: Tensor, normalized_shape: Sequence[int], *__: Any, **___: Any) -> None:
    for dim, size in zip(range(-len(normalized_shape), 0), normalized_shape, strict=True):
        trail.equate(size, out, out.ndim + dim)


@_use("group_norm")
def _grouped(trail: Trail, out: Tensor, _: Tensor, num_groups: int, *__: Any, **___: Any) -> None:
    trail.equate(num_groups, out, "groups")


@_use("conv1d", "conv2d", "conv3d")
def _convolved(trail: Trail, out: Tensor, *args: Any, **kwargs: Any) -> None:
    trail.equate(args[6] if len(args) > 6 else kwargs.get("groups"), out, "groups")


@_use("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(trail: Trail, out: Tensor, *args: Any, **kwargs: Any) -> None:
    trail.equate(args[6] if len(args) > 6 else kwargs.get("groups"), out, "groups")


@_use("scaled_dot_product_attention")
def _attended(trail: Trail, _: Tensor, query: Tensor, *args: Any, scale: float | None = None, **__: Any) -> None:
    if isinstance(scale, Scale):
        trail.scales.append(scale)
    elif scale is None:
        value = trail.recorder.value(query)
        trail.numbers.append({(((value, query.ndim - 1), 1),): Fraction(1)})


def attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every number a module keeps, as (path, what holds it, its key there, its value)."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for name, held in list(vars(layer).items()):
            yield from _numbers(f"{path}.{name}" if path else name, vars(layer), name, held, seen)


def _numbers(path: str, holder: Any, key: Any, held: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    sizes = type(held) in (tuple, list) and all(type(item) is int for item in held)
    if sizes or type(held) in (int, float):
        yield path, holder, key, held
    elif isinstance(held, types.SimpleNamespace) or (is_dataclass(type(held)) and hasattr(held, "__dict__")):
        # A configuration shared by many layers is one place: it keeps its first path.
        if id(held) not in seen:
            seen.add(id(held))
            for name, item in list(vars(held).items()):
                yield from _numbers(f"{path}.{name}", vars(held), name, item, seen)


def _follow_attributes(module: nn.Module, trail: Trail) -> None:
    for path, holder, key, held in list(attributes(module)):
        if isinstance(held, float):
            holder[key] = Scale(held)
            holder[key].path = path
        elif isinstance(held, int):
            if held > 1:
                holder[key] = trail.size(held, path)
        else:
            sizes = [trail.size(n, f"{path}.{at}") if n > 1 else n for at, n in enumerate(held)]
            holder[key] = type(held)(sizes)


@contextmanager
def _plain_backends() -> Iterator[None]:
    """Fused kernels off: they hide the products whose axes we look for."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True  # a member that does not run is an answer, not an incident
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        # In inference mode operations reach us whole (linear, matmul, layer_norm), whatever the strides.
        with sdpa_kernel(SDPBackend.MATH), torch.inference_mode(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        log.disabled = quiet
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)


def record(
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    known: Callable[[OpOverload], bool],
    *,
    follow: bool = True,
) -> Run:
    """Run a copy of a module on tensors without data and write down what it did."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(known)
    trail = Trail(recorder)

    def fake(tensor: Tensor) -> Tensor:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device("cpu"))

    def make(name: str, weight: Tensor) -> Tensor:
        made = fake(weight)
        recorder.name(made, Value(tuple(made.shape), weights.get(name, ()), name))
        return made

    module = blueprint(module, make)

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: recorder.layers.append(path)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        # Hooks that always run see no output when the layer raised.
        path = recorder.layers.pop()
        if output is None and sys.exc_info()[0] is not None and recorder.failed is None:
            recorder.failed = path

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path), prepend=True)
        layer.register_forward_hook(leave, always_call=True)
    if follow:
        _follow_attributes(module, trail)
    module.eval()
    given = pytree.tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    with ExitStack() as stack:
        stack.enter_context(_plain_backends())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        if follow:
            stack.enter_context(trail)
        try:
            output = module(*given)
        except Exception as error:
            raise RunError(recorder.calls, recorder.failed or "", _line_of(error)) from error
    output = pytree.tree_map(lambda leaf: recorder.value(leaf) if isinstance(leaf, Tensor) else leaf, output)
    _mark_live(recorder.calls, [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Value)])
    return Run(recorder.calls, output, trail)


def _mark_live(calls: list[Call], outputs: Sequence[Value]) -> None:
    """By storage and not by tensor, so that what is written through a view counts."""
    needed = {value.storage for value in outputs}
    for call in reversed(calls):
        if any(value.storage in needed for value in call.outs):
            call.live = True
            needed.update(value.storage for value in call.inputs)
