"""Engine that trains clients of equal shape together.

One gradient and one optimizer step serve all clients of a stack. Clients are stacked if their
member, learner and optimizer age are equal. Within a stack, a step groups clients whose batches
have the same size. Unequal amounts of data are therefore exact, whereas padding a batch would
change its statistics.
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

from fedquilt import noise
from fedquilt.engines.samples import EvalSamples
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation, is_same
from fedquilt.engines.vectorized.evaluator import Evaluator
from fedquilt.engines.vectorized.groups import (
    CaptureError,
    ClientGroup,
    Layout,
    Shape,
    fails_alone,
    replay_time,
    stacked,
)
from fedquilt.engines.vectorized.lines import Inner, Lines
from fedquilt.errors import FedquiltError, first_line
from fedquilt.family.grouped import GroupingError
from fedquilt.family.member import Member
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.torch_internals import foreach_norm, tree_flatten, tree_map
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
from fedquilt.round.evaluate import EvalSpec, Score
from fedquilt.round.merge import Fold
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
# Default bytes of a stack on a CPU. With more, the system allocates and frees pages all the time.
_STACKED = 256 << 20
_KEPT = 4  # Memory that idle client groups may hold on a CPU, as a multiple of a stack's memory
# Least number of clients with which layouts are timed, and least mean size of groups of clients
# with equally many samples.
_CROWD = 4
_AHEAD = 4  # Steps of a stack that are launched before the next stack is prepared
_READ = ("inputs", "targets", "scale")  # Fields of the data that a captured step reads.
# Bytes of cached masks. Phases that are drawn at random have hundreds, of one byte per weight.
_REGIONS = 2 << 30
_NO_RULE = "Batching rule not implemented"  # Text of vmap's error if it cannot stack an operation
# Text of vmap's warning if it can stack an operation, but slowly.
_SLOW = "There is a performance drop because we have not yet implemented the batching rule"


class _UnstackableError(FedquiltError):
    """Error for a member with an operation that vmap cannot stack."""

    def __init__(self, arch: Arch, cause: Exception) -> None:
        super().__init__(first_line(cause))
        self.arch = arch


@dataclass
class Stack:
    """Clients that train together. Every tensor has the clients in its first dimension."""

    server: Server  # Server's state that the clients started from
    received_bytes: list[int]  # Bytes that each client downloaded
    first_bytes: list[int]  # Part of `received_bytes` that each client downloads only once
    learner: Learner  # Local training of all clients
    jobs: list[Job]  # Client, round and sub-model of each client
    state: State  # Current weights and buffers
    slots: OptimiserState | None  # Optimizer slots. None: no client has any
    received: Received  # Weights and state slots that the round started from
    extras: list[Extras]  # State of the method that is not cut, of each client
    # Weights that the server knows each client to have. Links that code changes need them.
    known: list[Weights]
    held: Tensor  # (client, class) True where a client has samples of a class
    keys: Tensor  # (client,) Random keys
    shares: Tensor  # (client,) Shares of the clients' nets, by which the scaler divides
    batches: list[list[Tensor]]  # Positions of samples in the pool, by client and step
    # Optimizer steps behind each client's slots. They are equal if the optimizer depends on them.
    ages: list[int]
    losses: Tensor  # (step, client) Training losses
    passes: list[dict[str, State]]  # Results of each client's passes that are not training steps
    # State of the method that each client keeps or sends.
    left: list[Left] = field(default_factory=list)

    @property
    def arch(self) -> Arch:
        """Return the architecture of the member that all clients of the stack train."""
        return self.jobs[0].submodel.arch

    @cached_property
    def sizes(self) -> list[list[int]]:
        """Return the number of samples in every batch, by client and step."""
        return [[len(batch) for batch in client_batches] for client_batches in self.batches]

    def sizes_at(self, step: int) -> list[int]:
        """Return the batch sizes of the clients that have a batch in this step."""
        return [client_sizes[step] for client_sizes in self.sizes if step < len(client_sizes)]

    def groups(self, step: int) -> list[list[int]]:
        """Return the clients that have a batch in this step, grouped by its size."""
        by_size: dict[int, list[int]] = {}
        for client, client_sizes in enumerate(self.sizes):
            if step < len(client_sizes):
                by_size.setdefault(client_sizes[step], []).append(client)
        return list(by_size.values())


@dataclass
class Vectorized(Simulation):
    """Engine that trains stacks of clients.

    If more clients are alike than fit into `memory`, they are trained in several stacks.
    """

    # Bytes that stacks may take, as estimated by the family. 0: 256 MiB, or half of a GPU's free
    # memory.
    memory: int = 0
    record: bool | None = None  # True: steps are captured and replayed. None: only on a GPU
    # Layout of equal nets: one by one, side by side, stacked by vmap, or the fastest of these.
    layout: Literal["auto", "alone", "laid", "stack"] = "auto"

    def __post_init__(self) -> None:
        self.examiner = Evaluator(self)
        super().__post_init__()
        self.forget_family()
        # Torch warns if it runs an operation client by client. Clients that are not stacked run one
        # by one too, so that the warning does not matter.
        warnings.filterwarnings("ignore", _SLOW)
        free = (
            torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else _STACKED
        )
        self.memory = self.memory or free

    @classmethod
    def create(cls, data: FederatedData, options: EngineOptions) -> Self:
        return cls(data, options.device, options.precision, memory=options.memory)

    @property
    def engine_options(self) -> EngineOptions:
        return replace(super().engine_options, memory=self.memory)

    def forget_family(self) -> None:
        super().forget_family()
        self._idle: dict[Shape, list[ClientGroup]] = {}
        self._refused: dict[Shape, str] = {}
        self._chosen: dict[Shape, Layout] = {}
        self.single: dict[Arch, str] = {}  # Members that vmap cannot stack, with the reason
        self.warm: set[Hashable] = set()  # Actions that a client group has captured before
        # Number of steps with batches that were not full, by shape and batch size.
        self.tails: Counter[tuple[Shape, int]] = Counter()
        self._regions: dict[Hashable, Tensor] = {}
        self._nested: WeakValueDictionary[Hashable, Inner] = WeakValueDictionary()
        # Engine that trains clients that cannot be stacked.
        self._truth = Sequential(self.data, self.device, self.precision)
        self._truth._is_public = self._is_public
        self.examiner.forget()
        self._template: Weights | None = None

    @property
    def template(self) -> Weights:
        """Return weights of the full net, from which client groups take their shapes."""
        if self._template is None:
            self._template = self.world.family.init(0, self.device, self.world.dtype)
        return self._template

    def with_data(self, data: FederatedData) -> Self:
        """Return an engine for other samples.

        It takes over captured steps if they are still valid. A captured step reads samples and
        their scale at a fixed address, so that it serves any partition of the same pool.
        """
        engine = super().with_data(data)
        if engine is not self and all(
            is_same(getattr(engine.data, name), getattr(self.data, name)) for name in _READ
        ):
            # Captured steps read the scale at its old address, so that an equal copy would not do.
            engine.data = replace(engine.data, scale=self.data.scale)
            engine._federation = self._federation
            for name in ("_idle", "_refused", "_chosen", "single", "warm", "tails"):
                setattr(engine, name, getattr(self, name))
            for unit in (unit for units in engine._idle.values() for unit in units):
                unit.engine = engine
            self.forget_family()
        return engine

    # --- training --------------------------------------------------------------------------------

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        jobs_by_kind: dict[tuple[Arch, Learner, int], list[Job]] = {}
        shares: dict[Job, float] = {}
        for job in jobs:
            learner = learner_of(self.method, job, self.world)
            shares[job] = learner.share
            age = self._age(server, job, learner) if learner.local.optimizer.ages else 0
            jobs_by_kind.setdefault((job.submodel.arch, learner, age), []).append(job)
        for wave in self._waves(jobs_by_kind):
            stackable = [
                (learner, group)
                for learner, group in wave
                if group[0].submodel.arch not in self.single
            ]
            while stackable:
                try:
                    with self.computing():
                        stacks = self._run(server, stackable, shares)
                except _UnstackableError as error:
                    # The fold has no update of this wave yet, so that it can be trained again.
                    self.set_apart(error.arch, str(error))
                    stackable = [
                        (learner, group)
                        for learner, group in stackable
                        if group[0].submodel.arch != error.arch
                    ]
                    continue
                for stack in stacks:  # A GPU may still be training meanwhile
                    self._fold(stack, fold, outcome)
                self._check(stacks, outcome)
                break
            unstackable = [
                job for _, group in wave for job in group if job.submodel.arch in self.single
            ]
            for job in unstackable:  # Each run warns, also if an earlier run of the engine did
                self._warn_of_single(job.submodel.arch)
            self._truth.begin(self.federation)
            self._truth.extra_shapes = self.extra_shapes
            self._truth._train(server, unstackable, fold, outcome)

    def _waves(
        self, alike: Mapping[tuple[Arch, Learner, int], list[Job]]
    ) -> Iterator[list[tuple[Learner, list[Job]]]]:
        """Yield the stacks that are trained at the same time.

        A CPU trains one stack at a time, a GPU as many as fit into memory.
        """
        wave: list[tuple[Learner, list[Job]]] = []
        room = 0
        needs = {
            key: self.need(key[0], key[1].local.batch_size * self._sets(*key[:2]), key[1].num_slots)
            for key in alike
        }
        # The largest take longest, so that they begin.
        for key in sorted(alike, key=lambda key: -needs[key]):
            (arch, learner, _), members, need = key, alike[key], needs[key]
            for stack_jobs in self._split(arch, learner, members, max(1, self.memory // need)):
                if wave and (self.device.type != "cuda" or len(stack_jobs) * need > room):
                    yield wave
                    wave, room = [], 0
                room = (room if wave else self.memory) - len(stack_jobs) * need
                wave.append((learner, stack_jobs))
        if wave:
            yield wave

    def _split(
        self, arch: Arch, learner: Learner, jobs: list[Job], most: int
    ) -> Iterator[list[Job]]:
        """Yield the jobs of one member as stacks of at most `most` clients."""
        for remaining in self._by_samples(jobs):
            while remaining:
                size = min(len(remaining), most)
                # Powers of two, so that changing cohorts need captures of few sizes only.
                if self.recorded:
                    size = 1 << size.bit_length() - 1
                if self._layout(arch, learner, size) == "alone":
                    size = 1
                yield remaining[:size]
                remaining = remaining[size:]

    def _by_samples(self, jobs: list[Job]) -> list[list[Job]]:
        """Group clients by their number of samples if this gives few groups.

        Their last batches then have equal sizes and can be captured. With many groups, all clients
        are returned as one group in ascending order of their samples. A captured step lasts as long
        for every client as for the largest one.
        """
        if not self.recorded:
            return [jobs]
        by_size = sorted(jobs, key=lambda job: job.client.size)
        groups = [list(group) for _, group in groupby(by_size, key=lambda job: job.client.size)]
        return groups if _CROWD * len(groups) <= len(jobs) else [by_size]

    @staticmethod
    def _age(server: Server, job: Job, learner: Learner) -> int:
        """Return the number of optimizer steps behind the slots that a client starts with."""
        memory = memory_of(server, job) if learner.keep_slots else None
        return memory.steps if memory else 0

    def _sets(self, arch: Arch, learner: Learner) -> int:
        """Return the number of activation sets that a learner keeps in memory at once."""
        return learner.activation_sets(self.world.family.member(arch))

    def need(self, arch: Arch, batch_size: int, slots: int) -> int:
        """Return the bytes that one client of a member takes in training.

        Args:
            arch: Architecture of the member.
            batch_size: Samples whose activations are in memory at once.
            slots: Optimizer slots for each weight. 0 for evaluation.
        """
        member = self.world.family.member(arch)
        # A step holds old and new weights and slots at once, besides the received weights. The
        # member's costs are those of float32.
        float32_bytes = 2 * member.weight_bytes * (2 + slots) + member.activations(batch_size)
        return max(1, float32_bytes * self.world.dtype.itemsize // 4)

    def set_apart(self, arch: Arch, why: str) -> None:
        """Mark a member as one that vmap cannot stack, and warn about it.

        Args:
            arch: Architecture of the member.
            why: Reason, as the warning gives it.
        """
        self.single[arch] = why
        self._warn_of_single(arch)

    def _warn_of_single(self, arch: Arch) -> None:
        """Warn once in a run, for all members together, that nets cannot be stacked."""
        why = self.single[arch]
        self.once.warning(why, "clients with equal nets are trained one after another: %s", why)

    def _stack(
        self, server: Server, learner: Learner, jobs: list[Job], shares: Mapping[Job, float]
    ) -> Stack:
        """Return the clients of some jobs as a stack that is ready to train."""
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
            held=to_device_async(device, torch.stack([self.held(job.client.id) for job in jobs])),
            keys=to_device_async(device, torch.tensor([self.keys(job)[1] for job in jobs])),
            shares=to_device_async(
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
        """Return the state slots of the method, stacked over clients."""
        return {
            slot: stacked([start.state_slots[slot] for start in starts])
            for slot in learner.state.slots
        }

    def _slots(
        self, starts: Sequence[Start], learner: Learner, member: Member
    ) -> OptimiserState | None:
        """Return the optimizer slots, stacked over clients. None: no client has any."""
        if all(start.slots is None for start in starts):
            return None
        client_slots = [start.slots or learner.start_slots(start.state, member) for start in starts]
        return {slot: stacked([slots[slot] for slots in client_slots]) for slot in client_slots[0]}

    def _run(
        self, server: Server, work: list[tuple[Learner, list[Job]]], shares: Mapping[Job, float]
    ) -> list[Stack]:
        """Train stacks.

        Stacks whose steps can be captured train at the same time, the others one after another.
        """
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
            for step in range(_AHEAD):  # A GPU is busy while the next stacks are prepared
                self._run_step(stack, unit, step)
        for step in range(_AHEAD, max((len(stack.losses) for stack, _ in playing), default=0)):
            for stack, unit in playing:
                self._run_step(stack, unit, step)
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
            public.batches(job, lesson, client_extras)
            for job, client_extras in zip(stack.jobs, stack.extras, strict=True)
        ]
        losses = torch.zeros(
            max(map(len, batches)), len(stack.jobs), dtype=self.world.dtype, device=self.device
        )
        lesson_stack = replace(
            stack,
            learner=lesson,
            slots=None,
            batches=batches,
            ages=[0] * len(stack.jobs),
            losses=losses,
        )
        unit = public._unit(lesson_stack)
        if unit is None:
            public._run_one(lesson_stack)
        else:
            unit.load(lesson_stack)
            for step in range(len(losses)):
                public._run_step(lesson_stack, unit, step)
            unit.unload()
            public._put_by(unit)
        # Copies are needed, because a client group reuses these tensors for the next clients.
        stack.state = {name: value.clone() for name, value in lesson_stack.state.items()}
        stack.received = replace_weights(stack.received, stack.state)

    # --- passes that are not steps, and the method's state ---------------------------------------

    def _run_passes(self, stack: Stack, passes: Sequence[ClientPass]) -> None:
        """Run passes for all clients of a stack.

        Clients whose batches have the same size run together.
        """
        learner = stack.learner
        for client_pass in passes:
            rows = [self.pass_batches(job, learner, client_pass) for job in stack.jobs]
            keys = to_device_async(
                self.device,
                torch.tensor([self.pass_key(job, learner, client_pass) for job in stack.jobs]),
            )
            parts: list[list[State]] = [[] for _ in stack.jobs]
            for number in range(max(map(len, rows))):
                by_size: dict[int, list[int]] = {}
                for client, client_rows in enumerate(rows):
                    if number < len(client_rows):
                        by_size.setdefault(len(client_rows[number]), []).append(client)
                for clients in by_size.values():
                    batch_rows = torch.stack([rows[client][number] for client in clients]).to(
                        self.device
                    )
                    positions = torch.tensor(clients, device=self.device)
                    inputs, targets = self.pass_samples(client_pass, batch_rows)
                    folded = noise.fold_in(keys[positions], number)
                    batch = Batch(
                        inputs, targets, stack.held[positions], folded, stack.shares[positions]
                    )
                    with self._together(stack, clients, f"running the pass {client_pass.name!r}"):
                        results = self._pass(stack, client_pass, positions, batch)
                    for position, client in enumerate(clients):
                        parts[client].append(
                            {name: value[position] for name, value in results.items()}
                        )
            for client, client_rows in enumerate(rows):
                stack.passes[client][client_pass.name] = client_pass.merged(
                    parts[client], [len(batch_rows) for batch_rows in client_rows]
                )

    def _pass(self, stack: Stack, one: ClientPass, who: Tensor, batch: Batch) -> State:
        """Return the result of a pass on one batch of some clients of a stack.

        The clients are in the first dimension of every tensor.
        """
        learner, member = stack.learner, self.world.family.member(stack.arch)
        state, received = _of(stack.state, who), _of_received(stack.received, who)
        if len(who) == 1:  # Not every operation can be stacked, so that vmap is avoided
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

        fields = batch.inputs, batch.targets, batch.held, batch.key, batch.share
        results: State = vmap(run)(state, received, *fields)
        return results

    def _finish(self, stack: Stack) -> None:
        """Let the method update its state after training.

        All clients of a stack are updated together if their tensors have equal shapes.
        """
        learner = stack.learner
        if not learner.state:
            stack.left = [NOTHING_LEFT] * len(stack.jobs)
            return
        counts = [learner.moves(len(batches)) for batches in stack.batches]
        steps = to_device_async(self.device, torch.tensor(counts, dtype=self.world.dtype))
        mean_rates = [learner.mean_rate(len(batches)) for batches in stack.batches]
        rates = to_device_async(self.device, torch.tensor(mean_rates, dtype=self.world.dtype))
        names = [*stack.received.weights]
        weights = {name: stack.state[name] for name in names}
        extras_and_passes = list(zip(stack.extras, stack.passes, strict=True))
        everyone = list(range(len(stack.jobs)))

        def run(
            received: Received,
            weights: State,
            extras: State,
            passes: dict[str, State],
            steps: Tensor,
            lr: Tensor,
        ) -> Any:
            trained = Trained(received.weights, weights, received.slots, extras, steps, lr, passes)
            finished_state = learner.state.finish(trained)
            slots = [
                {slot: dict(values) for slot, values in slots_by_name.items()}
                for slots_by_name in (finished_state.kept, finished_state.sent)
            ]
            return *slots, dict(finished_state.kept_extras), dict(finished_state.sent_extras)

        if (
            len(stack.jobs) > 1
            and len({_signature(client_values) for client_values in extras_and_passes}) == 1
        ):
            extras, passes = tree_map(lambda *own: torch.stack(own), *extras_and_passes)
            with self._together(stack, everyone, "updating the method's state"):
                finished = vmap(run)(stack.received, weights, extras, passes, steps, rates)
            stack.left = [
                Left(*tree_map(lambda value, at=client: value[at], finished)) for client in everyone
            ]
        else:
            for client, (extras, passes) in enumerate(extras_and_passes):
                with blamed(stack.jobs[client], "updating the method's state"):
                    received_and_weights = (
                        _at_received(stack.received, client),
                        {name: value[client] for name, value in weights.items()},
                    )
                    stack.left.append(
                        Left(
                            *run(
                                *received_and_weights,
                                dict(extras),
                                passes,
                                steps[client],
                                rates[client],
                            )
                        )
                    )
        member = self.world.family.member(stack.arch)
        for job, client_left in zip(stack.jobs, stack.left, strict=True):
            check_left(job, learner, member, client_left)

    @contextmanager
    def _together(self, stack: Stack, clients: Sequence[int], stage: str) -> Iterator[None]:
        """Turn an error of several clients into one that tells if they would run one by one.

        Raises:
            _UnstackableError: Only the stack has failed.
        """
        try:
            yield
        except Exception as error:
            if len(clients) == 1 or fails_alone(error):
                with blamed(stack.jobs[clients[0]], stage):
                    raise
            raise _UnstackableError(stack.arch, error) from error

    def _put_by(self, unit: ClientGroup) -> None:
        """Keep an idle client group for later stacks of the same shape.

        Building groups anew in every round would be slow. If idle groups take too much memory, the
        least recently used shapes are dropped.
        """
        self._idle[unit.shape] = [*self._idle.pop(unit.shape, []), unit]
        max_bytes = self.memory if self.device.type == "cuda" else _KEPT * self.memory
        while len(self._idle) > 1 and sum(self._held_by(shape) for shape in self._idle) > max_bytes:
            self._idle.pop(next(iter(self._idle)))

    def _held_by(self, shape: Shape) -> int:
        """Return the bytes that the idle client groups of a shape hold.

        They hold weights and slots, and on a GPU also the workspace of their captured graphs.
        """
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

    def _run_step(self, stack: Stack, unit: ClientGroup, step: int) -> None:
        """Run one step of a stack in its client group."""
        self._tried(stack, step, range(len(stack.jobs)), partial(unit.run_step, step))

    def _run_one(self, stack: Stack) -> None:
        """Train a stack without captured steps."""
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
        """Run a step, and find the client that caused an error if it fails."""
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

    # --- units -----------------------------------------------------------------------------------

    def _unit(self, stack: Stack) -> ClientGroup | None:
        """Return a client group that can train a stack.

        Its steps are captured where that helps. None: the stack trains without a group.
        """
        if self.record is False:
            return None
        full = stack.learner.local.batch_size
        if not any(full in client_sizes for client_sizes in stack.sizes):
            return None
        count = len(stack.jobs)
        shape = Shape.of(
            stack.arch, stack.learner, count, self._layout(stack.arch, stack.learner, count)
        )
        ragged = any(
            set(client_sizes) != {full} or len(client_sizes) != len(stack.sizes[0])
            for client_sizes in stack.sizes
        )
        for layout in dict.fromkeys((shape.layout, "stack" if count > 1 else "alone")):
            candidate = replace(shape, layout=layout)
            try:
                with blamed(stack.jobs[0], f"preparing a stack of {count}"):
                    unit = self._ready(candidate)
                    if ragged and count > 1:
                        unit.record(masked=True)
                return unit
            except (CaptureError, GroupingError) as error:
                self._refuse(candidate, error)
        return None

    @property
    def recorded(self) -> bool:
        """Return True if steps are captured as CUDA graphs."""
        return self.record if self.record is not None else self.device.type == "cuda"

    def _layout(self, arch: Arch, learner: Learner, count: int) -> Layout:
        """Return the layout in which clients of a member are trained.

        It is the one that was asked for, or the fastest on this machine.
        """
        if self.layout != "auto":
            return self.layout
        if count == 1:
            return "alone"
        if self.device.type != "cuda":  # Never slower than stacked: bench/layouts.py
            return "laid"
        # A choice by measured times would not be deterministic.
        if not self.recorded or torch.are_deterministic_algorithms_enabled():
            return "stack"
        key = Shape.of(arch, learner, count, "stack")
        if key not in self._chosen:
            # Training side by side pays off more with more clients. If it did not for more clients
            # than these, it is not tried.
            layouts_of_more = (
                layout
                for shape, layout in self._chosen.items()
                if shape.count > count and replace(shape, count=count) == key
            )
            self._chosen[key] = "alone" if "alone" in layouts_of_more else self._fastest(key)
        return self._chosen[key]

    def _fastest(self, shape: Shape) -> Layout:
        """Capture every layout, time its replays, and return the fastest.

        Several groups are replayed together, as in a cohort. A single group would measure the
        latency of its kernels, whereas in a cohort their number matters.
        """
        crowd = shape.count * max(1, _CROWD // shape.count)
        seconds_by_layout: dict[Layout, float] = {}
        layouts: tuple[Layout, ...] = ("alone", "laid", "stack")
        for layout in layouts:
            # Stacked was never faster than side by side: docs/performance.md.
            if layout == "stack" and "laid" in seconds_by_layout:
                continue
            candidate = replace(shape, layout=layout, count=1 if layout == "alone" else shape.count)
            try:
                units = [self._ready(candidate) for _ in range(crowd // candidate.count)]
            except (CaptureError, GroupingError) as error:
                self._refuse(candidate, error)
                continue
            seconds_by_layout[layout] = replay_time(units)
            self._idle.setdefault(candidate, []).extend(units)
        best: Layout = (
            min(seconds_by_layout, key=lambda layout: seconds_by_layout[layout])
            if seconds_by_layout
            else "stack"
        )
        for layout in seconds_by_layout:
            if layout != best and layout != "alone":
                self._idle.pop(replace(shape, layout=layout), None)
        times = ", ".join(
            f"{layout} {1e3 * seconds:.2f} ms" for layout, seconds in seconds_by_layout.items()
        )
        _log.info("%d clients of one member, %d at once: %s", crowd, shape.count, times)
        return best

    def _ready(self, shape: Shape) -> ClientGroup:
        """Return an idle client group of this shape whose step is captured."""
        if shape in self._refused:
            raise CaptureError(self._refused[shape])
        unit = self._idle[shape].pop() if self._idle.get(shape) else ClientGroup(self, shape)
        with self.computing():  # A captured step keeps the precision of its capture.
            unit.record()
        return unit

    def _refuse(self, shape: Shape, error: FedquiltError) -> None:
        """Remember that a shape cannot be used, and log the reason once."""
        if shape not in self._refused:
            self._refused[shape] = str(error)
            if isinstance(error, GroupingError):  # Another layout is used instead
                _log.info(
                    "%d clients of one member cannot be trained %s: %s",
                    shape.count,
                    shape.layout,
                    error,
                )
            else:
                message = "clients with equal nets cannot be trained %s: %s"
                self.once.warning(str(error), message, shape.layout, error, kind=shape.layout)

    def _accuse(self, stack: Stack, step: int, clients: list[int]) -> None:
        """Repeat a step one client at a time, so that the error names the client that failed."""
        for client in clients:
            with blamed(stack.jobs[client], "training"):
                self.step(stack, step, [client])

    def step(self, stack: Stack, step: int, clients: list[int]) -> None:
        """Train some clients of a stack on one batch each, without capture.

        The other clients are left unchanged.

        Args:
            stack: Clients that train together.
            step: Step within the round.
            clients: Positions in the stack of clients whose batches have the same size.
        """
        learner, device = stack.learner, self.device
        everyone = len(clients) == len(stack.jobs)
        positions = torch.tensor(clients, device=device)
        state, slots, received = stack.state, stack.slots, stack.received
        assert slots is not None
        if not everyone:
            state, received = _of(state, positions), _of_received(received, positions)
            slots = {slot: _of(values, positions) for slot, values in slots.items()}
        rows = torch.stack([stack.batches[client][step] for client in clients]).to(device)
        inputs, targets, keys = (
            self.data.samples(rows),
            self.data.targets[rows],
            noise.fold_in(stack.keys[positions], step),
        )
        inputs, targets = self.augmented(learner, inputs, targets, keys)
        batch = Batch(inputs, targets, stack.held[positions], keys, stack.shares[positions])
        if learner.teacher:
            tables = [self.teacher_rows(learner, stack.extras[client]).table for client in clients]
            taught = torch.stack(
                [table[client_rows] for table, client_rows in zip(tables, rows, strict=True)]
            )
            batch = replace(batch, taught=taught)
        if learner.taught:
            batch = replace(
                batch,
                taught=self.taught(learner, self.world.family.member(stack.arch), state, batch),
            )
        member = self.world.family.member(stack.arch)
        rate = self._rate(stack, step, clients)
        for number, phase in enumerate(learner.phases_at(step)):
            grads, (loss, buffers) = self.gradients(
                learner, member, phase.objective, state, received, batch
            )
            grads = self.clipped(learner, grads)
            masks = learner.masks(self.world.family.member(stack.arch), phase, device)
            count = stack.ages[0] + learner.moves(step) + number
            state, slots = move(learner, phase, state, slots, grads, masks, count, rate)
            state = {**state, **buffers}
        stack.losses[step, positions] = loss.to(stack.losses.dtype)  # Logits may have any type
        if everyone:
            stack.state, stack.slots = state, slots
        else:
            stack.state = _put(stack.state, state, positions)
            assert stack.slots is not None
            stack.slots = {
                slot: _put(stack.slots[slot], values, positions) for slot, values in slots.items()
            }

    def _rate(self, stack: Stack, step: int, clients: Sequence[int]) -> float | Tensor:
        """Return the learning rate of clients in one step.

        Clients with unequal numbers of steps are at different points of a schedule within the
        round.

        Returns:
            One rate if all clients have the same, otherwise a tensor (client,).
        """
        rates = [stack.learner.rate(step, len(stack.batches[client])) for client in clients]
        if rates == [rates[0]] * len(rates):
            return rates[0]
        return to_device_async(self.device, torch.tensor(rates, dtype=self.world.dtype))

    # --- steps of the reference engine `Sequential`, for all clients of a stack ------------------

    @staticmethod
    def augmented(
        learner: Learner, inputs: Tensor, targets: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Augment the batches of several clients.

        Args:
            learner: Local training, which names the augmentation.
            inputs: Samples, (client, sample, …).
            targets: Targets, (client, sample, …).
            keys: Random keys, (client,).

        Returns:
            Augmented inputs and targets of the same shapes.
        """
        local, task = learner.local, learner.task
        if len(inputs) == 1:
            changed, changed_targets = augmented(inputs[0], targets[0], local, keys[0], task)
            return changed.unsqueeze(0), changed_targets.unsqueeze(0)
        changes = vmap(lambda own, own_targets, key: augmented(own, own_targets, local, key, task))
        changed, changed_targets = changes(inputs, targets, keys)
        return changed, changed_targets

    def taught(self, learner: Learner, member: Member, state: State, batch: Batch) -> Tensor:
        """Return the outputs of each client's teaching net for its batch.

        Args:
            learner: Local training, which names the teaching net.
            member: Member that the clients train.
            state: Weights and buffers, with clients in the first dimension.
            batch: Batches of the clients, in the first dimension.
        """
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
        """Return the gradients of an objective for several clients.

        Args:
            learner: Local training of the clients.
            member: Member that the clients train.
            objective: Function whose gradient is taken.
            state: Current weights and buffers, with clients in the first dimension.
            received: Weights and slots that the round started from, with clients in the first
                dimension.
            batch: Batches of the clients, in the first dimension.

        Returns:
            Gradients by weight name, and a pair of losses (client,) and new buffers.
        """
        if len(batch.inputs) == 1:  # Not every operation can be stacked, so that vmap is avoided
            alone, client_batch = (_first(state), _first_received(received)), _first_batch(batch)
            grads, (loss, buffers) = gradient(learner, member, objective, *alone, client_batch)
            return _lead(grads), (loss.unsqueeze(0), _lead(buffers))

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
            client_batch = Batch(inputs, targets, held, key, share, taught)
            return gradient(learner, member, objective, state, received, client_batch)

        mapped = vmap(one, (0, 0, 0, 0, 0, 0, 0, None if batch.taught is None else 0))
        results: tuple[State, tuple[Tensor, State]] = mapped(
            state,
            received,
            batch.inputs,
            batch.targets,
            batch.held,
            batch.key,
            batch.share,
            batch.taught,
        )
        return results

    def region(self, member: Member, moves: Region, lines: Lines) -> Tensor:
        """Return a mask that is True where a phase may move the weights of a member.

        The newest masks are cached.

        Args:
            member: Member that the clients train.
            moves: Region that the phase may move.
            lines: Layout of the member's weights in one row.

        Returns:
            Booleans of shape (1, entry).
        """
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
                and sum(cached_mask.numel() for cached_mask in self._regions.values()) > _REGIONS
            ):
                self._regions.pop(next(iter(self._regions)))
        return self._regions[key]

    def nested(self, member: Member, inner: Member, lines: Lines) -> Inner:
        """Return the positions of a nested net in the weights of a member.

        Client groups share the result as long as one of them uses it.

        Args:
            member: Outer net.
            inner: Nested net, which is part of `member`.
            lines: Layout of the outer net's weights in one row.
        """
        key = member, inner, lines.channels_last
        entries = self._nested.get(key)
        if entries is None:
            entries = lines.nested(self.world.family.cutter, member.index, inner.index).to(
                self.device
            )
            self._nested[key] = entries
        return entries

    @staticmethod
    def clipped(learner: Learner, grads: State) -> State:
        """Clip the gradients of each client as its optimizer asks for."""
        clip = learner.local.optimizer.clip
        return vmap(lambda own: clipped(own, clip))(grads) if clip else grads

    # --- sending back ----------------------------------------------------------------------------

    def _fold(self, stack: Stack, fold: Fold, outcome: Outcome) -> None:
        """Check, store and send what the clients of a stack have learnt, and add it to the fold.

        Updates of clients that send the same positions are summed before they are added.
        """
        family, learner = self.world.family, stack.learner
        member = family.member(stack.arch)
        outcome.stacks += 1
        clients_by_upload: dict[Submodel, list[int]] = {}
        for client, job in enumerate(stack.jobs):
            clients_by_upload.setdefault(
                learner.upload(member, job.submodel, self.held(job.client.id)), []
            ).append(client)
        sent_weights = {name: stack.state[name] for name in learner.sent(member)}
        for upload, clients in clients_by_upload.items():
            group_weights = (
                sent_weights if len(clients) == len(stack.jobs) else _some(sent_weights, clients)
            )
            # Clients of one stack that upload the same positions also trained the same positions.
            positions = stack.jobs[clients[0]].submodel.held
            state = family.cutter.narrow(group_weights, positions, upload.held, lead=1)
            self._send(stack, clients, upload, state, fold, outcome)

    def _send(
        self,
        stack: Stack,
        clients: list[int],
        wanted: Submodel,
        state: State,
        fold: Fold,
        outcome: Outcome,
    ) -> None:
        """Send the updates of clients that upload the same positions, and store their state."""
        updates, intact = [], True
        learner, member = stack.learner, self.world.family.member(stack.arch)
        kept_names = names_kept(self.federation, learner, member)
        kept_slots = (stack.slots or {}) if learner.keep_slots else {}
        for number, client in enumerate(clients):
            job = stack.jobs[client]
            weights = {name: value[number] for name, value in state.items()}
            payload = upload_of(self.federation, job, learner, wanted, weights, stack.left[client])
            memory = memory_of(stack.server, job)
            delivery = send(
                self.federation, job, payload, stack.known[client], memory, self.initial
            )
            intact = intact and delivery.intact
            macs = self.macs(job.client.id, learner, member, stack.sizes[client])
            received, first = stack.received_bytes[client], stack.first_bytes[client]
            outcome.charge(job.client.id, received, delivery.bytes, macs, first)
            kept_weights = {name: stack.state[name][client] for name in kept_names}
            slots = {
                slot: {name: v[client].clone() for name, v in values.items()}
                for slot, values in kept_slots.items()
            }
            batches = len(stack.batches[client])
            steps = steps_behind(memory, learner, batches)
            client_left = stack.left[client]
            if learner.state:
                old_slots = _at_received(stack.received, client).slots
                client_left = kept_state(
                    self.federation, learner, old_slots, stack.extras[client], client_left
                )
            kept_memory = remember(
                self.federation,
                job,
                learner,
                kept_weights,
                slots,
                steps,
                delivery.slots,
                memory,
                self.initial,
                client_left,
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
        """Refuse results that are not finite.

        All stacks are checked at once. Only if a value is not finite, each client is checked, and
        the round fails.
        """
        members = [self.world.family.member(stack.arch) for stack in stacks]
        moved = [stack.learner.moved(member) for stack, member in zip(stacks, members, strict=True)]
        learnt = [
            stack.state[name] for stack, names in zip(stacks, moved, strict=True) for name in names
        ]
        method_state = [
            value for stack in stacks for client_left in stack.left for value in client_left.tensors
        ]
        if method_state and not are_finite(method_state):
            for stack in stacks:
                for job, client_left in zip(stack.jobs, stack.left, strict=True):
                    check_state(job, client_left.tensors)
        norms = foreach_norm([*learnt, *(stack.losses for stack in stacks)])
        if not bool(torch.stack(list(norms)).isfinite().all()):
            for stack, names in zip(stacks, moved, strict=True):
                for client, job in enumerate(stack.jobs):
                    losses = stack.losses[: len(stack.batches[client]), client]
                    self.check_finite(job, losses, [stack.state[name][client] for name in names])
        for stack in stacks:
            losses = stack.losses.cpu()
            outcome.losses += [
                float(losses[: len(batches), position].mean())
                for position, batches in enumerate(stack.batches)
            ]

    # --- evaluation ------------------------------------------------------------------------------

    def _evaluate(self, exams: Sequence[EvalSamples], batch_size: int) -> list[Score]:
        return self.examiner.evaluate(exams, batch_size)

    def _calibrate(
        self, nets: Sequence[tuple[EvalSpec, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        return self.examiner.calibrate(nets, batches)


def _first(state: Weights) -> State:
    """Return the state of the first client, without the client dimension."""
    return {name: value[0] for name, value in state.items()}


def replace_weights(received: Received, weights: State) -> Received:
    """Return received values with other weights for the round to start from."""
    return received._replace(weights=weights)


def _first_received(received: Received) -> Received:
    """Return the received values of the first client, without the client dimension."""
    return _at_received(received, 0)


def _at_received(received: Received, client: int) -> Received:
    """Return the received values of one client of a stack."""
    values: Received = tree_map(lambda value: value[client], received)
    return values


def _of_received(received: Received, who: Tensor) -> Received:
    """Return the received values of some clients of a stack."""
    values: Received = tree_map(lambda value: value.index_select(0, who), received)
    return values


def _signature(tensors: Any) -> Hashable:
    """Return the names, shapes and types of nested named tensors.

    Tensors with equal signatures can be stacked.
    """
    leaves, spec = tree_flatten(tensors)
    return str(spec), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def _first_batch(batch: Batch) -> Batch:
    """Return the batch of the first client, without the client dimension."""
    taught = None if batch.taught is None else batch.taught[0]
    return Batch(
        batch.inputs[0], batch.targets[0], batch.held[0], batch.key[0], batch.share[0], taught
    )


def _lead(state: Weights) -> State:
    """Return one client's state as a stack of one client."""
    return {name: value.unsqueeze(0) for name, value in state.items()}


def _some(state: Weights, clients: Sequence[int]) -> State:
    """Return the states of some clients of a stack, as views if it is one client.

    `state` may be empty, because clients may send nothing.
    """
    first = clients[0]
    if len(clients) == 1 or not state:
        return {name: value[first : first + 1] for name, value in state.items()}
    return _of(state, to_device_async(next(iter(state.values())).device, torch.tensor(clients)))


def _of(state: Weights, who: Tensor) -> State:
    """Return the states of the clients at the positions `who`."""
    return {name: value.index_select(0, who) for name, value in state.items()}


def _put(state: Weights, part: Weights, who: Tensor) -> State:
    """Return a stack's state in which the clients at the positions `who` have the state `part`."""
    return {name: value.index_copy(0, who, part[name]) for name, value in state.items()}
