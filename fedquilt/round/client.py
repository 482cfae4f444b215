"""What one client does in a round: receive, train, send, remember.

Each of these is a function of values, so that an engine that simulates clients and a real device run the same code. A
client has its memory of earlier rounds and the initial weights, which the server sent it once. Training in between is
the engine's: one client after another, or many as one stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.family.member import Member
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Trip
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.terms import Job, Memory, Payload, Server, Slots, Update, Weights


@dataclass(frozen=True)
class Start:
    """What a client starts a round from."""

    state: State
    slots: OptimiserState | None  # Optimizer slots that it remembers. None: they are empty.
    steps: int  # Optimizer steps behind the slots.
    bytes: int  # Bytes that arrived.
    known: Weights = field(default_factory=dict)  # What both sides know that it received, where a codec needs it.


@dataclass(frozen=True)
class Delivery:
    """What came of a client's upload."""

    sent: tuple[Payload, ...]  # The payload as it arrived, or nothing.
    bytes: int
    intact: bool  # True if it arrived as it was sent.
    slots: Slots = field(default_factory=dict)  # What the client keeps because of the link.


def memory_of(server: Server, job: Job) -> Memory | None:
    """Return what a job's client remembers of the net that it trains."""
    return server.memory.get((job.client.id, job.submodel.scope))


def receive(
    federation: Federation,
    job: Job,
    learner: Learner,
    payload: Payload,
    memory: Memory | None,
    initial: Weights,
) -> Start:
    """Put together what a client starts from: what it received, else what it remembers, else the initial weights.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        payload: The sub-model as the server sends it. The link may lose or code some of it.
        memory: What the client kept from earlier rounds, by global position.
        initial: All weights before the first round, by scope and name.
    """
    family, submodel, link = federation.world.family, job.submodel, federation.link
    member, cutter, held = family.member(submodel), family.cutter, submodel.held
    names, shared = learner.names(member), learner.received(member)
    with blamed(job, "receiving"):
        known = _known(federation, job, shared, memory, initial) if link.tracks else {}
        arrival = link.down(payload, Trip(federation.world, job), known)
        arrived = arrival.payload
        if arrived and arrived.submodel == submodel and len(shared) == len(names):
            state = {name: arrived.weights[name] for name in names}
        else:
            state = cutter.gather(initial, submodel, names)
            if memory:
                state = cutter.overlay(state, held, memory.weights, memory.submodel.held)
            if arrived:
                state = cutter.overlay(state, held, arrived.weights, arrived.submodel.held)
        if arrived and link.coder:
            coded = {name: arrived.weights[name] for name in _coded(member, shared)}
            known = cutter.overlay(known, held, coded, arrived.submodel.held) if known else coded
        slots = None
        if memory and learner.keep_slots:
            slots = learner.start_slots(state, member)
            for slot, values in slots.items():
                slots[slot] = cutter.overlay(values, held, memory.slots.get(slot, {}), memory.submodel.held)
    steps = memory.steps if memory and learner.keep_slots else 0
    return Start(state, slots, steps, arrival.bytes, known)


def send(
    federation: Federation,
    job: Job,
    payload: Payload,
    known: Weights,
    memory: Memory | None,
    initial: Weights,
) -> Delivery:
    """Send what a client trained.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        payload: What it uploads.
        known: What both sides know that it started from (`Start.known`).
        memory: What the client kept from earlier rounds.
        initial: All weights before the first round.
    """
    link, cutter, held = federation.link, federation.world.family.cutter, job.submodel.held
    residual = _recalled(federation, job, "residual", known, memory) if link.feedback else {}
    lost = residual
    with blamed(job, "sending"):
        beside = [cutter.narrow(one, held, payload.submodel.held) if one else one for one in (known, residual)]
        arrival = link.up(payload, Trip(federation.world, job, up=True), *beside)
        if arrival.payload:
            if link.codec:  # A codec's range may exceed that of the numbers it decodes to.
                check_sent(job, arrival.payload.weights.values())
            if arrival.error:  # The residual of what did not arrive stays as it was.
                lost = cutter.overlay(lost, held, arrival.error, arrival.payload.submodel.held)
        slots = {"residual": lost} if lost else {}
        if link.tracks and known:  # Kept as the change since the beginning, so that an empty slot is zero.
            first = cutter.gather(initial, job.submodel, list(known))
            slots["received"] = {name: value - first[name] for name, value in known.items()}
    sent = (arrival.payload,) if arrival.payload else ()
    return Delivery(sent, arrival.bytes, arrival.payload is payload, slots)


def remember(
    federation: Federation,
    job: Job,
    learner: Learner,
    trained: State,
    slots: OptimiserState,
    steps: int,
    kept: Slots,
    memory: Memory | None,
    initial: Weights,
) -> Memory | None:
    """Return what a client keeps for its next round, or None if that is nothing.

    Positions that it did not hold this time stay as they were.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        learner: How it trained.
        trained: Its weights after training, at least those that `names_kept` names.
        slots: Its optimizer slots after training.
        steps: Its optimizer steps so far (`steps_behind`).
        kept: What it keeps because of the link (`Delivery.slots`).
        memory: What it kept from earlier rounds.
        initial: All weights before the first round.
    """
    member = federation.world.family.member(job.submodel)
    weights = {name: trained[name].clone() for name in names_kept(federation, learner, member)}
    if not weights and not kept and not learner.keep_slots and not learner.counts_steps:
        return None
    own = {**slots, **kept} if learner.keep_slots else kept
    new = Memory(job.submodel, weights, own, steps if _counts_steps(learner) else 0, job.round)
    if memory is None or not (weights or own) or memory.submodel.index == new.submodel.index:
        return new
    return _joined(federation, memory, new, initial)


