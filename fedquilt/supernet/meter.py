"""Costs of configurations: multiply-adds, parameters, training memory and inference time, without building a net."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.supernet.blocks import BlockSpec
from fedquilt.supernet.latency import LatencyTable
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.space import Config, Space
from fedquilt.units import amount, size

MAX_CACHED_BLOCKS = 65_536  # distinct blocks whose saved activations are kept
MAX_CACHED_CONFIGS = 131_072  # configurations whose multiply-adds and parameters are kept


@dataclass(frozen=True)
class Costs:
    """The costs of a member."""

    macs: int  # multiply-adds of one sample's forward pass
    params: int  # number of parameters
    memory: int  # bytes of a training step
    milliseconds: float | None = None  # predicted inference time of one sample; None: there is no table of blocks

    def __str__(self) -> str:
        text = f"{amount(self.macs)} multiply-adds, {amount(self.params)} parameters, {size(self.memory)} to train"
        return text if self.milliseconds is None else f"{text}, {self.milliseconds:.3g} ms"


class Meter:
    """Counts what configurations of a space cost.

    Multiply-adds and parameters are exact. Training memory is summed over blocks and equals that of the traced
    member. Inference time is the sum of measured blocks.
    """

    def __init__(self, space: Space, step: TrainingStep = TrainingStep(), table: LatencyTable | None = None) -> None:
        """Prepare counting.

        Args:
            space: Space of the configurations.
            step: Training step whose memory is limited. The default is a batch of 32 with momentum.
            table: Measured times of the space's blocks. None: inference time is not known.
        """
        self.space = space
        self.step = step
        self.table = table
        self.cost = lru_cache(MAX_CACHED_CONFIGS)(space.cost)  # multiply-adds and parameters of a configuration

    def costs(self, config: Config) -> Costs:
        """Return all costs of a configuration."""
        macs, params = self.cost(config)
        milliseconds = None if self.table is None else self.table.latency(self.space, config)
        return Costs(macs, params, self._memory(config), milliseconds)

    def value(self, config: Config, name: str) -> float:
        """Return one cost of a configuration by the name that `Limits` has for it.

        Raises:
            ConfigError: Milliseconds were asked for, and there is no table of blocks.
        """
        if name == "memory":
            return self._memory(config)
        if name == "milliseconds":
            if self.table is None:
                raise ConfigError(
                    "a limit in milliseconds was given without a table of measured blocks; "
                    f"`fedquilt probe --space {self.space.name} --out table.json` measures one."
                )
            return self.table.latency(self.space, config)
        return float(getattr(self.cost(config), name))

    def exceeded(self, config: Config, limits: Limits) -> list[str]:
        """Return the limits that a configuration exceeds, each with its value."""
        over = []
        cost = self.cost(config)
        for name, limit in limits.given.items():
            value = getattr(cost, name) if name in ("macs", "params") else self.value(config, name)
            if value > limit:
                over.append(f"{name} {limit:g}")
        return over

    def _memory(self, config: Config) -> int:
        blocks = tuple(self.space.blocks(config).values())
        saved = 0
        before: Saved | None = None
        for block in blocks:
            activations = saved_activations(block, self.step.batch_size)
            shared = before is not None and before.has_output and activations.has_input
            saved += activations.bytes - (activations.input_bytes if shared else 0)
            before = activations
        params = sum(block.cost.params for block in blocks)
        return self.step.memory(4 * params, [saved] * self.step.passes)


class Saved(NamedTuple):
    """What the backward pass of a block reads, for a batch in float32."""

    bytes: int  # all tensors, input and output included if they are among them
    input_bytes: int
    has_input: bool  # True if the block's input is among them
    has_output: bool  # True if the block's output is among them


_lock = threading.Lock()


def saved_activations(block: BlockSpec, batch_size: int) -> Saved:
    """Count what autograd saves in one pass of a block. The block runs once, on tensors without data.

    Args:
        block: Description of the block.
        batch_size: Samples of a training step.
    """
    with _lock:  # hooks on saved tensors belong to the thread, but building a block seeds a shared generator
        return _saved_activations(block, batch_size)


@lru_cache(MAX_CACHED_BLOCKS)
def _saved_activations(block: BlockSpec, batch_size: int) -> Saved:
    count = max(2, batch_size)  # norms over the batch refuse to train on one sample alone
    with torch.device("meta"):
        module = block.build().train()
        inputs = torch.empty(count, block.in_channels, block.size, block.size)
    weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # they are held, because the address of a freed one is used again

    def keep(tensor: Tensor) -> None:  # no backward pass follows, so that nothing has to be returned
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        output = module(inputs)
    total = sum(storage.nbytes() for storage in kept.values())
    return Saved(
        bytes=total * batch_size // count,
        input_bytes=inputs.untyped_storage().nbytes() * batch_size // count,
        has_input=inputs.untyped_storage()._cdata in kept,
        has_output=output.untyped_storage()._cdata in kept,
    )
