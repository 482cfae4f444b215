"""The steps of one client in a round: receive, train, send, remember.

Each of these is a function of values, so that an engine that simulates clients and a real device run the same code. A
client has its memory of earlier rounds and the initial weights, which the server sent it once. Training in between is
the engine's: one client after another, or many as one stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import DivergenceError, FedquiltError, TrainingError
from fedquilt.family.member import Member
from fedquilt.faults import is_out_of_memory, memory_text
from fedquilt.names import said
from fedquilt.round.budgets import learner_of
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Trip
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.round.training.state import Left, Received, Trained
from fedquilt.terms import (
    Extras,
    Job,
    Memory,
    Payload,
    Server,
    Slots,
    Submodel,
    Update,
    Weights,
    in_slots,
)

Results = Mapping[str, Weights]  # of passes over samples, by the name of the pass
NOTHING_LEFT = Left()


@dataclass(frozen=True)
class Start:
    """Weights, optimizer slots and received bytes at the start of a client's round."""

    state: State
    slots: OptimiserState | None  # Optimizer slots that it remembers. None: they are empty.
    steps: int  # Optimizer steps behind the slots.
    bytes: int  # Bytes that arrived.
    known: Weights = field(
        default_factory=dict
    )  # What both sides know that it received, where a codec needs it.
    state_slots: dict[str, State] = field(
        default_factory=dict
    )  # Slots of the method: the server's, and its own.
    extras: Extras = field(default_factory=dict)  # Extras of the method: the server's, and its own.
    first_bytes: int = (
        0  # Bytes of weights that it received for the first and only time; `bytes` has them too.
    )

    @property
    def received(self) -> Received:
        """Return what stays as it is while the client trains."""
        return Received(self.state, self.state_slots)


@dataclass(frozen=True)
class Delivery:
    """Result of an upload: the payload that arrived, its bytes, and what the client keeps."""

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
        arrival = link.down(replace(payload, first={}), Trip(federation.world, job), known)
        arrived = arrival.payload
        if arrived and arrived.submodel == submodel and len(shared) == len(names):
            state = {name: arrived.weights[name] for name in names}
        else:
            state = cutter.gather(initial, submodel, names)
            if memory:
                state = cutter.overlay(state, held, memory.weights, memory.submodel.held)
            state |= payload.first
            if arrived:
                state = cutter.overlay(state, held, arrived.weights, arrived.submodel.held)
        if arrived and link.coder:
            coded = {name: arrived.weights[name] for name in _coded(member, shared)}
            known = cutter.overlay(known, held, coded, arrived.submodel.held) if known else coded
        slots = None
        if memory and learner.keep_slots:
            slots = learner.start_slots(state, member)
            for slot, values in slots.items():
                slots[slot] = cutter.overlay(
                    values, held, memory.slots.get(slot, {}), memory.submodel.held
                )
        state_slots: dict[str, State] = {}
        extras: Extras = {}
        if learner.state:
            state_slots = _state_slots(federation, job, learner, state, arrived, memory)
            extras = _state_extras(learner, arrived, memory)
    steps = memory.steps if memory and learner.keep_slots else 0
    first = payload.first_bytes
    return Start(state, slots, steps, arrival.bytes + first, known, state_slots, extras, first)


def first_names(
    federation: Federation, job: Job, learner: Learner, memory: Memory | None
) -> tuple[str, ...]:
    """Return the names of the weights that a client downloads because it has none of them yet.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        memory: What the client kept from earlier rounds.
    """
    names = learner.installed(federation.world.family.member(job.submodel))
    return tuple(name for name in names if memory is None or name not in memory.weights)


