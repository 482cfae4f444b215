"""One run of a module on tensors without data, as a list of its ATen calls."""

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedquilt.errors import TraceError
from fedquilt.family.build import blueprint
from fedquilt.family.dual import adjustables
from fedquilt.family.recurrent import SHORT, RecurrentCall
from fedquilt.family.staged import StageEnd
from fedquilt.family.tracing.atoms import Dim, plain
from fedquilt.family.variants import choose
from fedquilt.hardware.torch_internals import (
    FAKE_TENSOR_LOGGER,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    core_aten_decompositions,
    is_onednn_enabled,
    set_onednn_enabled,
    unset_fake_temporarily,
)
from fedquilt.terms import WHOLE

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parents[1])  # fedquilt/family
_LRU = type(cache(len))
SMALL = 2**20  # Elements up to which the values of a constant are computed while tracing


@dataclass(eq=False)
class Value:
    """A tensor of the run: its shape, and what is known about its dimensions."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...] = ()
    weight: str | None = None
    number: int = 0  # Position in the order of first appearance
    is_mask: bool = False  # True: its entries are booleans, so that it indexes all its dimensions
    # Dimensions of numbers in a call: "groups", or ("start", dim) of a slice
    marks: dict[object, Dim] = field(default_factory=dict)
    known: bool = True  # True: a rule has described its dimensions
    constant: bool = False  # True: it depends on no input, no weight and no random number
    read: bool = False  # True: an operation or the caller has read it

    def __post_init__(self) -> None:
        self.dims = self.dims or tuple(plain(n) for n in self.shape)


@dataclass(eq=False)
class Call:
    """One ATen operation of the run."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value, ...]
    layer: str  # Name of the innermost module that was running
    where: str  # File and line in the user's code
    constant: bool = False  # True: it depends on no input, no weight and no random number

    @property
    def inputs(self) -> list[Value]:
        """Return the tensors among the arguments."""
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)
        ]

    def __str__(self) -> str:
        return f"{self.op.overloadpacket.__name__} in {layer_name(self.layer)} ({self.where})"


def layer_name(path: str) -> str:
    """Return a module's name as it is written in messages."""
    return f"layer {path!r}" if path else "the module itself"


@dataclass(eq=False)
class Visit:
    """One execution of a module within a run."""

    path: str  # Name of the module
    start: int  # Number of operations before it
    inputs: Any  # (args, kwargs) with Values in place of tensors, and None for all else
    within: Visit | None  # Execution of the module around it. None: there is none.
    stop: int = 0  # Number of operations before its end
    output: Any = None  # Output with Values in place of tensors, and None for all else


