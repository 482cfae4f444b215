"""One run of a module on tensors without data: its ATen calls, in order."""

from __future__ import annotations

import gc
import logging
import random
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.errors import TraceError
from fedquilt.family.atoms import Dim, plain
from fedquilt.family.build import blueprint
from fedquilt.family.dual import adjustables
from fedquilt.family.staged import StageEnd
from fedquilt.family.variants import choose
from fedquilt.terms import WHOLE

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
_LRU = type(cache(len))
SMALL = 2**20  # elements of a constant worth knowing


@dataclass(eq=False)
class Value:
    """A tensor of the run: its sizes, and what is known about its dimensions."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...] = ()
    weight: str | None = None
    number: int = 0  # by first appearance
    is_mask: bool = False  # true or false: as an index it looks along as many dimensions as it has
    marks: dict[object, Dim] = field(default_factory=dict)  # "groups", or ("start", dim) of a slice
    known: bool = True  # whether a rule described it
    constant: bool = False  # whether no input, no weight and no random number goes into it
    read: bool = False  # whether an operation or the caller took it

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
    constant: bool = False  # whether no input, no weight and no random number goes into it

    @property
    def inputs(self) -> list[Value]:
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)
        ]

    def __str__(self) -> str:
        return f"{self.op.overloadpacket.__name__} in {layer_name(self.layer)} ({self.where})"


def layer_name(path: str) -> str:
    return f"layer {path!r}" if path else "the module itself"


@dataclass(eq=False)
class Visit:
    """One execution of a module within a run."""

    path: str  # name of the module
    start: int  # number of operations before it
    inputs: Any  # (args, kwargs) with Values in place of tensors, and None for all else
    within: Visit | None  # execution of the module around it; None: there is none
    stop: int = 0  # number of operations before its end
    output: Any = None  # Values in place of tensors, and None for all else


@dataclass
class Run:
    """What one run of a module left behind."""

    calls: list[Call]
    output: Any  # Values in place of tensors
    reads: list[str]  # where Python read the value of a constant
    train: bool
    variant: str = WHOLE
    visits: list[Visit] = field(
        default_factory=list
    )  # executions of modules, in the order of their ends

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the weights that it computes with, by first use."""
        uses = (value.weight for call in self.calls for value in call.inputs)
        return tuple(
            dict.fromkeys([name for name in (*uses, self.output.weight) if name is not None])
        )


class Follower(AbstractContextManager[Any], Protocol):
    """Someone who watches a run from Python's side."""

    def attach(self, module: nn.Module, value: Callable[[Tensor], Value]) -> None:
        """Meet the module that will run, and the way to ask what a tensor stands for."""


