"""One training step of a client group, on its static tensors.

A step whose phases are always the same is one action. Where phases are drawn at random, the step is
divided into actions that exchange data through buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.engines.vectorized.cuda_graph import unsearched
from fedquilt.engines.vectorized.group_tensors import LINE, GroupTensors, Shape
from fedquilt.engines.vectorized.lines import Inner
from fedquilt.engines.vectorized.stacked_step import augment, clip, gradients, teach_clients
from fedquilt.engines.vectorized.stacking import batch_tensors, laid_out_as, put_back, rewrite
from fedquilt.engines.vectorized.step_buffers import StepBuffers
from fedquilt.family.member import Member
from fedquilt.hardware.device import channels_last
from fedquilt.hardware.torch_internals import (
    foreach_add_,
)
from fedquilt.round.training.learner import Phase
from fedquilt.round.training.objectives import Objective, apart
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.regions import Everywhere
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, grouped_gradient

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


class GroupStep(GroupTensors):
    """Training step of a client group, as actions that can be captured.

    Args:
        engine: Engine that the group belongs to.
        shape: Member, learner, number of clients and layout of the group.
    """

    def __init__(self, engine: Vectorized, shape: Shape) -> None:
        super().__init__(engine, shape)
        learner = shape.learner
        # Masks of phases that are the same in every step.
        self._masks: dict[Phase, Tensor | None] = {}
        # Buffers of a step whose phases are drawn at random. None: they are always the same.
        self._buffers: StepBuffers | None = None
        if learner.drawn:
            self._buffers = StepBuffers.empty(self)
        else:
            self._masks = {phase: self._mask(phase) for phase in learner.phases}

    def _actions(
        self, phases: tuple[Phase, ...], size: int, masked: bool
    ) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Yield the parts of a step in order, each with the key under which its graph is stored.

        A part with the key None is never captured. A step whose phases are always the same is one
        part.

        Args:
            phases: Phases of the step. They have an effect only if phases are drawn at random.
            size: Samples in each client's batch.
            masked: True if clients without a batch are restored at the end of the step.
        """
        buffers = self._buffers
        if buffers is None:
            yield (size, masked), partial(self._step, size, masked)
            return
        if size not in buffers.batches:
            buffers.batches[size] = Batch(
                *(value.clone() for value in batch_tensors(self._batch(size)))
            )
        batch = buffers.batches[size]
        yield ("open", size, masked), partial(self._load_batch, buffers, batch, masked)
        for phase in phases:
            for objective in apart(phase.objective, self.member):
                nested = buffers.nested_for(self, objective)
                yield (objective, size), partial(self._add, buffers, batch, objective, nested)
            moves_all = isinstance(phase.moves, Everywhere)
            if not moves_all:
                yield None, partial(self._load_mask, buffers, phase)
            key = ("move", moves_all or phase.freeze)
            yield key, partial(self._move_by_sums, buffers, phase, moves_all)
        close = partial(self._close, buffers.losses, buffers.old_state, buffers.old_slots, masked)
        yield ("close", masked), close

    # --- a step whose phases are always the same -------------------------------------------------

    def _step(self, size: int, masked: bool) -> None:
        """Run one step whose phases are the same in every step, in-place on the static tensors.

        Args:
            size: Samples in each client's batch.
            masked: True if clients without a batch are restored at the end of the step.
        """
        learner = self.shape.learner
        batch = self._batch(size)
        old_state = {name: value.clone() for name, value in self.state.items()} if masked else {}
        old_slots = {
            slot: {name: value.clone() for name, value in values.items()}
            for slot, values in self.slots.items()
            if masked
        }
        losses = self.losses[0]
        for phase in learner.phases:
            grads, (losses, new_buffers) = self._gradients(
                phase.objective, batch, self.member, self.state, self.received
            )
            if LINE in self.moving[0]:
                grads = {LINE: self.lines.join(grads)}
            self._move(clip(learner, grads), phase, self._masks[phase])
            rewrite(self.state, new_buffers)
        self._close(losses, old_state, old_slots, masked)

    def _batch(self, size: int) -> Batch:
        """Return the batches of all clients in the current step, each with `size` samples."""
        learner = self.shape.learner
        rows = self.rows.index_select(0, self.chunk_step)[0, :, :size]  # (client, sample)
        keys = self.noise.index_select(0, self.chunk_step)[0]  # (client,)
        stored = self.engine.data.samples(rows), self.engine.data.targets[rows]
        inputs, targets = augment(learner, *stored, keys)
        if self._channels_last:
            inputs = channels_last(inputs[0]).unsqueeze(0)
        batch = Batch(inputs, targets, self.class_masks, keys, self.shares)
        if self.tables is not None:
            everyone = torch.arange(self.shape.count, device=rows.device)[:, None]
            return replace(batch, taught=self.tables[everyone, rows])
        return replace(batch, taught=self._taught(batch)) if learner.taught else batch

    def _close(
        self, losses: Tensor, old_state: State, old_slots: Mapping[str, State], masked: bool
    ) -> None:
        """End a step: store its losses, restore clients that had no batch, and advance by one.

        Args:
            losses: Losses of the step, (client,).
            old_state: Weights and buffers before the step.
            old_slots: Optimizer slots before the step.
            masked: True if some clients may have had no batch.
        """
        if masked:
            has_batch = self.active.index_select(0, self.chunk_step)[0]  # (client,)
            put_back(self.state, old_state, has_batch)
            for slot, values in self.slots.items():
                put_back(values, old_slots[slot], has_batch)
        self.losses.index_copy_(0, self.chunk_step, losses.to(self.losses.dtype).unsqueeze(0))
        self.chunk_step += 1

    # --- a step whose phases are drawn at random: parts that communicate through buffers ---------

    def _load_batch(self, buffers: StepBuffers, batch: Batch, masked: bool) -> None:
        """Copy the batches of the current step into their buffer.

        Args:
            buffers: Static buffers of the step.
            batch: Buffer that is overwritten. Its shape gives the batch size.
            masked: True: also save weights and slots, so that clients without a batch can be
                restored.
        """
        new_batch = self._batch(batch.targets.shape[1])
        for buffer, new in zip(batch_tensors(batch), batch_tensors(new_batch), strict=True):
            buffer.copy_(new)
        if masked:
            rewrite(buffers.old_state, self.state)
            for slot, values in self.slots.items():
                rewrite(buffers.old_slots[slot], values)

    def _add(
        self, buffers: StepBuffers, batch: Batch, objective: Objective, nested: Inner | None
    ) -> None:
        """Add the gradient and the loss of one objective to the sums over its phase.

        The gradient of a nested net is added only at the positions of that net. New norm statistics
        are written into the group's state.

        Args:
            buffers: Static buffers of the step, with the sums.
            batch: Buffer with the batches of all clients.
            objective: Objective whose gradient is taken.
            nested: Nested net that the objective runs. None: it runs the member itself, or several
                nets.
        """
        member = self.member
        if nested is None:
            grads, (losses, new_buffers) = self._gradients(
                objective, batch, member, self.state, self.received
            )
            sums = buffers.views  # Tensors of equal strides are added by one launch
            foreach_add_(
                list(sums.values()),
                [laid_out_as(grads[name], gradient_sum) for name, gradient_sum in sums.items()],
            )
        else:
            (inner,) = objective.nets(member)
            inner_member = member.family.member(inner.arch)
            other_tensors = {
                name: value for name, value in self.state.items() if name not in nested.lines.shapes
            }
            other_tensors = member.narrowed(other_tensors, inner, lead=1)
            received = Received(
                member.narrowed(self.received.weights, inner, lead=1),
                {
                    slot: member.narrowed(values, inner, lead=1)
                    for slot, values in self.received.slots.items()
                },
            )
            nested_weights = nested.lines.views(nested.cut(self.moving[0][LINE]))
            with unsearched():
                grads, (losses, new_buffers) = self._gradients(
                    objective, batch, inner_member, {**other_tensors, **nested_weights}, received
                )
            nested.add(buffers.grads, nested.lines.join(grads))
        buffers.sums += losses
        rewrite(self.state, new_buffers)

    def _load_mask(self, buffers: StepBuffers, phase: Phase) -> None:
        """Copy the mask of a phase, True where it may move weights, into `buffers.mask`."""
        buffers.mask.copy_(self.engine.line_cache.mask(self.member, phase.moves, self.lines))

    def _move_by_sums(self, buffers: StepBuffers, phase: Phase, moves_all: bool) -> None:
        """Move the weights by the summed gradients of a phase, and reset the sums.

        The summed losses become the losses of the step.

        Args:
            buffers: Static buffers of the step, with the sums.
            phase: Phase of the step.
            moves_all: True if the phase moves all weights. False: `buffers.mask` says which.
        """
        grads = clip(self.shape.learner, {LINE: buffers.grads})
        self._move(grads, phase, None if moves_all else buffers.mask)
        buffers.grads.zero_()
        buffers.losses.copy_(buffers.sums)
        buffers.sums.zero_()

    # --- parts of both kinds of step -------------------------------------------------------------

    def _taught(self, batch: Batch) -> Tensor:
        """Return the outputs of each client's teaching net for its batch, (client, sample, …)."""
        learner, member = self.shape.learner, self.member
        if self.net is not None and not learner.taught_by:
            with torch.no_grad():
                shares = self.shares if learner.local.scaler else None
                return self.net(self.state, batch.inputs, member.class_dim, shares)
        return teach_clients(learner, member, self.state, batch)

    def _gradients(
        self, objective: Objective, batch: Batch, member: Member, state: State, received: Received
    ) -> tuple[State, tuple[Tensor, State]]:
        """Return gradients, losses and new buffers of all clients, in the group's layout.

        Nets are computed side by side only if `member` is the group's own member.

        Args:
            objective: Function whose gradient is taken.
            batch: Batches of the clients, in the first dimension.
            member: Member of the group, or a net that is nested in it.
            state: Weights and buffers of `member`, with clients in the first dimension.
            received: Weights and slots that the round started from, in the same form.

        Returns:
            Gradients by weight name, and a pair of losses (client,) and new buffers.
        """
        learner = self.shape.learner
        if self.net is not None and member == self.member:
            return grouped_gradient(learner, member, objective, self.net, state, received, batch)
        return gradients(learner, member, objective, state, received, batch)

    def _mask(self, phase: Phase) -> Tensor | None:
        """Return a mask (1, entry), True where a phase may move weights. None: everywhere."""
        if isinstance(phase.moves, Everywhere):
            return None
        return self.engine.line_cache.mask(self.member, phase.moves, self.lines)

    def _move(self, grads: State, phase: Phase, mask: Tensor | None) -> None:
        """Take one optimizer step in-place.

        Entries that the mask excludes are restored bit by bit.

        Args:
            grads: Gradients by weight name, or of all weights in one row.
            phase: Phase of the step.
            mask: True where the phase may move, (1, entry). None: everywhere.
        """
        self.age += 1
        optimizer, (weights, slots) = self.shape.learner.local.optimizer, self.moving
        if mask is not None and phase.freeze == "gradient":
            grads, mask = {name: value * mask for name, value in grads.items()}, None
        moving_tensors = [
            value for values in (weights, *slots.values()) for value in values.values()
        ]
        old_values = [] if mask is None else [value.clone() for value in moving_tensors]
        rates = self.rates.index_select(0, self.chunk_step)[0]  # (client,)
        if self._fused:
            matching_grads = [laid_out_as(grads[name], weight) for name, weight in weights.items()]
            listed = {slot: list(values.values()) for slot, values in slots.items()}
            self._update_(list(weights.values()), listed, matching_grads, rates)
        else:
            lr = rates if self._own_rates else rates[0]
            moved, new_slots = optimizer.update(weights, slots, grads, lr, 0)
            rewrite(weights, moved)
            for slot, values in new_slots.items():
                rewrite(slots[slot], values)
        if mask is not None:
            for value, old in zip(moving_tensors, old_values, strict=True):
                torch.where(mask, value, old, out=value)

    def _update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        rates: Tensor,
    ) -> None:
        """Move all clients by one fused optimizer step, in-place.

        The fused kernels take a single learning rate, so that clients with unequal rates are moved
        one by one.

        Args:
            weights: Weights, each with clients in the first dimension.
            slots: Optimizer slots of these weights, in the same order, by slot.
            grads: Gradients of these weights, in the same order and memory layout.
            rates: Learning rates, (client,).
        """
        update_ = self.shape.learner.local.optimizer.update_
        if not self._own_rates:
            update_(weights, slots, grads, rates[0], self.age)
            return
        for client, rate in enumerate(rates):
            client_weights = [weight[client] for weight in weights]
            client_slots = {
                slot: [value[client] for value in values] for slot, values in slots.items()
            }
            client_grads = [grad[client] for grad in grads]
            update_(client_weights, client_slots, client_grads, rate, self.age)