def names_kept(federation: Federation, learner: Learner, member: Member) -> tuple[str, ...]:
    """Return the weights that a client keeps for its next round: all that it trained where a link may lose some."""
    if not federation.link.lossy:
        return learner.kept(member)
    return tuple(name for name in learner.names(member) if name not in member.carried)


def steps_behind(memory: Memory | None, learner: Learner, batches: int) -> int:
    """Return a client's optimizer steps after this round's batches, with those of earlier rounds if it counts them.

    Where neither its slots nor the merge depend on earlier rounds, it starts from 0 in every round.
    """
    before = memory.steps if memory and _counts_steps(learner) else 0
    return before + learner.moves(batches)


def update_of(job: Job, learner: Learner, sent: tuple[Payload, ...], steps: int, batches: int) -> Update:
    """Return what the merge is given of a job, whose client has taken `steps` optimizer steps so far."""
    return Update(job, sent, steps, learner.pace(batches), times=learner.times)


def own_state(federation: Federation, server: Server, job: Job, device: torch.device) -> State:
    """Return the net of a job as its client holds it, with what the server has of it now, over a link without loss."""
    world = federation.world
    learner = federation.method.learner(job, world)
    names = learner.received(world.family.member(job.submodel))
    cut = world.family.cutter.gather(server.weights, job.submodel, names)
    near = replace(federation, link=PERFECT)
    payload, memory = Payload(job.submodel, cut), memory_of(server, job)
    return receive(near, job, learner, payload, memory, federation.initial_on(device)).state


@contextmanager
def blamed(job: Job, stage: str) -> Iterator[None]:
    """Raise any error inside as a TrainingError that names the client, the round (from 1) and the stage."""
    try:
        yield
    except FedquiltError:
        raise
    except Exception as error:
        raise TrainingError(
            f"client {job.client.id} (budget {job.client.budget}) failed in round {job.round + 1} while {stage}: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_sent(job: Job, weights: Iterable[Tensor]) -> None:
    """Refuse weights that are not finite before they reach the server."""
    sent = list(weights)
    # One transfer from the device decides. A norm may be infinite although its weights are not.
    norms = torch._foreach_norm(sent) if sent else ()
    if not sent or bool(torch.stack(list(norms)).isfinite().all()):
        return
    if not all(bool(weight.isfinite().all()) for weight in sent):
        raise TrainingError(
            f"client {job.client.id} (budget {job.client.budget}) sent weights that are not finite in round "
            f"{job.round + 1}; they were refused, and the server's state is that of the round before."
        )


def _counts_steps(learner: Learner) -> bool:
    return learner.keep_slots or learner.counts_steps


def _coded(member: Member, names: Sequence[str]) -> list[str]:
    """Return the weights whose changes a link may code. Norm statistics and constants are sent as they are."""
    trainable = set(member.trainable)
    return [name for name in names if name in trainable]


def _known(
    federation: Federation, job: Job, names: Sequence[str], memory: Memory | None, initial: Weights
) -> dict[str, Tensor]:
    """Return what both sides know that a client received last, else the initial weights, which both have."""
    family = federation.world.family
    first = family.cutter.gather(initial, job.submodel, _coded(family.member(job.submodel), names))
    since = _recalled(federation, job, "received", first, memory)
    return {name: value + since[name] for name, value in first.items()}


def _recalled(federation: Federation, job: Job, slot: str, like: Weights, memory: Memory | None) -> dict[str, Tensor]:
    """Return a slot of a client's memory at a job's positions, zero where it has nothing."""
    found = {name: torch.zeros_like(value) for name, value in like.items()}
    if memory and slot in memory.slots:
        there = memory.slots[slot], memory.submodel.held
        found = federation.world.family.cutter.overlay(found, job.submodel.held, *there)
    return found


def _joined(federation: Federation, old: Memory, new: Memory, initial: Weights) -> Memory:
    """Return both memories by global position. Where they overlap the new one counts."""
    family = federation.world.family
    cutter = family.cutter
    index = cutter.union(old.submodel.index, new.submodel.index)
    arch = replace(new.submodel.arch, widths=tuple((axis, len(kept)) for axis, kept in index.items()))
    both = replace(new.submodel, arch=arch, index=index)

    def joined(base: Weights, before: Weights, after: Weights) -> dict[str, Tensor]:
        under = cutter.overlay(base, index, before, old.submodel.index)
        return cutter.overlay(under, index, after, new.submodel.index)

    # Between two cuts there are pairs of positions that neither held. There a client has its initial weights.
    weights = joined(cutter.gather(initial, both, list(new.weights)), old.weights, new.weights)
    sizes, slots = family.layout.sizes | arch.sizes, {}
    for slot, values in new.slots.items():
        empty = {name: v.new_zeros(family.layout.shape(name, sizes)) for name, v in values.items()}
        slots[slot] = joined(empty, old.slots.get(slot, {}), values)
    return replace(new, submodel=both, weights=weights, slots=slots)
