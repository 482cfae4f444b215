"""One training step of one client, or of many under vmap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedquilt.family.net import Pass
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import Local
from fedquilt.round.training.objectives import Objective, View
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.state import Received

if TYPE_CHECKING:
    from fedquilt.family.laid import LaidNet
    from fedquilt.family.member import Member


@dataclass(frozen=True)
class Batch:
    """One batch of one client, or of a stack of clients with a leading dimension."""

    inputs: Tensor
    targets: Tensor
    held: Tensor
    key: Tensor
    share: Tensor = field(
        default_factory=lambda: torch.ones(())
    )  # of the client's net, for the scaler
    taught: Tensor | None = None


def train_pass(local: Local) -> Pass:
    """Return how nets run in training."""
    return local.norm.training_pass(local.scaler)


def teach(member: Member, local: Local, state: State, batch: Batch) -> Tensor:
    """The logits that a client's own net gives before a batch moves it. May be vmapped."""
    with torch.no_grad():
        logits, _ = member.net(state, batch.inputs, train_pass(local), batch.key, share=batch.share)
    return logits.movedim(member.class_dim, 1)


def gradient(
    learner: Learner,
    member: Member,
    objective: Objective,
    state: State,
    received: Received,
    batch: Batch,
) -> tuple[State, tuple[Tensor, State]]:
    """One client's gradient of one objective, with the loss and the norm statistics seen. May be vmapped."""
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in member.trainable}
    rest = {name: value for name, value in state.items() if name not in moving}

    def loss_of(weights: State) -> tuple[Tensor, tuple[Tensor, State]]:
        own = {**weights, **rest}
        sample = batch.inputs, batch.targets, batch.held
        view = View(
            member,
            own,
            *sample,
            received.weights,
            mode,
            batch.key,
            batch.taught,
            share=batch.share,
            slots=received.slots,
            task=learner.task,
        )
        loss = objective(view)
        return loss, (loss.detach(), {name: value.detach() for name, value in view.seen.items()})

    grads, aux = grad(loss_of, has_aux=True)(moving)
    return grads, aux


def run_pass(
    learner: Learner,
    member: Member,
    one: ClientPass,
    state: State,
    received: Received,
    batch: Batch,
) -> State:
    """Return what a pass gives for one batch of one client. May be vmapped."""
    sample = batch.inputs, batch.targets, batch.held
    view = View(
        member,
        state,
        *sample,
        received.weights,
        one.mode(learner.local),
        batch.key,
        batch.taught,
        share=batch.share,
        slots=received.slots,
        task=learner.task,
    )
    return {name: value.detach() for name, value in one(view).items()}


def clipped(grads: State, clip: float) -> State:
    """Bound the norm of one client's whole gradient: torch.nn.utils.clip_grad_norm_, with its small constant."""
    if not clip:
        return grads
    total = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    factor = (clip / (total + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def laid_gradient(
    learner: Learner,
    member: Member,
    objective: Objective,
    net: LaidNet,
    state: State,
    received: Received,
    batch: Batch,
) -> tuple[State, tuple[Tensor, State]]:
    """Return what `vmap(gradient)` gives, with the clients' own nets run side by side instead of stacked."""
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in member.trainable}
    rest = {name: value for name, value in state.items() if name not in moving}

    def one(
        weights: State,
        received: Received,
        own: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        taught: Tensor | None,
        logits: Tensor | None,
    ) -> Tensor:
        inputs, targets, held, key, share = own
        known = {} if logits is None else {member: logits}
        sample = inputs, targets, held
        view = View(
            member,
            weights,
            *sample,
            received.weights,
            mode,
            key,
            taught,
            known,
            share=share,
            slots=received.slots,
            task=learner.task,
        )
        return objective(view)

    def loss_of(weights: State) -> tuple[Tensor, Tensor]:
        logits = None
        if member in objective.nets(member):
            shares = batch.share if mode.scaler else None
            logits = net({**weights, **rest}, batch.inputs, member.class_dim, shares)
        own = (batch.inputs, batch.targets, batch.held, batch.key, batch.share)
        dims = (0, 0, 0, None if batch.taught is None else 0, None if logits is None else 0)
        losses = vmap(one, dims)({**weights, **rest}, received, own, batch.taught, logits)
        return losses.sum(), losses.detach()  # a client's weights enter its own loss alone

    grads, losses = grad(loss_of, has_aux=True)(moving)
    return grads, (losses, {})


def move(
    learner: Learner,
    phase: Phase,
    state: State,
    slots: OptimiserState,
    grads: State,
    masks: Mapping[str, Tensor | bool],
    step: int,
) -> tuple[State, OptimiserState]:
    """Apply one phase's gradient where the phase may move; elsewhere weights *and slots* stay, bit for bit.

    Masking gradients would not do: momentum and weight decay move a weight whose gradient is zero.
    """
    if phase.freeze == "gradient":
        grads = {name: g if masks[name] is True else g * masks[name] for name, g in grads.items()}
        masks = dict.fromkeys(grads, True)
    free = {name: g for name, g in grads.items() if masks[name] is not False}
    if not free:
        return state, slots
    moved, new_slots = learner.local.optimiser.update(state, slots, free, learner.lr, step)
    for name in free:
        mask = masks[name]
        if isinstance(mask, Tensor):
            moved[name] = torch.where(mask, moved[name], state[name])
            for slot, values in new_slots.items():
                values[name] = torch.where(mask, values[name], slots[slot][name])
    return {**state, **moved}, {
        slot: {**slots[slot], **values} for slot, values in new_slots.items()
    }
