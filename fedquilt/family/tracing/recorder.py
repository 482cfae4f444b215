"""The recorder, which notes every ATen call while a module runs on tensors without data."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.family.recurrent import SHORT, RecurrentCall
from fedquilt.family.staged import StageEnd
from fedquilt.family.tracing.run import AtenCall, Value, Visit, layer_name
from fedquilt.hardware.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    core_aten_decompositions,
    schema_of,
    storage_id,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)

TORCH_FOLDER = str(Path(torch.__file__).parent)
FAMILY_FOLDER = str(Path(__file__).parents[1])  # fedquilt/family
_LRU = type(cache(len))  # Type of functions with a cache
MAX_CONSTANT_SIZE = (
    2**20
)  # Elements up to which the values of a constant are computed while tracing


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records every ATen call with a rule, and decomposes all other calls.

    Values of constants are computed along the way, because Python may read them: a mask, or a
    counter of positions. Other tensors have no data.

    Args:
        is_recorded: Returns True for operations that are recorded as they are.
        train: True: single random numbers count as constants, because in training they decide
            whether a layer is skipped.
    """

    def __init__(self, is_recorded: Callable[[OpOverload], bool], train: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_recorded = is_recorded
        self.train = train
        # Values of the tensors that depend on no input and no weight, by id
        self.constants: dict[int, Tensor] = {}
        self.reads: list[str] = []  # Lines in which Python read one of them
        self.calls: list[AtenCall] = []
        self.layers: list[str] = [""]  # Names of the modules that are running, outermost first
        self.visits: list[Visit] = []  # Executions that have ended
        self.open_visits: list[Visit] = []  # Executions that have not ended, outermost first
        self.failed: str | None = None  # Innermost layer that an exception passed
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # Tensors are kept, so that no id is used twice

    def value(self, tensor: Tensor) -> Value:
        """Return the Value of a tensor.

        A tensor that the run has not seen yet is registered with plain sizes, which are never cut.
        """
        if id(tensor) not in self._values:
            self.name(tensor, Value(tuple(tensor.shape)))
        return self._values[id(tensor)]

    def name(self, tensor: Tensor, value: Value) -> None:
        """Register the Value of a tensor, and number it in the order of registration.

        The tensor is kept alive, so that its id stays unique.
        """
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
        if not self.is_recorded(op):
            for take_apart in (_decompositions().get(op), getattr(op, "decompose", None)):
                if take_apart is not None:
                    with self:
                        out = take_apart(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
        constant = self._is_constant(op, args, kwargs)
        results = schema_of(op).returns
        if constant and not any("Tensor" in str(returned.type) for returned in results):
            self.reads.append(f"{layer_name(self.layers[-1])} ({_where()})")
            return self._compute(op, args, kwargs)
        out = _run_op(op, args, kwargs)
        tensors = tensors_in(out)
        if constant and all(tensor.numel() <= MAX_CONSTANT_SIZE for tensor in tensors):
            values = tensors_in(self._compute(op, args, kwargs))
            self.constants.update(
                {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
            )
        else:
            self._forget(tensors)
        if tensors:
            read_args = tuple(self.read_values(args)), self.read_values(kwargs)
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            fixed = not is_random and all(
                self.value(tensor).constant for tensor in tensors_in((args, kwargs))
            )
            outs = []
            for tensor in tensors:
                # An in-place operation returns its argument, which keeps its dimensions.
                if id(tensor) not in self._values:
                    self.name(tensor, Value(tuple(tensor.shape), described=False))
                outs.append(self._values[id(tensor)])
                outs[-1].constant = fixed
            self.calls.append(
                AtenCall(op, *read_args, tuple(outs), self.layers[-1], _where(), fixed)
            )
        return out

    def _is_constant(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Return True if an operation can be computed, because all its arguments have known values.

        Tensors with data that the run has not seen yet are registered as constants. Random
        operations are not constant, except those that draw a single number in training.

        Args:
            op: ATen operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments. A device other than the CPU gives False.
        """
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        tensors = tensors_in((args, kwargs))
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
        """Run an operation on the known values of its arguments, and return the real result.

        All tensors among the arguments must be constants.
        """

        def real(leaf: Any) -> Any:
            return self.constants[id(leaf)] if isinstance(leaf, Tensor) else leaf

        with _real_tensors():
            return op(*tree_map(real, args), **tree_map(real, kwargs))

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Drop the values of constants into which data was written.

        Constants that share memory with them are dropped too.

        Args:
            written: Tensors that an operation returned. Those that are no constants have no effect.
        """
        for tensor in written:
            if id(tensor) in self.constants:
                storage = storage_id(self.constants[id(tensor)].untyped_storage())
                items = self.constants.items()
                self.constants = {
                    key: constant
                    for key, constant in items
                    if storage_id(constant.untyped_storage()) != storage
                }

    def close(self, mode: FakeTensorMode) -> list[AtenCall]:
        """Remove tensors without data from wherever a later call of the user's code finds them.

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
                    torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                        tensor, constant.detach()
                    )
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

    def _read_value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        value = self.value(leaf)
        value.read = True
        return value

    def read_values(self, tree: Any) -> Any:
        """Return a nested structure with Values for tensors, and note that they are read.

        All else in the structure is kept.
        """
        return tree_map(self._read_value, tree)

    def values_in(self, tree: Any) -> Any:
        """Return a nested structure with Values for the run's tensors, and None for all else.

        The values do not count as read.
        """
        return tree_map(
            lambda leaf: self.value(leaf) if isinstance(leaf, FakeTensor) else None, tree
        )

    def enter(self, path: str, inputs: Any) -> None:
        """Note that a module begins to run.

        Args:
            path: Name of the module.
            inputs: (args, kwargs) of its call.
        """
        self.layers.append(path)
        around = self.open_visits[-1] if self.open_visits else None
        self.open_visits.append(Visit(path, len(self.calls), self.values_in(inputs), around))

    def leave(self, output: Any) -> None:
        """Note that the innermost running module has ended.

        If an exception passes it, `failed` gets its name, unless a module inside it has failed
        before. The end of a stage (`StageEnd`) is no failure.

        Args:
            output: Output of the module. None: it raised, or returned None.
        """
        path = self.layers.pop()
        visit = self.open_visits.pop()
        visit.stop = len(self.calls)
        visit.output = self.values_in(output)
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
    """Run an operation on tensors without data, and return its output.

    A recurrent layer runs only a few of its time steps, and its output is lengthened to all of
    them.
    """
    layer = RecurrentCall.of(op, args, kwargs)
    return layer.lengthened(layer.run(min(SHORT))) if layer else op(*args, **kwargs)


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Compute with data within the block, and make tensors that autograd accepts after the run."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


def _remove_from_caches(items: list[Any]) -> None:
    """Remove objects from dictionaries and lists that hold them, also if they are in tuples.

    An `lru_cache` that holds one is cleared completely. Attributes of objects and globals of files
    are left unchanged.
    """
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


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _draws_one(args: Sequence[Any]) -> bool:
    """Return True if a random operation is given a size of one element, such as `rand([1])`.

    In training, such a number decides whether a layer is skipped. Operations whose first argument
    is not a size give False.

    Args:
        args: Positional arguments of the operation.
    """
    return bool(args) and isinstance(args[0], (list, tuple)) and all(n == 1 for n in args[0])


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def _where() -> str:
    """Return "file:line" of the innermost line of the user's code that is running.

    Without such a line it is the innermost line of `torch.nn`, or else "torch".
    """
    frame: FrameType | None = sys._getframe(2)
    inner = ""
    while frame is not None and frame.f_code is not call_module.__code__:
        file = frame.f_code.co_filename
        if file.startswith(TORCH_FOLDER):
            if not inner and "/nn/" in file:
                inner = f"{file}:{frame.f_lineno}"
        elif not file.startswith((FAMILY_FOLDER, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return inner or "torch"


def call_module(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Run a module on its inputs, and return the output.

    `_where` recognizes this function, and looks for lines of the user's code only inside it.
    """
    return module(*inputs)


def line_of(error: BaseException) -> str:
    """Return "file:line" of the innermost line of the user's code that an exception passed.

    Without such a line it is the innermost line of `torch.nn`, or else of any code.
    """
    lines = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    user_lines = [
        (file, line)
        for file, line in lines
        if not file.startswith((TORCH_FOLDER, FAMILY_FOLDER, "<"))
    ]
    layer_lines = [(file, line) for file, line in lines if file.startswith(f"{TORCH_FOLDER}/nn/")]
    file, line = (user_lines or layer_lines or lines)[-1]
    return f"{file}:{line}"
