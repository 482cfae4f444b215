"""Memory of a training step, counted block by block.

Autograd saves tensors of each block for the backward pass. The tensor between two neighbouring
blocks may be saved by both, and then counts once. Every distinct block is run once on tensors
without data, so that a configuration is counted without building its net.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedquilt.hardware.torch_internals import storage_id
from fedquilt.supernet.blocks import BlockSpec

MAX_CACHED_BLOCKS = 16_384  # Distinct blocks and batch sizes whose saved bytes are cached.


class SavedBytes(NamedTuple):
    """Bytes that the backward pass of one block reads, in float32."""

    inside: int  # Bytes of tensors that only this block saves.
    input: int  # Bytes of the input.
    output: int  # Bytes of the output.
    saves_input: bool  # True if the block saves its input.
    saves_output: bool  # True if the block saves its output.


def saved_bytes(blocks: Iterable[BlockSpec], batch_size: int) -> int:
    """Return the bytes that the backward pass of a net reads, besides its weights, in float32.

    A tensor between two blocks counts once. A batch of one sample counts as half of two.

    Args:
        blocks: Blocks in the order of the forward pass.
        batch_size: Samples per step.
    """
    count = max(2, batch_size)  # Batch norms cannot train on a single sample.
    total = 0
    is_saved = False  # True if the previous block saves its output, the input of this block.
    for block in blocks:
        saved = _saved(block, count)
        total += saved.inside
        total += saved.input if saved.saves_input and not is_saved else 0
        total += saved.output if saved.saves_output else 0
        is_saved = saved.saves_output
    return total * batch_size // count


@lru_cache(MAX_CACHED_BLOCKS)
def _saved(block: BlockSpec, count: int) -> SavedBytes:
    with torch.device("meta"):
        module = block.build().train()
        x = torch.empty(count, block.in_channels, block.size, block.size, requires_grad=True)
    weights = {_address(parameter) for parameter in module.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> None:
        # Holding the storage keeps its address from being used again.
        storages[_address(tensor)] = tensor.untyped_storage()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        output = module(x)
    ends = {_address(x), _address(output)}
    return SavedBytes(
        inside=sum(
            saved.nbytes() for address, saved in storages.items() if address not in weights | ends
        ),
        input=x.nbytes,
        output=output.nbytes,
        saves_input=_address(x) in storages,
        saves_output=_address(output) in storages,
    )


def _address(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())
