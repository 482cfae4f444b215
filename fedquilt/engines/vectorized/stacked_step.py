"""Steps of the reference engine `Sequential` for several clients at once.

Every tensor has the clients in its first dimension. A single client is computed without vmap,
because not every operation can be stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.engines.vectorized.stack import Stack
from fedquilt.engines.vectorized.stacking import (
    add_lead,
    batch_tensors,
    first_batch,
    first_client,
    put_clients,
    received_by,
    take_clients,
    take_received,
)
from fedquilt.family.member import Member
from fedquilt.hardware.device import to_device_async
from fedquilt.round.training.augmentation import augmented
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import (
    Batch,
    StepSettings,
    clipped,
    gradient,
    move,
    teach,
)

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


def train_step(engine: Vectorized, stack: Stack, step: int, clients: list[int]) -> None:
    """Train some clients of a stack on one batch each, without capture.

    The other clients are left unchanged.

    Args:
        engine: Engine that has the samples and the family.
        stack: Clients that train together.
        step: Step within the round.
        clients: Positions in the stack of clients whose batches have the same size.
    """
    learner, device = stack.learner, engine.device
    everyone = len(clients) == len(stack.jobs)
    positions = torch.tensor(clients, device=device)
    state, slots, received = stack.state, stack.slots, stack.received
    assert slots is not None
    if not everyone:
        state, received = take_clients(state, positions), take_received(received, positions)
        slots = {slot: take_clients(values, positions) for slot, values in slots.items()}
    # Positions of samples, (client, sample).
    rows = torch.stack([stack.batches[client][step] for client in clients]).to(device)
    keys = noise.fold_in(stack.keys[positions], step)
    stored = engine.data.samples(rows), engine.data.targets[rows]
    inputs, targets = augment(learner, *stored, keys)
    batch = Batch(inputs, targets, stack.class_masks[positions], keys, stack.shares[positions])
    if learner.teacher:
        tables = [engine.teacher_rows(learner, stack.extras[client]).table for client in clients]
        taught = torch.stack(
            [table[client_rows] for table, client_rows in zip(tables, rows, strict=True)]
        )
        batch = replace(batch, taught=taught)
    member = engine.world.family.member(stack.arch)
    if learner.taught:
        batch = replace(batch, taught=teach_clients(learner, member, state, batch))
    rate = _learning_rate(engine, stack, step, clients)
    for number, phase in enumerate(learner.phases_at(step)):
        grads, (loss, buffers) = gradients(learner, member, phase.objective, state, received, batch)
        grads = clip(learner, grads)
        masks = learner.masks(member, phase, device)
        count = stack.ages[0] + learner.moves(step) + number
        state, slots = move(learner, phase, state, slots, grads, masks, StepSettings(count, rate))
        state = {**state, **buffers}
    stack.losses[step, positions] = loss.to(stack.losses.dtype)  # Logits may have any type
    if everyone:
        stack.state, stack.slots = state, slots
    else:
        stack.state = put_clients(stack.state, state, positions)
        assert stack.slots is not None
        stack.slots = {
            slot: put_clients(stack.slots[slot], values, positions)
            for slot, values in slots.items()
        }


def _learning_rate(
    engine: Vectorized, stack: Stack, step: int, clients: Sequence[int]
) -> float | Tensor:
    """Return the learning rate of clients in one step.

    Clients with unequal numbers of steps are at different points of a schedule within the
    round.

    Returns:
        One rate if all clients have the same, or else a tensor (client,).
    """
    rates = [stack.learner.rate(step, len(stack.batches[client])) for client in clients]
    if rates == [rates[0]] * len(rates):
        return rates[0]
    return to_device_async(engine.device, torch.tensor(rates, dtype=engine.world.dtype))


def augment(
    learner: Learner, inputs: Tensor, targets: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Augment the batches of several clients.

    Args:
        learner: Local training, which names the augmentation.
        inputs: Samples, (client, sample, …).
        targets: Targets, (client, sample, …).
        keys: Random keys, (client,).

    Returns:
        Augmented inputs and targets of the same shapes.
    """
    local, task = learner.local, learner.task
    if len(inputs) == 1:
        changed, changed_targets = augmented(inputs[0], targets[0], local, keys[0], task)
        return changed.unsqueeze(0), changed_targets.unsqueeze(0)

    def augment_client(inputs: Tensor, targets: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return augmented(inputs, targets, local, key, task)

    changed, changed_targets = vmap(augment_client)(inputs, targets, keys)
    return changed, changed_targets


def teach_clients(learner: Learner, member: Member, state: State, batch: Batch) -> Tensor:
    """Return the outputs of each client's teaching net for its batch.

    Args:
        learner: Local training, which names the teaching net.
        member: Member that the clients train.
        state: Weights and buffers, with clients in the first dimension.
        batch: Batches of the clients, in the first dimension.
    """
    member = learner.teaching_net(member)
    if len(batch.inputs) == 1:
        return teach(member, learner.local, first_client(state), first_batch(batch)).unsqueeze(0)

    def teach_client(state: State, tensors: list[Tensor]) -> Tensor:
        return teach(member, learner.local, state, Batch(*tensors))

    return vmap(teach_client)(state, batch_tensors(replace(batch, taught=None)))


def gradients(
    learner: Learner,
    member: Member,
    objective: Objective,
    state: State,
    received: Received,
    batch: Batch,
) -> tuple[State, tuple[Tensor, State]]:
    """Return the gradients of an objective for several clients.

    Args:
        learner: Local training of the clients.
        member: Member that the clients train.
        objective: Function whose gradient is taken.
        state: Current weights and buffers, with clients in the first dimension.
        received: Weights and slots that the round started from, with clients in the first
            dimension.
        batch: Batches of the clients, in the first dimension.

    Returns:
        Gradients by weight name, and a pair of losses (client,) and new buffers.
    """
    if len(batch.inputs) == 1:  # Not every operation can be stacked, so that vmap is avoided
        alone, client_batch = (first_client(state), received_by(received, 0)), first_batch(batch)
        grads, (loss, buffers) = gradient(learner, member, objective, *alone, client_batch)
        return add_lead(grads), (loss.unsqueeze(0), add_lead(buffers))

    def client_gradients(
        state: State, received: Received, tensors: list[Tensor]
    ) -> tuple[State, tuple[Tensor, State]]:
        return gradient(learner, member, objective, state, received, Batch(*tensors))

    results: tuple[State, tuple[Tensor, State]] = vmap(client_gradients)(
        state, received, batch_tensors(batch)
    )
    return results


def clip(learner: Learner, grads: State) -> State:
    """Clip the gradients of each client to the norm that its optimizer asks for.

    Without clipping, `grads` itself is returned.

    Args:
        learner: Local training, with the optimizer.
        grads: Gradients by weight name, with clients in the first dimension.
    """
    max_norm = learner.local.optimizer.clip
    if not max_norm:
        return grads
    return vmap(lambda client_grads: clipped(client_grads, max_norm))(grads)
