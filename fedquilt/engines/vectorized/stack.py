"""Stacks, which are clients that train together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.engines.vectorized.stacking import stacked
from fedquilt.family.member import Member
from fedquilt.hardware.device import to_device_async
from fedquilt.round.client import Start, receive
from fedquilt.round.client_state import memory_of
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimizerState, State
from fedquilt.round.training.state import Left, Received
from fedquilt.terms import Arch, Extras, Job, Server, Weights

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


@dataclass
class Stack:
    """Clients that train together. Every tensor has the clients in its first dimension."""

    server: Server  # Server's state that the clients started from
    received_bytes: list[int]  # Bytes that each client downloaded
    first_bytes: list[int]  # Part of `received_bytes` that each client downloads only once
    learner: Learner  # Local training of all clients
    jobs: list[Job]  # Client, round and sub-model of each client
    state: State  # Current weights and buffers
    slots: OptimizerState | None  # Optimizer slots. None: no client has any
    received: Received  # Weights and state slots that the round started from
    extras: list[Extras]  # State of the method that is not cut, of each client
    # Weights that the server knows each client to have. Links that code changes need them.
    known_weights: list[Weights]
    class_masks: Tensor  # (client, class) True where a client has samples of a class
    keys: Tensor  # (client,) Random keys
    shares: Tensor  # (client,) Shares of the clients' nets, by which the scaler divides
    batches: list[list[Tensor]]  # Positions of samples in the pool, by client and step
    # Optimizer steps behind each client's slots. They are equal if the optimizer depends on them.
    ages: list[int]
    losses: Tensor  # (step, client) Training losses
    passes: list[dict[str, State]]  # Results of each client's passes that are not training steps
    # State of the method that each client keeps or sends after its training.
    method_states: list[Left] = field(default_factory=list)

    @property
    def arch(self) -> Arch:
        """Return the architecture of the member that all clients of the stack train."""
        return self.jobs[0].submodel.arch

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Return the number of samples in every batch, by client and step."""
        return [[len(batch) for batch in client_batches] for client_batches in self.batches]

    def sizes_at(self, step: int) -> list[int]:
        """Return the batch sizes in this step, in the order of the clients.

        Clients without a batch in this step are left out.
        """
        return [client_sizes[step] for client_sizes in self.sizes if step < len(client_sizes)]

    def groups(self, step: int) -> list[list[int]]:
        """Return the positions in the stack of clients that have a batch, grouped by its size.

        Args:
            step: Step within the round. Clients that have ended before it are left out.
        """
        by_size: dict[int, list[int]] = {}
        for client, client_sizes in enumerate(self.sizes):
            if step < len(client_sizes):
                by_size.setdefault(client_sizes[step], []).append(client)
        return list(by_size.values())


def build_stack(
    engine: Vectorized,
    server: Server,
    learner: Learner,
    jobs: list[Job],
    shares: Mapping[Job, float],
) -> Stack:
    """Return the clients of some jobs as a stack that is ready to train.

    Args:
        engine: Engine that has the samples and the federation.
        server: State that the clients start from.
        learner: Local training of all clients.
        jobs: Client, round and sub-model of each client. All have the same architecture.
        shares: Shares of the clients' nets, by job.
    """
    device, dtype = engine.device, engine.world.dtype
    member = engine.world.family.member(jobs[0].submodel)
    starts = [
        receive(
            engine.federation,
            job,
            learner,
            engine.payload(server, job, learner),
            memory_of(server, job),
            engine.initial,
        )
        for job in jobs
    ]
    state = stacked([start.state for start in starts])
    batches = [
        engine.batches(job, learner, start.extras) for job, start in zip(jobs, starts, strict=True)
    ]
    class_masks = [engine.classes_present(job.client.id) for job in jobs]
    return Stack(
        server=server,
        received_bytes=[start.bytes for start in starts],
        first_bytes=[start.first_bytes for start in starts],
        learner=learner,
        jobs=jobs,
        state=state,
        slots=_slots(starts, learner, member),
        received=Received(state, _state_slots(starts, learner)),
        extras=[start.extras for start in starts],
        known_weights=[start.known for start in starts],
        class_masks=to_device_async(device, torch.stack(class_masks)),
        keys=to_device_async(device, torch.tensor([engine.keys(job)[1] for job in jobs])),
        shares=to_device_async(device, torch.tensor([shares[job] for job in jobs], dtype=dtype)),
        batches=batches,
        ages=[start.steps for start in starts],
        losses=torch.zeros(max(map(len, batches)), len(jobs), dtype=dtype, device=device),
        passes=[{} for _ in jobs],
    )


def _state_slots(starts: Sequence[Start], learner: Learner) -> dict[str, State]:
    """Return the state slots of the method by slot and weight name, stacked over clients."""
    return {
        slot: stacked([start.state_slots[slot] for start in starts]) for slot in learner.state.slots
    }


def _slots(starts: Sequence[Start], learner: Learner, member: Member) -> OptimizerState | None:
    """Return the optimizer slots by slot and weight name, stacked over clients.

    A client without slots gets new ones. None: no client has any.

    Args:
        starts: Starting state of each client.
        learner: Local training, which makes new slots.
        member: Member that the clients train.
    """
    if all(start.slots is None for start in starts):
        return None
    client_slots = [start.slots or learner.start_slots(start.state, member) for start in starts]
    return {slot: stacked([slots[slot] for slots in client_slots]) for slot in client_slots[0]}
