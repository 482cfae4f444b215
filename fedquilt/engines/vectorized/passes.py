"""Passes of stacked clients that are not training steps, and the state of their method."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.engines.vectorized.failures import together
from fedquilt.engines.vectorized.stack import Stack
from fedquilt.engines.vectorized.stacking import (
    add_lead,
    batch_tensors,
    first_batch,
    first_client,
    received_by,
    signature,
    take_clients,
    take_received,
)
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.torch_internals import (
    tree_map,
)
from fedquilt.round.client import NOTHING_LEFT
from fedquilt.round.client_checks import blamed, check_left
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.state import Left, Received, Trained
from fedquilt.round.training.step import Batch, run_pass

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


def run_passes(engine: Vectorized, stack: Stack, passes: Sequence[ClientPass]) -> None:
    """Run passes for all clients of a stack.

    Clients whose batches have the same size run together. Results are stored in `stack.passes`.

    Args:
        engine: Engine that has the samples.
        stack: Clients that train together.
        passes: Passes to run, in order.
    """
    learner = stack.learner
    for client_pass in passes:
        rows = [engine.pass_batches(job, learner, client_pass) for job in stack.jobs]
        keys = to_device_async(
            engine.device,
            torch.tensor([engine.pass_key(job, learner, client_pass) for job in stack.jobs]),
        )
        parts: list[list[State]] = [[] for _ in stack.jobs]
        for number in range(max(map(len, rows))):
            by_size: dict[int, list[int]] = {}
            for client, client_rows in enumerate(rows):
                if number < len(client_rows):
                    by_size.setdefault(len(client_rows[number]), []).append(client)
            for clients in by_size.values():
                batch_rows = torch.stack([rows[client][number] for client in clients])
                positions = torch.tensor(clients, device=engine.device)
                inputs, targets = engine.pass_samples(client_pass, batch_rows.to(engine.device))
                batch = Batch(
                    inputs,
                    targets,
                    stack.class_masks[positions],
                    noise.fold_in(keys[positions], number),
                    stack.shares[positions],
                )
                with together(stack, clients, f"running the pass {client_pass.name!r}"):
                    results = _run_batch(engine, stack, client_pass, positions, batch)
                for position, client in enumerate(clients):
                    parts[client].append({name: value[position] for name, value in results.items()})
        for client, client_rows in enumerate(rows):
            stack.passes[client][client_pass.name] = client_pass.merged(
                parts[client], [len(batch_rows) for batch_rows in client_rows]
            )


def _run_batch(
    engine: Vectorized, stack: Stack, client_pass: ClientPass, clients: Tensor, batch: Batch
) -> State:
    """Return the result of a pass on one batch of some clients of a stack.

    Args:
        engine: Engine that has the family.
        stack: Clients that train together.
        client_pass: Pass to run.
        clients: Positions of the clients in the stack, (client,).
        batch: Batches of these clients, in the first dimension.

    Returns:
        Results by name, with these clients in the first dimension.
    """
    learner, member = stack.learner, engine.world.family.member(stack.arch)
    state, received = take_clients(stack.state, clients), take_received(stack.received, clients)
    if len(clients) == 1:  # Not every operation can be stacked, so that vmap is avoided
        alone = first_client(state), received_by(received, 0), first_batch(batch)
        return add_lead(run_pass(learner, member, client_pass, *alone))

    def run(state: State, received: Received, tensors: list[Tensor]) -> State:
        return run_pass(learner, member, client_pass, state, received, Batch(*tensors))

    results: State = vmap(run)(state, received, batch_tensors(batch))
    return results


def finish_stack(engine: Vectorized, stack: Stack) -> None:
    """Let the method update its state after training, and store it in `stack.method_states`.

    All clients of a stack are updated together if their extras and passes have equal shapes.
    Otherwise they are updated one by one. A learner without state gives empty states.
    """
    learner = stack.learner
    if not learner.state:
        stack.method_states = [NOTHING_LEFT] * len(stack.jobs)
        return
    counts = [learner.moves(len(batches)) for batches in stack.batches]
    steps = to_device_async(engine.device, torch.tensor(counts, dtype=engine.world.dtype))
    mean_rates = [learner.mean_rate(len(batches)) for batches in stack.batches]
    rates = to_device_async(engine.device, torch.tensor(mean_rates, dtype=engine.world.dtype))
    weights = {name: stack.state[name] for name in stack.received.weights}
    extras_and_passes = list(zip(stack.extras, stack.passes, strict=True))
    everyone = list(range(len(stack.jobs)))

    def run(
        received: Received,
        weights: State,
        extras: State,
        passes: dict[str, State],
        steps: Tensor,
        lr: Tensor,
    ) -> Any:
        trained = Trained(received.weights, weights, received.slots, extras, steps, lr, passes)
        finished_state = learner.state.finish(trained)
        slots = [
            {slot: dict(values) for slot, values in slots_by_name.items()}
            for slots_by_name in (finished_state.kept, finished_state.sent)
        ]
        return *slots, dict(finished_state.kept_extras), dict(finished_state.sent_extras)

    num_signatures = len({signature(client_values) for client_values in extras_and_passes})
    if len(stack.jobs) > 1 and num_signatures == 1:
        extras, passes = tree_map(lambda *values: torch.stack(values), *extras_and_passes)
        with together(stack, everyone, "updating the method's state"):
            finished = vmap(run)(stack.received, weights, extras, passes, steps, rates)
        stack.method_states = [Left(*tree_map(itemgetter(client), finished)) for client in everyone]
    else:
        for client, (extras, passes) in enumerate(extras_and_passes):
            client_weights = {name: value[client] for name, value in weights.items()}
            received = received_by(stack.received, client)
            with blamed(stack.jobs[client], "updating the method's state"):
                finished = run(
                    received, client_weights, dict(extras), passes, steps[client], rates[client]
                )
                stack.method_states.append(Left(*finished))
    member = engine.world.family.member(stack.arch)
    for job, client_state in zip(stack.jobs, stack.method_states, strict=True):
        check_left(job, learner, member, client_state)