def _state_slots(
    federation: Federation,
    job: Job,
    learner: Learner,
    state: State,
    arrived: Payload | None,
    memory: Memory | None,
) -> dict[str, State]:
    """Return the method's slots at a job's positions: what arrived, else what the client remembers, else zero."""
    cutter, held = federation.world.family.cutter, job.submodel.held
    names = learner.slotted(federation.world.family.member(job.submodel))
    like = {name: state[name] for name in names}
    found = {}
    for slot in learner.state.slots:
        values = arrived.slots.get(slot) if arrived and slot in learner.state.slots_down else None
        if arrived and values is not None and arrived.submodel == job.submodel:
            found[slot] = dict(values)
            continue
        found[slot] = _recalled(federation, job, slot, like, memory)
        if arrived and values is not None:
            found[slot] = cutter.overlay(found[slot], held, values, arrived.submodel.held)
    return found


def _state_extras(learner: Learner, arrived: Payload | None, memory: Memory | None) -> Extras:
    """Return the method's extras: what arrived, else what the client remembers."""
    known = {**(memory.extras if memory else {}), **(arrived.extras if arrived else {})}
    names = (*learner.state.extras_down, *learner.state.extras_kept)
    return {name: known[name] for name in names if name in known}


def finish(
    job: Job, learner: Learner, start: Start, trained: State, batches: int, passes: Results
) -> Left:
    """Return what a client keeps and sends of its method's state.

    Args:
        job: What the client was asked to train.
        learner: How it trained.
        start: What it started from.
        trained: Its weights after training.
        batches: Number of batches that it trained on.
        passes: Results of the learner's passes, by name.
    """
    if not learner.state:
        return Left()
    like = next(iter(trained.values()))
    steps = torch.tensor(learner.moves(batches), dtype=like.dtype, device=like.device)
    with blamed(job, "updating the method's state"):
        return learner.state.finish(
            Trained(
                start.state, trained, start.state_slots, start.extras, steps, learner.lr, passes
            )
        )


