"""What every engine does alike: find a client's data, put together what it starts from, take down what it keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import ConfigError, DataError, FedquiltError, TrainingError
from fedquilt.family.net import Pass
from fedquilt.precision import Precision, computing, unfit
from fedquilt.round.attack import PGD
from fedquilt.round.budgets import check_budgets
from fedquilt.round.link import Link, Trip
from fedquilt.round.merge import Fold
from fedquilt.round.serve import Exam, Kind, Score, both_statistics
from fedquilt.round.training.batches import batched, itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.terms import Job, Memory, Payload, Server, Slots, Submodel, Update, Weights, World

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.methods.method import Method


MEASURE = Pass(statistics="measure")
_CUTS_KEPT = 16
_HOLDERS_KEPT = 4096
_CALIBRATION = 1 << 16  # samples that norm statistics are measured over, at most: all of CIFAR or MNIST


class Cost(NamedTuple):
    """What a client's round took: bytes both ways, and multiply-adds."""

    down: int = 0
    up: int = 0
    macs: int = 0


@dataclass
class Outcome:
    """What a cohort's training leaves behind besides the fold."""

    memory: dict[tuple[int, str], Memory] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    costs: dict[int, Cost] = field(default_factory=dict)  # by client
    stacks: int = 0  # how many groups of clients were trained as one

    def charge(self, client: int, down: int, up: int, macs: int) -> None:
        """Count what a client was sent, what arrived from it, and the multiply-adds of its training."""
        had = self.costs.get(client, Cost())
        self.costs[client] = Cost(had.down + down, had.up + up, had.macs + macs)

    @property
    def total(self) -> Cost:
        """What all clients took together."""
        costs = self.costs.values()
        return Cost(sum(one.down for one in costs), sum(one.up for one in costs), sum(one.macs for one in costs))

    def join(self, other: Outcome) -> None:
        """Take what other clients of the cohort left behind."""
        self.memory.update(other.memory)
        self.losses += other.losses
        for client, cost in other.costs.items():
            self.charge(client, *cost)
        self.stacks += other.stacks


@dataclass(frozen=True)
class Start:
    """What a client starts a round from."""

    state: State
    slots: OptimiserState | None  # what it remembers; None: empty
    steps: int  # optimiser steps behind the slots
    bytes: int  # that arrived
    known: Weights = field(default_factory=dict)  # where links code changes: what both sides know that it received


@dataclass(frozen=True)
class Delivery:
    """What came of a client's upload."""

    sent: tuple[Payload, ...]  # as it arrived, if anything did
    bytes: int
    intact: bool  # it arrived as it was sent
    slots: Slots = field(default_factory=dict)  # what the client keeps of it


@dataclass(frozen=True)
class _Exact:
    """A fold that adds in full whatever the clients trained in: rounded to bf16, a mean forgets what was learnt."""

    fold: Fold
    device: torch.device

    def add(self, update: Update) -> None:
        with computing("fp32", self.device):
            self.fold.add(update)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        with computing("fp32", self.device):
            self.fold.add_stack(updates, stacked)

    def join(self, other: Any) -> None:
        with computing("fp32", self.device):
            self.fold.join(other)

    def finish(self, server: Server) -> tuple[Weights, Slots]:
        return self.fold.finish(server)


