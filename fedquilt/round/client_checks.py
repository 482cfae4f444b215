"""Checks of what a client leaves after training, and errors that name the client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedquilt.errors import DivergenceError, FedquiltError, TrainingError
from fedquilt.errors.faults import is_out_of_memory, memory_text
from fedquilt.family.member import Member
from fedquilt.hardware.torch_internals import foreach_norm
from fedquilt.names import said
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.state import Left
from fedquilt.terms import (
    Job,
    Weights,
)


@contextmanager
def blamed(job: Job, stage: str) -> Iterator[None]:
    """Raise any error inside as a TrainingError that names client, round and stage.

    Errors of fedquilt pass unchanged. An error of memory is reported as such. Rounds are counted
    from 1 in the message.

    Args:
        job: Job that is being run. It has client and round.
        stage: What the client is doing, such as "receiving", for the message.
    """
    try:
        yield
    except FedquiltError:
        raise
    except Exception as error:
        client = f"client {job.client.id} (budget {job.client.budget})"
        stage_text = f"in round {job.round + 1} while {stage}"
        if is_out_of_memory(error):
            raise TrainingError(
                f"{client} ran out of memory {stage_text}. {memory_text(error)}"
            ) from error
        raise TrainingError(f"{client} failed {stage_text}: {said(error)}") from error


def check_left(job: Job, learner: Learner, member: Member, left: Left) -> None:
    """Refuse state of a method whose slots, shapes or extras differ from the learner's declaration.

    Slots must be exactly the declared ones. Declared extras may be absent. Values are not checked
    here.

    Args:
        job: What the client was asked to train.
        learner: It declares slots and extras.
        member: It has the shapes of the weights.
        left: State that the client keeps and sends.

    Raises:
        TrainingError: Names the client and the difference.
    """
    client = f"client {job.client.id} (budget {job.client.budget}) of round {job.round + 1}"
    state = learner.state
    for verb, slots, declared in (
        ("keeps", left.kept, state.slots_kept),
        ("sends", left.sent, state.slots_up),
    ):
        if set(slots) != set(declared):
            raise TrainingError(
                f"{client} {verb} the slots {sorted(slots)}; its learner declares "
                f"{sorted(declared)}. MethodState.finish has to return those that are declared, "
                "and no others."
            )
        for slot, values in slots.items():
            _check_slot(f"{client} {verb} the slot {slot!r}", values, learner, member)
    for verb, extras, names in (
        ("keeps", left.kept_extras, state.extras_kept),
        ("sends", left.sent_extras, state.extras_up),
    ):
        if unknown := sorted(set(extras) - set(names)):
            raise TrainingError(
                f"{client} {verb} the extras {unknown}; its learner declares {sorted(names)}. "
                "MethodState.finish may return those that are declared."
            )


def _check_slot(description: str, values: Weights, learner: Learner, member: Member) -> None:
    names = learner.slotted(member)
    if set(values) != set(names):
        missing = sorted(set(names) - set(values))
        unknown = sorted(set(values) - set(names))
        raise TrainingError(
            f"{description}, in which {missing or 'nothing'} is missing and {unknown or 'nothing'} "
            "is unknown; a tensor for every weight that is trained and travels both ways would "
            "work."
        )
    for name in names:
        if tuple(values[name].shape) != member.shape(name):
            raise TrainingError(
                f"{description}, in which {name!r} has the shape {tuple(values[name].shape)}; the "
                f"shape of the weight that it belongs to, {member.shape(name)}, would work."
            )


def check_state(job: Job, tensors: Iterable[Tensor]) -> None:
    """Raise DivergenceError if tensors of a method's state are not finite.

    Args:
        job: Job of the client that left them, for the message.
        tensors: Slots and extras that the client keeps or sends.
    """
    if not are_finite(tensors):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) left state of its method that is "
            f"not finite in round {job.round + 1}; it was refused, and the server's state is that "
            "of the round before. Finite values would work; a smaller learning rate may give them."
        )


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all values of all floating-point tensors are finite.

    Tensors of other types are ignored. No tensors at all count as finite.
    """
    real = [value for value in tensors if value.is_floating_point()]
    if not real:
        return True
    # Usually one transfer from the device is enough. A norm may overflow although all values are
    # finite, so that values are only looked at if a norm is infinite.
    norms = [norm.to(real[0].dtype) for norm in foreach_norm(real)]
    if bool(torch.stack(norms).isfinite().all()):
        return True
    return all(bool(value.isfinite().all()) for value in real)


def check_sent(job: Job, weights: Iterable[Tensor]) -> None:
    """Raise DivergenceError if weights that a client sends to the server are not finite.

    Args:
        job: Job of the client, for the message.
        weights: Weights as they arrive.
    """
    if not are_finite(weights):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) sent weights that are not finite "
            f"in round {job.round + 1}; they were refused, and the server's state is that of the "
            "round before."
        )
