"""What a member costs: counted on the meta device, where nothing is computed or allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """Multiply-adds a sample, parameters, their bytes, and the peak memory of a training step in bytes."""

    macs: int
    params: int
    bytes: int
    memory: int


def measure(module: nn.Module, example_inputs: tuple[Any, ...], batch_size: int, slots: int) -> Cost:
    """Count one member. Memory = weights + gradients + optimiser slots + activations saved for the backward pass."""
    module = module.to("meta")
    count = max(2, batch_size)  # norms over the batch refuse to train on one sample alone
    inputs = tuple(_resized(value, count) for value in example_inputs)
    weights = {id(p): p for p in module.parameters()}.values()
    params = sum(p.numel() for p in weights)
    size = sum(p.numel() * p.element_size() for p in weights)
    own = {p.untyped_storage()._cdata for p in weights}

    def counted(train: bool) -> tuple[int, int]:
        """The operations of a pass, and the bytes of what it saves."""
        saved: dict[int, int] = {}
        alive: list[Any] = []

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:  # a weight's view, such as its transpose, is no activation
                saved[storage._cdata] = storage.nbytes()
                alive.append(storage)  # a freed storage's address could be met again
            return tensor

        # What a forward makes without naming a device, positions or noise, must be where the weights are.
        with (
            torch.device("meta"),
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            module.train(train)(*inputs)
        return flops.get_total_flops(), sum(saved.values())

    try:
        operations, activations = counted(train=True)
    except Exception:  # in training it reads data, and there is none here: evaluation has to do, as in tracing
        operations, activations = counted(train=False)
    return Cost(
        macs=operations // 2 // count,
        params=params,
        bytes=size,
        memory=size * (2 + slots) + activations * batch_size // count,
    )


def _resized(value: Any, batch_size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty((batch_size, *value.shape[1:]), dtype=value.dtype, device="meta")
