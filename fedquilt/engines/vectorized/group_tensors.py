"""Static tensors of a client group.

A captured step reads and writes at fixed addresses. All that it uses is therefore kept in tensors
that are created once and rewritten for every stack of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedquilt.engines.vectorized.cuda_graph import CaptureError
from fedquilt.engines.vectorized.lines import Lines
from fedquilt.hardware.device import channels_last
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.regions import Everywhere
from fedquilt.round.training.state import Received
from fedquilt.terms import Arch

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


# "alone": each client has its own stream. "grouped": nets are computed side by side, as groups of
# grouped convolutions. "stack": nets are stacked by vmap.
GroupLayout = Literal["alone", "grouped", "stack"]
CHUNK_STEPS = 64  # Steps whose batch positions are on the device at once
LINE = ""  # Name of the tensor that joins all trainable weights of a group


@dataclass(frozen=True)
class Shape:
    """Properties that two client groups must share to be interchangeable."""

    arch: Arch  # Architecture of the member that the clients train
    learner: Learner  # Local training, without settings that change between rounds
    count: int  # Number of clients
    layout: GroupLayout  # Layout in which their nets are computed

    @staticmethod
    def of(arch: Arch, learner: Learner, count: int, layout: GroupLayout) -> Shape:
        """Return the shape of a client group.

        It leaves out the learner's settings that change between rounds, because they are loaded
        with the clients.

        Args:
            arch: Architecture of the member that the clients train.
            learner: Local training of the clients.
            count: Number of clients in the group.
            layout: Layout in which their nets are computed.
        """
        return Shape(arch, learner.timeless, count, layout)


class GroupTensors:
    """Static tensors of a client group.

    Args:
        engine: Engine that the group belongs to, which has the samples.
        shape: Member, learner, number of clients and layout of the group.

    Raises:
        CaptureError: Steps of the learner cannot be captured.
        GroupingError: The layout is "grouped", and the nets cannot be computed side by side.
    """

    def __init__(self, engine: Vectorized, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        world, family, learner = engine.world, engine.world.family, shape.learner
        self.member = member = family.member(shape.arch)
        device, count = engine.device, shape.count
        _check_capturable(learner)
        self.net = member.grouped(count) if shape.layout == "grouped" else None

        # Weights and slots, with clients in the first dimension.
        fresh = family.cutter.gather(engine.template, member.prefix, learner.names(member))
        self.state = {name: self._per_client(value) for name, value in fresh.items()}
        self.slots = {
            slot: {name: torch.zeros_like(self.state[name]) for name in member.trainable}
            for slot in learner.local.optimizer.slots
        }
        # Weights and slots that the optimizer moves. Where phases move only some positions, these
        # are the joined rows that the weights are views of.
        self.moving = {name: self.state[name] for name in member.trainable}, self.slots
        self.lines = Lines(
            {name: fresh[name].shape for name in member.trainable}, self._channels_last
        )
        if learner.drawn or any(
            not isinstance(phase.moves, Everywhere) for phase in learner.phases
        ):
            self._line_up()
        slotted = learner.slotted(member)
        # State slots of the method, which objectives read.
        state_slots = {
            slot: {name: torch.zeros_like(self.state[name]) for name in slotted}
            for slot in learner.state.slots
        }
        self.received = Received(
            {name: value.clone() for name, value in self.state.items()}, state_slots
        )

        # Batches and losses of the steps of a chunk.
        # A short last batch may be joined to the one before.
        max_batch = 2 * learner.local.batch_size
        # Positions of samples, (step, client, sample).
        self.rows = torch.zeros(CHUNK_STEPS, count, max_batch, dtype=torch.int64, device=device)
        # True where a client has a batch that the captured step trains on, (step, client).
        self.active = torch.ones(CHUNK_STEPS, count, dtype=torch.bool, device=device)
        # Training losses, (step, client).
        self.losses = torch.zeros(CHUNK_STEPS, count, dtype=world.dtype, device=device)

        # Properties of the clients.
        # True where a client has samples of a class, (client, class).
        self.class_masks = torch.ones(count, family.num_outputs, dtype=torch.bool, device=device)
        self.keys = torch.zeros(count, dtype=torch.int64, device=device)  # Random keys, (client,)
        # Shares of the clients' nets, by which the scaler divides, (client,).
        self.shares = torch.ones(count, dtype=world.dtype, device=device)
        # Teacher's outputs for all public samples, (client, sample, …).
        self.tables: Tensor | None = None
        if learner.teacher:
            self.tables = torch.zeros(
                count, *engine.table_shape(learner), dtype=world.dtype, device=device
            )

        # Values that change from step to step.
        # Random keys of every step, (step, client).
        self.noise = torch.zeros(CHUNK_STEPS, count, dtype=torch.int64, device=device)
        # Step within the chunk, (1,).
        self.chunk_step = torch.zeros(1, dtype=torch.int64, device=device)
        self.age = torch.zeros((), dtype=torch.float32, device=device)  # Optimizer steps taken

        on_gpu = device.type == "cuda"
        # On a GPU the fused kernels read the learning rate in float32, too coarse for float64.
        fine = world.dtype == torch.float64 or not on_gpu
        self._fused = not (on_gpu and fine) or learner.local.optimizer.ages
        # Learning rates that a captured step reads, (step, client).
        rate_type = torch.float32 if on_gpu and self._fused else torch.float64
        self.rates = torch.zeros(CHUNK_STEPS, count, dtype=rate_type, device=device)
        # True if learning rates may differ between clients.
        self._own_rates = count > 1 and not learner.local.within_round.is_constant

    @property
    def chunk_steps(self) -> int:
        """Return the number of steps whose batch positions are on the device at once."""
        return len(self.rows)

    def _per_client(self, value: Tensor) -> Tensor:
        """Return copies of a weight for all clients of the group, (client, …).

        A client that trains alone on a GPU has convolutions in channels-last layout, which fast
        kernels need.
        """
        copies = value.expand(self.shape.count, *value.shape).clone(
            memory_format=torch.contiguous_format
        )
        return channels_last(copies[0]).unsqueeze(0) if self._channels_last else copies

    def _line_up(self) -> None:
        """Store the trainable weights in one row per client, and each optimizer slot likewise.

        `state` and `slots` become views of these rows, and `moving` refers to the rows themselves.
        """
        line = self.lines.join(self.state)
        slots = {slot: torch.zeros_like(line) for slot in self.slots}
        self.moving = (
            {LINE: line},
            {slot: {LINE: slot_line} for slot, slot_line in slots.items()},
        )
        self.state |= self.lines.views(line)
        self.slots = {slot: self.lines.views(slot_line) for slot, slot_line in slots.items()}

    @property
    def _channels_last(self) -> bool:
        """Return True if convolutions are stored with their channels last."""
        return self.shape.layout == "alone" and self.engine.device.type == "cuda"


def _check_capturable(learner: Learner) -> None:
    """Refuse learners whose optimizer would have to count steps for every position.

    Raises:
        CaptureError: The optimizer counts steps, and some phase moves only a part of the weights.
    """
    partly = any(not isinstance(phase.moves, Everywhere) for phase in learner.phases)
    if learner.local.optimizer.ages and partly:
        raise CaptureError(
            f"{type(learner.local.optimizer).__name__} counts steps, and some positions do not move"
        )
