"""Costs of members, counted on tensors without data, so that nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.family.dual import adjustables
from fedquilt.family.recurrent import SHORT, RecurrentCall
from fedquilt.family.tracing.record import RunOptions, record
from fedquilt.family.tracing.recorder import MAX_CONSTANT_SIZE
from fedquilt.family.tracing.run import RunError
from fedquilt.hardware.precision import DTYPES, Precision
from fedquilt.hardware.torch_internals import OpOverload, TorchDispatchMode, storage_id, tree_leaves


@dataclass(frozen=True)
class Cost:
    """The cost of one member, or of several that a device holds together."""

    macs: int  # Multiply-adds of one sample's forward pass
    params: int  # Number of parameters
    bytes: int  # Bytes of the parameters in float32
    memory: int  # Bytes of a training step
    activations: int  # Bytes that one sample's forward pass needs besides parameters, in float32

    @property
    def inference(self) -> int:
        """Return the bytes that a device needs to run the member on one sample, in float32."""
        return self.bytes + self.activations

    def __add__(self, other: Cost) -> Cost:
        """Add another net's cost. Both are trained at once, but run one after the other."""
        return Cost(
            self.macs + other.macs,
            self.params + other.params,
            self.bytes + other.bytes,
            self.memory + other.memory,
            max(self.activations, other.activations),
        )


@dataclass(frozen=True)
class TrainingStep:
    """The properties of a client's local step that determine how much memory it needs.

    `Family.fit` takes a step to read a budget of memory as a budget of training, and `Family.cost`
    to count that memory. It is the memory of a device which updates its weights in place: weights,
    gradients, optimizer slots, and the activations that the backward pass reads. Workspaces of
    single operations are not counted.

    Args:
        batch_size: Number of samples of a step.
        slots: Tensors per weight besides its gradient: 0 for SGD, 1 for SGD with momentum, 2 for
            Adam. A proximal term needs one more, the weights that were received.
        precision: Precision of the run. With `bf16`, activations take half, and a bf16 copy of the
            weights is kept too.
        passes: Forward passes of the member per backward pass: 2 with attacked samples beside clean
            ones.
        nested: Shares of nested nets whose activations are kept as well. A share that runs twice is
            listed twice. Nets that are no narrower than the member are left out.
        most: Number of nets of `nested` that one step runs. The widest ones are counted. None: all.

    Example:
        >>> import fedquilt as fq
        >>> import torch
        >>> from fedquilt.methods.api import TrainingStep
        >>> family = fq.trace(torch.nn.Linear(4, 2), torch.zeros(1, 4))
        >>> family.cost(family.whole, TrainingStep(batch_size=8, slots=0)).memory
        208
        >>> family.cost(family.whole, TrainingStep(batch_size=8, slots=2)).memory  # Adam
        288
    """

    batch_size: int = 32
    slots: int = 1
    precision: Precision = "fp32"
    passes: int = 1
    nested: tuple[float, ...] = ()
    most: int | None = None

    def memory(self, weights: int, activations: Sequence[int]) -> int:
        """Return the bytes of the step, in its precision.

        Args:
            weights: Bytes of the parameters in float32.
            activations: Bytes that each forward pass of a batch saves, in float32. They are added.
        """
        saved = sum(activations)
        # With bf16, autocast saves copies of the weights together with the activations.
        if self.precision == "bf16":
            saved = (saved + weights) // 2
        return (weights * (2 + self.slots) + saved) * DTYPES[self.precision].itemsize // 4


@dataclass(frozen=True)
class Count:
    """Counts for one member and one batch size, in float32."""

    macs: int  # Multiply-adds of one sample's forward pass
    trained_macs: int  # Multiply-adds whose result depends on a weight that is trained
    saved: int  # Bytes of the activations that the backward pass of a batch reads

    def __add__(self, other: Count) -> Count:
        """Add the counts of another net that is trained at the same time."""
        return Count(
            self.macs + other.macs, self.trained_macs + other.trained_macs, self.saved + other.saved
        )


