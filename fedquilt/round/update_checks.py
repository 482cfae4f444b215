"""Checks of updates before they are folded: each must follow from a job of the round.

The fold of every engine is wrapped in a `CheckedFold`. Engines that simulate clients send what the
job says, so that these checks find mistakes of a method or an engine. On real devices they refuse
what a device made up. Names, shapes and types are compared without looking at values. Values
are read once, to see that they are finite; the engine itself reads those of stacks on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.axes import Index, Positions
from fedquilt.errors import TrainingError
from fedquilt.round.budgets import learner_of
from fedquilt.round.client_checks import are_finite, check_sent, check_state
from fedquilt.round.client_state import memory_of, steps_behind
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Fold, Merged, fold_of
from fedquilt.round.link import Link
from fedquilt.round.training.batches import num_batches
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Job, Payload, Server, Submodel, Update, Weights, in_slots

Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # Shape and type of tensors, by name


@dataclass
class UpdateChecks:
    """Checks of the updates of one round. Results of comparisons are kept for the round.

    Args:
        federation: World, method and link.
        server: State that the round starts from.
        jobs: Jobs of the round.
    """

    federation: Federation
    server: Server
    jobs: Sequence[Job]
    # Problem of the positions of an upload, by upload, job's sub-model and whether rows may lack
    _positions: dict[tuple[Submodel, Submodel, bool], str] = field(default_factory=dict)
    _shapes: dict[tuple[Submodel, tuple[str, ...]], Shapes] = field(default_factory=dict)
    _batches: dict[object, int] = field(default_factory=dict)

    def check(self, update: Update) -> None:
        """Refuse an update that does not follow from its job, or has values that are not finite.

        Raises:
            TrainingError: It names the client and what differs.
            DivergenceError: A value is not finite.
        """
        self.check_structure(update)
        job = update.job
        for payload in update.sent:
            check_sent(job, payload.weights.values())
            check_state(job, [*in_slots(payload.slots), *payload.extras.values()])

    def check_structure(self, update: Update) -> None:
        """Refuse an update whose job, numbers, names, positions, shapes or types do not fit.

        Raises:
            TrainingError: It names the client and what differs.
        """
        job = update.job
        if job not in self._known_jobs:
            raise TrainingError(
                f"an update of client {job.client.id} for round {job.round + 1} reached the fold; "
                f"no such job is part of round {self.server.round + 1}."
            )
        learner = learner_of(self.federation.method, job, self.federation.world)
        problem = self._wrong_numbers(update, learner)
        if not problem and not _is_sent(update.sent):
            problem = "something else than one payload or none"
        for payload in () if problem else update.sent:
            problem = self._wrong_payload(payload, job, learner)
        if problem:
            raise TrainingError(
                f"client {job.client.id} (budget {job.client.budget}) sent {problem} in round "
                f"{job.round + 1}; it was refused, and the server's state is that of the round "
                "before."
            )

    @cached_property
    def _known_jobs(self) -> frozenset[Job]:
        return frozenset(self.jobs)

    def _wrong_numbers(self, update: Update, learner: Learner) -> str:
        """Describe step counts or factors of an update that do not follow from its job."""
        job = update.job
        for name in ("steps", "times"):
            if type(getattr(update, name)) is not int:
                return f"{name} of the type {type(getattr(update, name)).__name__}; int would fit"
        if job.client.size < 1:
            return f"an update for {job.client.size} samples; at least 1 would fit"
        batches = self._num_batches(job, learner)
        # A device that has lost its state starts without earlier steps.
        allowed = {
            steps_behind(memory, learner, batches) for memory in (memory_of(self.server, job), None)
        }
        if update.steps not in allowed:
            fitting = " or ".join(map(str, sorted(allowed)))
            return f"a count of {update.steps} steps; {fitting} would fit"
        if update.times != learner.times:
            return f"the factor {update.times}; {learner.times} would fit"
        effective_steps = learner.effective_steps(batches)
        if update.effective_steps != effective_steps:
            return f"{update.effective_steps} effective steps; {effective_steps} would fit"
        return ""

    def _num_batches(self, job: Job, learner: Learner) -> int:
        local = learner.local
        key = (job.client.size, local.epochs, local.batch_size, local.last_batch)
        if key not in self._batches:
            self._batches[key] = num_batches(job.client.size, local)
        batches = self._batches[key]
        return min(batches, learner.max_batches) if learner.max_batches else batches

    def _wrong_payload(self, payload: Payload, job: Job, learner: Learner) -> str:
        """Describe the first difference between a payload and what its job says. Empty: none."""
        world = self.federation.world
        member = world.family.member(job.submodel)
        sends_rows = learner.class_rows and member.class_rows
        key = (payload.submodel, job.submodel, sends_rows)
        problem = self._positions.get(key)
        if problem is None:
            problem = self._positions[key] = self._wrong_positions(*key)
        if problem:
            return problem

        expected = self._expected(payload.submodel, learner.sent(member))
        if problem := difference("weights", payload.weights, expected):
            return problem
        slots = learner.state.slots_up
        if payload.slots.keys() != {*slots}:
            return f"the slots {sorted(payload.slots)}; {sorted(slots)} would fit"
        if slots:
            expected = self._expected(payload.submodel, learner.slotted(member))
            for slot, values in payload.slots.items():
                if problem := difference(f"the slot {slot!r}", values, expected):
                    return problem
        return self._wrong_extras(payload, learner)

    def _wrong_positions(self, sent: Submodel, planned: Submodel, sends_rows: bool) -> str:
        """Describe how the positions of an upload differ from those that its job allows.

        A client may leave out rows of classes that it has no samples of. A lossy link delivers the
        first columns.

        Args:
            sent: Positions of the upload.
            planned: Positions of the job.
            sends_rows: True: the client sends only the rows of its own classes.
        """
        family = self.federation.world.family
        if sent.scope != planned.scope:
            return f"weights of the scope {sent.scope!r}; {planned.scope!r} would fit"
        upload = planned
        if sends_rows:
            rows = sent.index.get("class", Positions.prefix(family.num_outputs))
            if problem := _wrong_rows(rows, family.num_outputs):
                return problem
            upload = replace(planned, index=Index({**planned.index, "class": rows}))
        if sent == upload:
            return ""
        link = self.federation.link
        if type(link).up is not Link.up:  # A link of the user may lose any positions.
            return _outside(sent, upload)
        if link.loss is not None and link.lossy:
            member = family.member(upload)
            for columns in range(1, link.loss.count(member) + 1):
                share = columns * link.loss.granularity
                if member.nested(share).arch == sent.arch and family.part(upload, share) == sent:
                    return ""
            return "positions that are not the first columns of its job"
        return "other positions than those of its job"

    def _expected(self, submodel: Submodel, names: tuple[str, ...]) -> Shapes:
        """Return the shapes and types of weights at positions. They are those of the server."""
        expected = self._shapes.get((submodel, names))
        if expected is None:
            layout = self.federation.world.family.layout
            kept_sizes = {axis: len(positions) for axis, positions in submodel.index.items()}
            sizes = layout.sizes | submodel.arch.sizes | kept_sizes
            expected = self._shapes[submodel, names] = {
                name: (
                    torch.Size(layout.shape(name, sizes)),
                    self.server.weights[submodel.scope + name].dtype,
                )
                for name in names
            }
        return expected

    def _wrong_extras(self, payload: Payload, learner: Learner) -> str:
        """Describe extras that the learner does not send, or that differ from the server's."""
        for name, value in payload.extras.items():
            if name not in learner.state.extras_up:
                return f"the extra {name!r}; {sorted(learner.state.extras_up)} would fit"
            if not isinstance(value, Tensor):
                return f"a {type(value).__name__} as the extra {name!r}"
            old = self.server.extras.get(name)
            if old is not None and (value.shape, value.dtype) != (old.shape, old.dtype):
                return (
                    f"the extra {name!r} as {value.dtype} {list(value.shape)} in place of "
                    f"{old.dtype} {list(old.shape)}"
                )
        return ""

    def check_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        """Refuse a stack whose updates do not fit, or whose tensors are not those of the updates.

        Weights on a GPU are compared without looking at their values, because that would wait for
        a GPU that is still training. The engine reads the values of all stacks at once afterwards,
        and the round fails if one is not finite.

        Args:
            updates: Updates that sent the same positions.
            stacked: Weights of each payload, with the clients in dimension 0.

        Raises:
            TrainingError: It names the client and what differs.
            DivergenceError: A value is not finite.
        """
        for update in updates:
            self.check_structure(update)
        first = updates[0]
        cuts = {tuple(payload.submodel for payload in update.sent) for update in updates}
        problem = ""
        if len(cuts) != 1 or len(stacked) != len(first.sent):
            problem = f"{len(cuts)} kinds of positions and {len(stacked)} payloads"
        for payload, weights in () if problem else zip(first.sent, stacked, strict=True):
            expected = {
                name: (torch.Size((len(updates), *value.shape)), value.dtype)
                for name, value in payload.weights.items()
            }
            problem = problem or difference("weights", weights, expected)
        if problem:
            raise TrainingError(
                f"a stack of {len(updates)} updates reached the fold with {problem} in round "
                f"{self.server.round + 1}; updates of the same positions and their weights, with "
                "the clients in dimension 0, would fit."
            )
        for weights in stacked:
            if not all(value.is_cuda for value in weights.values()) and not are_finite(
                weights.values()
            ):
                for row, update in enumerate(updates):
                    check_sent(update.job, [value[row] for value in weights.values()])
        for update in updates:
            for payload in update.sent:
                check_state(update.job, [*in_slots(payload.slots), *payload.extras.values()])