class RunError(Exception):
    """A module did not run; says how far it came, and where it stopped."""

    def __init__(self, calls: list[Call], layer: str, where: str) -> None:
        super().__init__(layer, where)
        self.calls, self.layer, self.where = calls, layer, where


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every ATen call that has a rule, and takes the others apart."""

    def __init__(self, known: Callable[[OpOverload], bool], train: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.train = train
        self.constants: dict[
            int, Tensor
        ] = {}  # the values of tensors that no input and no weight goes into
        self.reads: list[str] = []  # where Python read one
        self.calls: list[Call] = []
        self.layers: list[str] = [""]
        self.visits: list[Visit] = []  # those that ended
        self.open_visits: list[Visit] = []
        self.failed: str | None = None  # the innermost layer an exception came through
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # ids are names only while the tensors live

    def value(self, tensor: Tensor) -> Value:
        """The value a tensor stands for; one the run did not make is a constant, whose sizes never change."""
        if id(tensor) not in self._values:
            self.name(tensor, Value(tuple(tensor.shape)))
        return self._values[id(tensor)]

    def name(self, tensor: Tensor, value: Value) -> None:
        value.number = len(self._values) + 1
        value.is_mask = tensor.dtype is torch.bool
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
        constant = self._is_constant(op, args, kwargs)
        if constant and not any("Tensor" in str(made.type) for made in op._schema.returns):
            self.reads.append(f"{layer_name(self.layers[-1])} ({_where()})")
            return self._compute(op, args, kwargs)
        out = op(*args, **kwargs)
        tensors = _tensors(out)
        if constant and all(tensor.numel() <= SMALL for tensor in tensors):
            values = _tensors(self._compute(op, args, kwargs))
            self.constants.update(
                {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
            )
        else:
            self._forget(tensors)
        if tensors:
            given = tuple(self.taken(args)), self.taken(kwargs)
            random_ = torch.Tag.nondeterministic_seeded in op.tags
            fixed = not random_ and all(
                self.value(tensor).constant for tensor in _tensors((args, kwargs))
            )
            outs = []
            for tensor in tensors:
                # An in-place operation returns its argument: the same tensor, still the same dimensions.
                if id(tensor) not in self._values:
                    self.name(tensor, Value(tuple(tensor.shape), known=False))
                outs.append(self._values[id(tensor)])
                outs[-1].constant = fixed
            self.calls.append(Call(op, *given, tuple(outs), self.layers[-1], _where(), fixed))
        return out

    def _is_constant(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether all that an operation works on is known: masks and counters, not data."""
        here = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        tensors = _tensors((args, kwargs))
        for tensor in tensors:
            if (
                not isinstance(tensor, FakeTensor)
                and not tensor.is_meta
                and id(tensor) not in self._values
            ):
                self.value(tensor).constant = True  # kept in a plain attribute or a cache
                with _real_tensors():
                    self.constants[id(tensor)] = tensor.detach().clone()
        if torch.Tag.nondeterministic_seeded in op.tags and not (self.train and _draws_one(args)):
            return False
        return here and all(id(tensor) in self.constants for tensor in tensors)

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            return self.constants[id(leaf)] if isinstance(leaf, Tensor) else leaf

        with _real_tensors():
            return op(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))

    def _forget(self, written: Sequence[Tensor]) -> None:
        """What data was written into is no constant any more, nor is what shares its memory."""
        for tensor in written:
            if id(tensor) in self.constants:
                lost = self.constants[id(tensor)].untyped_storage()._cdata
                kept = self.constants.items()
                self.constants = {key: t for key, t in kept if t.untyped_storage()._cdata != lost}

    def close(self, mode: FakeTensorMode) -> list[Call]:
        """Leave no tensor without data where a later call of the user's code could find it.

        Forward may keep what it computes in a cache that outlives the run: `functools.lru_cache`, a
        dictionary of its file. Constants such as tables of positions get their values there, in place.
        Other tensors are removed.

        Returns:
            The calls whose results are still held, by something that is no cache.
        """
        torch.clear_autocast_cache()  # it holds weights that were cast to another precision
        # Tensors with weak references cannot be swapped.
        mode.fake_tensor_converter.tensor_memo.clear()
        made = [
            (weakref.ref(tensor), self._values[id(tensor)], self.constants.get(id(tensor)))
            for tensor in self._alive
            if isinstance(tensor, FakeTensor)
        ]
        self._alive.clear()
        held = [(ref(), value, constant) for ref, value, constant in made if ref() is not None]
        made.clear()
        results: list[tuple[weakref.ref[Tensor], Value]] = []
        while held:
            tensor, value, constant = held.pop()
            if constant is not None:
                with suppress(RuntimeError):  # a view or a graph still refers to it
                    torch.utils.swap_tensors(tensor, constant.detach())  # type: ignore[no-untyped-call]
            if isinstance(tensor, FakeTensor):
                results.append((weakref.ref(tensor), value))
            del tensor
        if results:
            gc.collect()  # a module in a reference cycle keeps its tensors until then
            left = [ref() for ref, _ in results]
            _remove_from_caches([tensor for tensor in left if tensor is not None])
            left.clear()
        values = {value for ref, value in results if ref() is not None}
        return [call for call in self.calls if not values.isdisjoint(call.outs)]

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        value = self.value(leaf)
        value.read = True
        return value

    def taken(self, tree: Any) -> Any:
        """What an operation or the caller takes: values in place of tensors."""
        return pytree.tree_map(self._taken, tree)

    def seen(self, tree: Any) -> Any:
        """Return values in place of the run's tensors, which do not count as read, and None for all else."""
        return pytree.tree_map(
            lambda leaf: self.value(leaf) if isinstance(leaf, FakeTensor) else None, tree
        )

    def enter(self, path: str, inputs: Any) -> None:
        """Note that a module begins to run."""
        self.layers.append(path)
        around = self.open_visits[-1] if self.open_visits else None
        self.open_visits.append(Visit(path, len(self.calls), self.seen(inputs), around))

    def leave(self, output: Any) -> None:
        """Note that a module has ended. Its output is None if it raised."""
        path = self.layers.pop()
        visit = self.open_visits.pop()
        visit.stop = len(self.calls)
        visit.output = self.seen(output)
        self.visits.append(visit)
        error = sys.exc_info()[1]
        if (
            output is None
            and error is not None
            and not isinstance(error, StageEnd)
            and self.failed is None
        ):
            self.failed = path


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Compute with data, and make tensors that autograd accepts after the run."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


def _remove_from_caches(items: list[Any]) -> None:
    """Remove objects from the dictionaries, lists and `lru_cache`s that hold them, also in tuples."""
    if not items:
        return
    wanted = {id(item) for item in items}
    tuples = []
    for holder in gc.get_referrers(*items):
        if isinstance(holder, _LRU):
            holder.cache_clear()
        elif isinstance(holder, tuple):
            tuples.append(holder)
        elif isinstance(holder, list) and holder is not items:
            holder[:] = [held for held in holder if id(held) not in wanted]
        elif isinstance(holder, dict) and not _is_namespace(holder):
            for key in [key for key, held in holder.items() if id(held) in wanted]:
                del holder[key]
    _remove_from_caches(tuples)


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Return True if a dictionary holds the globals of a file or the attributes of an object."""
    owners = gc.get_referrers(holder)
    return any(
        isinstance(owner, type) or getattr(owner, "__dict__", None) is holder for owner in owners
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _draws_one(args: Sequence[Any]) -> bool:
    """Whether a random operation is asked for a single number: in training, the lot that skips a layer."""
    return bool(args) and isinstance(args[0], (list, tuple)) and all(n == 1 for n in args[0])


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def _where() -> str:
    """The innermost line of the user's own code, else of torch's."""
    frame: FrameType | None = sys._getframe(2)
    inner = ""
    while frame is not None and frame.f_code is not _run.__code__:
        file = frame.f_code.co_filename
        if file.startswith(TORCH):
            if not inner and "/nn/" in file:
                inner = f"{file}:{frame.f_lineno}"
        elif not file.startswith((HERE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return inner or "torch"


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception came through."""
    lines = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [(file, line) for file, line in lines if not file.startswith((TORCH, HERE, "<"))]
    layers = [(file, line) for file, line in lines if file.startswith(f"{TORCH}/nn/")]
    file, line = (own or layers or lines)[-1]
    return f"{file}:{line}"


