"""What a member costs: counted on tensors without data, where nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.family.dual import adjustables
from fedquilt.family.record import SMALL, RunError, record
from fedquilt.precision import DTYPES, Precision


@dataclass(frozen=True)
class Cost:
    """The cost of one member, or of several that a device holds together."""

    macs: int  # multiply-adds of one sample's forward pass
    params: int  # number of parameters
    bytes: int  # bytes of the parameters in float32
    memory: int  # bytes of a training step
    activations: int  # bytes that one sample's forward pass needs besides them, in float32

    @property
    def inference(self) -> int:
        """Return the bytes that a device needs to run the member on one sample."""
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
    """The properties of a client's local step that decide how much memory it needs.

    The memory is that of a device which updates its weights in place: weights, gradients, optimizer
    slots, and the activations that the backward pass reads. Workspaces of single operations are not
    counted.

    Args:
        batch_size: Samples per step.
        slots: Tensors per weight besides its gradient: 0 for SGD, 1 for SGD with momentum, 2 for
            Adam. A proximal term needs one more, the weights that were received.
        precision: Precision of the run. With `bf16` activations take half, and a bf16 copy of the
            weights is kept too.
        passes: Forward passes of the member that one backward pass goes through: 2 with attacked
            samples beside clean ones.
        nested: Shares of nested nets whose activations are kept besides. A share that runs twice is
            listed twice. Nets that are no narrower than the member are left out.
        most: How many of `nested` one step runs; the widest count. None: all.
    """

    batch_size: int = 32
    slots: int = 1
    precision: Precision = "fp32"
    passes: int = 1
    nested: tuple[float, ...] = ()
    most: int | None = None

    def memory(self, weights: int, activations: Sequence[int]) -> int:
        """Return the bytes of the step.

        Args:
            weights: Bytes of the parameters in float32.
            activations: Bytes that each forward pass of a batch saves, in float32.
        """
        saved = sum(activations)
        if (
            self.precision == "bf16"
        ):  # autocast saves bf16 copies of the weights with the activations
            saved = (saved + weights) // 2
        return (weights * (2 + self.slots) + saved) * DTYPES[self.precision].itemsize // 4


@dataclass(frozen=True)
class Count:
    """What was counted of one member and one batch size, in float32."""

    macs: int
    trained_macs: int  # Multiply-adds whose result depends on a weight that is trained
    saved: int  # bytes of the activations that the backward pass of a batch reads

    def __add__(self, other: Count) -> Count:
        """Add what was counted of another net that is trained at the same time."""
        return Count(
            self.macs + other.macs, self.trained_macs + other.trained_macs, self.saved + other.saved
        )


def measure(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    batch_size: int,
    constants: Mapping[str, Tensor],
) -> Count:
    """Count one member's operations, and what a training step on a batch saves.

    Args:
        module: The member in float32; its weights may be on the meta device.
        example_inputs: What its forward takes, a batch of any size.
        batch_size: Samples of a training step.
        constants: Buffers that every member has alike, by name. Its forward may read the small ones in Python.
    """
    count = max(2, batch_size)  # norms over the batch refuse to train on one sample alone
    inputs = tuple(_resized(value, count) for value in example_inputs)

    def counted(train: bool) -> _Counter:
        counter = _Counter()
        record(module, {}, inputs, lambda _: True, counter, _readable(constants), train, grad=True)
        return counter

    try:
        counter = counted(train=True)
    except (
        RunError
    ):  # in training it reads data, and there is none here: evaluation has to do, as in tracing
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

    A tensor counts from the operation that makes it to the last that reads it. Buffers count
    throughout. The arguments are those of `measure`.
    """

    def peak(train: bool, count: int) -> int:
        spans = _Spans()
        inputs = tuple(_resized(value, count) for value in example_inputs)
        record(module, {}, inputs, lambda _: True, spans, _readable(constants), train)
        return spans.peak

    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    try:
        return buffers + peak(train=False, count=1)
    except (
        RunError
    ):  # it refuses one sample alone, or reads data in evaluation: this is an upper bound
        return buffers + peak(train=True, count=2)


def _readable(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    small = {
        name: value
        for name, value in constants.items()
        if value.numel() <= SMALL and not value.is_meta
    }
    return {name: value.to(_float32(value.dtype)) for name, value in small.items()}


class _Flops(FlopCounterMode):
    """torch's counter, which also counts the operations that a backward pass goes through."""

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
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _Counter(ExitStack):
    """A follower of a run that counts its operations, and the bytes that autograd saves of it."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = _Flops(display=False)
        self._weights: set[int] = set()
        self._saved: dict[int, int] = {}
        self._alive: list[
            Any
        ] = []  # storages, because the address of a freed one may be used again

    @property
    def operations(self) -> int:
        return self._flops.get_total_flops()

    @property
    def trained_operations(self) -> int:
        return self._flops.trained

    @property
    def activations(self) -> int:
        return sum(self._saved.values())

    def attach(self, module: nn.Module, value: Callable[[Tensor], Any]) -> None:
        self._weights = {p.untyped_storage()._cdata for p in module.parameters()}
        for layer in adjustables(module):
            layer.robustness = 0.0  # one of two norms, as in use

    def __enter__(self) -> _Counter:
        self.enter_context(self._flops)
        self.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved)
        )
        return self

    def _keep(self, tensor: Tensor) -> None:
        # No backward pass follows. Returning the tensor would make an operation's output hold itself.
        storage = tensor.untyped_storage()
        if (
            storage._cdata not in self._weights
        ):  # a weight's view, such as its transpose, is no activation
            self._saved[storage._cdata] = storage.nbytes()
            self._alive.append(storage)


class _Spans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A follower of a run that notes by which operations each tensor is made, and read last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()
        self._spans: dict[
            int, tuple[int, int, int]
        ] = {}  # storage → bytes, first operation, last operation
        self._alive: list[
            Any
        ] = []  # storages, because the address of a freed one may be used again
        self._now = 0

    def attach(self, module: nn.Module, value: Callable[[Tensor], Any]) -> None:
        self._own = {
            one.untyped_storage()._cdata for one in (*module.parameters(), *module.buffers())
        }
        for layer in adjustables(module):
            layer.robustness = 0.0  # one of two norms, as in use

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        self._now += 1
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._own:
                storage = leaf.untyped_storage()
                size, first, _ = self._spans.get(
                    storage._cdata, (storage.nbytes(), self._now, self._now)
                )
                self._spans[storage._cdata] = size, first, self._now
                self._alive.append(storage)
        return result

    @property
    def peak(self) -> int:
        """Return the bytes of the tensors that are needed at once, at most."""
        change = [0] * (self._now + 2)
        for size, first, last in self._spans.values():
            change[first] += size
            change[last + 1] -= size
        return max(accumulate(change))


def _resized(value: Any, batch_size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty((batch_size, *value.shape[1:]), dtype=_float32(value.dtype), device="meta")


def float32_size(value: Tensor) -> int:
    """Return the bytes of one entry if a tensor's real numbers are in float32."""
    return _float32(value.dtype).itemsize


def _float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a type of real numbers: a run casts them, whatever the module has."""
    return torch.float32 if dtype.is_floating_point else dtype