def upload_of(
    federation: Federation,
    job: Job,
    learner: Learner,
    wanted: Submodel,
    weights: Weights,
    left: Left,
) -> Payload:
    """Return what a client uploads.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        learner: How it trained.
        wanted: Positions that are sent.
        weights: Weights that are sent, already narrowed to these positions.
        left: State of the method, at all positions that the client holds.
    """
    if not learner.state:
        return Payload(wanted, weights)
    narrow, held = federation.world.family.cutter.narrow, job.submodel.held
    slots = {slot: narrow(values, held, wanted.held) for slot, values in left.sent.items()}
    coded = tuple(name for name in learner.state.coded_extras if name in left.sent_extras)
    return Payload(wanted, weights, slots, left.sent_extras, coded)


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
        beside = [
            cutter.narrow(one, held, payload.submodel.held) if one else one
            for one in (known, residual)
        ]
        arrival = link.up(payload, Trip(federation.world, job, up=True), *beside)
        if arrival.payload:
            if link.codec:  # A codec's range may exceed that of the numbers it decodes to.
                check_sent(job, arrival.payload.weights.values())
                check_state(job, in_slots(arrival.payload.slots))
            if arrival.error:  # The residual of what did not arrive stays as it was.
                lost = cutter.overlay(lost, held, arrival.error, arrival.payload.submodel.held)
        slots = {"residual": lost} if lost else {}
        if (
            link.tracks and known
        ):  # Kept as the change since the beginning, so that an empty slot is zero.
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
    left: Left = NOTHING_LEFT,
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
        left: What it keeps of its method's state (`kept_state`).
    """
    member = federation.world.family.member(job.submodel)
    weights = {name: trained[name].clone() for name in names_kept(federation, learner, member)}
    kept = {**kept, **left.kept}
    if not weights and not kept and not left.kept_extras and not _counts_steps(learner):
        return None
    own = {**slots, **kept} if learner.keep_slots else kept
    counted = steps if _counts_steps(learner) else 0
    new = Memory(job.submodel, weights, own, counted, job.round, left.kept_extras)
    if memory is None or not (weights or own) or _covers(new, memory):
        return new
    return _joined(federation, memory, new, initial)


def _covers(new: Memory, old: Memory) -> bool:
    """Return True if a memory has all weights and positions of an older one."""
    same = new.submodel.index == old.submodel.index and old.weights.keys() <= new.weights.keys()
    return same and all(
        values.keys() <= new.slots.get(slot, {}).keys() for slot, values in old.slots.items()
    )


def kept_state(
    federation: Federation, learner: Learner, slots: Slots, extras: Extras, left: Left
) -> Left:
    """Return what a client keeps of its method's state.

    Where a link may lose some, it also keeps what it received, to replace what is lost in its next round.

    Args:
        federation: World, method and link.
        learner: How the client trained.
        slots: Slots that it started from.
        extras: Extras that it started from.
        left: What it left after training.
    """
    if not learner.state:
        return left
    kept, kept_extras = dict(left.kept), dict(left.kept_extras)
    if federation.link.lossy:
        kept |= {slot: slots[slot] for slot in learner.state.slots_down}
        kept_extras |= {name: extras[name] for name in learner.state.extras_down if name in extras}
    # Copies, because an engine may use the memory of these tensors for the next clients.
    return replace(
        left,
        kept={
            slot: {name: value.clone() for name, value in values.items()}
            for slot, values in kept.items()
        },
        kept_extras={name: value.clone() for name, value in kept_extras.items()},
    )


def names_kept(federation: Federation, learner: Learner, member: Member) -> tuple[str, ...]:
    """Return the weights that a client keeps for its next round: all that it trained where a link may lose some."""
    if not federation.link.lossy:
        return learner.kept(member)
    constants = set(member.family.carried)
    return tuple(name for name in learner.names(member) if name not in constants)


def steps_behind(memory: Memory | None, learner: Learner, batches: int) -> int:
    """Return a client's optimizer steps after this round's batches, with those of earlier rounds if it counts them.

    Where neither its slots nor the merge depend on earlier rounds, it starts from 0 in every round.
    """
    before = memory.steps if memory and _counts_steps(learner) else 0
    return before + learner.moves(batches)


def update_of(
    job: Job, learner: Learner, sent: tuple[Payload, ...], steps: int, batches: int
) -> Update:
    """Return what the merge is given of a job, whose client has taken `steps` optimizer steps so far."""
    return Update(job, sent, steps, learner.pace(batches), times=learner.times)


def own_state(federation: Federation, server: Server, job: Job, device: torch.device) -> State:
    """Return the net of a job as its client holds it, with what the server has of it now, over a link without loss."""
    world = federation.world
    learner = learner_of(federation.method, job, world)
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
        who = f"client {job.client.id} (budget {job.client.budget})"
        when = f"in round {job.round + 1} while {stage}"
        if is_out_of_memory(error):
            raise TrainingError(f"{who} ran out of memory {when}. {memory_text(error)}") from error
        raise TrainingError(f"{who} failed {when}: {said(error)}") from error


def check_left(job: Job, learner: Learner, member: Member, left: Left) -> None:
    """Refuse state of a method that is not as its learner declares it. Values are not looked at."""
    who = f"client {job.client.id} (budget {job.client.budget}) of round {job.round + 1}"
    state = learner.state
    for what, found, declared in (
        ("keeps", left.kept, state.slots_kept),
        ("sends", left.sent, state.slots_up),
    ):
        if set(found) != set(declared):
            raise TrainingError(
                f"{who} {what} the slots {sorted(found)}; its learner declares {sorted(declared)}. "
                "MethodState.finish has to return those that are declared, and no others."
            )
        for slot, values in found.items():
            _check_slot(f"{who} {what} the slot {slot!r}", values, learner, member)
    for what, extras, names in (
        ("keeps", left.kept_extras, state.extras_kept),
        ("sends", left.sent_extras, state.extras_up),
    ):
        if unknown := sorted(set(extras) - set(names)):
            raise TrainingError(
                f"{who} {what} the extras {unknown}; its learner declares {sorted(names)}. "
                "MethodState.finish may return those that are declared."
            )


def _check_slot(what: str, values: Weights, learner: Learner, member: Member) -> None:
    names = learner.slotted(member)
    if set(values) != set(names):
        missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise TrainingError(
            f"{what}, in which {missing or 'nothing'} is missing and {unknown or 'nothing'} is unknown; a tensor for "
            "every weight that is trained and travels both ways would work."
        )
    for name in names:
        if tuple(values[name].shape) != member.shape(name):
            raise TrainingError(
                f"{what}, in which {name!r} has the shape {tuple(values[name].shape)}; the shape of the weight that "
                f"it belongs to, {member.shape(name)}, would work."
            )


def check_state(job: Job, tensors: Iterable[Tensor]) -> None:
    """Refuse state of a method that is not finite before it reaches the server."""
    if not are_finite(tensors):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) left state of its method that is not finite in "
            f"round {job.round + 1}; it was refused, and the server's state is that of the round before. Finite "
            "values would work; a smaller learning rate may give them."
        )


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all values of floating-point tensors are finite."""
    real = [value for value in tensors if value.is_floating_point()]
    if not real:
        return True
    # One transfer from the device decides. A norm may be infinite although its values are not.
    norms = [norm.to(real[0].dtype) for norm in torch._foreach_norm(real)]
    if bool(torch.stack(norms).isfinite().all()):
        return True
    return all(bool(value.isfinite().all()) for value in real)


