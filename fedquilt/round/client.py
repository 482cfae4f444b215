"""The steps of one client in a round: receive, train, send, remember.

Each of these is a function of values, so that an engine that simulates clients and a real device
run the same code. A client has its memory of earlier rounds and the initial weights, which the
server sent it once. Training in between is the engine's: one client after another, or many as one
stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import DivergenceError, FedquiltError, TrainingError
from fedquilt.errors.faults import is_out_of_memory, memory_text
from fedquilt.family.member import Member
from fedquilt.names import said
from fedquilt.round.budgets import learner_of
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Transmission
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimiserState, State
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

    state: State
    slots: OptimiserState | None  # Optimizer slots that it remembers. None: they are empty.
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
        """Return the weights and slots that do not change while the client trains."""
        return Received(self.state, self.state_slots)


@dataclass(frozen=True)
class Delivery:
    """Result of an upload: the payload that arrived, its bytes, and what the client keeps."""

    sent: tuple[Payload, ...]  # The payload as it arrived, or nothing.
    bytes: int  # Bytes that arrived.
    intact: bool  # True if it arrived as it was sent.
    slots: Slots = field(default_factory=dict)  # Slots that the client keeps for the link.


def memory_of(server: Server, job: Job) -> ClientState | None:
    """Return the memory that a job's client has of the net that it trains."""
    return server.memory.get((job.client.id, job.submodel.scope))


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
    rounds, or else the initial weight.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        payload: The sub-model as the server sends it. The link may lose or code some of it.
        memory: What the client kept from earlier rounds, by global position.
        initial: All weights before the first round, by scope and name.
    """
    family, submodel, link = federation.world.family, job.submodel, federation.link
    member, cutter, index = family.member(submodel), family.cutter, submodel.held
    names, shared = learner.names(member), learner.received(member)
    with blamed(job, "receiving"):
        reference = known_weights(federation, job, shared, memory, initial) if link.tracks else {}
        arrival = link.down(
            replace(payload, first={}), Transmission(federation.world, job), reference
        )
        arrived = arrival.payload
        if arrived and arrived.submodel == submodel and len(shared) == len(names):
            state = {name: arrived.weights[name] for name in names}
        else:
            state = cutter.gather(initial, submodel, names)
            if memory:
                state = cutter.overlay(state, index, memory.weights, memory.submodel.held)
            state |= payload.first
            if arrived:
                state = cutter.overlay(state, index, arrived.weights, arrived.submodel.held)
        reference = known_after(federation, job, shared, arrived, reference)
        slots = None
        if memory and learner.keep_slots:
            slots = learner.start_slots(state, member)
            for slot, values in slots.items():
                slots[slot] = cutter.overlay(
                    values, index, memory.slots.get(slot, {}), memory.submodel.held
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

    They are empty if no codec needs them.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        names: Weights that the client receives.
        arrived: What arrived. None: nothing.
        known: The weights before the download (`known_weights`).
    """
    if arrived is None or federation.link.coder is None:
        return known
    family = federation.world.family
    coded = {name: arrived.weights[name] for name in _coded(family.member(job.submodel), names)}
    if not known:
        return coded
    return family.cutter.overlay(known, job.submodel.held, coded, arrived.submodel.held)


def first_names(
    federation: Federation, job: Job, learner: Learner, memory: ClientState | None
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
    memory: ClientState | None,
) -> dict[str, State]:
    """Return the method's slots at a job's positions.

    Values that did not arrive are those that the client remembers, or else zero.
    """
    cutter, index = federation.world.family.cutter, job.submodel.held
    names = learner.slotted(federation.world.family.member(job.submodel))
    weights = {name: state[name] for name in names}
    state_slots = {}
    for slot in learner.state.slots:
        values = arrived.slots.get(slot) if arrived and slot in learner.state.slots_down else None
        if arrived and values is not None and arrived.submodel == job.submodel:
            state_slots[slot] = dict(values)
            continue
        state_slots[slot] = _recalled(federation, job, slot, weights, memory)
        if arrived and values is not None:
            state_slots[slot] = cutter.overlay(
                state_slots[slot], index, values, arrived.submodel.held
            )
    return state_slots


def _state_extras(learner: Learner, arrived: Payload | None, memory: ClientState | None) -> Extras:
    """Return the method's extras. Those that did not arrive are taken from the client's memory."""
    extras = {**(memory.extras if memory else {}), **(arrived.extras if arrived else {})}
    names = (*learner.state.extras_down, *learner.state.extras_kept)
    return {name: extras[name] for name in names if name in extras}


