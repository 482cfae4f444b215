"""Clients of equal shape as one: one gradient and one optimiser step for all of them, side by side or stacked.

Clients stack when their member, learner and optimiser age are equal; within a stack, a step groups those whose batch
has the same size, so that unequal amounts of data are exact: padding a batch would change its statistics.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from fedquilt import noise
from fedquilt.devices import onto
from fedquilt.engines.examiner import Examiner
from fedquilt.engines.exams import Exam
from fedquilt.engines.lines import Inner, Lines
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation, is_same
from fedquilt.engines.units import (
    CaptureError,
    Layout,
    Shape,
    Unit,
    fails_alone,
    replay_time,
    stacked,
)
from fedquilt.errors import FedquiltError, first_line
from fedquilt.family.laid import LayoutError
from fedquilt.family.member import Member
from fedquilt.round.budgets import learner_of
from fedquilt.round.client import (
    NOTHING_LEFT,
    Start,
    are_finite,
    blamed,
    check_left,
    check_state,
    kept_state,
    memory_of,
    names_kept,
    receive,
    remember,
    send,
    steps_behind,
    update_of,
    upload_of,
)
from fedquilt.round.engine import Outcome
from fedquilt.round.merge import Fold
from fedquilt.round.serve import Kind, Score
from fedquilt.round.training.augmentation import augmented
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.regions import Region
from fedquilt.round.training.state import Left, Received, Trained
from fedquilt.round.training.step import Batch, clipped, gradient, move, run_pass, teach
from fedquilt.terms import Arch, Extras, Job, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.engines.options import EngineOptions

_log = logging.getLogger(__name__)
_STACKED = (
    256 << 20
)  # bytes of a stack on a CPU: with more, its pages are handed out and taken back all the time
_KEPT = 4  # times a stack's memory that idle units may hold
_CROWD = 4  # clients that layouts are timed with, at least, and that a group has on average
_AHEAD = 4
_READ = ("inputs", "targets", "scale")  # Fields of the data that a recorded step reads.
_REGIONS = (
    2 << 30
)  # bytes of masks that are kept: drawn phases have hundreds, each of a byte a weight
_NO_RULE = "Batching rule not implemented"  # how vmap says that it cannot stack an operation
_SLOW = "There is a performance drop because we have not yet implemented the batching rule"  # and that it can, slowly


class _UnstackableError(FedquiltError):
    """A member with an operation that vmap cannot stack."""

    def __init__(self, arch: Arch, cause: Exception) -> None:
        super().__init__(first_line(cause))
        self.arch = arch


@dataclass
class Stack:
    """Clients that train as one: every tensor has them in its first dimension."""

    server: Server  # what they started from
    received_bytes: list[int]  # of each client
    first_bytes: list[int]  # of each client, those of `received_bytes` that it gets once
    learner: Learner
    jobs: list[Job]
    state: State
    slots: OptimiserState | None  # None: empty
    received: Received
    extras: list[Extras]  # of each client, state of the method that is not cut
    known: list[
        Weights
    ]  # of each client, what the server knows that it received, where links code changes
    held: Tensor  # (client, class)
    keys: Tensor  # (client,)
    shares: Tensor  # (client,) of the clients' nets, which the scaler divides by
    batches: list[list[Tensor]]  # of each client, the positions of its samples in the pool
    ages: list[
        int
    ]  # the optimiser steps behind each client's slots; all equal where a step depends on them
    losses: Tensor  # (step, client)
    passes: list[dict[str, State]]  # of each client, the results of passes that are not steps
    left: list[Left] = field(
        default_factory=list
    )  # of each client, what it keeps and sends of the method's state

    @property
    def arch(self) -> Arch:
        return self.jobs[0].submodel.arch

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Of each client, how many samples each of its batches has."""
        return [[len(batch) for batch in own] for own in self.batches]

    def sizes_at(self, step: int) -> list[int]:
        """How many samples each client that still trains has in this step."""
        return [own[step] for own in self.sizes if step < len(own)]

    def groups(self, step: int) -> list[list[int]]:
        """The clients that still train at this step, by the size of their batch."""
        by_size: dict[int, list[int]] = {}
        for client, own in enumerate(self.sizes):
            if step < len(own):
                by_size.setdefault(own[step], []).append(client)
        return list(by_size.values())


