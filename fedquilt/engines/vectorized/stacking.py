"""Tensors of several clients, with clients in the first dimension.

Functions stack the tensors of clients, take some clients out of a stack, and put them back.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.torch_internals import (
    foreach_copy_,
    tree_flatten,
    tree_map,
)
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch
from fedquilt.terms import Weights


def stacked(states: Sequence[Weights]) -> State:
    """Stack the states of clients along a new first dimension.

    Clients that received the same tensors share them as an expanded view until they are changed.
    """
    first, stack = states[0], {}
    for name, value in first.items():
        values = [state[name] for state in states]
        same = all(candidate is value for candidate in values)
        stack[name] = value.expand(len(values), *value.shape) if same else torch.stack(values)
    return stack


def first_client(state: Weights) -> State:
    """Return the state of the first client, without the client dimension."""
    return {name: value[0] for name, value in state.items()}


def add_lead(state: Weights) -> State:
    """Return one client's state as a stack of one client."""
    return {name: value.unsqueeze(0) for name, value in state.items()}


def some_clients(state: Weights, clients: Sequence[int]) -> State:
    """Return the states of some clients of a stack, still with clients in the first dimension.

    The result has views if it is one client, and copies if it is several.

    Args:
        state: State of all clients of the stack. It may be empty, because clients may send nothing.
        clients: Positions of the clients in the stack.
    """
    first = clients[0]
    if len(clients) == 1 or not state:
        return {name: value[first : first + 1] for name, value in state.items()}
    device = next(iter(state.values())).device
    return take_clients(state, to_device_async(device, torch.tensor(clients)))


def take_clients(state: Weights, clients: Tensor) -> State:
    """Return copies of the states of the clients at these positions in the stack, (client,)."""
    return {name: value.index_select(0, clients) for name, value in state.items()}


def put_clients(state: Weights, part: Weights, clients: Tensor) -> State:
    """Return a copy of a stack's state with new states for some of its clients.

    Args:
        state: State of all clients of the stack. It does not change.
        part: New states of some clients.
        clients: Positions of these clients in the stack, (client,).
    """
    return {name: value.index_copy(0, clients, part[name]) for name, value in state.items()}


def received_by(received: Received, client: int) -> Received:
    """Return the received values of one client of a stack."""
    values: Received = tree_map(lambda value: value[client], received)
    return values


def take_received(received: Received, clients: Tensor) -> Received:
    """Return the received values of the clients at these positions in the stack, (client,)."""
    values: Received = tree_map(lambda value: value.index_select(0, clients), received)
    return values


def first_batch(batch: Batch) -> Batch:
    """Return the batch of the first client, without the client dimension."""
    taught = None if batch.taught is None else batch.taught[0]
    return Batch(
        batch.inputs[0],
        batch.targets[0],
        batch.classes_present[0],
        batch.key[0],
        batch.share[0],
        taught,
    )


def batch_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that are not None."""
    values = (
        batch.inputs,
        batch.targets,
        batch.classes_present,
        batch.key,
        batch.share,
        batch.taught,
    )
    return [value for value in values if value is not None]


def signature(tensors: Any) -> Hashable:
    """Return the names, shapes and types of nested named tensors.

    Tensors with equal signatures can be stacked.
    """
    leaves, spec = tree_flatten(tensors)
    return str(spec), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def rewrite(static: State, new: Mapping[str, Tensor]) -> None:
    """Copy new values into static tensors in-place, for all names that `new` has.

    Other static tensors keep their values.
    """
    names = [name for name in new if new[name] is not static[name]]
    matching_names = [name for name in names if new[name].stride() == static[name].stride()]
    # One launch copies all tensors of equal strides, provided that every pair matches.
    if matching_names:
        foreach_copy_(
            [static[name] for name in matching_names], [new[name] for name in matching_names]
        )
    for name in names:
        if new[name].stride() != static[name].stride():
            static[name].copy_(new[name])


def put_back(state: State, old_state: State, is_changed: Tensor) -> None:
    """Restore the old values of all clients that must not change, in-place.

    Args:
        state: Current values, with clients in the first dimension.
        old_state: Old values of the same shapes.
        is_changed: True for clients that keep their current values, (client,).
    """
    for name, value in state.items():
        mask = is_changed.view([-1] + [1] * (value.dim() - 1))
        value.copy_(torch.where(mask, value, old_state[name]))


def laid_out_as(grad: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the strides of its weight, as a copy only if they differ.

    A fused optimizer step walks through memory, so that both need the same memory layout.
    """
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)
