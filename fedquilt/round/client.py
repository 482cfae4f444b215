"""The steps of one client in a round: receive, train, send, remember.

Each of these is a function of values, so that an engine that simulates clients and a real device
run the same code. A client has its state from earlier rounds and the initial weights, which the
server sent it once. Training in between is the engine's: one client after another, or many as one
stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.family.member import Member
from fedquilt.round.budgets import learner_of
from fedquilt.round.client_checks import (
    blamed,
    check_sent,
    check_state,
)
from fedquilt.round.client_state import (
    counts_steps,
    covers,
    joined_states,
    memory_of,
    names_kept,
    recalled,
)
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Transmission
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimizerState, State
from fedquilt.round.training.state import Left, Received, Trained
from fedquilt.terms import (
    ClientState,
    Extras,
    Job,
    Payload,
    Server,
    Slots,
    Submodel,
    Update,
    Weights,
    in_slots,
)

Results = Mapping[str, Weights]  # Results of passes over samples, by the name of the pass.
NOTHING_LEFT = Left()


@dataclass(frozen=True)
class Start:
    """Weights, optimizer slots and received bytes at the start of a client's round."""

    state: State  # Weights that training starts from, by name.
    slots: OptimizerState | None  # Optimizer slots from earlier rounds. None: they are empty.
    steps: int  # Optimizer steps behind the slots.
    bytes: int  # Bytes that arrived.
    # Weights that server and client both know the client received. Empty unless a codec needs them.
    known: Weights = field(default_factory=dict)
    # Slots of the method, both those of the server and those of the client.
    state_slots: dict[str, State] = field(default_factory=dict)
    # Extras of the method, both those of the server and those of the client.
    extras: Extras = field(default_factory=dict)
    # Bytes of weights that it received for the first and only time. `bytes` includes them.
    first_bytes: int = 0

    @property
    def received(self) -> Received:
        """Return the starting weights and method slots, which stay fixed while the client trains.

        Objectives compare the changing weights with them.
        """
        return Received(self.state, self.state_slots)


@dataclass(frozen=True)
class AfterRound:
    """Values that a client has after training and sending, from which it keeps a part."""

    weights: State  # Trained weights by name, at least those that `names_kept` names.
    optimizer_slots: OptimizerState  # Slots of its optimizer, by slot and name.
    steps: int  # Its optimizer steps so far (`steps_behind`).
    link_slots: Slots = field(default_factory=dict)  # Slots kept for the link (`Delivery.slots`).
    left: Left = NOTHING_LEFT  # State of its method that it keeps (`kept_state`).


@dataclass(frozen=True)
class Delivery:
    """Result of an upload: the payload that arrived, its bytes, and what the client keeps."""

    sent: tuple[Payload, ...]  # The payload as it arrived, or nothing.
    bytes: int  # Bytes that arrived.
    intact: bool  # True if it arrived as it was sent.
    slots: Slots = field(default_factory=dict)  # Slots that the client keeps for the link.