@dataclass
class Vectorised(Simulation):
    """Trains stacks of clients. `memory` bounds a stack: more clients than fit are trained in several."""

    memory: int = 0  # bytes stacks may take, by the family's own estimate; 0: 256 MiB, or half of what a GPU has free
    record: bool | None = None  # steps are recorded and replayed; None: on a GPU
    layout: Literal["auto", "alone", "laid", "stack"] = "auto"

    def __post_init__(self) -> None:
        self.examiner = Examiner(self)
        super().__post_init__()
        self.forget_family()
        # Torch warns where it runs an operation client by client. Clients that are not stacked run likewise.
        warnings.filterwarnings("ignore", _SLOW)
        free = (
            torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else _STACKED
        )
        self.memory = self.memory or free

    @classmethod
    def create(cls, data: FederatedData, options: EngineOptions) -> Self:
        return cls(data, options.device, options.precision, memory=options.memory)

    def forget_family(self) -> None:
        super().forget_family()
        self._idle: dict[Shape, list[Unit]] = {}
        self._refused: dict[Shape, str] = {}
        self._chosen: dict[Shape, Layout] = {}
        self.single: set[Arch] = set()  # members that vmap cannot stack
        self.warm: set[Hashable] = set()  # what units have recorded before
        self.tails: Counter[tuple[Shape, int]] = (
            Counter()
        )  # batches that were not full, by their size
        self._regions: dict[Hashable, Tensor] = {}
        self._nested: WeakValueDictionary[Hashable, Inner] = WeakValueDictionary()
        self._truth = Sequential(
            self.data, self.device, self.precision
        )  # trains what cannot be stacked
        self._truth._is_public = self._is_public
        self.examiner.forget()
        self._template: Weights | None = None

    @property
    def template(self) -> Weights:
        """Return weights of the whole net, from which units take their shapes."""
        if self._template is None:
            self._template = self.world.family.init(0, self.device, self.world.dtype)
        return self._template

    def with_data(self, data: FederatedData) -> Self:
        """Return an engine for other samples, which takes over what was recorded if it still holds.

        A recorded step reads samples and their scale where they are in memory, so that it serves any partition of the
        same pool.
        """
        other = super().with_data(data)
        if other is not self and all(
            is_same(getattr(other.data, name), getattr(self.data, name)) for name in _READ
        ):
            other.data = replace(
                other.data, scale=self.data.scale
            )  # An equal one elsewhere would not be read.
            other._federation = self._federation
            for name in ("_idle", "_refused", "_chosen", "single", "warm", "tails"):
                setattr(other, name, getattr(self, name))
            for unit in (unit for units in other._idle.values() for unit in units):
                unit.engine = other
            self.forget_family()
        return other

    # --- training ----------------------------------------------------------------------------------------------

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        alike: dict[tuple[Arch, Learner, int], list[Job]] = {}
        shares: dict[Job, float] = {}
        for job in jobs:
            learner = learner_of(self.method, job, self.world)
            shares[job] = learner.share
            age = self._age(server, job, learner) if learner.local.optimiser.ages else 0
            alike.setdefault((job.submodel.arch, learner, age), []).append(job)
        for wave in self._waves(alike):
            stackable = [
                (learner, some)
                for learner, some in wave
                if some[0].submodel.arch not in self.single
            ]
            while stackable:
                try:
                    with self.computing():
                        stacks = self._run(server, stackable, shares)
                except (
                    _UnstackableError
                ) as error:  # nothing has been added yet: the rest of the wave once more
                    self.set_apart(error.arch, str(error))
                    stackable = [
                        (learner, some)
                        for learner, some in stackable
                        if some[0].submodel.arch != error.arch
                    ]
                    continue
                for (
                    stack
                ) in stacks:  # a GPU is still training while its results are put in their place
                    self._fold(stack, fold, outcome)
                self._check(stacks, outcome)
                break
            apart = [job for _, some in wave for job in some if job.submodel.arch in self.single]
            self._truth.begin(self.federation)
            self._truth.extra_shapes = self.extra_shapes
            self._truth._train(server, apart, fold, outcome)

    def _waves(
        self, alike: Mapping[tuple[Arch, Learner, int], list[Job]]
    ) -> Iterator[list[tuple[Learner, list[Job]]]]:
        """Stacks that are trained at the same time: on a CPU one, on a GPU as many as fit."""
        wave: list[tuple[Learner, list[Job]]] = []
        room = 0
        needs = {
            key: self.need(key[0], key[1].local.batch_size * self._sets(*key[:2]), key[1].num_slots)
            for key in alike
        }
        for key in sorted(
            alike, key=lambda key: -needs[key]
        ):  # the largest take longest: they begin
            (arch, learner, _), members, need = key, alike[key], needs[key]
            for some in self._split(arch, learner, members, max(1, self.memory // need)):
                if wave and (self.device.type != "cuda" or len(some) * need > room):
                    yield wave
                    wave, room = [], 0
                room = (room if wave else self.memory) - len(some) * need
                wave.append((learner, some))
        if wave:
            yield wave

    def _split(
        self, arch: Arch, learner: Learner, jobs: list[Job], most: int
    ) -> Iterator[list[Job]]:
        """Jobs of one member as the stacks they are trained in."""
        for alike in self._by_samples(jobs):
            while alike:
                size = min(len(alike), most)
                if self.recorded:  # in powers of two: cohorts change from round to round, and few sizes need recording
                    size = 1 << size.bit_length() - 1
                if self._layout(arch, learner, size) == "alone":
                    size = 1
                yield alike[:size]
                alike = alike[size:]

    def _by_samples(self, jobs: list[Job]) -> list[list[Job]]:
        """Clients by how many samples they have, if that makes few groups: tails of one size can be recorded, too.

        Else those with few samples first: what is recorded lasts for everyone as long as for the largest.
        """
        if not self.recorded:
            return [jobs]
        by_size = sorted(jobs, key=lambda job: job.client.size)
        alike = [list(some) for _, some in groupby(by_size, key=lambda job: job.client.size)]
        return alike if _CROWD * len(alike) <= len(jobs) else [by_size]

    @staticmethod
    def _age(server: Server, job: Job, learner: Learner) -> int:
        """The optimiser steps behind the slots a client starts with."""
        memory = memory_of(server, job) if learner.keep_slots else None
        return memory.steps if memory else 0

    def _sets(self, arch: Arch, learner: Learner) -> int:
        return learner.activation_sets(self.world.family.member(arch))

    def need(self, arch: Arch, batch_size: int, slots: int) -> int:
        """The bytes one client of a member takes in training."""
        member = self.world.family.member(arch)
        # A pure step holds old and new weights and slots at once, and what was received; costs are in float32.
        held = 2 * member.weight_bytes * (2 + slots) + member.activations(batch_size)
        return max(1, held * self.world.dtype.itemsize // 4)

    def set_apart(self, arch: Arch, why: str) -> None:
        self.single.add(arch)
        _log.warning("clients of one member are trained one after another: %s", why)

    def _stack(
        self, server: Server, learner: Learner, jobs: list[Job], shares: Mapping[Job, float]
    ) -> Stack:
        device = self.device
        starts = [
            receive(
                self.federation,
                job,
                learner,
                self.payload(server, job, learner),
                memory_of(server, job),
                self.initial,
            )
            for job in jobs
        ]
        state = stacked([start.state for start in starts])
        batches = [
            self.batches(job, learner, start.extras)
            for job, start in zip(jobs, starts, strict=True)
        ]
        return Stack(
            server=server,
            received_bytes=[start.bytes for start in starts],
            first_bytes=[start.first_bytes for start in starts],
            learner=learner,
            jobs=jobs,
            state=state,
            slots=self._slots(starts, learner, self.world.family.member(jobs[0].submodel)),
            received=Received(state, self._state_slots(starts, learner)),
            extras=[start.extras for start in starts],
            known=[start.known for start in starts],
            held=onto(device, torch.stack([self.held(job.client.id) for job in jobs])),
            keys=onto(device, torch.tensor([self.keys(job)[1] for job in jobs])),
            shares=onto(
                device, torch.tensor([shares[job] for job in jobs], dtype=self.world.dtype)
            ),
            batches=batches,
            ages=[start.steps for start in starts],
            losses=torch.zeros(
                max(map(len, batches)), len(jobs), dtype=self.world.dtype, device=device
            ),
            passes=[{} for _ in jobs],
        )

    @staticmethod
    def _state_slots(starts: Sequence[Start], learner: Learner) -> dict[str, State]:
        """Return the method's slots of a whole stack."""
        return {
            slot: stacked([start.state_slots[slot] for start in starts])
            for slot in learner.state.slots
        }

    def _slots(
        self, starts: Sequence[Start], learner: Learner, member: Member
    ) -> OptimiserState | None:
        """The optimisers' memory of a whole stack; None if nobody has any."""
        if all(start.slots is None for start in starts):
            return None
        own = [start.slots or learner.start_slots(start.state, member) for start in starts]
        return {slot: stacked([slots[slot] for slots in own]) for slot in own[0]}

    def _run(
        self, server: Server, work: list[tuple[Learner, list[Job]]], shares: Mapping[Job, float]
    ) -> list[Stack]:
        """Train stacks: those that can be recorded side by side, the others one after another."""
        playing, plain = [], []
        for learner, jobs in work:
            stack = self._stack(server, learner, jobs, shares)
            if learner.lesson:
                self._teach(stack, learner.lesson)
            self._run_passes(stack, learner.before)
            unit = self._unit(stack)
            if unit is None:
                plain.append(stack)
                continue
            unit.load(stack)
            playing.append((stack, unit))
            for step in range(_AHEAD):  # a GPU has something to do while the others are made ready
                self._play(stack, unit, step)
        for step in range(_AHEAD, max((len(stack.losses) for stack, _ in playing), default=0)):
            for stack, unit in playing:
                self._play(stack, unit, step)
        for _, unit in playing:
            unit.unload()
            self._put_by(unit)
        for stack in plain:
            self._run_one(stack)
        stacks = [*(stack for stack, _ in playing), *plain]
        for stack in stacks:
            self._run_passes(stack, stack.learner.after)
            self._finish(stack)
        return stacks

    def _teach(self, stack: Stack, lesson: Learner) -> None:
        """Train the clients of a stack on public samples before they train on their own."""
        public = self.on_public(self.world)
        public.begin(self.federation)
        public.extra_shapes = self.extra_shapes
        batches = [
            public.batches(job, lesson, own)
            for job, own in zip(stack.jobs, stack.extras, strict=True)
        ]
        losses = torch.zeros(
            max(map(len, batches)), len(stack.jobs), dtype=self.world.dtype, device=self.device
        )
        own = replace(
            stack,
            learner=lesson,
            slots=None,
            batches=batches,
            ages=[0] * len(stack.jobs),
            losses=losses,
        )
        unit = public._unit(own)
        if unit is None:
            public._run_one(own)
        else:
            unit.load(own)
            for step in range(len(losses)):
                public._play(own, unit, step)
            unit.unload()
            public._put_by(unit)
        # Copies, because a unit uses the memory of these tensors for the next clients.
        stack.state = {name: value.clone() for name, value in own.state.items()}
        stack.received = replace_weights(stack.received, stack.state)

    # --- passes that are not steps, and the method's state -----------------------------------------------------

    def _run_passes(self, stack: Stack, passes: Sequence[ClientPass]) -> None:
        """Run passes for all clients of a stack. Those whose batches have the same size run as one."""
        learner = stack.learner
        for one in passes:
            rows = [self.pass_batches(job, learner, one) for job in stack.jobs]
            keys = onto(
                self.device, torch.tensor([self.pass_key(job, learner, one) for job in stack.jobs])
            )
            parts: list[list[State]] = [[] for _ in stack.jobs]
            for place in range(max(map(len, rows))):
                by_size: dict[int, list[int]] = {}
                for client, own in enumerate(rows):
                    if place < len(own):
                        by_size.setdefault(len(own[place]), []).append(client)
                for clients in by_size.values():
                    some = torch.stack([rows[client][place] for client in clients]).to(self.device)
                    who = torch.tensor(clients, device=self.device)
                    inputs, targets = self.pass_samples(one, some)
                    folded = noise.fold_in(keys[who], place)
                    batch = Batch(inputs, targets, stack.held[who], folded, stack.shares[who])
                    with self._together(stack, clients, f"running the pass {one.name!r}"):
                        found = self._pass(stack, one, who, batch)
                    for at, client in enumerate(clients):
                        parts[client].append({name: value[at] for name, value in found.items()})
            for client, own in enumerate(rows):
                stack.passes[client][one.name] = one.merged(
                    parts[client], [len(some) for some in own]
                )

    def _pass(self, stack: Stack, one: ClientPass, who: Tensor, batch: Batch) -> State:
        """Return what a pass gives for one batch of some clients of a stack, who are in the first dimension."""
        learner, member = stack.learner, self.world.family.member(stack.arch)
        state, received = _of(stack.state, who), _of_received(stack.received, who)
        if len(who) == 1:  # as the truth does it: not all that a net may do can be stacked
            alone = _first(state), _first_received(received), _first_batch(batch)
            return _lead(run_pass(learner, member, one, *alone))

        def run(
            state: State,
            received: Received,
            inputs: Tensor,
            targets: Tensor,
            held: Tensor,
            key: Tensor,
            share: Tensor,
        ) -> State:
            return run_pass(
                learner, member, one, state, received, Batch(inputs, targets, held, key, share)
            )

        own = batch.inputs, batch.targets, batch.held, batch.key, batch.share
        found: State = vmap(run)(state, received, *own)
        return found

    def _finish(self, stack: Stack) -> None:
        """Let the method update its state, for all clients of a stack at once where their tensors have equal shapes."""
        learner = stack.learner
        if not learner.state:
            stack.left = [NOTHING_LEFT] * len(stack.jobs)
            return
        counts = [learner.moves(len(own)) for own in stack.batches]
        steps = onto(self.device, torch.tensor(counts, dtype=self.world.dtype))
        names = [*stack.received.weights]
        weights = {name: stack.state[name] for name in names}
        whole = list(zip(stack.extras, stack.passes, strict=True))
        everyone = list(range(len(stack.jobs)))

        def run(
            received: Received,
            weights: State,
            extras: State,
            passes: dict[str, State],
            steps: Tensor,
        ) -> Any:
            trained = Trained(
                received.weights, weights, received.slots, extras, steps, learner.lr, passes
            )
            left = learner.state.finish(trained)
            slots = [
                {slot: dict(values) for slot, values in own.items()}
                for own in (left.kept, left.sent)
            ]
            return *slots, dict(left.kept_extras), dict(left.sent_extras)

        if len(stack.jobs) > 1 and len({_signature(own) for own in whole}) == 1:
            extras, passes = tree_map(lambda *own: torch.stack(own), *whole)
            with self._together(stack, everyone, "updating the method's state"):
                found = vmap(run)(stack.received, weights, extras, passes, steps)
            stack.left = [Left(*tree_map(lambda value, at=at: value[at], found)) for at in everyone]
        else:
            for at, (extras, passes) in enumerate(whole):
                with blamed(stack.jobs[at], "updating the method's state"):
                    own = (
                        _at_received(stack.received, at),
                        {name: value[at] for name, value in weights.items()},
                    )
                    stack.left.append(Left(*run(*own, dict(extras), passes, steps[at])))
        member = self.world.family.member(stack.arch)
        for job, left in zip(stack.jobs, stack.left, strict=True):
            check_left(job, learner, member, left)

    @contextmanager
    def _together(self, stack: Stack, clients: Sequence[int], stage: str) -> Iterator[None]:
        """Turn an error of several clients into one that says whether they would run one by one."""
        try:
            yield
        except Exception as error:
            if len(clients) == 1 or fails_alone(error):
                with blamed(stack.jobs[clients[0]], stage):
                    raise
            raise _UnstackableError(stack.arch, error) from error

    def _put_by(self, unit: Unit) -> None:
        """Keep a unit for its like; of all that nobody uses, those used last: rebuilt every round they would cost."""
        self._idle[unit.shape] = [*self._idle.pop(unit.shape, []), unit]
        most = self.memory if self.device.type == "cuda" else _KEPT * self.memory
        while len(self._idle) > 1 and sum(self._held_by(shape) for shape in self._idle) > most:
            self._idle.pop(next(iter(self._idle)))

    def _held_by(self, shape: Shape) -> int:
        """The bytes that idle units of a shape hold: their weights, and on a GPU what their recording works in."""
        local = shape.learner.local
        if self.device.type != "cuda":
            weights = (
                self.world.family.member(shape.arch).weight_bytes * self.world.dtype.itemsize // 4
            )
            return len(self._idle[shape]) * shape.count * weights * (2 + shape.learner.num_slots)
        return (
            len(self._idle[shape])
            * shape.count
            * self.need(shape.arch, local.batch_size, shape.learner.num_slots)
        )

    def _play(self, stack: Stack, unit: Unit, step: int) -> None:
        self._tried(stack, step, range(len(stack.jobs)), partial(unit.play, step))

    def _run_one(self, stack: Stack) -> None:
        if stack.slots is None:
            stack.slots = stack.learner.start_slots(
                stack.state, self.world.family.member(stack.arch)
            )
        for step in range(len(stack.losses)):
            for clients in stack.groups(step):
                self._tried(stack, step, clients, partial(self.step, stack, step, clients))

    def _tried(
        self, stack: Stack, step: int, clients: Sequence[int], action: Callable[[], None]
    ) -> None:
        """If a step fails, say whose fault it was."""
        try:
            action()
        except Exception as error:
            if _NO_RULE not in str(error):
                self._accuse(
                    stack, step, [client for client in clients if step < len(stack.batches[client])]
                )
            if fails_alone(error):
                with blamed(stack.jobs[clients[0]], f"training in a stack of {len(clients)}"):
                    raise error
            raise _UnstackableError(stack.arch, error) from error

    # --- units -------------------------------------------------------------------------------------------------

    def _unit(self, stack: Stack) -> Unit | None:
        """A unit that can train a stack, recorded where that helps; None if its steps cannot be."""
        if self.record is False:
            return None
        full = stack.learner.local.batch_size
        if not any(full in own for own in stack.sizes):
            return None
        count = len(stack.jobs)
        shape = Shape.of(
            stack.arch, stack.learner, count, self._layout(stack.arch, stack.learner, count)
        )
        ragged = any(set(own) != {full} or len(own) != len(stack.sizes[0]) for own in stack.sizes)
        for layout in dict.fromkeys((shape.layout, "stack" if count > 1 else "alone")):
            one = replace(shape, layout=layout)
            try:
                with blamed(stack.jobs[0], f"preparing a stack of {count}"):
                    unit = self._ready(one)
                    if ragged and count > 1:
                        unit.record(masked=True)
                return unit
            except (CaptureError, LayoutError) as error:
                self._refuse(one, error)
        return None

    @property
    def recorded(self) -> bool:
        return self.record if self.record is not None else self.device.type == "cuda"

    def _layout(self, arch: Arch, learner: Learner, count: int) -> Layout:
        """How clients of a member are trained: as asked, or as is found to be fastest on this machine."""
        if self.layout != "auto":
            return self.layout
        if count == 1:
            return "alone"
        if self.device.type != "cuda":  # never slower than stacked: bench/layouts.py
            return "laid"
        if (
            not self.recorded or torch.are_deterministic_algorithms_enabled()
        ):  # a choice by the clock would not be
            return "stack"
        key = Shape.of(arch, learner, count, "stack")
        if key not in self._chosen:
            # Side by side pays the more the more there are: where it did not for many, few need not be tried.
            more = (
                own
                for one, own in self._chosen.items()
                if one.count > count and replace(one, count=count) == key
            )
            self._chosen[key] = "alone" if "alone" in more else self._fastest(key)
        return self._chosen[key]

    def _fastest(self, shape: Shape) -> Layout:
        """Record every layout and time its replays, beside others of its kind, as in a cohort.

        On its own a unit waits for each of its kernels; in a crowd it counts how many there are.
        """
        crowd = shape.count * max(1, _CROWD // shape.count)
        taken: dict[Layout, float] = {}
        layouts: tuple[Layout, ...] = ("alone", "laid", "stack")
        for layout in layouts:
            if (
                layout == "stack" and "laid" in taken
            ):  # never faster where both were timed: docs/performance.md
                continue
            one = replace(shape, layout=layout, count=1 if layout == "alone" else shape.count)
            try:
                units = [self._ready(one) for _ in range(crowd // one.count)]
            except (CaptureError, LayoutError) as error:
                self._refuse(one, error)
                continue
            taken[layout] = replay_time(units)
            self._idle.setdefault(one, []).extend(units)
        best: Layout = min(taken, key=lambda layout: taken[layout]) if taken else "stack"
        for layout in taken:
            if layout != best and layout != "alone":
                self._idle.pop(replace(shape, layout=layout), None)
        times = ", ".join(f"{layout} {1e3 * seconds:.2f} ms" for layout, seconds in taken.items())
        _log.info("%d clients of one member, %d at once: %s", crowd, shape.count, times)
        return best

    def _ready(self, shape: Shape) -> Unit:
        """A unit nobody is using, recorded."""
        if shape in self._refused:
            raise CaptureError(self._refused[shape])
        unit = self._idle[shape].pop() if self._idle.get(shape) else Unit(self, shape)
        with self.computing():  # A recorded step keeps the precision that it was recorded in.
            unit.record()
        return unit

    def _refuse(self, shape: Shape, error: FedquiltError) -> None:
        if shape not in self._refused:
            self._refused[shape] = str(error)
            level = (
                logging.INFO if isinstance(error, LayoutError) else logging.WARNING
            )  # another layout will do
            _log.log(
                level,
                "%d clients of one member cannot be trained %s: %s",
                shape.count,
                shape.layout,
                error,
            )

    def _accuse(self, stack: Stack, step: int, clients: list[int]) -> None:
        """Once more, one client after another, to say whose batch it was."""
        for client in clients:
            with blamed(stack.jobs[client], "training"):
                self.step(stack, step, [client])

    def step(self, stack: Stack, step: int, clients: list[int]) -> None:
        """One batch of the clients that have one of this size; the others are left as they are."""
        learner, device = stack.learner, self.device
        everyone = len(clients) == len(stack.jobs)
        who = torch.tensor(clients, device=device)
        state, slots, received = stack.state, stack.slots, stack.received
        assert slots is not None
        if not everyone:
            state, received = _of(state, who), _of_received(received, who)
            slots = {slot: _of(values, who) for slot, values in slots.items()}
        rows = torch.stack([stack.batches[client][step] for client in clients]).to(device)
        inputs, targets, keys = (
            self.data.samples(rows),
            self.data.targets[rows],
            noise.fold_in(stack.keys[who], step),
        )
        inputs, targets = self.augmented(learner, inputs, targets, keys)
        batch = Batch(inputs, targets, stack.held[who], keys, stack.shares[who])
        if learner.teacher:
            tables = [self.teacher_rows(learner, stack.extras[client]).table for client in clients]
            taught = torch.stack([table[own] for table, own in zip(tables, rows, strict=True)])
            batch = replace(batch, taught=taught)
        if learner.taught:
            batch = replace(
                batch,
                taught=self.taught(learner, self.world.family.member(stack.arch), state, batch),
            )
        member = self.world.family.member(stack.arch)
        for place, phase in enumerate(learner.phases_at(step)):
            grads, (loss, seen) = self.gradients(
                learner, member, phase.objective, state, received, batch
            )
            grads = self.clipped(learner, grads)
            masks = learner.masks(self.world.family.member(stack.arch), phase, device)
            state, slots = move(
                learner,
                phase,
                state,
                slots,
                grads,
                masks,
                stack.ages[0] + learner.moves(step) + place,
            )
            state = {**state, **seen}
        stack.losses[step, who] = loss.to(stack.losses.dtype)  # logits may be of any type
        if everyone:
            stack.state, stack.slots = state, slots
        else:
            stack.state = _put(stack.state, state, who)
            assert stack.slots is not None
            stack.slots = {
                slot: _put(stack.slots[slot], values, who) for slot, values in slots.items()
            }

    # --- what the truth does for one client, for all of a stack -------------------------------------------------

    @staticmethod
    def augmented(
        learner: Learner, inputs: Tensor, targets: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        local, task = learner.local, learner.task
        if len(inputs) == 1:
            changed, changed_targets = augmented(inputs[0], targets[0], local, keys[0], task)
            return changed.unsqueeze(0), changed_targets.unsqueeze(0)
        changes = vmap(lambda own, own_targets, key: augmented(own, own_targets, local, key, task))
        changed, changed_targets = changes(inputs, targets, keys)
        return changed, changed_targets

    def taught(self, learner: Learner, member: Member, state: State, batch: Batch) -> Tensor:
        member = learner.teaching_net(member)
        if len(batch.inputs) == 1:
            return teach(member, learner.local, _first(state), _first_batch(batch)).unsqueeze(0)

        def one(
            state: State, inputs: Tensor, targets: Tensor, held: Tensor, key: Tensor, share: Tensor
        ) -> Tensor:
            return teach(member, learner.local, state, Batch(inputs, targets, held, key, share))

        return vmap(one)(state, batch.inputs, batch.targets, batch.held, batch.key, batch.share)

    def gradients(
        self,
        learner: Learner,
        member: Member,
        objective: Objective,
        state: State,
        received: Received,
        batch: Batch,
    ) -> tuple[State, tuple[Tensor, State]]:
        if len(batch.inputs) == 1:  # as the truth does it: not all that a net may do can be stacked
            alone, own = (_first(state), _first_received(received)), _first_batch(batch)
            grads, (loss, seen) = gradient(learner, member, objective, *alone, own)
            return _lead(grads), (loss.unsqueeze(0), _lead(seen))

        def one(
            state: State,
            received: Received,
            inputs: Tensor,
            targets: Tensor,
            held: Tensor,
            key: Tensor,
            share: Tensor,
            taught: Any,
        ) -> tuple[State, tuple[Tensor, State]]:
            own = Batch(inputs, targets, held, key, share, taught)
            return gradient(learner, member, objective, state, received, own)

        mapped = vmap(one, (0, 0, 0, 0, 0, 0, 0, None if batch.taught is None else 0))
        found: tuple[State, tuple[Tensor, State]] = mapped(
            state,
            received,
            batch.inputs,
            batch.targets,
            batch.held,
            batch.key,
            batch.share,
            batch.taught,
        )
        return found

    def region(self, member: Member, moves: Region, lines: Lines) -> Tensor:
        """Where a phase may move, for all weights of a member in a line of booleans; those asked for last are kept."""
        key = member, moves, lines.channels_last
        if key not in self._regions:
            masks = {}
            for name, shape in lines.shapes.items():
                mask = moves.mask(member, name)
                masks[name] = (
                    mask[None] if isinstance(mask, Tensor) else torch.full((1, *shape), mask)
                )
            self._regions[key] = lines.join(masks).to(self.device)
            while (
                len(self._regions) > 1
                and sum(known.numel() for known in self._regions.values()) > _REGIONS
            ):
                self._regions.pop(next(iter(self._regions)))
        return self._regions[key]

    def nested(self, member: Member, inner: Member, lines: Lines) -> Inner:
        """A net within a member, as units that are alive have it."""
        key = member, inner, lines.channels_last
        found = self._nested.get(key)
        if found is None:
            found = lines.nested(self.world.family.cutter, member.index, inner.index).to(
                self.device
            )
            self._nested[key] = found
        return found

    @staticmethod
    def clipped(learner: Learner, grads: State) -> State:
        clip = learner.local.optimiser.clip
        return vmap(lambda own: clipped(own, clip))(grads) if clip else grads

    # --- sending back ------------------------------------------------------------------------------------------

    def _fold(self, stack: Stack, fold: Fold, outcome: Outcome) -> None:
        """Remember, check, send and add. Clients that sent the same positions are summed before they are placed."""
        family, learner = self.world.family, stack.learner
        member = family.member(stack.arch)
        outcome.stacks += 1
        alike: dict[Submodel, list[int]] = {}
        for client, job in enumerate(stack.jobs):
            alike.setdefault(
                learner.upload(member, job.submodel, self.held(job.client.id)), []
            ).append(client)
        own = {name: stack.state[name] for name in learner.sent(member)}
        for wanted, clients in alike.items():
            chosen = own if len(clients) == len(stack.jobs) else _some(own, clients)
            # Clients of one stack that upload the same positions also held the same.
            held = stack.jobs[clients[0]].submodel.held
            state = family.cutter.narrow(chosen, held, wanted.held, lead=1)
            self._send(stack, clients, wanted, state, fold, outcome)

    def _send(
        self,
        stack: Stack,
        clients: list[int],
        wanted: Submodel,
        state: State,
        fold: Fold,
        outcome: Outcome,
    ) -> None:
        updates, intact = [], True
        learner, member = stack.learner, self.world.family.member(stack.arch)
        kept_names = names_kept(self.federation, learner, member)
        kept = (stack.slots or {}) if learner.keep_slots else {}
        for place, client in enumerate(clients):
            job = stack.jobs[client]
            weights = {name: value[place] for name, value in state.items()}
            payload = upload_of(self.federation, job, learner, wanted, weights, stack.left[client])
            memory = memory_of(stack.server, job)
            delivery = send(
                self.federation, job, payload, stack.known[client], memory, self.initial
            )
            intact = intact and delivery.intact
            macs = self.macs(job.client.id, learner, member, stack.sizes[client])
            received, first = stack.received_bytes[client], stack.first_bytes[client]
            outcome.charge(job.client.id, received, delivery.bytes, macs, first)
            own = {name: stack.state[name][client] for name in kept_names}
            slots = {
                slot: {name: v[client].clone() for name, v in values.items()}
                for slot, values in kept.items()
            }
            batches = len(stack.batches[client])
            steps = steps_behind(memory, learner, batches)
            left = stack.left[client]
            if learner.state:
                given = _at_received(stack.received, client).slots
                left = kept_state(self.federation, learner, given, stack.extras[client], left)
            kept_memory = remember(
                self.federation,
                job,
                learner,
                own,
                slots,
                steps,
                delivery.slots,
                memory,
                self.initial,
                left,
            )
            if kept_memory:
                outcome.memory[job.client.id, job.submodel.scope] = kept_memory
            updates.append(update_of(job, learner, delivery.sent, steps, batches))
        if intact:
            fold.add_stack(updates, [state])
        else:
            for update in updates:
                fold.add(update)

    def _check(self, stacks: list[Stack], outcome: Outcome) -> None:
        """One look at all stacks; only if something is wrong, at every client: then the round fails."""
        members = [self.world.family.member(stack.arch) for stack in stacks]
        moved = [stack.learner.moved(member) for stack, member in zip(stacks, members, strict=True)]
        learnt = [
            stack.state[name] for stack, names in zip(stacks, moved, strict=True) for name in names
        ]
        method_state = [value for stack in stacks for left in stack.left for value in left.tensors]
        if method_state and not are_finite(method_state):
            for stack in stacks:
                for job, left in zip(stack.jobs, stack.left, strict=True):
                    check_state(job, left.tensors)
        norms = torch._foreach_norm([*learnt, *(stack.losses for stack in stacks)])
        if not bool(torch.stack(list(norms)).isfinite().all()):
            for stack, names in zip(stacks, moved, strict=True):
                for client, job in enumerate(stack.jobs):
                    losses = stack.losses[: len(stack.batches[client]), client]
                    self.check_finite(job, losses, [stack.state[name][client] for name in names])
        for stack in stacks:
            losses = stack.losses.cpu()
            outcome.losses += [
                float(losses[: len(own), place].mean()) for place, own in enumerate(stack.batches)
            ]

    # --- evaluation --------------------------------------------------------------------------------------------

    def _evaluate(self, exams: Sequence[Exam], batch_size: int) -> list[Score]:
        return self.examiner.evaluate(exams, batch_size)

    def _calibrate(
        self, nets: Sequence[tuple[Kind, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        return self.examiner.calibrate(nets, batches)


def _first(state: Weights) -> State:
    """The only client's."""
    return {name: value[0] for name, value in state.items()}


def replace_weights(received: Received, weights: State) -> Received:
    """Return what clients received, with other weights that the round starts from."""
    return received._replace(weights=weights)


def _first_received(received: Received) -> Received:
    return _at_received(received, 0)


def _at_received(received: Received, client: int) -> Received:
    """Return what one client of a stack received."""
    found: Received = tree_map(lambda value: value[client], received)
    return found


def _of_received(received: Received, who: Tensor) -> Received:
    """Return what some clients of a stack received."""
    found: Received = tree_map(lambda value: value.index_select(0, who), received)
    return found


def _signature(tensors: Any) -> Hashable:
    """Return the names, shapes and types of nested named tensors, which are equal where they can be stacked."""
    leaves, spec = tree_flatten(tensors)
    return str(spec), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def _first_batch(batch: Batch) -> Batch:
    taught = None if batch.taught is None else batch.taught[0]
    return Batch(
        batch.inputs[0], batch.targets[0], batch.held[0], batch.key[0], batch.share[0], taught
    )


def _lead(state: Weights) -> State:
    """One client's as a stack of one."""
    return {name: value.unsqueeze(0) for name, value in state.items()}


def _some(state: Weights, clients: Sequence[int]) -> State:
    """The states of some clients; of one, as views. Clients may send nothing."""
    first = clients[0]
    if len(clients) == 1 or not state:
        return {name: value[first : first + 1] for name, value in state.items()}
    return _of(state, onto(next(iter(state.values())).device, torch.tensor(clients)))


def _of(state: Weights, who: Tensor) -> State:
    return {name: value.index_select(0, who) for name, value in state.items()}


def _put(state: Weights, part: Weights, who: Tensor) -> State:
    return {name: value.index_copy(0, who, part[name]) for name, value in state.items()}
