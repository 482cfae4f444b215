"""Updates of stacked clients: checked, sent over the link, stored and added to the fold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedquilt.engines.vectorized.stack import Stack
from fedquilt.engines.vectorized.stacking import received_by, some_clients
from fedquilt.hardware.torch_internals import (
    foreach_norm,
)
from fedquilt.round.client import AfterRound, remember, send, update_of, upload_of
from fedquilt.round.client_checks import are_finite, check_state
from fedquilt.round.client_state import kept_state, memory_of, names_kept, steps_behind
from fedquilt.round.engine import Outcome
from fedquilt.round.fold import Fold
from fedquilt.round.training.optimizers import State
from fedquilt.terms import Submodel

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


def fold_stack(engine: Vectorized, stack: Stack, fold: Fold, outcome: Outcome) -> None:
    """Check, store and send what the clients of a stack have learnt, and add it to the fold.

    Updates of clients that send the same positions are summed before they are added.

    Args:
        engine: Engine that has the federation.
        stack: Clients that trained together.
        fold: Fold to which updates are added.
        outcome: Outcome to which costs and client states are added.
    """
    family, learner = engine.world.family, stack.learner
    member = family.member(stack.arch)
    outcome.stacks += 1
    clients_by_upload: dict[Submodel, list[int]] = {}
    for client, job in enumerate(stack.jobs):
        clients_by_upload.setdefault(
            learner.upload(member, job.submodel, engine.classes_present(job.client.id)), []
        ).append(client)
    sent_weights = {name: stack.state[name] for name in learner.sent(member)}
    for upload, clients in clients_by_upload.items():
        group_weights = (
            sent_weights if len(clients) == len(stack.jobs) else some_clients(sent_weights, clients)
        )
        # Clients of one stack that upload the same positions also trained the same positions.
        positions = stack.jobs[clients[0]].submodel.positions
        state = family.cutter.narrow(group_weights, positions, upload.positions, lead=1)
        _send(engine, stack, clients, upload, state, fold, outcome)


def _send(
    engine: Vectorized,
    stack: Stack,
    clients: list[int],
    upload: Submodel,
    state: State,
    fold: Fold,
    outcome: Outcome,
) -> None:
    """Send the updates of clients that upload the same positions, and store their state.

    Args:
        engine: Engine that has the federation.
        stack: Clients that trained together.
        clients: Positions in the stack of clients that upload the same positions.
        upload: Sub-model that each of them sends.
        state: Weights that they send, with these clients in the first dimension.
        fold: Fold to which updates are added.
        outcome: Outcome to which costs and client states are added.
    """
    updates, intact = [], True
    learner, member = stack.learner, engine.world.family.member(stack.arch)
    kept_names = names_kept(engine.federation, learner, member)
    kept_slots = (stack.slots or {}) if learner.keep_slots else {}
    for number, client in enumerate(clients):
        job = stack.jobs[client]
        weights = {name: value[number] for name, value in state.items()}
        payload = upload_of(
            engine.federation, job, learner, upload, weights, stack.method_states[client]
        )
        old_state = memory_of(stack.server, job)
        delivery = send(
            engine.federation, job, payload, stack.known_weights[client], old_state, engine.initial
        )
        intact = intact and delivery.intact
        macs = engine.macs(job.client.id, learner, member, stack.sizes[client])
        received, first = stack.received_bytes[client], stack.first_bytes[client]
        outcome.charge(job.client.id, received, delivery.bytes, macs, first)
        kept_weights = {name: stack.state[name][client] for name in kept_names}
        slots = {
            slot: {name: value[client].clone() for name, value in values.items()}
            for slot, values in kept_slots.items()
        }
        batches = len(stack.batches[client])
        steps = steps_behind(old_state, learner, batches)
        method_state = stack.method_states[client]
        if learner.state:
            old_slots = received_by(stack.received, client).slots
            method_state = kept_state(
                engine.federation, learner, old_slots, stack.extras[client], method_state
            )
        client_state = remember(
            engine.federation,
            job,
            learner,
            AfterRound(kept_weights, slots, steps, delivery.slots, method_state),
            old_state,
            engine.initial,
        )
        if client_state:
            outcome.memory[job.client.id, job.submodel.scope] = client_state
        updates.append(update_of(job, learner, delivery.sent, steps, batches))
    if intact:
        fold.add_stack(updates, [state])
    else:
        for update in updates:
            fold.add(update)


def check_stacks(engine: Vectorized, stacks: list[Stack], outcome: Outcome) -> None:
    """Refuse losses, weights and method states that are not finite.

    All stacks are checked at once. Only if a value is not finite, each client is checked, and the
    round fails. The mean loss of each client is added to the outcome.

    Args:
        engine: Engine that has the family.
        stacks: Stacks that trained at the same time.
        outcome: Outcome of the round.

    Raises:
        DivergenceError: A loss or a weight is not finite.
        TrainingError: A loss is not finite because of the client's samples, or a method's state is
            not.
    """
    members = [engine.world.family.member(stack.arch) for stack in stacks]
    moved = [stack.learner.moved(member) for stack, member in zip(stacks, members, strict=True)]
    learnt = [
        stack.state[name] for stack, names in zip(stacks, moved, strict=True) for name in names
    ]
    states = [state for stack in stacks for state in stack.method_states]
    state_tensors = [value for state in states for value in state.tensors]
    if state_tensors and not are_finite(state_tensors):
        for stack in stacks:
            for job, method_state in zip(stack.jobs, stack.method_states, strict=True):
                check_state(job, method_state.tensors)
    norms = foreach_norm([*learnt, *(stack.losses for stack in stacks)])
    if not bool(torch.stack(list(norms)).isfinite().all()):
        for stack, names in zip(stacks, moved, strict=True):
            for client, job in enumerate(stack.jobs):
                losses = stack.losses[: len(stack.batches[client]), client]
                engine.check_finite(job, losses, [stack.state[name][client] for name in names])
    for stack in stacks:
        losses = stack.losses.cpu()
        outcome.losses += [
            float(losses[: len(batches), position].mean())
            for position, batches in enumerate(stack.batches)
        ]
