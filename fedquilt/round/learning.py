"""Training on the server: its nets learn from public samples as clients learn from their own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.errors import DivergenceError, FedquiltError, TrainingError
from fedquilt.errors.faults import is_out_of_memory
from fedquilt.family.net import Pass
from fedquilt.hardware.precision import computing
from fedquilt.names import said
from fedquilt.round.client_checks import are_finite
from fedquilt.round.fold import Merged
from fedquilt.round.link import PERFECT
from fedquilt.round.merge import Mean
from fedquilt.round.ranking import scored
from fedquilt.round.teachers import output_batch
from fedquilt.round.training.batches import batched
from fedquilt.round.training.passes import LossPass
from fedquilt.round.training.public import POSITIONS
from fedquilt.round.training.server import TEACHER, Teaching
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, run_pass
from fedquilt.storage.files import compact
from fedquilt.terms import Budget, Client, ClientState, Job, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import Federation
    from fedquilt.round.training.local import LocalTraining

# Round numbers that are reserved for the students of one round of the run. A student's job has one
# round number per comparison.
_MAX_CHECKS = 1 << 20
_SERVER = Client(0, Budget(share=1.0))  # The server, as the client that trains all students.


@dataclass(frozen=True)
class Learnt:
    """Costs of the server's training in a round."""

    seconds: float = 0.0  # Wall-clock time
    macs: int = 0  # Multiply-adds
    steps: int = 0  # Optimizer steps of all students


@dataclass(frozen=True)
class EvaluatedLoss(LossPass):
    """Value of an objective with a net as it is evaluated, without dropout."""

    @override
    def mode(self, local: LocalTraining) -> Pass:
        return Pass(train=False, statistics="stored" if local.norm.tracks else "batch")


@dataclass
class _Progress:
    """Weights, optimizer state and best result of one student."""

    weights: Weights  # By scope and name
    best: float  # Smallest loss so far
    best_weights: Weights  # Weights that had it
    # State of the student's optimizer, by client and scope
    memory: dict[tuple[int, str], ClientState] = field(default_factory=dict)
    failures: int = 0  # Comparisons in a row without progress

    def take(self, value: float) -> None:
        """Record the value of the current weights, where smaller is better.

        If it is below the best so far, the weights become the best ones. Else it counts as a
        failure.
        """
        if value < self.best:
            self.best = value
            self.best_weights = self.weights
            self.failures = 0
        else:
            self.failures += 1


def learn(
    federation: Federation, server: Server, merged: Merged, engine: Engine
) -> tuple[Server, Learnt]:
    """Run the server's own training (`Method.learn`), and return its new state and the costs.

    The state is `server` itself if the method does not train on the server.

    Args:
        federation: World, method and link.
        server: State after the merge.
        merged: Result of the fold, with the outputs of teachers.
        engine: Engine of the run. It trains students as it trains clients.

    Raises:
        DivergenceError: Outputs of teachers are not finite, or students diverge.
    """
    began = time.perf_counter()
    macs = merged.macs
    steps = 0
    if not are_finite(merged.outputs.values()):
        raise DivergenceError(
            f"nets that the server received in round {server.round} have outputs on the public "
            "samples that are not finite; they were refused, and the server's state is that of the "
            "round before. A smaller learning rate of clients may help, or gradient clipping "
            "(clip=1.0)."
        )

    def train(state: Server, teaching: Teaching) -> Server:
        nonlocal macs, steps
        if not teaching.how.steps:
            return state
        with _blamed(state, teaching):
            trainer = _StudentTrainer(federation, state, teaching, engine)
            trainer.train()
        macs += trainer.macs
        steps += trainer.steps
        return replace(state, weights={**state.weights, **compact(trainer.best)})

    new_server = federation.method.learn(server, merged.outputs, federation.world, train)
    return new_server, Learnt(time.perf_counter() - began, macs, steps)


@contextmanager
def _blamed(server: Server, teaching: Teaching) -> Iterator[None]:
    """Raise any error inside as a TrainingError that names the server and not a client.

    The engine trains students as clients, and its errors name client 0.

    Args:
        server: State of the round, for its number.
        teaching: Training of the students, with their loss.
    """
    kept = "the server's state is that of the round before."
    try:
        yield
    except DivergenceError as error:
        raise DivergenceError(
            f"the server's training on public samples diverged in round {server.round}. A smaller "
            f"learning rate (method.server_training.optimizer.lr) would help; {kept}"
        ) from error
    except Exception as error:
        cause = error.__cause__ if isinstance(error, TrainingError) else error
        if isinstance(error, FedquiltError) and not isinstance(error, TrainingError):
            raise
        if cause is None or is_out_of_memory(cause):
            raise
        loss = type(teaching.method.objective).__name__
        raise TrainingError(
            f"the server's training on public samples failed in round {server.round}: "
            f"{said(cause)}. Its loss is {loss}, which should return one number for logits "
            f"(sample, class, …) and the teacher's rows (sample, …); {kept}"
        ) from error