def check_sent(job: Job, weights: Iterable[Tensor]) -> None:
    """Refuse weights that are not finite before they reach the server."""
    if not are_finite(weights):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) sent weights that are not finite in round "
            f"{job.round + 1}; they were refused, and the server's state is that of the round before."
        )


def _counts_steps(learner: Learner) -> bool:
    return learner.keep_slots or learner.counts_steps


def _coded(member: Member, names: Sequence[str]) -> list[str]:
    """Return the weights whose changes a link may code. Norm statistics and constants are sent as they are.

    Weights that the member does not train are among them, because others do.
    """
    trainable = set(member.family.trainable)
    return [name for name in names if name in trainable]


def _known(
    federation: Federation, job: Job, names: Sequence[str], memory: Memory | None, initial: Weights
) -> dict[str, Tensor]:
    """Return what both sides know that a client received last, else the initial weights, which both have."""
    family = federation.world.family
    first = family.cutter.gather(initial, job.submodel, _coded(family.member(job.submodel), names))
    since = _recalled(federation, job, "received", first, memory)
    return {name: value + since[name] for name, value in first.items()}


def _recalled(
    federation: Federation, job: Job, slot: str, like: Weights, memory: Memory | None
) -> dict[str, Tensor]:
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
    arch = replace(
        new.submodel.arch, widths=tuple((axis, len(kept)) for axis, kept in index.items())
    )
    both = replace(new.submodel, arch=arch, index=index)

    def joined(base: Weights, before: Weights, after: Weights) -> dict[str, Tensor]:
        under = cutter.overlay(base, index, before, old.submodel.index)
        return cutter.overlay(under, index, after, new.submodel.index)

    # Between two cuts there are pairs of positions that neither held. There a client has its initial weights. Weights
    # of a variant that it trained before, and not this time, are kept too.
    names = list({**old.weights, **new.weights})
    weights = joined(cutter.gather(initial, both, names), old.weights, new.weights)
    sizes, slots = family.layout.sizes | arch.sizes, {}
    for slot in {**old.slots, **new.slots}:
        before, after = old.slots.get(slot, {}), new.slots.get(slot, {})
        values = {**before, **after}
        empty = {name: v.new_zeros(family.layout.shape(name, sizes)) for name, v in values.items()}
        slots[slot] = joined(empty, before, after)
    return replace(new, submodel=both, weights=weights, slots=slots)
