"""State that a client keeps from one round to the next."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedquilt.family.member import Member
from fedquilt.round.federation import Federation
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.state import Left
from fedquilt.terms import (
    ClientState,
    Extras,
    Job,
    Server,
    Slots,
    Weights,
)


def memory_of(server: Server, job: Job) -> ClientState | None:
    """Return what a job's client remembers of the net that it trains, or None for nothing.

    Client states are kept in `server.memory`, by the client's number and the net's scope.
    """
    return server.memory.get((job.client.id, job.submodel.scope))


def covers(new: ClientState, old: ClientState) -> bool:
    """Return True if a memory makes an older one superfluous.

    It has equal positions, and at least the older one's names of weights and of every slot. Values
    are not compared.

    Args:
        new: Memory after the round.
        old: Memory before the round.
    """
    same = new.submodel.index == old.submodel.index and old.weights.keys() <= new.weights.keys()
    return same and all(
        values.keys() <= new.slots.get(slot, {}).keys() for slot, values in old.slots.items()
    )


def kept_state(
    federation: Federation, learner: Learner, slots: Slots, extras: Extras, left: Left
) -> Left:
    """Return what a client left after training, with all state of its method that it keeps.

    If the link may lose values, the client also keeps the slots and extras that it received. They
    replace values that get lost in its next round. Kept tensors are copies. What the client sends
    is unchanged.

    Args:
        federation: World, method and link.
        learner: How the client trained.
        slots: Slots that it started from.
        extras: Extras that it started from.
        left: What it left after training.
    """
    if not learner.state:
        return left
    kept_slots = dict(left.kept)
    kept_extras = dict(left.kept_extras)
    if federation.link.lossy:
        kept_slots |= {slot: slots[slot] for slot in learner.state.slots_down}
        kept_extras |= {name: extras[name] for name in learner.state.extras_down if name in extras}
    # Copies, because an engine may use the memory of these tensors for the next clients.
    return replace(
        left,
        kept={
            slot: {name: value.clone() for name, value in values.items()}
            for slot, values in kept_slots.items()
        },
        kept_extras={name: value.clone() for name, value in kept_extras.items()},
    )


def names_kept(federation: Federation, learner: Learner, member: Member) -> tuple[str, ...]:
    """Return the names of the weights that a client keeps for its next round.

    If the link loses nothing, the learner names them. If the link may lose values, they are all
    tensors that the client holds, except constants.

    Args:
        federation: World, method and link.
        learner: How the client trained.
        member: The member that it trained.
    """
    if not federation.link.lossy:
        return learner.kept(member)
    constants = set(member.family.carried)
    return tuple(name for name in learner.names(member) if name not in constants)


def steps_behind(memory: ClientState | None, learner: Learner, batches: int) -> int:
    """Return the number of a client's optimizer steps after this round's batches.

    Steps of earlier rounds count only if its slots or the merge depend on them.

    Args:
        memory: What the client kept from earlier rounds.
        learner: How it trained.
        batches: Number of batches in this round.
    """
    earlier_steps = memory.steps if memory and counts_steps(learner) else 0
    return earlier_steps + learner.moves(batches)


def counts_steps(learner: Learner) -> bool:
    """Return True if a client must count its optimizer steps over all rounds.

    It must if it keeps optimizer slots between rounds, or if the merge weights clients by steps.
    """
    return learner.keep_slots or learner.counts_steps


def recalled(
    federation: Federation, job: Job, slot: str, like: Weights, memory: ClientState | None
) -> dict[str, Tensor]:
    """Return a slot of a client's memory at a job's positions, zero where it has nothing.

    Args:
        federation: World, method and link.
        job: It has the positions.
        slot: Name of the slot.
        like: Tensors whose names, shapes and types the result has.
        memory: What the client kept from earlier rounds. None: nothing.
    """
    values = {name: torch.zeros_like(value) for name, value in like.items()}
    if memory and slot in memory.slots:
        source = memory.slots[slot], memory.submodel.positions
        values = federation.world.family.cutter.overlay(values, job.submodel.positions, *source)
    return values


def joined_states(
    federation: Federation, old: ClientState, new: ClientState, initial: Weights
) -> ClientState:
    """Join two states of a client by global position. The new one counts where both have a value.

    The result has the positions of both on every axis. A weight at a pair of positions that neither
    memory has is initial, and a slot is zero there. Steps, round and extras are those of the new
    memory.

    Args:
        federation: World, method and link.
        old: What the client kept from earlier rounds.
        new: What it keeps of this round.
        initial: All weights before the first round, by scope and name.
    """
    family = federation.world.family
    cutter = family.cutter
    index = cutter.union(old.submodel.index, new.submodel.index)
    arch = replace(
        new.submodel.arch, widths=tuple((axis, len(positions)) for axis, positions in index.items())
    )
    union = replace(new.submodel, arch=arch, index=index)

    def joined(base: Weights, before: Weights, after: Weights) -> dict[str, Tensor]:
        with_old = cutter.overlay(base, index, before, old.submodel.index)
        return cutter.overlay(with_old, index, after, new.submodel.index)

    # Some pairs of positions are in the union but in neither cut. They get the initial weights.
    # Weights of a variant that the client trained only in an earlier round are kept too.
    names = list({**old.weights, **new.weights})
    weights = joined(cutter.gather(initial, union, names), old.weights, new.weights)
    sizes = family.layout.sizes | arch.sizes
    slots = {}
    for slot in {**old.slots, **new.slots}:
        before = old.slots.get(slot, {})
        after = new.slots.get(slot, {})
        values = {**before, **after}
        empty = {name: v.new_zeros(family.layout.shape(name, sizes)) for name, v in values.items()}
        slots[slot] = joined(empty, before, after)
    return replace(new, submodel=union, weights=weights, slots=slots)