class _StudentTrainer:
    """Trainer of the students of one round, a few steps at a time."""

    def __init__(
        self, federation: Federation, server: Server, teaching: Teaching, engine: Engine
    ) -> None:
        self._federation = federation
        self._server = server
        self._teaching = teaching
        self._engine = engine
        self._students = replace(federation, method=teaching.method, link=PERFECT, received={})
        world = federation.world
        assert world.public is not None, (
            "a method that teaches without public samples was refused before the run"
        )
        positions = torch.arange(world.num_public)
        if teaching.positions is not None:
            positions = teaching.positions.cpu()
        rows, held_rows = teaching.how.split(len(positions), world.seed)
        self._public = engine.on_public(world)
        teacher = teaching.teacher.to(engine.device, world.dtype)
        self._extras = {
            TEACHER: teacher[rows.to(engine.device)],
            TEACHER + POSITIONS: positions[rows],
        }
        samples = world.public[positions[held_rows].to(world.public.device)].to(engine.device)
        self._held = samples, teacher[held_rows.to(engine.device)]
        self.macs = self.steps = 0
        self._progress: dict[Submodel, _Progress] = {}
        for student, value in self._compared(teaching.students, server.weights).items():
            weights = {
                name: weight
                for name, weight in server.weights.items()
                if name.startswith(student.scope)
            }
            self._progress[student] = _Progress(weights, value, weights)

    @property
    def best(self) -> dict[str, Tensor]:
        """Return the best weights so far of all students, by scope and name.

        These may be the weights before the first step.
        """
        return {
            name: weight
            for progress in self._progress.values()
            for name, weight in progress.best_weights.items()
        }

    def train(self) -> None:
        """Train until every student has taken all steps or has stopped making progress.

        After every few steps, students are compared with the teacher, and each one's best weights
        are kept.
        """
        how = self._teaching.how
        for check in range(math.ceil(how.steps / how.steps_per_check)):
            active = [
                net for net, progress in self._progress.items() if progress.failures < how.patience
            ]
            if not active:
                return
            self._train(active, check)
            weights = {
                name: weight
                for net in active
                for name, weight in self._progress[net].weights.items()
            }
            for student, value in self._compared(active, weights).items():
                self._progress[student].take(value)

    def _train(self, active: Sequence[Submodel], check: int) -> None:
        """Train students for the steps between two comparisons, and store their new weights.

        Each student is a job of one client, the server, with all public samples that are not held
        back.

        Args:
            active: Students that are still trained.
            check: Number of comparisons since the first step of the round, from 0.
        """
        jobs = [
            Job(_SERVER, student, self._server.round * _MAX_CHECKS + check) for student in active
        ]
        state = Server(
            jobs[0].round,
            {
                name: weight
                for net in active
                for name, weight in self._progress[net].weights.items()
            },
            {key: memory for net in active for key, memory in self._progress[net].memory.items()},
            extras=self._extras,
        )
        fold = Mean(self._federation.world.family.cutter, "uniform").begin(state)
        how = self._teaching.how
        batches = min(how.steps_per_check, how.steps - check * how.steps_per_check)
        method = replace(self._teaching.method, batches=batches, rate_factor=how.rate_factor(check))
        students = replace(self._students, method=method)
        outcome = self._public.train(students, state, jobs, fold)
        merged = fold.finish(state).weights
        for student in active:
            progress = self._progress[student]
            key = (_SERVER.id, student.scope)
            progress.weights = {name: merged[name] for name in progress.weights}
            progress.memory = {key: outcome.memory[key]}
        self.macs += outcome.total.macs
        self.steps += len(active) * batches

    def _compared(
        self, students: Sequence[Submodel], weights: Mapping[str, Tensor]
    ) -> dict[Submodel, float]:
        """Return a measure of each student's progress, where smaller is better.

        It is the loss on public samples that are held back, or the negated score on labelled
        samples of clients (`ServerTraining.stop_by`).

        Args:
            students: Students to compare.
            weights: Their weights, by scope and name.
        """
        if self._teaching.how.stop_by == "labels":
            state = replace(self._server, weights={**self._server.weights, **weights})
            scores = scored(self._federation, state, tuple(students), self._engine)
            return {student: -score for student, score in zip(students, scores, strict=True)}
        return {student: self._held_loss(student, weights) for student in students}

    def _held_loss(self, student: Submodel, weights: Mapping[str, Tensor]) -> float:
        """Return a student's mean loss on the public samples that are held back.

        The net runs as in evaluation. Its multiply-adds are counted in `macs`.

        Args:
            student: The student's sub-model.
            weights: Weights of students, by scope and name.
        """
        world, (samples, rows) = self._federation.world, self._held
        member = world.family.member(student)
        device = samples.device
        learner = self._teaching.method.learner(Job(_SERVER, student, 0), world)
        names = [name for name in member.names if student.scope + name in weights]
        state = world.family.cutter.gather(weights, student, names)
        loss_pass = EvaluatedLoss(objective=self._teaching.method.objective)
        targets = world.task.blank_targets((len(samples), *world.family.output_shape[1:])).to(
            device
        )
        present = torch.ones(world.family.num_outputs, dtype=torch.bool, device=device)
        key = torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=device)
        share = torch.ones((), dtype=world.dtype, device=device)
        parts = []
        sizes = []
        with torch.no_grad(), computing(world.precision, device):
            for chunk in batched(torch.arange(len(samples), device=device), output_batch(world)):
                batch = Batch(
                    samples[chunk].clone(),
                    targets[chunk],
                    present,
                    key,
                    share,
                    rows[chunk],
                )
                parts.append(run_pass(learner, member, loss_pass, state, Received(state), batch))
                sizes.append(len(chunk))
        self.macs += member.macs * len(samples)
        loss = loss_pass.merged(parts, sizes)["loss"]
        if loss.dim():
            raise ValueError(f"the loss of a batch has the shape {tuple(loss.shape)}")
        return float(loss)