def receive(
    federation: Federation,
    job: Job,
    learner: Learner,
    payload: Payload,
    memory: ClientState | None,
    initial: Weights,
) -> Start:
    """Return the state that a client starts training from.

    Each value is the one it received. If none arrived, it is the one it remembers from earlier
    rounds, or else the initial weight. The link simulates the download of `payload`.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        payload: The sub-model as the server sends it. The link may lose or code some of it, but
            `payload.first` always arrives.
        memory: What the client kept from earlier rounds, by global position. None: nothing.
        initial: All weights before the first round, by scope and name.
    """
    family = federation.world.family
    submodel = job.submodel
    link = federation.link
    member = family.member(submodel)
    cutter = family.cutter
    index = submodel.positions
    names = learner.names(member)
    shared = learner.received(member)
    with blamed(job, "receiving"):
        reference = known_weights(federation, job, shared, memory, initial) if link.tracks else {}
        arrival = link.down(
            replace(payload, first={}), Transmission(federation.world, job), reference
        )
        arrived = arrival.payload

        # Weights. If all of them arrived, nothing has to be filled in.
        if arrived and arrived.submodel == submodel and len(shared) == len(names):
            state = {name: arrived.weights[name] for name in names}
        else:
            state = cutter.gather(initial, submodel, names)
            if memory:
                state = cutter.overlay(state, index, memory.weights, memory.submodel.positions)
            state |= payload.first
            if arrived:
                state = cutter.overlay(state, index, arrived.weights, arrived.submodel.positions)

        # Weights that both sides know the client to have. Its upload is coded as changes of them.
        reference = known_after(federation, job, shared, arrived, reference)

        # State of the optimizer and of the method.
        slots = None
        if memory and learner.keep_slots:
            slots = learner.start_slots(state, member)
            for slot, values in slots.items():
                slots[slot] = cutter.overlay(
                    values, index, memory.slots.get(slot, {}), memory.submodel.positions
                )
        state_slots: dict[str, State] = {}
        extras: Extras = {}
        if learner.state:
            state_slots = _state_slots(federation, job, learner, state, arrived, memory)
            extras = _state_extras(learner, arrived, memory)

    steps = memory.steps if memory and learner.keep_slots else 0
    first = payload.first_bytes
    return Start(state, slots, steps, arrival.bytes + first, reference, state_slots, extras, first)


