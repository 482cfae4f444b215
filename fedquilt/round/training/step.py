"""One training step of one client, or of many under vmap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedquilt.family.net import Pass
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import OptimizerState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.state import Received
from fedquilt.round.training.view import View

if TYPE_CHECKING:
    from fedquilt.family.grouped import GroupedNet
    from fedquilt.family.member import Member


@dataclass(frozen=True)
class Batch:
    """One batch of one client, or of a stack of clients with a leading dimension."""

    inputs: Tensor  # (sample, …).
    targets: Tensor  # (sample, …).
    classes_present: Tensor  # (class,) True where the client has samples of the class.
    key: Tensor  # () Random key of the step.
    # () Share of the client's net, which the scaler divides by. 1 has no effect.
    share: Tensor = field(default_factory=lambda: torch.ones(()))
    taught: Tensor | None = None  # Logits or rows of a teacher. None: there is no teacher.


def train_pass(local: LocalTraining) -> Pass:
    """Return how nets run in a training step: statistics of norms, and HeteroFL's scaler."""
    return local.norm.training_pass(local.scaler)


def teach(member: Member, local: LocalTraining, state: State, batch: Batch) -> Tensor:
    """Return the logits of a net before a batch changes it (sample, class, …). May be vmapped.

    The net runs as in training, and no gradient flows.

    Args:
        member: Net that gives the logits.
        local: Settings of local training.
        state: Weights of the client, by name.
        batch: The batch.
    """
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
    """Return a client's gradient of an objective, its loss, and norm statistics. May be vmapped.

    Args:
        learner: Settings of training, and the task.
        member: The client's net.
        objective: Objective to differentiate.
        state: Weights of the client, by name.
        received: Weights and slots that the client started from.
        batch: The batch.

    Returns:
        The gradient of every trained weight by name. Then the loss, a scalar, and the new norm
        statistics by name, as a pair.
    """
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in member.trainable}
    fixed = {name: value for name, value in state.items() if name not in moving}

    def loss_of(weights: State) -> tuple[Tensor, tuple[Tensor, State]]:
        all_weights = {**weights, **fixed}
        sample = batch.inputs, batch.targets, batch.classes_present
        view = View(
            member,
            all_weights,
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
        return loss, (
            loss.detach(),
            {name: value.detach() for name, value in view.norm_statistics.items()},
        )

    grads, aux = grad(loss_of, has_aux=True)(moving)
    return grads, aux


def run_pass(
    learner: Learner,
    member: Member,
    client_pass: ClientPass,
    state: State,
    received: Received,
    batch: Batch,
) -> State:
    """Return the result of a pass for one batch of one client, by name. May be vmapped.

    Args:
        learner: Settings of training, and the task.
        member: The client's net.
        client_pass: The pass, which is not an optimizer step.
        state: Weights of the client, by name.
        received: Weights and slots that the client started from.
        batch: The batch.
    """
    sample = batch.inputs, batch.targets, batch.classes_present
    view = View(
        member,
        state,
        *sample,
        received.weights,
        client_pass.mode(learner.local),
        batch.key,
        batch.taught,
        share=batch.share,
        slots=received.slots,
        task=learner.task,
    )
    return {name: value.detach() for name, value in client_pass(view).items()}


def clipped(grads: State, clip: float) -> State:
    """Return one client's gradients, scaled down so that their joint norm is at most `clip`.

    It computes the same as torch.nn.utils.clip_grad_norm_. The gradients are not changed in-place.

    Args:
        grads: Gradients by name.
        clip: Largest norm. 0: gradients are not clipped.
    """
    if not clip:
        return grads
    total = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    factor = (clip / (total + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def grouped_gradient(
    learner: Learner,
    member: Member,
    objective: Objective,
    net: GroupedNet,
    state: State,
    received: Received,
    batch: Batch,
) -> tuple[State, tuple[Tensor, State]]:
    """Return the result of `vmap(gradient)`, with the clients' nets run as one grouped net.

    Norm statistics are empty, because a grouped net does not track any.

    Args:
        learner: Settings of training, and the task.
        member: The clients' net.
        objective: Objective to differentiate.
        net: Grouped net that runs all clients' nets side by side.
        state: (client, …) Weights by name.
        received: Weights and slots that the clients started from.
        batch: Batches of all clients, with the clients in dimension 0.
    """
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in member.trainable}
    fixed = {name: value for name, value in state.items() if name not in moving}

    def loss_of_client(
        weights: State,
        received: Received,
        client_batch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        taught: Tensor | None,
        logits: Tensor | None,
    ) -> Tensor:
        inputs, targets, classes_present, key, share = client_batch
        logits_by_net = {} if logits is None else {member: logits}
        sample = inputs, targets, classes_present
        view = View(
            member,
            weights,
            *sample,
            received.weights,
            mode,
            key,
            taught,
            logits_by_net,
            share=share,
            slots=received.slots,
            task=learner.task,
        )
        return objective(view)

    def loss_of(weights: State) -> tuple[Tensor, Tensor]:
        logits = None
        if member in objective.nets(member):
            shares = batch.share if mode.scaler else None
            logits = net({**weights, **fixed}, batch.inputs, member.class_dim, shares)
        client_batch = (batch.inputs, batch.targets, batch.classes_present, batch.key, batch.share)
        dims = (0, 0, 0, None if batch.taught is None else 0, None if logits is None else 0)
        losses = vmap(loss_of_client, dims)(
            {**weights, **fixed}, received, client_batch, batch.taught, logits
        )
        return losses.sum(), losses.detach()  # A client's weights only affect its own loss.

    grads, losses = grad(loss_of, has_aux=True)(moving)
    return grads, (losses, {})


class StepSettings(NamedTuple):
    """Number and learning rate of one optimizer step."""

    number: int  # Number of the client's optimizer steps before this one.
    # Learning rate of the batch, or (client,) those of a stack. None: that of the round.
    rate: float | Tensor | None = None


def move(
    learner: Learner,
    phase: Phase,
    state: State,
    slots: OptimizerState,
    grads: State,
    masks: Mapping[str, Tensor | bool],
    step: StepSettings,
) -> tuple[State, OptimizerState]:
    """Apply the gradient of a phase at the positions that the phase may change.

    At other positions, weights *and slots* keep their exact values. It would not be enough to mask
    gradients, because momentum and weight decay change a weight whose gradient is zero. The test
    `test_a_phase_leaves_what_it_may_not_move_bit_for_bit` shows it.

    Args:
        learner: Provides the optimizer.
        phase: Phase that says how other positions are frozen.
        state: Weights by name. Those of a stack have the clients in dimension 0.
        slots: Slots of the optimizer.
        grads: Gradients by name.
        masks: Masks of the positions that may change, by name.
        step: Number of the step, and its learning rate.
    """
    if phase.freeze == "gradient":
        grads = {name: g if masks[name] is True else g * masks[name] for name, g in grads.items()}
        masks = dict.fromkeys(grads, True)
    free = {name: g for name, g in grads.items() if masks[name] is not False}
    if not free:
        return state, slots
    lr = learner.lr if step.rate is None else step.rate
    moved, new_slots = learner.local.optimizer.update(state, slots, free, lr, step.number)
    for name in free:
        mask = masks[name]
        if isinstance(mask, Tensor):
            moved[name] = torch.where(mask, moved[name], state[name])
            for slot, values in new_slots.items():
                values[name] = torch.where(mask, values[name], slots[slot][name])
    return {**state, **moved}, {
        slot: {**slots[slot], **values} for slot, values in new_slots.items()
    }