@dataclass
class Engine(ABC):
    """Trains and tests cohorts. Subclasses decide how many clients run at once, and where."""

    world: World
    data: FederatedData
    link: Link = Link()

    @classmethod  # noqa: B027 (most need nothing)
    def check(cls) -> None:
        """Whether what it needs is installed; asked before anything heavy."""

    @property
    def precision(self) -> Precision:
        """Return the precision of products; weights and sums are in the world's dtype."""
        return self.world.precision

    def computing(self) -> AbstractContextManager[None]:
        """What all training and testing happens in."""
        return computing(self.precision, self.world.device)

    def __post_init__(self) -> None:
        if why := unfit(self.precision, str(self.world.device)):
            raise ConfigError(f"precision = {why}")
        self._cuts: dict[tuple[Submodel, tuple[str, ...]], dict[str, Tensor]] = {}
        self._cut_from: Weights | None = None
        self.method: Method | None = None
        self._first: Weights | None = None
        self.deal(self.data)

    def deal(self, data: FederatedData, seed: int | None = None) -> None:
        """Go on with other data, or the same dealt otherwise; and with another seed."""
        if seed is not None and seed != self.world.seed:
            self.world = replace(self.world, seed=seed)
            self.__dict__.pop("initial", None)
            self._first = None
        self.data = data.to(self.world.device, self.world.dtype)
        self._holds: dict[int, Tensor] = {}
        self._attackable: set[PGD] = set()
        self.__dict__.pop("pooled", None)
        self._check_data()

    # --- the two verbs -----------------------------------------------------------------------------------------

    def train(self, method: Method, server: Server, jobs: Sequence[Job], fold: Fold) -> Outcome:
        """Cut, send, train, send back and add: everything a cohort does between plan and finish."""
        outcome = Outcome()
        self.follow(method)
        for submodel, job in {job.submodel: job for job in jobs}.items():
            self.world.family.check(submodel, f"client {job.client.id} (budget {job.client.budget})")
        check_budgets(method, jobs, self.world)
        try:
            with self.computing():
                self._train(method, server, jobs, _Exact(fold, self.world.device), outcome)
        finally:
            self._cuts.clear()  # they are the old server's, and need not outlive it
            self._cut_from = None
        return outcome

    @abstractmethod
    def _train(self, method: Method, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None: ...

    def evaluate(self, method: Method, exams: Sequence[Exam], batch_size: int) -> list[Score]:
        """Test networks on samples."""
        for attack in {exam.attack for exam in exams if exam.attack}:
            self._check_range(attack)
        with _failing("the evaluation failed"), self.computing():
            return self._evaluate(method, exams, batch_size)

    @abstractmethod
    def _evaluate(self, method: Method, exams: Sequence[Exam], batch_size: int) -> list[Score]: ...

    def calibrate(
        self,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        samples: Tensor | None = None,
        attack: PGD | None = None,
    ) -> list[dict[str, Tensor]]:
        """Norm statistics of networks, measured over the pooled training data (the papers' static norms), or some.

        Noised norms have those of attacked samples, as they had in training; conditioned ones, which see both kinds,
        the mean of clean samples' at robustness 0 and attacked samples' at 1.
        """
        batches = batched(self.pooled if samples is None else samples, batch_size)

        def measured(mode: Pass, by: PGD | None) -> list[dict[str, Tensor]]:
            kinds = [(Kind((Submodel(net.arch),), mode, by), weights) for net, weights in nets]
            return self._calibrate(kinds, batches)

        with _failing("the calibration of norms failed"), self.computing():
            found = measured(MEASURE, None)
            if not self.world.family.adjustable:
                return found
            noised = measured(replace(MEASURE, robustness=1.0), attack)
            return [both_statistics(clean, own) for clean, own in zip(found, noised, strict=True)]

    @abstractmethod
    def _calibrate(self, nets: Sequence[tuple[Kind, Weights]], batches: list[Tensor]) -> list[dict[str, Tensor]]:
        """The statistics each net sees, their mean over batches of training samples."""

    # --- the pieces they share ---------------------------------------------------------------------------------

    def start(self, server: Server, job: Job, learner: Learner, link: Link | None = None) -> Start:
        """What it received, else what it remembers, else the initial weights, position by position.

        It comes over the engine's link, or another.
        """
        family, submodel, link = self.world.family, job.submodel, self.link if link is None else link
        names, shared = learner.names(family), learner.received(family)
        memory = server.memory.get((job.client.id, submodel.scope))
        with self.blame(job, "receiving"):
            payload = Payload(submodel, self._cut(server, submodel, shared))
            known = self._known(server, job, shared) if link.tracks else {}
            arrival = link.down(payload, Trip(self.world, job), known)
            arrived = arrival.payload
            if arrived and arrived.submodel == submodel and len(shared) == len(names):
                state = {name: arrived.weights[name] for name in names}
            else:
                state = family.cutter.gather(self._initial, submodel, names)
                if memory:
                    state = family.cutter.overlay(state, submodel.held, memory.weights, memory.submodel.held)
                if arrived:
                    state = family.cutter.overlay(state, submodel.held, arrived.weights, arrived.submodel.held)
            if arrived and link.coder:
                coded = {name: arrived.weights[name] for name in self._coded(shared)}
                known = family.cutter.overlay(known, submodel.held, coded, arrived.submodel.held) if known else coded
            slots = None
            if memory and learner.keep_slots:
                slots = learner.start_slots(state, family)
                for slot, values in slots.items():
                    remembered = memory.slots.get(slot, {})
                    slots[slot] = family.cutter.overlay(values, submodel.held, remembered, memory.submodel.held)
        return Start(state, slots, memory.steps if memory and learner.keep_slots else 0, arrival.bytes, known)

    def _coded(self, names: Sequence[str]) -> list[str]:
        """The weights whose changes a link may code: norm statistics and constants are sent as they are."""
        trainable = set(self.world.family.trainable)
        return [name for name in names if name in trainable]

    def _known(self, server: Server, job: Job, names: Sequence[str]) -> dict[str, Tensor]:
        """What both sides know that a client received last, else the initial weights, which both have."""
        first = self.world.family.cutter.gather(self._initial, job.submodel, self._coded(names))
        since = self._recalled(server, job, "received", first)
        return {name: value + since[name] for name, value in first.items()}

    def _recalled(self, server: Server, job: Job, slot: str, like: Weights) -> dict[str, Tensor]:
        """A slot of a client's memory at a job's positions; zero where there is nothing."""
        found = {name: torch.zeros_like(value) for name, value in like.items()}
        memory = server.memory.get((job.client.id, job.submodel.scope))
        if memory and slot in memory.slots:
            there = memory.slots[slot], memory.submodel.held
            found = self.world.family.cutter.overlay(found, job.submodel.held, *there)
        return found

    def deliver(self, server: Server, job: Job, payload: Payload, known: Weights) -> Delivery:
        """Send what a client trained; `known` is what both sides know that it started from."""
        cutter, held, link = self.world.family.cutter, job.submodel.held, self.link
        residual = self._recalled(server, job, "residual", known) if link.feedback else {}
        lost = residual
        with self.blame(job, "sending"):
            beside = [cutter.narrow(one, held, payload.submodel.held) if one else one for one in (known, residual)]
            arrival = link.up(payload, Trip(self.world, job, up=True), *beside)
            if arrival.payload:
                if link.codec:  # whose range may be wider than numbers reach
                    self._check_sent(job, arrival.payload.weights.values())
                if arrival.error:  # of what did not arrive the residual stays as it was
                    lost = cutter.overlay(lost, held, arrival.error, arrival.payload.submodel.held)
            slots = {"residual": lost} if lost else {}
            if link.tracks and known:  # kept as the change since the beginning: an empty slot is zero
                first = cutter.gather(self._initial, job.submodel, list(known))
                slots["received"] = {name: value - first[name] for name, value in known.items()}
        sent = (arrival.payload,) if arrival.payload else ()
        return Delivery(sent, arrival.bytes, arrival.payload is payload, slots)

    def _cut(self, server: Server, submodel: Submodel, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Clients that get the same positions get the same tensors: cut once. Few are kept: a cohort may not fit."""
        if self._cut_from is not server.weights:
            self._cuts.clear()
            self._cut_from = server.weights
        known = self._cuts.get((submodel, names))
        if known is None:
            if len(self._cuts) >= _CUTS_KEPT:
                self._cuts.pop(next(iter(self._cuts)))
            known = self.world.family.cutter.gather(server.weights, submodel, names)
            self._cuts[submodel, names] = known
        return known

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """The weights everyone starts from, without a scope."""
        return self.world.family.init(self.world.seed, self.world.device, self.world.dtype)

    @property
    def _initial(self) -> Weights:
        """The weights everyone started from, under every scope the method has."""
        if self._first is None:
            self._first = self.initial if self.method is None else self.method.initial(self.world)
        return self._first

    def follow(self, method: Method, initial: Weights | None = None) -> None:
        """Train by this method from now on. Clients start from its initial weights.

        Workers are given `initial`. They cannot draw it, because their family has one seed's weights.
        """
        if method is not self.method:
            self.method, self._first = method, initial
        if method.attack is not None:
            self._check_range(method.attack)

    def _check_range(self, attack: PGD) -> None:
        """Refuse data that an attack is not made for; looked at once."""
        if attack not in self._attackable:
            attack.check(self.data)
            self._attackable.add(attack)

    def kept(self, learner: Learner) -> tuple[str, ...]:
        """The weights a client keeps for its next round: where something may get lost, all that it trained."""
        family = self.world.family
        if not self.link.lossy:
            return learner.kept(family)
        return tuple(name for name in learner.names(family) if name not in family.carried)

    def remember(
        self,
        server: Server,
        job: Job,
        learner: Learner,
        state: State,
        slots: OptimiserState,
        steps: int,
        travel: Slots,
    ) -> Memory | None:
        """What the client keeps for its next round. Positions it did not hold this time stay as they were."""
        weights = {name: state[name].clone() for name in self.kept(learner)}
        if not weights and not travel and not learner.keep_slots and not learner.counts_steps:
            return None
        own = {**slots, **travel} if learner.keep_slots else travel
        new = Memory(job.submodel, weights, own, steps if self._remembers_steps(learner) else 0, job.round)
        old = server.memory.get((job.client.id, job.submodel.scope))
        if old is None or not (weights or own) or old.submodel.index == new.submodel.index:
            return new
        return self._joined(old, new)

    def steps(self, server: Server, job: Job, learner: Learner, batches: int) -> int:
        """Return the optimizer steps behind a client after so many batches, those of earlier rounds included if kept.

        Where neither its slots nor the merge depend on earlier rounds, it starts from 0 in every round.
        """
        memory = server.memory.get((job.client.id, job.submodel.scope)) if self._remembers_steps(learner) else None
        return (memory.steps if memory else 0) + learner.moves(batches)

    @staticmethod
    def _remembers_steps(learner: Learner) -> bool:
        return learner.keep_slots or learner.counts_steps

    def _joined(self, old: Memory, new: Memory) -> Memory:
        """Both memories, by global position; where they overlap the new one counts."""
        family, cutter = self.world.family, self.world.family.cutter
        index = cutter.union(old.submodel.index, new.submodel.index)
        arch = replace(new.submodel.arch, widths=tuple((axis, len(kept)) for axis, kept in index.items()))
        both = replace(new.submodel, arch=arch, index=index)

        def joined(base: Weights, before: Weights, after: Weights) -> dict[str, Tensor]:
            under = cutter.overlay(base, index, before, old.submodel.index)
            return cutter.overlay(under, index, after, new.submodel.index)

        # Between two cuts lie pairs of positions that neither held: there a client has its initial weights.
        weights = joined(cutter.gather(self._initial, both, list(new.weights)), old.weights, new.weights)
        sizes, slots = family.layout.sizes | arch.sizes, {}
        for slot, values in new.slots.items():
            empty = {name: v.new_zeros(family.layout.shape(name, sizes)) for name, v in values.items()}
            slots[slot] = joined(empty, old.slots.get(slot, {}), values)
        return replace(new, submodel=both, weights=weights, slots=slots)

    def keys(self, job: Job) -> tuple[int, int]:
        """The seeds of a job's batch order and of its noise; all nets of a client see equal batches."""
        name = (self.world.seed, job.client.id, job.round)
        return noise.key(1, *name), noise.key(2, *name)

    def batches(self, job: Job, learner: Learner) -> list[Tensor]:
        """The positions in the pool of every batch the client goes through."""
        part = self.data.parts[job.client.id]
        batches = itinerary(len(part), learner.local, self.keys(job)[0])
        return list(part[torch.cat(batches)].split_with_sizes([len(batch) for batch in batches]))

    def held(self, client: int) -> Tensor:
        """(class,) True where the client has samples of the class; on the CPU. Found once for those seen lately."""
        if client not in self._holds:
            if len(self._holds) >= _HOLDERS_KEPT:
                self._holds.pop(next(iter(self._holds)))
            self._holds[client] = self.data.held(client, self.world.family.num_classes).cpu()
        return self._holds[client]

    @contextmanager
    def blame(self, job: Job, stage: str) -> Iterator[None]:
        """Say whose training failed, when and where; rounds are counted from 1, as in the records."""
        with _failing(
            f"client {job.client.id} (budget {job.client.budget}) failed in round {job.round + 1} while {stage}"
        ):
            yield

    def check_finite(self, job: Job, losses: Tensor, updates: Sequence[Tensor]) -> None:
        """Refuse what is not a number, before the round counts."""
        good = losses.isfinite()
        if not bool(good.all()):
            step = int((~good).nonzero()[0])
            hint = self.data.flaw(job.client.id) or "A smaller learning rate or gradient clipping (clip=1.0) would help"
            raise TrainingError(
                f"client {job.client.id} (budget {job.client.budget}) had a loss of {float(losses[step])} in round "
                f"{job.round + 1}, step {step}. {hint}; the server's state is that of the round before."
            )
        self._check_sent(job, updates)

    @staticmethod
    def _check_sent(job: Job, updates: Iterable[Tensor]) -> None:
        updates = list(updates)
        norms = torch._foreach_norm(updates) if updates else ()  # one look at the device; too large a norm is no proof
        if not updates or bool(torch.stack(list(norms)).isfinite().all()):
            return
        if not all(bool(update.isfinite().all()) for update in updates):
            raise TrainingError(
                f"client {job.client.id} (budget {job.client.budget}) sent weights that are not finite in round "
                f"{job.round + 1}; they were refused, and the server's state is that of the round before."
            )

    @staticmethod
    def update(job: Job, learner: Learner, sent: tuple[Payload, ...], steps: int, batches: int) -> Update:
        """Return what the merge is given of a job: `steps` are the client's optimizer steps so far."""
        return Update(job, sent, steps, learner.pace(batches), times=learner.times)

    def exam_samples(self, exam: Exam) -> Tensor:
        count = len(self.data.test_targets)
        samples = torch.arange(count) if exam.samples is None else exam.samples
        return samples.to(self.world.device)

    @cached_property
    def pooled(self) -> Tensor:
        """The training samples that clients hold, mixed, so that a batch is like the whole; of very many, a fixed draw.

        Found once: going through all clients at every evaluation would cost with the population.
        """
        samples = self.data.parts.order
        mixed = samples[noise.order(noise.key(3, self.world.seed), len(samples))]
        return mixed[:_CALIBRATION].to(self.world.device)

    def _check_data(self) -> None:
        if len(self.world.family.example_inputs) != 1:
            raise DataError(
                f"the model was traced with {len(self.world.family.example_inputs)} inputs; {self.data.name} has one a "
                "sample. Wrap the model in a module that takes one tensor, and trace that."
            )
        example, inputs = self.world.family.example_inputs[0], self.data.example
        if tuple(example.shape[1:]) != tuple(inputs.shape[1:]):
            raise DataError(
                f"the model was traced with inputs of shape {tuple(example.shape[1:])} a sample; "
                f"{self.data.name} has {tuple(inputs.shape[1:])}."
            )
        if example.is_floating_point() != inputs.is_floating_point():
            raise DataError(f"the model takes {example.dtype} inputs; {self.data.name} has {inputs.dtype}.")
        if self.data.num_classes > self.world.family.num_classes:
            raise DataError(
                f"{self.data.name} has {self.data.num_classes} classes; the model's output has "
                f"{self.world.family.num_classes}."
            )
        homes, tests = self.data.test_domains, len(self.data.test_targets)
        if homes is not None and len(homes) != tests:  # a test set that was put in another's place
            raise DataError(f"{self.data.name} has {tests} test samples and the domains of {len(homes)}.")


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Anything that goes wrong inside is fedquilt's error, and says what failed."""
    try:
        yield
    except FedquiltError:
        raise
    except Exception as error:
        raise TrainingError(f"{what}: {type(error).__name__}: {error}") from error
