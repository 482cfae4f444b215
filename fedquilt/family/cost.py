"""What a member costs: counted on tensors without data, where nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.family.dual import adjustables
from fedquilt.family.record import SMALL, RunError, record


@dataclass(frozen=True)
class Cost:
    """Multiply-adds a sample, parameters, their bytes, and the peak memory of a training step in bytes."""

    macs: int
    params: int
    bytes: int
    memory: int


def measure(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    batch_size: int,
    slots: int,
    constants: Mapping[str, Tensor],
) -> Cost:
    """Count one member. Memory = weights + gradients + optimiser slots + activations saved for the backward pass.

    Args:
        module: The member; its weights may be on the meta device.
        example_inputs: What its forward takes, a batch of any size.
        batch_size: Samples of a training step.
        slots: Tensors that the optimiser keeps for each weight.
        constants: Buffers that every member has alike, by name. Its forward may read the small ones in Python.
    """
    readable = {name: value for name, value in constants.items() if value.numel() <= SMALL and not value.is_meta}
    count = max(2, batch_size)  # norms over the batch refuse to train on one sample alone
    inputs = tuple(_resized(value, count) for value in example_inputs)
    weights = {id(p): p for p in module.parameters()}.values()
    params = sum(p.numel() for p in weights)
    size = sum(p.numel() * p.element_size() for p in weights)

    def counted(train: bool) -> _Counter:
        counter = _Counter()
        record(module, {}, inputs, lambda _: True, counter, readable, train, grad=True)
        return counter

    try:
        counter = counted(train=True)
    except RunError:  # in training it reads data, and there is none here: evaluation has to do, as in tracing
        counter = counted(train=False)
    return Cost(
        macs=counter.operations // 2 // count,
        params=params,
        bytes=size,
        memory=size * (2 + slots) + counter.activations * batch_size // count,
    )


class _Counter(ExitStack):
    """A follower of a run that counts its operations, and the bytes that autograd saves of it."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = FlopCounterMode(display=False)
        self._weights: set[int] = set()
        self._saved: dict[int, int] = {}
        self._alive: list[Any] = []  # a freed storage's address could be met again

    @property
    def operations(self) -> int:
        return self._flops.get_total_flops()

    @property
    def activations(self) -> int:
        return sum(self._saved.values())

    def attach(self, module: nn.Module, value: Callable[[Tensor], Any]) -> None:
        self._weights = {p.untyped_storage()._cdata for p in module.parameters()}
        for layer in adjustables(module):
            layer.robustness = 0.0  # one of two norms, as in use

    def __enter__(self) -> _Counter:
        self.enter_context(self._flops)
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved))
        return self

    def _keep(self, tensor: Tensor) -> None:
        # No backward pass follows. Returning the tensor would make an operation's output hold itself.
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:  # a weight's view, such as its transpose, is no activation
            self._saved[storage._cdata] = storage.nbytes()
            self._alive.append(storage)


def _resized(value: Any, batch_size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty((batch_size, *value.shape[1:]), dtype=value.dtype, device="meta")