def finish(
    job: Job, learner: Learner, start: Start, trained: State, batches: int, passes: Results
) -> Left:
    """Return the state of its method that a client keeps and sends.

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
    wanted: Submodel,
    weights: Weights,
    left: Left,
) -> Payload:
    """Return the payload that a client uploads.

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
    narrow, index = federation.world.family.cutter.narrow, job.submodel.held
    slots = {slot: narrow(values, index, wanted.held) for slot, values in left.sent.items()}
    coded = tuple(name for name in learner.state.coded_extras if name in left.sent_extras)
    return Payload(wanted, weights, slots, left.sent_extras, coded)


def untrained_upload(
    federation: Federation, job: Job, learner: Learner, wanted: Submodel, start: Start
) -> int:
    """Return the bytes of an upload if training changed nothing, without the extras of the method.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it would train.
        wanted: Positions that are sent.
        start: What it starts from.
    """
    family, index = federation.world.family, job.submodel.held
    member = family.member(job.submodel)

    def cut(names: Iterable[str], values: Weights) -> dict[str, Tensor]:
        return family.cutter.narrow({name: values[name] for name in names}, index, wanted.held)

    slots = {slot: cut(learner.slotted(member), start.state) for slot in learner.state.slots_up}
    payload = Payload(wanted, cut(learner.sent(member), start.state), slots)
    with blamed(job, "sending"):
        trip = Transmission(federation.world, job, up=True)
        return federation.link.up(payload, trip, cut(start.known, start.known)).bytes


def send(
    federation: Federation,
    job: Job,
    payload: Payload,
    known: Weights,
    memory: ClientState | None,
    initial: Weights,
) -> Delivery:
    """Send a client's trained weights to the server.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        payload: What it uploads.
        known: What both sides know that it started from (`Start.known`).
        memory: What the client kept from earlier rounds.
        initial: All weights before the first round.
    """
    link, cutter, index = federation.link, federation.world.family.cutter, job.submodel.held
    residual = _recalled(federation, job, "residual", known, memory) if link.feedback else {}
    lost = residual
    with blamed(job, "sending"):
        references = [
            cutter.narrow(values, index, payload.submodel.held) if values else values
            for values in (known, residual)
        ]
        arrival = link.up(payload, Transmission(federation.world, job, up=True), *references)
        if arrival.payload:
            if link.codec:  # A codec's range may exceed that of the numbers it decodes to.
                check_sent(job, arrival.payload.weights.values())
                check_state(job, in_slots(arrival.payload.slots))
            if arrival.error:  # The residual of what did not arrive stays as it was.
                lost = cutter.overlay(lost, index, arrival.error, arrival.payload.submodel.held)
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
    trained: State,
    slots: OptimiserState,
    steps: int,
    kept: Slots,
    memory: ClientState | None,
    initial: Weights,
    left: Left = NOTHING_LEFT,
) -> ClientState | None:
    """Return the memory that a client keeps for its next round, or None if it keeps nothing.

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
    all_slots = {**slots, **kept} if learner.keep_slots else kept
    counted = steps if _counts_steps(learner) else 0
    new = ClientState(job.submodel, weights, all_slots, counted, job.round, left.kept_extras)
    if memory is None or not (weights or all_slots) or _covers(new, memory):
        return new
    return joined_states(federation, memory, new, initial)


def _covers(new: ClientState, old: ClientState) -> bool:
    """Return True if a memory has all weights and positions of an older one."""
    same = new.submodel.index == old.submodel.index and old.weights.keys() <= new.weights.keys()
    return same and all(
        values.keys() <= new.slots.get(slot, {}).keys() for slot, values in old.slots.items()
    )


def kept_state(
    federation: Federation, learner: Learner, slots: Slots, extras: Extras, left: Left
) -> Left:
    """Return the state of its method that a client keeps.

    If the link may lose values, the client also keeps the state that it received. It replaces
    values that get lost in its next round.

    Args:
        federation: World, method and link.
        learner: How the client trained.
        slots: Slots that it started from.
        extras: Extras that it started from.
        left: What it left after training.
    """
    if not learner.state:
        return left
    kept_slots, kept_extras = dict(left.kept), dict(left.kept_extras)
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

    If the link may lose values, these are all weights that the client trained.

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
    earlier_steps = memory.steps if memory and _counts_steps(learner) else 0
    return earlier_steps + learner.moves(batches)


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
    """Return a job's net as its client would hold it after a download without loss.

    Args:
        federation: World, method and link. The link is not used.
        server: State that the client downloads from.
        job: The client and its sub-model.
        device: Device on which the weights are put together.
    """
    world = federation.world
    learner = learner_of(federation.method, job, world)
    names = learner.received(world.family.member(job.submodel))
    cut = world.family.cutter.gather(server.weights, job.submodel, names)
    near = replace(federation, link=PERFECT)
    payload, memory = Payload(job.submodel, cut), memory_of(server, job)
    return receive(near, job, learner, payload, memory, federation.initial_on(device)).state


@contextmanager
def blamed(job: Job, stage: str) -> Iterator[None]:
    """Raise any error inside as a TrainingError that names client, round and stage.

    Rounds are counted from 1 in the message.
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

    Values are not checked here.

    Args:
        job: What the client was asked to train.
        learner: It declares slots and extras.
        member: It has the shapes of the weights.
        left: State that the client keeps and sends.
    """
    client = f"client {job.client.id} (budget {job.client.budget}) of round {job.round + 1}"
    state = learner.state
    for verb, slots, declared in (
        ("keeps", left.kept, state.slots_kept),
        ("sends", left.sent, state.slots_up),
    ):
        if set(slots) != set(declared):
            raise TrainingError(
                f"{client} {verb} the slots {sorted(slots)}; "
                f"its learner declares {sorted(declared)}. "
                "MethodState.finish has to return those that are declared, and no others."
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


def _check_slot(what: str, values: Weights, learner: Learner, member: Member) -> None:
    names = learner.slotted(member)
    if set(values) != set(names):
        missing, unknown = sorted(set(names) - set(values)), sorted(set(values) - set(names))
        raise TrainingError(
            f"{what}, in which {missing or 'nothing'} is missing and {unknown or 'nothing'} is "
            "unknown; a tensor for "
            "every weight that is trained and travels both ways would work."
        )
    for name in names:
        if tuple(values[name].shape) != member.shape(name):
            raise TrainingError(
                f"{what}, in which {name!r} has the shape {tuple(values[name].shape)}; the shape "
                "of the weight that "
                f"it belongs to, {member.shape(name)}, would work."
            )


def check_state(job: Job, tensors: Iterable[Tensor]) -> None:
    """Refuse state of a method that is not finite before it reaches the server."""
    if not are_finite(tensors):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) left state of its method that is "
            "not finite in "
            f"round {job.round + 1}; it was refused, and the server's state is that of the round "
            "before. Finite "
            "values would work; a smaller learning rate may give them."
        )


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all values of floating-point tensors are finite."""
    real = [value for value in tensors if value.is_floating_point()]
    if not real:
        return True
    # Usually one transfer from the device is enough. A norm may overflow although all values are
    # finite, so that values are only looked at if a norm is infinite.
    norms = [norm.to(real[0].dtype) for norm in torch._foreach_norm(real)]
    if bool(torch.stack(norms).isfinite().all()):
        return True
    return all(bool(value.isfinite().all()) for value in real)


