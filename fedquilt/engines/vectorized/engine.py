"""Engine that trains clients of equal shape together.

One gradient and one optimizer step serve all clients of a stack. Clients are stacked if their
member, learner and optimizer age are equal. Within a stack, a step groups clients whose batches
have the same size. Unequal amounts of data are therefore exact, whereas padding a batch would
change its statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.engines.samples import EvalSamples
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation, is_same
from fedquilt.engines.vectorized.evaluator import Evaluator
from fedquilt.engines.vectorized.failures import UnstackableError, fails_alone
from fedquilt.engines.vectorized.group_store import GroupStore
from fedquilt.engines.vectorized.groups import ClientGroup
from fedquilt.engines.vectorized.line_cache import LineCache
from fedquilt.engines.vectorized.passes import finish_stack, run_passes
from fedquilt.engines.vectorized.sending import check_stacks, fold_stack
from fedquilt.engines.vectorized.stack import Stack, build_stack
from fedquilt.engines.vectorized.stacked_step import train_step
from fedquilt.engines.vectorized.waves import Wave, waves
from fedquilt.round.budgets import learner_of
from fedquilt.round.client_checks import blamed
from fedquilt.round.client_state import memory_of
from fedquilt.round.engine import Outcome
from fedquilt.round.eval_jobs import EvalSpec
from fedquilt.round.fold import Fold
from fedquilt.round.scores import Score
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Arch, Job, Server, Weights

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.engines.options import EngineOptions

# Default bytes of a stack on a CPU. With more, the system allocates and frees pages all the time.
CPU_STACK_BYTES = 256 << 20
STEPS_AHEAD = 4  # Steps of a stack that are launched before the next stack is prepared
_CAPTURED_FIELDS = ("inputs", "targets", "scale")  # Fields of the data that a captured step reads
# Text of vmap's error if it cannot stack an operation.
_NO_BATCHING_RULE = "Batching rule not implemented"
# Text of vmap's warning if it can stack an operation, but slowly.
_SLOW_BATCHING = "There is a performance drop because we have not yet implemented the batching rule"


@dataclass
class Vectorized(Simulation):
    """Engine that trains stacks of clients.

    If more clients are alike than fit into `memory`, they are trained in several stacks.

    Args:
        data: Samples of all clients. They are moved to the device.
        device: Device on which clients are trained.
        precision: Precision of matrix products and convolutions.
        memory: Bytes that stacks may take.
        record: True if steps are captured as CUDA graphs.
        layout: Layout of equal nets.
    """

    # Bytes that stacks may take, as estimated by the family. 0: 256 MiB, or half of a GPU's free
    # memory.
    memory: int = 0
    record: bool | None = None  # True: steps are captured and replayed. None: only on a GPU
    # Layout of equal nets: one by one, side by side, stacked by vmap, or the fastest of these.
    layout: Literal["auto", "alone", "grouped", "stack"] = "auto"

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self)
        super().__post_init__()
        self.forget_family()
        # Torch warns if it runs an operation client by client. Clients that are not stacked run one
        # by one too, so that the warning does not matter.
        warnings.filterwarnings("ignore", _SLOW_BATCHING)
        if not self.memory:
            self.memory = CPU_STACK_BYTES
            if self.device.type == "cuda":
                self.memory = torch.cuda.mem_get_info(self.device)[0] // 2

    @classmethod
    @override
    def create(cls, data: FederatedData, options: EngineOptions) -> Self:
        return cls(data, options.device, options.precision, memory=options.memory)

    @property
    @override
    def engine_options(self) -> EngineOptions:
        return replace(super().engine_options, memory=self.memory)

    @override
    def forget_family(self) -> None:
        super().forget_family()
        self.groups = GroupStore(self)
        self.line_cache = LineCache(self)
        self.unstackable: dict[Arch, str] = {}  # Members that vmap cannot stack, with the reason
        # Engine that trains clients that cannot be stacked.
        self._sequential = Sequential(self.data, self.device, self.precision)
        self._sequential._is_public = self._is_public
        self.evaluator.forget()
        self._template: Weights | None = None

    @property
    def template(self) -> Weights:
        """Return weights of the full net, from which client groups take their shapes.

        Their values do not matter. They are cached until the family changes.
        """
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
            is_same(getattr(engine.data, name), getattr(self.data, name))
            for name in _CAPTURED_FIELDS
        ):
            # Captured steps read the scale at its old address, so that an equal copy would not do.
            engine.data = replace(engine.data, scale=self.data.scale)
            engine._federation = self._federation
            engine.groups, engine.unstackable = self.groups, self.unstackable
            engine.groups.move_to(engine)
            self.forget_family()
        return engine

    @property
    def captures_steps(self) -> bool:
        """Return True if steps are captured as CUDA graphs."""
        return self.record if self.record is not None else self.device.type == "cuda"

    # --- training --------------------------------------------------------------------------------

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Train waves of stacks.

        Clients that cannot be stacked are trained one by one after the stacks of their wave.

        Args:
            server: State that the clients start from.
            jobs: Clients with their sub-models.
            fold: Fold to which updates are added.
            outcome: Outcome to which costs, losses and client states are added.
        """
        jobs_by_kind: dict[tuple[Arch, Learner, int], list[Job]] = {}
        shares: dict[Job, float] = {}
        for job in jobs:
            learner = learner_of(self.method, job, self.world)
            shares[job] = learner.share
            age = self._age(server, job, learner) if learner.local.optimizer.ages else 0
            jobs_by_kind.setdefault((job.submodel.arch, learner, age), []).append(job)
        for wave in waves(self, jobs_by_kind):
            self._train_stackable(server, wave, shares, fold, outcome)
            jobs_of_wave = [job for _, stack_jobs in wave for job in stack_jobs]
            unstackable = [job for job in jobs_of_wave if job.submodel.arch in self.unstackable]
            for job in unstackable:  # Each run warns, also if an earlier run of the engine did
                self._warn_of_unstackable(job.submodel.arch)
            self._sequential.begin(self.federation)
            self._sequential.extra_shapes = self.extra_shapes
            self._sequential._train(server, unstackable, fold, outcome)

    def _train_stackable(
        self,
        server: Server,
        wave: Wave,
        shares: Mapping[Job, float],
        fold: Fold,
        outcome: Outcome,
    ) -> None:
        """Train the stacks of a wave whose members can be stacked.

        If an operation turns out not to be stackable, its member is marked in `unstackable`, and
        the other stacks of the wave are trained again. The fold has no update of the wave by then.

        Args:
            server: State that the clients start from.
            wave: Stacks that train at the same time.
            shares: Shares of the clients' nets, by job.
            fold: Fold to which updates are added.
            outcome: Outcome of the round.
        """
        while stackable := [
            (learner, stack_jobs)
            for learner, stack_jobs in wave
            if stack_jobs[0].submodel.arch not in self.unstackable
        ]:
            try:
                with self.computing():
                    stacks = self._run(server, stackable, shares)
            except UnstackableError as error:
                self.set_apart(error.arch, str(error))
                continue
            # A GPU may still be training. Updates are folded meanwhile, and values read afterwards.
            is_training = self.device.type == "cuda"
            if not is_training:
                check_stacks(self, stacks, outcome)
            for stack in stacks:
                fold_stack(self, stack, fold, outcome)
            if is_training:
                check_stacks(self, stacks, outcome)
            return

    @staticmethod
    def _age(server: Server, job: Job, learner: Learner) -> int:
        """Return the number of optimizer steps behind the slots that a client starts with.

        It is 0 for a client that starts with new slots.
        """
        memory = memory_of(server, job) if learner.keep_slots else None
        return memory.steps if memory else 0

    def client_bytes(self, arch: Arch, batch_size: int, slots: int) -> int:
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

    def _run(self, server: Server, wave: Wave, shares: Mapping[Job, float]) -> list[Stack]:
        """Train stacks, and return them with their results. Nothing is sent or folded.

        Stacks that have a client group train at the same time, the others one after another. A step
        of every group is launched before the next step of any, because a stream accepts only a few
        launches in advance and then blocks.

        Args:
            server: State that the clients start from.
            wave: Local training and jobs of every stack.
            shares: Shares of the clients' nets, by job.

        Returns:
            Stacks with a client group, followed by those without one.
        """
        grouped, ungrouped = [], []
        for learner, jobs in wave:
            stack = build_stack(self, server, learner, jobs, shares)
            if learner.lesson:
                self._teach(stack, learner.lesson)
            run_passes(self, stack, learner.before)
            group = self.groups.group_for(stack)
            if group is None:
                ungrouped.append(stack)
                continue
            group.load(stack)
            grouped.append((stack, group))
            for step in range(STEPS_AHEAD):  # A GPU is busy while the next stacks are prepared
                self._run_step(stack, group, step)

        num_steps = max((len(stack.losses) for stack, _ in grouped), default=0)
        for step in range(STEPS_AHEAD, num_steps):
            for stack, group in grouped:
                self._run_step(stack, group, step)
        for _, group in grouped:
            group.unload()
            self.groups.keep(group)
        for stack in ungrouped:
            self._run_ungrouped(stack)

        stacks = [*(stack for stack, _ in grouped), *ungrouped]
        for stack in stacks:
            run_passes(self, stack, stack.learner.after)
            finish_stack(self, stack)
        return stacks

    def _teach(self, stack: Stack, lesson: Learner) -> None:
        """Train the clients of a stack on public samples before they train on their own.

        The resulting weights replace those of `stack`, as if the clients had received them. The
        optimizer begins without slots, and its slots are dropped afterwards.

        Args:
            stack: Clients with their starting states. It is changed.
            lesson: Settings of the training on public samples.
        """
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
        group = public.groups.group_for(lesson_stack)
        if group is None:
            public._run_ungrouped(lesson_stack)
        else:
            group.load(lesson_stack)
            for step in range(len(losses)):
                public._run_step(lesson_stack, group, step)
            group.unload()
            public.groups.keep(group)
        # Copies are needed, because a client group reuses these tensors for the next clients.
        stack.state = {name: value.clone() for name, value in lesson_stack.state.items()}
        stack.received = stack.received._replace(weights=stack.state)

    def _run_step(self, stack: Stack, group: ClientGroup, step: int) -> None:
        """Run one step of a stack in its client group, and find the client that caused an error.

        A step after the last one of the stack has no effect.

        Args:
            stack: Clients that are loaded into the group.
            group: Client group.
            step: Step within the round.
        """
        self._run_action(stack, step, range(len(stack.jobs)), partial(group.run_step, step))

    def _run_ungrouped(self, stack: Stack) -> None:
        """Train a stack without a client group, and thus without captured steps.

        The stack is changed. In each step, clients whose batches have equal sizes are trained
        together.
        """
        if stack.slots is None:
            stack.slots = stack.learner.start_slots(
                stack.state, self.world.family.member(stack.arch)
            )
        for step in range(len(stack.losses)):
            for clients in stack.groups(step):
                self._run_action(
                    stack, step, clients, partial(train_step, self, stack, step, clients)
                )

    def _run_action(
        self, stack: Stack, step: int, clients: Sequence[int], action: Callable[[], None]
    ) -> None:
        """Run a step, and find the client that caused an error if it fails.

        Args:
            stack: Clients that train together.
            step: Step within the round.
            clients: Positions in the stack of the clients that the action trains.
            action: Function that trains them.

        Raises:
            UnstackableError: The clients fail only because they are stacked.
        """
        try:
            action()
        except Exception as error:
            if _NO_BATCHING_RULE not in str(error):
                active = [client for client in clients if step < len(stack.batches[client])]
                self._find_failed(stack, step, active)
            if fails_alone(error):
                with blamed(stack.jobs[clients[0]], f"training in a stack of {len(clients)}"):
                    raise error
            raise UnstackableError(stack.arch, error) from error

    def _find_failed(self, stack: Stack, step: int, clients: list[int]) -> None:
        """Repeat a step one client at a time, so that the error names the client that failed.

        If no client fails alone, nothing is raised.

        Args:
            stack: Clients that train together.
            step: Step within the round.
            clients: Positions in the stack of clients that have a batch in this step.
        """
        for client in clients:
            with blamed(stack.jobs[client], "training"):
                train_step(self, stack, step, [client])

    def set_apart(self, arch: Arch, why: str) -> None:
        """Mark a member as one that vmap cannot stack, and warn about it.

        Args:
            arch: Architecture of the member.
            why: Reason, as the warning gives it.
        """
        self.unstackable[arch] = why
        self._warn_of_unstackable(arch)

    def _warn_of_unstackable(self, arch: Arch) -> None:
        """Warn that clients of a member cannot be stacked, once in a run for each reason.

        Args:
            arch: Architecture that `unstackable` contains, with the reason.
        """
        why = self.unstackable[arch]
        self.once.warning(why, "clients with equal nets are trained one after another: %s", why)

    # --- evaluation ------------------------------------------------------------------------------

    def _evaluate(self, evaluations: Sequence[EvalSamples], batch_size: int) -> list[Score]:
        return self.evaluator.evaluate(evaluations, batch_size)

    def _calibrate(
        self, nets: Sequence[tuple[EvalSpec, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        return self.evaluator.calibrate(nets, batches)