def measure(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    batch_size: int,
    constants: Mapping[str, Tensor],
) -> Count:
    """Count one member's operations, and the bytes that a training step on a batch saves.

    The module runs on tensors without data, in training mode. If it reads data there, it runs in
    evaluation mode instead.

    Args:
        module: The member in float32. Its weights may be on the meta device.
        example_inputs: Inputs of its forward, a batch of any size.
        batch_size: Samples of a training step.
        constants: Buffers that are the same in every member, by name. Its forward may read the
            small ones in Python.

    Returns:
        Operations of one sample, and bytes of the whole batch.
    """
    count = max(2, batch_size)  # Batch norms refuse to train on a single sample.
    inputs = tuple(_resized(value, count) for value in example_inputs)

    def counted(train: bool) -> _Counter:
        counter = _Counter()
        options = RunOptions(
            _every_operation,
            observer=counter,
            constants=_readable(constants),
            train=train,
            grad=True,
        )
        record(module, inputs, options)
        return counter

    try:
        counter = counted(train=True)
    except RunError:
        # In training the module reads data, which is missing here. As in tracing, evaluation is
        # used instead.
        counter = counted(train=False)
    return Count(
        macs=counter.operations // 2 // count,
        trained_macs=counter.trained_operations // 2 // count,
        saved=counter.activations * batch_size // count,
    )


def inference_activations(
    module: nn.Module, example_inputs: tuple[Any, ...], constants: Mapping[str, Tensor]
) -> int:
    """Return the bytes that one sample's forward pass needs at once, besides the parameters.

    A tensor counts from the operation that makes it to the last one that reads it. Buffers count
    throughout.

    Args:
        module: The member in float32. Its weights may be on the meta device.
        example_inputs: Inputs of its forward, a batch of any size.
        constants: Buffers that are the same in every member, by name.
    """

    def peak(train: bool, count: int) -> int:
        spans = _Spans()
        inputs = tuple(_resized(value, count) for value in example_inputs)
        options = RunOptions(
            _every_operation, observer=spans, constants=_readable(constants), train=train
        )
        record(module, inputs, options)
        return spans.peak

    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    try:
        return buffers + peak(train=False, count=1)
    except RunError:
        # The module refuses a single sample, or reads data in evaluation. This is an upper bound.
        return buffers + peak(train=True, count=2)


def _every_operation(op: OpOverload) -> bool:
    """Return True, so that no operation is decomposed."""
    return True