def difference(title: str, values: Mapping[str, Tensor], expected: Shapes) -> str:
    """Describe the first difference in names, shapes or types. The text is empty if all match.

    Args:
        title: What the tensors are, such as "weights".
        values: Tensors by name.
        expected: Shapes and types by name.
    """
    if not isinstance(values, Mapping):
        return f"a {type(values).__name__} as {title}"
    if values.keys() != expected.keys():
        names = sorted(values.keys() ^ expected.keys(), key=str)
        verb = "without" if names[0] in expected else "with"
        return f"{title} {verb} {names[0]!r}"
    for name, (shape, dtype) in expected.items():
        value = values[name]
        if not isinstance(value, Tensor):
            return f"a {type(value).__name__} as {name!r} of {title}"
        if value.shape != shape or value.dtype != dtype:
            return (
                f"{name!r} of {title} as {value.dtype} {list(value.shape)} in place of {dtype} "
                f"{list(shape)}"
            )
    return ""


def _outside(sent: Submodel, upload: Submodel) -> str:
    """Describe positions of `sent` that `upload` does not have, or has in another order."""
    held = upload.positions
    if sent.arch != upload.arch or sent.positions.keys() != held.keys():
        return "a net of another member than that of its job"
    for axis, positions in sent.positions.items():
        if not len(positions) or positions != held[axis].keep(positions):
            return f"positions on axis {axis!r} that are not those of its job"
    return ""