def known_after(
    federation: Federation,
    job: Job,
    names: Sequence[str],
    arrived: Payload | None,
    known: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the weights that both sides know the client received, after a download.

    They have only weights that a codec may code. If nothing arrived, or if no codec has an effect,
    the result is `known` itself.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        names: Weights that the client receives.
        arrived: What arrived. None: nothing.
        known: The weights before the download (`known_weights`). Empty: neither side keeps them.
    """
    if arrived is None or federation.link.coder is None:
        return known
    family = federation.world.family
    coded = {name: arrived.weights[name] for name in _coded(family.member(job.submodel), names)}
    if not known:
        return coded
    return family.cutter.overlay(known, job.submodel.positions, coded, arrived.submodel.positions)


def first_names(
    federation: Federation, job: Job, learner: Learner, memory: ClientState | None
) -> tuple[str, ...]:
    """Return the names of the weights that a client downloads because it has none of them yet.

    They are among those that the learner installs once, such as a private net. The result is empty
    if the learner installs nothing.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        memory: What the client kept from earlier rounds. None: nothing, so that all are downloaded.
    """
    names = learner.installed(federation.world.family.member(job.submodel))
    return tuple(name for name in names if memory is None or name not in memory.weights)


def _state_slots(
    federation: Federation,
    job: Job,
    learner: Learner,
    state: State,
    arrived: Payload | None,
    memory: ClientState | None,
) -> dict[str, State]:
    """Return the method's slots at a job's positions, by slot and name.

    Values that did not arrive are those that the client remembers, or else zero.

    Args:
        federation: World, method and link.
        job: It has the positions.
        learner: It declares the slots: those of the server, and those that clients keep.
        state: Weights of the client, whose shapes and types the slots have.
        arrived: What arrived. None: nothing.
        memory: What the client kept from earlier rounds. None: nothing.
    """
    cutter = federation.world.family.cutter
    index = job.submodel.positions
    names = learner.slotted(federation.world.family.member(job.submodel))
    weights = {name: state[name] for name in names}
    state_slots = {}
    for slot in learner.state.slots:
        values = arrived.slots.get(slot) if arrived and slot in learner.state.slots_down else None
        if arrived and values is not None and arrived.submodel == job.submodel:
            state_slots[slot] = dict(values)
            continue
        state_slots[slot] = recalled(federation, job, slot, weights, memory)
        if arrived and values is not None:
            state_slots[slot] = cutter.overlay(
                state_slots[slot], index, values, arrived.submodel.positions
            )
    return state_slots


def _state_extras(learner: Learner, arrived: Payload | None, memory: ClientState | None) -> Extras:
    """Return the method's extras by name. An extra that arrived replaces the remembered one.

    An extra that neither arrived nor is remembered is left out.

    Args:
        learner: It declares the extras: those of the server, and those that clients keep.
        arrived: What arrived. None: nothing.
        memory: What the client kept from earlier rounds. None: nothing.
    """
    extras = {**(memory.extras if memory else {}), **(arrived.extras if arrived else {})}
    names = (*learner.state.extras_down, *learner.state.extras_kept)
    return {name: extras[name] for name in names if name in extras}


def finish(
    job: Job, learner: Learner, start: Start, trained: State, batches: int, passes: Results
) -> Left:
    """Return the state of its method that a client keeps and sends, by `MethodState.finish`.

    It is empty if the method has no state on clients.

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
    weight = next(iter(trained.values()))
    steps = torch.tensor(learner.moves(batches), dtype=weight.dtype, device=weight.device)
    lr = torch.tensor(learner.mean_rate(batches), dtype=weight.dtype, device=weight.device)
    with blamed(job, "updating the method's state"):
        return learner.state.finish(
            Trained(start.state, trained, start.state_slots, start.extras, steps, lr, passes)
        )


def upload_of(
    federation: Federation,
    job: Job,
    learner: Learner,
    upload: Submodel,
    weights: Weights,
    left: Left,
) -> Payload:
    """Return the payload that a client uploads: weights, and the slots and extras of its method.

    Slots are cut down to the positions that are sent. Extras are sent whole.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        learner: How it trained.
        upload: Positions that are sent.
        weights: Weights that are sent, already narrowed to these positions.
        left: State of the method, at all positions that the client holds.
    """
    if not learner.state:
        return Payload(upload, weights)
    narrow = federation.world.family.cutter.narrow
    index = job.submodel.positions
    slots = {slot: narrow(values, index, upload.positions) for slot, values in left.sent.items()}
    coded = tuple(name for name in learner.state.coded_extras if name in left.sent_extras)
    return Payload(upload, weights, slots, left.sent_extras, coded)


def untrained_upload(
    federation: Federation, job: Job, learner: Learner, upload: Submodel, start: Start
) -> int:
    """Return the bytes of an upload if training changed nothing, without the extras of the method.

    The upload is simulated with the starting weights, so that losses of the link are included.
    Slots have the size that they will have.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it would train.
        upload: Positions that are sent.
        start: What it starts from.
    """
    family = federation.world.family
    index = job.submodel.positions
    member = family.member(job.submodel)

    def cut(names: Iterable[str], values: Weights) -> dict[str, Tensor]:
        return family.cutter.narrow({name: values[name] for name in names}, index, upload.positions)

    slots = {slot: cut(learner.slotted(member), start.state) for slot in learner.state.slots_up}
    payload = Payload(upload, cut(learner.sent(member), start.state), slots)
    with blamed(job, "sending"):
        transmission = Transmission(federation.world, job, up=True)
        return federation.link.up(payload, transmission, cut(start.known, start.known)).bytes


def send(
    federation: Federation,
    job: Job,
    payload: Payload,
    known: Weights,
    memory: ClientState | None,
    initial: Weights,
) -> Delivery:
    """Send a client's trained weights to the server over the simulated link.

    The result also has the slots that the client keeps for the link. `residual` is the error of
    coding, for error feedback. `received` is the change of `known` since the initial weights, if a
    codec needs it.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        payload: What it uploads.
        known: What both sides know that it started from (`Start.known`).
        memory: What the client kept from earlier rounds. None: nothing.
        initial: All weights before the first round, by scope and name.

    Raises:
        DivergenceError: Values that a codec decoded are not finite.
    """
    link = federation.link
    cutter = federation.world.family.cutter
    index = job.submodel.positions
    residual = recalled(federation, job, "residual", known, memory) if link.feedback else {}
    lost = residual
    with blamed(job, "sending"):
        references = [
            cutter.narrow(values, index, payload.submodel.positions) if values else values
            for values in (known, residual)
        ]
        arrival = link.up(payload, Transmission(federation.world, job, up=True), *references)
        if arrival.payload:
            if link.codec:  # A codec's range may exceed that of the numbers it decodes to.
                check_sent(job, arrival.payload.weights.values())
                check_state(job, in_slots(arrival.payload.slots))
            if arrival.error:  # The residual of what did not arrive stays as it was.
                lost = cutter.overlay(
                    lost, index, arrival.error, arrival.payload.submodel.positions
                )
        slots = {"residual": lost} if lost else {}
        # Stored as the change since the first round, so that an empty slot means zero.
        if link.tracks and known:
            first = cutter.gather(initial, job.submodel, list(known))
            slots["received"] = {name: value - first[name] for name, value in known.items()}
    sent = (arrival.payload,) if arrival.payload else ()
    return Delivery(sent, arrival.bytes, arrival.payload is payload, slots)


def remember(
    federation: Federation,
    job: Job,
    learner: Learner,
    after: AfterRound,
    memory: ClientState | None,
    initial: Weights,
) -> ClientState | None:
    """Return the state that a client keeps for its next round, or None if it keeps nothing.

    Positions that it did not hold this time stay as they were.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        learner: How it trained.
        after: What it has after training and sending.
        memory: What it kept from earlier rounds. None: nothing.
        initial: All weights before the first round, by scope and name.
    """
    member = federation.world.family.member(job.submodel)
    names = names_kept(federation, learner, member)
    weights = {name: after.weights[name].clone() for name in names}
    kept = {**after.link_slots, **after.left.kept}
    extras = after.left.kept_extras
    if not weights and not kept and not extras and not counts_steps(learner):
        return None
    all_slots = {**after.optimizer_slots, **kept} if learner.keep_slots else kept
    counted = after.steps if counts_steps(learner) else 0
    new = ClientState(job.submodel, weights, all_slots, counted, job.round, extras)
    if memory is None or not (weights or all_slots) or covers(new, memory):
        return new
    return joined_states(federation, memory, new, initial)


def update_of(
    job: Job, learner: Learner, sent: tuple[Payload, ...], steps: int, batches: int
) -> Update:
    """Return a client's update as the merge gets it.

    Args:
        job: What the client was asked to train.
        learner: How it trained.
        sent: The payload as it arrived, or nothing.
        steps: The client's optimizer steps so far (`steps_behind`).
        batches: Number of batches in this round.
    """
    return Update(job, sent, steps, learner.effective_steps(batches), times=learner.times)


def own_state(federation: Federation, server: Server, job: Job, device: torch.device) -> State:
    """Return the weights of a job's net as its client holds them after a download without loss.

    Weights that the client does not receive are those that it remembers, or else the initial ones.
    Nothing is trained.

    Args:
        federation: World, method and link. The link is not used.
        server: State that the client downloads from. It has the client states.
        job: The client and its sub-model.
        device: Device of the initial weights that fill in what is missing.

    Returns:
        Weights by name, without the scope.
    """
    world = federation.world
    learner = learner_of(federation.method, job, world)
    names = learner.received(world.family.member(job.submodel))
    cut = world.family.cutter.gather(server.weights, job.submodel, names)
    lossless = replace(federation, link=PERFECT)
    payload = Payload(job.submodel, cut)
    memory = memory_of(server, job)
    return receive(lossless, job, learner, payload, memory, federation.initial_on(device)).state


def _coded(member: Member, names: Sequence[str]) -> list[str]:
    """Return those of `names` whose changes a link may code, in the same order.

    They are trainable weights of the family. Norm statistics and constants are never coded. Weights
    that `member` itself does not train are included, because other members train them.
    """
    trainable = set(member.family.trainable)
    return [name for name in names if name in trainable]


def known_weights(
    federation: Federation,
    job: Job,
    names: Sequence[str],
    memory: ClientState | None,
    initial: Weights,
) -> dict[str, Tensor]:
    """Return the weights that server and client both know the client received last.

    Before the first download these are the initial weights, which both have. Only weights that a
    codec may code are included.

    Args:
        federation: World, method and link.
        job: It has the positions of the result.
        names: Weights that the client receives.
        memory: What the client kept from earlier rounds. Its slot `received` has the change since
            the initial weights. None: nothing.
        initial: All weights before the first round, by scope and name.
    """
    family = federation.world.family
    first = family.cutter.gather(initial, job.submodel, _coded(family.member(job.submodel), names))
    since = recalled(federation, job, "received", first, memory)
    return {name: value + since[name] for name, value in first.items()}