def _readable(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the constants that are small and have data, by name. Real numbers are in float32.

    A forward may read their values in Python.
    """
    small = {
        name: value
        for name, value in constants.items()
        if value.numel() <= MAX_CONSTANT_SIZE and not value.is_meta
    }
    return {name: value.to(_float32(value.dtype)) for name, value in small.items()}


class _Flops(FlopCounterMode):
    """torch's counter, which also counts the operations that a backward pass visits."""

    def __init__(self, display: bool) -> None:
        super().__init__(display=display)
        self.trained = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry and any(
            _moves(leaf) for leaf in tree_leaves((args, kwargs))
        ):
            self.trained += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


def _moves(leaf: Any) -> bool:
    """Return True if an argument is a tensor that requires a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


@dataclass(frozen=True)
class _Tally:
    """Operations and saved bytes of a part of a run."""

    operations: int = 0
    trained: int = 0
    saved: int = 0

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(
            self.operations + other.operations,
            self.trained + other.trained,
            self.saved + other.saved,
        )

    def __mul__(self, times: int) -> _Tally:
        return _Tally(self.operations * times, self.trained * times, self.saved * times)

    def __sub__(self, other: _Tally) -> _Tally:
        return self + other * -1


class _Shortener(TorchFunctionMode):
    """A context that counts recurrent layers on few of their time steps."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        layer = RecurrentCall.of(function, args, kwargs)
        return self._counter.count_layer(layer) if layer else function(*args, **(kwargs or {}))


class _Counter(ExitStack):
    """An observer of a run that counts its operations, and the bytes that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = _Flops(display=False)
        self._weights: set[int] = set()
        self._saved: dict[int, int] = {}
        # Storages are kept, because the address of a freed one may be used again.
        self._alive: list[Any] = []
        # Counts of time steps that were not run. They are negative for steps that ran too often.
        self._not_run = _Tally()

    @property
    def operations(self) -> int:
        return self._flops.get_total_flops() + self._not_run.operations

    @property
    def trained_operations(self) -> int:
        return self._flops.trained + self._not_run.trained

    @property
    def activations(self) -> int:
        return sum(self._saved.values()) + self._not_run.saved

    def count_layer(self, layer: RecurrentCall) -> tuple[Tensor, ...]:
        """Count a recurrent layer by two short runs, and return its results for all time steps.

        Operations and bytes grow linearly with the time steps, so that two runs determine them. The
        counts are added to this counter's. Results have the right shapes and no meaningful values.
        """
        short, long = SHORT
        first, _ = self._tally(layer, short)
        second, results = self._tally(layer, long)
        # Bytes that short runs save are not in `_saved`.
        counted = replace(first + second, saved=0)
        self._not_run += first + (second - first) * (layer.num_steps - short) - counted
        return layer.lengthened(results)

    def _tally(self, layer: RecurrentCall, num_steps: int) -> tuple[_Tally, tuple[Tensor, ...]]:
        """Run a layer on few time steps, and return its counts and its results.

        Arguments that it saves for the backward pass are not in these counts. They are added to the
        counter once, however often the layer runs.

        Args:
            layer: The recurrent layer.
            num_steps: Number of time steps to run.
        """
        operations, trained = self._flops.get_total_flops(), self._flops.trained
        earlier_saved, self._saved = self._saved, {}
        try:
            results = layer.run(num_steps)
        finally:
            layer_saved, self._saved = self._saved, earlier_saved
        argument_storages = layer.storages
        self._saved |= {
            address: argument_storages[address].nbytes()
            for address in layer_saved
            if address in argument_storages
        }
        saved = sum(
            size for address, size in layer_saved.items() if address not in argument_storages
        )
        return _Tally(
            self._flops.get_total_flops() - operations, self._flops.trained - trained, saved
        ), results

    def attach(self, module: nn.Module, value: Callable[[Tensor], Any]) -> None:
        """Remember which memory belongs to the weights of `module`, before it runs.

        Adjustable norms of the module are set to robustness 0. `value` is not used.
        """
        self._weights = {storage_id(p.untyped_storage()) for p in module.parameters()}
        for layer in adjustables(module):
            layer.robustness = 0.0  # Only one norm of a dual norm runs, as in deployment.

    def __enter__(self) -> _Counter:
        self.enter_context(self._flops)
        self.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved)
        )
        self.enter_context(_Shortener(self))
        return self

    def _keep(self, tensor: Tensor) -> None:
        # No backward pass follows. If the tensor was returned, an operation's output would keep
        # itself alive.
        storage = tensor.untyped_storage()
        # A view of a weight, such as its transpose, is no activation.
        if storage_id(storage) not in self._weights:
            self._saved[storage_id(storage)] = storage.nbytes()
            self._alive.append(storage)


class _Spans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An observer of a run that notes which operations make each tensor, and read it last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()
        # Bytes, first operation and last operation, by storage
        self._spans: dict[int, tuple[int, int, int]] = {}
        # Storages are kept, because the address of a freed one may be used again.
        self._alive: list[Any] = []
        self._now = 0

    def attach(self, module: nn.Module, value: Callable[[Tensor], Any]) -> None:
        """Remember which memory belongs to weights and buffers of `module`, before it runs.

        Adjustable norms of the module are set to robustness 0. `value` is not used.
        """
        state = (*module.parameters(), *module.buffers())
        self._own = {storage_id(tensor.untyped_storage()) for tensor in state}
        for layer in adjustables(module):
            layer.robustness = 0.0  # Only one norm of a dual norm runs, as in deployment.

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        self._now += 1
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and storage_id(leaf.untyped_storage()) not in self._own:
                storage = leaf.untyped_storage()
                size, first, _ = self._spans.get(
                    storage_id(storage), (storage.nbytes(), self._now, self._now)
                )
                self._spans[storage_id(storage)] = size, first, self._now
                self._alive.append(storage)
        return result

    @property
    def peak(self) -> int:
        """Return the largest number of bytes needed at once, besides weights and buffers."""
        change = [0] * (self._now + 2)
        for size, first, last in self._spans.values():
            change[first] += size
            change[last + 1] -= size
        return max(accumulate(change))


def _resized(value: Any, batch_size: int) -> Any:
    """Return an input for a batch of another size, on the meta device and with float32 for reals.

    Inputs that are no tensors are returned as they are.
    """
    if not isinstance(value, Tensor):
        return value
    return torch.empty((batch_size, *value.shape[1:]), dtype=_float32(value.dtype), device="meta")


def float32_size(value: Tensor) -> int:
    """Return the bytes of one entry of a tensor. A real number takes 4, as in float32."""
    return _float32(value.dtype).itemsize


def _float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a type of real numbers, and other types as they are.

    A run casts all real numbers to float32.
    """
    return torch.float32 if dtype.is_floating_point else dtype