def _is_sent(sent: object) -> bool:
    """Return True for a tuple of at most one payload."""
    return (
        isinstance(sent, tuple)
        and len(sent) <= 1
        and all(isinstance(payload, Payload) for payload in sent)
    )


def _wrong_rows(rows: Positions, num_outputs: int) -> str:
    """Describe class rows that are none, not distinct, not ascending or beyond the outputs."""
    positions = list(rows) if len(rows) <= num_outputs else []
    if not positions or positions != sorted(set(positions)):
        return f"{len(rows)} class rows; distinct ones in ascending order would fit"
    if positions[0] < 0 or positions[-1] >= num_outputs:
        return f"the class row {positions[-1]}; the model has {num_outputs}"
    return ""


@dataclass
class CheckedFold(Fold):
    """A fold that refuses updates which do not follow from the jobs of the round.

    Args:
        fold: Fold of the method.
        checks: What updates are compared with.
    """

    fold: Fold
    checks: UpdateChecks
    _added: set[Job] = field(default_factory=set)  # Jobs whose updates were added

    @override
    def add(self, update: Update) -> None:
        self.checks.check(update)
        self._count([update])
        self.fold.add(update)

    @override
    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        if not updates:
            raise TrainingError("a stack without updates reached the fold; one or more would fit.")
        self.checks.check_stack(updates, stacked)
        self._count(updates)
        self.fold.add_stack(updates, stacked)

    @override
    def join(self, other: Self | Fold) -> None:
        """Add the sums of another fold, whose updates were checked when they were added."""
        self.fold.join(other.fold if isinstance(other, CheckedFold) else other)

    @override
    def finish(self, server: Server) -> Merged:
        return self.fold.finish(server)

    def _count(self, updates: Sequence[Update]) -> None:
        for update in updates:
            job = update.job
            if job in self._added:
                raise TrainingError(
                    f"client {job.client.id} sent a second update for its job in round "
                    f"{job.round + 1}; one would fit."
                )
            self._added.add(job)


def checked_fold(federation: Federation, server: Server, jobs: Sequence[Job]) -> CheckedFold:
    """Return the fold of a method, which refuses updates that do not follow from jobs.

    Args:
        federation: World, method and link.
        server: State that the round starts from.
        jobs: Jobs whose updates are folded.

    Raises:
        ConfigError: The method's fold lacks what engines call.
    """
    fold = fold_of(federation.method, server, federation.world)
    return CheckedFold(fold, UpdateChecks(federation, server, jobs))