def check_sent(job: Job, weights: Iterable[Tensor]) -> None:
    """Refuse weights that are not finite before they reach the server."""
    if not are_finite(weights):
        raise DivergenceError(
            f"client {job.client.id} (budget {job.client.budget}) sent weights that are not finite "
            "in round "
            f"{job.round + 1}; they were refused, and the server's state is that of the round "
            "before."
        )


def _counts_steps(learner: Learner) -> bool:
    return learner.keep_slots or learner.counts_steps


def _coded(member: Member, names: Sequence[str]) -> list[str]:
    """Return the names of the weights whose changes a link may code.

    Norm statistics and constants are never coded. Weights that this member does not train are
    included, because other members train them.
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

    Before the first download these are the initial weights, which both have.
    """
    family = federation.world.family
    first = family.cutter.gather(initial, job.submodel, _coded(family.member(job.submodel), names))
    since = _recalled(federation, job, "received", first, memory)
    return {name: value + since[name] for name, value in first.items()}


def _recalled(
    federation: Federation, job: Job, slot: str, like: Weights, memory: ClientState | None
) -> dict[str, Tensor]:
    """Return a slot of a client's memory at a job's positions, zero where it has nothing."""
    recalled = {name: torch.zeros_like(value) for name, value in like.items()}
    if memory and slot in memory.slots:
        source = memory.slots[slot], memory.submodel.held
        recalled = federation.world.family.cutter.overlay(recalled, job.submodel.held, *source)
    return recalled


def joined_states(
    federation: Federation, old: ClientState, new: ClientState, initial: Weights
) -> ClientState:
    """Join two memories by global position. Where they overlap, the new one replaces the old."""
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
    sizes, slots = family.layout.sizes | arch.sizes, {}
    for slot in {**old.slots, **new.slots}:
        before, after = old.slots.get(slot, {}), new.slots.get(slot, {})
        values = {**before, **after}
        empty = {name: v.new_zeros(family.layout.shape(name, sizes)) for name, v in values.items()}
        slots[slot] = joined(empty, before, after)
    return replace(new, submodel=union, weights=weights, slots=slots)