@dataclass
class Run:
    """The record of one run of a module."""

    calls: list[Call]
    output: Any  # Output with Values in place of tensors
    reads: list[str]  # Lines in which Python read the value of a constant
    train: bool
    variant: str = WHOLE
    # Executions of modules, in the order in which they end
    visits: list[Visit] = field(default_factory=list)

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the weights that the run computes with, in the order of first use."""
        uses = (value.weight for call in self.calls for value in call.inputs)
        return tuple(
            dict.fromkeys([name for name in (*uses, self.output.weight) if name is not None])
        )


class Follower(AbstractContextManager[Any], Protocol):
    """A context that observes a run at the level of Python."""

    def attach(self, module: nn.Module, value: Callable[[Tensor], Value]) -> None:
        """Prepare for a run.

        Args:
            module: The module that will run.
            value: Returns the Value of a tensor of the run.
        """


class RunError(Exception):
    """A module failed during a run. The error has the calls before it, the layer and the line."""

    def __init__(self, calls: list[Call], layer: str, where: str) -> None:
        super().__init__(layer, where)
        self.calls, self.layer, self.where = calls, layer, where


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records every ATen call with a rule, and decomposes all other calls."""

    def __init__(self, known: Callable[[OpOverload], bool], train: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.train = train
        # Values of the tensors that depend on no input and no weight, by id
        self.constants: dict[int, Tensor] = {}
        self.reads: list[str] = []  # Lines in which Python read one of them
        self.calls: list[Call] = []
        self.layers: list[str] = [""]
        self.visits: list[Visit] = []  # Executions that have ended
        self.open_visits: list[Visit] = []
        self.failed: str | None = None  # Innermost layer that an exception passed
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # Tensors are kept, so that no id is used twice

    def value(self, tensor: Tensor) -> Value:
        """Return the Value of a tensor.

        A tensor that the run did not make is a constant, whose sizes never change.
        """
        if id(tensor) not in self._values:
            self.name(tensor, Value(tuple(tensor.shape)))
        return self._values[id(tensor)]

    def name(self, tensor: Tensor, value: Value) -> None:
        """Register the Value of a tensor."""
        value.number = len(self._values) + 1
        value.is_mask = tensor.dtype is torch.bool
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "prim":
            return op(*args, **kwargs)  # It asks for a device, for example, and returns no tensor.
        if not self.known(op):
            for take_apart in (_decompositions().get(op), getattr(op, "decompose", None)):
                if take_apart is not None:
                    with self:
                        out = take_apart(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
        constant = self._is_constant(op, args, kwargs)
        if constant and not any("Tensor" in str(returned.type) for returned in op._schema.returns):
            self.reads.append(f"{layer_name(self.layers[-1])} ({_where()})")
            return self._compute(op, args, kwargs)
        out = _run_op(op, args, kwargs)
        tensors = _tensors(out)
        if constant and all(tensor.numel() <= SMALL for tensor in tensors):
            values = _tensors(self._compute(op, args, kwargs))
            self.constants.update(
                {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
            )
        else:
            self._forget(tensors)
        if tensors:
            read_args = tuple(self.taken(args)), self.taken(kwargs)
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            fixed = not is_random and all(
                self.value(tensor).constant for tensor in _tensors((args, kwargs))
            )
            outs = []
            for tensor in tensors:
                # An in-place operation returns its argument, which keeps its dimensions.
                if id(tensor) not in self._values:
                    self.name(tensor, Value(tuple(tensor.shape), known=False))
                outs.append(self._values[id(tensor)])
                outs[-1].constant = fixed
            self.calls.append(Call(op, *read_args, tuple(outs), self.layers[-1], _where(), fixed))
        return out

    def _is_constant(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Return True if the values of all arguments are known, as for masks and counters."""
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        tensors = _tensors((args, kwargs))
        for tensor in tensors:
            if (
                not isinstance(tensor, FakeTensor)
                and not tensor.is_meta
                and id(tensor) not in self._values
            ):
                self.value(tensor).constant = True  # It is from a plain attribute or a cache.
                with _real_tensors():
                    self.constants[id(tensor)] = tensor.detach().clone()
        if torch.Tag.nondeterministic_seeded in op.tags and not (self.train and _draws_one(args)):
            return False
        return on_cpu and all(id(tensor) in self.constants for tensor in tensors)

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the values of constants."""

        def real(leaf: Any) -> Any:
            return self.constants[id(leaf)] if isinstance(leaf, Tensor) else leaf

        with _real_tensors():
            return op(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Drop constants into which data was written, and all that share their memory."""
        for tensor in written:
            if id(tensor) in self.constants:
                storage = self.constants[id(tensor)].untyped_storage()._cdata
                items = self.constants.items()
                self.constants = {
                    key: constant
                    for key, constant in items
                    if constant.untyped_storage()._cdata != storage
                }

    def close(self, mode: FakeTensorMode) -> list[Call]:
        """Remove tensors without data from places where a later call of the user's code could find
        them.

        Forward may keep what it computes in a cache that outlives the run: `functools.lru_cache`,
        or a dictionary of its file. Constants such as tables of positions get their values there,
        in place. Other tensors are removed.

        Args:
            mode: Context that made the tensors.

        Returns:
            The calls whose results are still held by something that is no cache.
        """
        torch.clear_autocast_cache()  # it holds weights that were cast to another precision
        # Tensors with weak references cannot be swapped.
        mode.fake_tensor_converter.tensor_memo.clear()
        candidates = [
            (weakref.ref(tensor), self._values[id(tensor)], self.constants.get(id(tensor)))
            for tensor in self._alive
            if isinstance(tensor, FakeTensor)
        ]
        self._alive.clear()
        alive = [
            (ref(), value, constant) for ref, value, constant in candidates if ref() is not None
        ]
        candidates.clear()
        results: list[tuple[weakref.ref[Tensor], Value]] = []
        while alive:
            tensor, value, constant = alive.pop()
            if constant is not None:
                with suppress(RuntimeError):  # a view or a graph still refers to it
                    torch.utils.swap_tensors(tensor, constant.detach())  # type: ignore[no-untyped-call]
            if isinstance(tensor, FakeTensor):
                results.append((weakref.ref(tensor), value))
            del tensor
        if results:
            gc.collect()  # a module in a reference cycle keeps its tensors until then
            leftovers = [ref() for ref, _ in results]
            _remove_from_caches([tensor for tensor in leftovers if tensor is not None])
            leftovers.clear()
        values = {value for ref, value in results if ref() is not None}
        return [call for call in self.calls if not values.isdisjoint(call.outs)]

    def _taken(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        value = self.value(leaf)
        value.read = True
        return value

    def taken(self, tree: Any) -> Any:
        """Return values in place of tensors, and note that they are read."""
        return pytree.tree_map(self._taken, tree)

    def seen(self, tree: Any) -> Any:
        """Return values in place of the run's tensors, and None for all else.

        The values do not count as read.
        """
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


def _run_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors without data, a recurrent layer on few of its time steps."""
    layer = RecurrentCall.of(op, args, kwargs)
    return layer.lengthened(layer.run(min(SHORT))) if layer else op(*args, **kwargs)


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Compute with data, and make tensors that autograd accepts after the run."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


def _remove_from_caches(items: list[Any]) -> None:
    """Remove objects from dictionaries, lists and `lru_cache`s, also if they are in tuples."""
    if not items:
        return
    removed = {id(item) for item in items}
    tuples = []
    for holder in gc.get_referrers(*items):
        if isinstance(holder, _LRU):
            holder.cache_clear()
        elif isinstance(holder, tuple):
            tuples.append(holder)
        elif isinstance(holder, list) and holder is not items:
            holder[:] = [entry for entry in holder if id(entry) not in removed]
        elif isinstance(holder, dict) and not _is_namespace(holder):
            for key in [key for key, entry in holder.items() if id(entry) in removed]:
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
    """Return True if a random operation draws a single number.

    In training, such a number decides whether a layer is skipped.
    """
    return bool(args) and isinstance(args[0], (list, tuple)) and all(n == 1 for n in args[0])


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def _where() -> str:
    """Return the innermost line of the user's code that is running, or else of torch's."""
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
    """Return the innermost line of the user's code that an exception passed."""
    lines = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    user_lines = [(file, line) for file, line in lines if not file.startswith((TORCH, HERE, "<"))]
    layer_lines = [(file, line) for file, line in lines if file.startswith(f"{TORCH}/nn/")]
    file, line = (user_lines or layer_lines or lines)[-1]
    return f"{file}:{line}"


@contextmanager
def _plain_backends(grad: bool) -> Iterator[None]:
    """Switch off fused kernels, which hide the products whose axes are traced."""
    had_fastpath, had_onednn = (
        torch.backends.mha.get_fastpath_enabled(),
        is_onednn_enabled(),
    )
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    # A member that does not run is a result, and nothing to log.
    was_disabled, log.disabled = (
        log.disabled,
        True,
    )
    torch.backends.mha.set_fastpath_enabled(False)
    set_onednn_enabled(False)
    try:
        # In inference mode torch does not decompose linear, matmul and layer_norm, whatever the
        # strides are.
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.inference_mode(not grad),
            torch.set_grad_enabled(grad),
        ):
            yield
    finally:
        log.disabled = was_disabled
        torch.backends.mha.set_fastpath_enabled(had_fastpath)
        set_onednn_enabled(had_onednn)


@contextmanager
def _same_dice() -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch identically for every traced run.

    Some modules draw the layers that they skip in training. The user's generators are restored
    afterwards.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def rehearse(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Run a copy of a module on the example itself, so that tables that forward caches are real.

    The copy shares the parameters. Modules without data are not run. If the copy fails, nothing is
    raised, because tracing reports what is wrong.
    """
    tensors = [*module.parameters(), *module.buffers(), *_tensors(inputs)]
    if any(tensor.is_meta for tensor in tensors):
        return

    def real(_: str, weight: Tensor) -> Tensor:
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(weight.detach().cpu(), weight.requires_grad)
        return weight.detach().cpu().clone()

    copied = pytree.tree_map(
        lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, inputs
    )
    with _same_dice(), torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        blueprint(module, real).eval()(*copied)


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
    """Run a copy of a module on tensors without data and record its calls.

    Args:
        module: The module, which does not change.
        weights: Dimensions of the weights, by name. All other weights have plain sizes.
        inputs: Example inputs, of which shapes and types are used.
        known: Returns True for operations that are recorded as they are. Others are decomposed.
        follower: Context that observes the run. None: there is none.
        constants: Buffers whose values Python may read, because all members have the same. None:
            there are none.
        train: True: the module runs in training mode.
        grad: True: autograd saves what a backward pass would need. Single random numbers are then
            not known, so that no layer is skipped by chance.
        variant: Variant that runs. None: the one that was chosen last.

    Raises:
        RunError: The module fails.
        TraceError: The module keeps a result where it outlives the run.
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
    outliving = recorder.close(mode)
    if outliving:
        raise TraceError(
            f"{type(module).__name__} keeps what it computes where it outlives the module: the "
            f"result of {outliving[0]}. "
            "A later call would find a tensor without data there. Keep it in an attribute of the "
            "module, or return it."
        )
    return run


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an exception and its causes, whose variables hold tensors of the run."""
    seen: list[BaseException] = []  # An error may be its own cause (`raise error from error`).
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
    """Run a copy of a module under a recorder. The other arguments are those of `record`."""

    def fake(tensor: Tensor) -> Tensor:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device("cpu"))

    def make(name: str, weight: Tensor) -> Tensor:
        tensor_made = fake(weight).requires_grad_(grad and weight.requires_grad)
        recorder.name(tensor_made, Value(tuple(tensor_made.shape), weights.get(name, ()), name))
        if name in constants:
            recorder.constants[id(tensor_made)] = constants[name].detach().cpu().clone()
        return tensor_made

    module = blueprint(module, make)
    if variant is not None:
        choose(module, variant)
    for layer in adjustables(module):
        layer.robustness = 0.5  # Both norms of a dual norm run, so that both are recorded.

    def enter(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: recorder.enter(path, (args, kwargs))

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path), prepend=True, with_kwargs=True)
        # Hooks that always run see no output when the layer raised.
        layer.register_forward_hook(lambda _, __, output: recorder.leave(output), always_call=True)
    module.train(train)
    fake_inputs = pytree.tree_map(
        lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs
    )
    with ExitStack() as stack:
        stack.enter_context(_plain_backends(grad))
        stack.enter_context(_same_dice())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        if follower is not None:
            follower.attach(module, recorder.value)
            stack.enter_context(follower)
        try:
            output = module(*fake_inputs)
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
