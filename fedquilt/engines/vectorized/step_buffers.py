"""Static buffers of a step whose phases are drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt.engines.vectorized.group_tensors import LINE, GroupTensors
from fedquilt.engines.vectorized.lines import Inner
from fedquilt.engines.vectorized.stacking import batch_tensors
from fedquilt.family.member import Member
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.step import Batch


@dataclass
class StepBuffers:
    """Static buffers through which the separately captured parts of a step exchange data.

    They hold the batch, gradients, losses and masks of a step whose phases are drawn at random.
    """

    batches: dict[int, Batch]  # Batches of all clients, by batch size
    nested: dict[Member, Inner]  # Nested nets that have been drawn so far
    grads: Tensor  # (client, entry) Gradients, summed over the objectives of a phase
    views: State  # Views of `grads`, by weight name
    sums: Tensor  # (client,) Losses, summed over the objectives of a phase
    losses: Tensor  # (client,) Losses of the last phase
    mask: Tensor  # (1, entry) True where the phase may move
    old_state: State  # Weights before the step, to restore clients without a batch
    old_slots: dict[str, State]  # Optimizer slots before the step, for the same purpose

    @staticmethod
    def empty(group: GroupTensors) -> StepBuffers:
        """Return buffers of zeros with the shapes of a client group."""
        grads = torch.zeros_like(group.moving[0][LINE])
        return StepBuffers(
            batches={},
            nested={},
            grads=grads,
            views=group.lines.views(grads),
            sums=torch.zeros_like(group.losses[0]),
            losses=torch.zeros_like(group.losses[0]),
            mask=torch.zeros_like(grads[:1], dtype=torch.bool),
            old_state={name: value.clone() for name, value in group.state.items()},
            old_slots={
                slot: {name: value.clone() for name, value in values.items()}
                for slot, values in group.slots.items()
            },
        )

    def nested_for(self, group: GroupTensors, objective: Objective) -> Inner | None:
        """Return the nested net of an objective that runs only this net and reads no other weights.

        Its gradient is then taken with respect to that net's weights alone. The net is kept in
        `nested`, because captured steps read it at the same address.

        Args:
            group: Client group whose member contains the net.
            objective: Objective of a phase.

        Returns:
            The nested net. None: the objective needs several nets, or the member itself.
        """
        nets = objective.nets(group.member)
        if len(nets) != 1 or nets[0] == group.member or not objective.reads_its_nets_alone:
            return None
        net = nets[0]
        if net not in self.nested:
            self.nested[net] = group.engine.line_cache.nested_net(group.member, net, group.lines)
        return self.nested[net]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the buffers."""
        for batch in self.batches.values():
            yield from batch_tensors(batch)
        yield from (self.grads, self.sums, self.losses, self.mask)
        yield from self.old_state.values()
        for values in self.old_slots.values():
            yield from values.values()