@contextmanager
def _plain_backends(grad: bool) -> Iterator[None]:
    """Fused kernels off: they hide the products whose axes we look for."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = (
        log.disabled,
        True,
    )  # a member that does not run is an answer, not an incident
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        # In inference mode operations reach us whole (linear, matmul, layer_norm), whatever the strides.
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.inference_mode(not grad),
            torch.set_grad_enabled(grad),
        ):
            yield
    finally:
        log.disabled = quiet
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)


@contextmanager
def _same_dice() -> Iterator[None]:
    """Python that draws lots (which layers to skip in training) draws the same in every run, and the user's stay."""
    lots, lots_of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(lots)
            np.random.set_state(lots_of_numpy)


def rehearse(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Run a copy of a module on the example itself, so that tables that forward caches are real.

    The copy shares the parameters. Modules without data, and those that do not run, are left to
    tracing, which says what is wrong with them.
    """
    tensors = [*module.parameters(), *module.buffers(), *_tensors(inputs)]
    if any(tensor.is_meta for tensor in tensors):
        return

    def real(_: str, weight: Tensor) -> Tensor:
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(weight.detach().cpu(), weight.requires_grad)
        return weight.detach().cpu().clone()

    given = pytree.tree_map(
        lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, inputs
    )
    with _same_dice(), torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        blueprint(module, real).eval()(*given)


def record(
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    known: Callable[[OpOverload], bool],
    follower: Follower | None = None,
    constants: Mapping[str, Tensor] | None = None,
    train: bool = False,
    grad: bool = False,
    variant: str | None = None,
) -> Run:
    """Run a copy of a module on tensors without data and write down what it did.

    `variant` is the one that runs, of a module that has several. None: the one that was chosen last.

    `constants` are buffers whose values Python may read, since members have the same. With `grad`, autograd saves what
    a backward pass would need. A single random number is not known then, so that no layer is skipped by a draw.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(known, train and not grad)
    try:
        run = _run(
            recorder, mode, module, weights, inputs, follower, constants or {}, train, grad, variant
        )
    except RunError as failure:
        _forget_frames(failure)
        recorder.close(mode)
        raise
    held = recorder.close(mode)
    if held:
        raise TraceError(
            f"{type(module).__name__} keeps what it computes where it outlives the module: the result of {held[0]}. "
            "A later call would find a tensor without data there. Keep it in an attribute of the "
            "module, or return it."
        )
    return run


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an exception and its causes, whose variables hold tensors of the run."""
    seen: list[BaseException] = []  # `raise error from error` is its own cause
    while error is not None and error not in seen:
        seen.append(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run(
    recorder: Recorder,
    mode: FakeTensorMode,
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    follower: Follower | None,
    constants: Mapping[str, Tensor],
    train: bool,
    grad: bool,
    variant: str | None,
) -> Run:
    def fake(tensor: Tensor) -> Tensor:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device("cpu"))

    def make(name: str, weight: Tensor) -> Tensor:
        made = fake(weight).requires_grad_(grad and weight.requires_grad)
        recorder.name(made, Value(tuple(made.shape), weights.get(name, ()), name))
        if name in constants:
            recorder.constants[id(made)] = constants[name].detach().cpu().clone()
        return made

    module = blueprint(module, make)
    if variant is not None:
        choose(module, variant)
    for layer in adjustables(module):
        layer.robustness = 0.5  # both of two norms run: neither may be missed

    def enter(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: recorder.enter(path, (args, kwargs))

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path), prepend=True, with_kwargs=True)
        # Hooks that always run see no output when the layer raised.
        layer.register_forward_hook(lambda _, __, output: recorder.leave(output), always_call=True)
    module.train(train)
    given = pytree.tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    with ExitStack() as stack:
        stack.enter_context(_plain_backends(grad))
        stack.enter_context(_same_dice())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        if follower is not None:
            follower.attach(module, recorder.value)
            stack.enter_context(follower)
        try:
            output = module(*given)
        except Exception as error:
            raise RunError(recorder.calls, recorder.failed or "", _line_of(error)) from error
    return Run(
        recorder.calls,
        recorder.taken(output),
        recorder.reads,
        train,
        variant or WHOLE,
        recorder.visits,
    )
