"""Inputs of clients: samples, batches, random keys, and what the server sends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.data import FederatedData
from fedquilt.data.parts import Parts
from fedquilt.engines.samples import EvalSamples
from fedquilt.errors import (
    ConfigError,
    DivergenceError,
    TrainingError,
)
from fedquilt.errors.once import Once
from fedquilt.hardware.precision import DTYPES, Precision, unfit
from fedquilt.round.client import first_names
from fedquilt.round.client_checks import check_sent
from fedquilt.round.client_state import memory_of
from fedquilt.round.engine import Engine
from fedquilt.round.eval_jobs import EvalJob, EvalSpec, SampleSet
from fedquilt.round.federation import Federation, World
from fedquilt.round.training.attacks import PGD
from fedquilt.round.training.batches import batched, itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.public import PublicRows, drawn_positions, public_rows
from fedquilt.tensors import BoundedCache
from fedquilt.terms import Extras, Job, Payload, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member
    from fedquilt.round.method import Method


MAX_CACHED_CUTS = 16  # Cuts of the server's state that are kept at once.
MAX_CACHED_CLASSES = 4096  # Clients whose class masks are cached.
# Most samples on which norm statistics are measured. CIFAR and MNIST have fewer.
MAX_CALIBRATION_SAMPLES = 1 << 16
CPU = torch.device("cpu")
_FIRST = "/first"  # Key of the initial weights in the cache of cuts. No slot has this name.

_log = logging.getLogger(__name__)


@dataclass
class ClientInputs(Engine):
    """Base class of engines that hold the samples of all clients.

    It has the samples and the federation of the call in progress. From these it derives what the
    training of a client starts from: its payload, its batches and its random keys.

    Args:
        data: Samples of all clients. They are moved to the device.
        device: Device on which clients are trained.
        precision: Precision of matrix products and convolutions. Weights and sums are kept in
            fp32, or in fp64 if that is asked for.
    """

    data: FederatedData
    device: torch.device = CPU
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if why := unfit(self.precision, str(self.device)):
            raise ConfigError(f"precision = {why}")
        self._unmoved_data = self.data  # Samples as they were given, before they were moved
        self.data = self.data.to(self.device, DTYPES[self.precision])
        self._federation: Federation | None = None
        self.once = Once(_log)  # Logs each warning once per federation, which is one run
        # Cuts of the server's state, by slot, sub-model and names of weights.
        self._cuts: BoundedCache[tuple[str, Submodel, tuple[str, ...]], dict[str, Tensor]] = (
            BoundedCache(MAX_CACHED_CUTS)
        )
        self._cut_from: Weights | None = None  # Weights that the cached cuts are cut from
        # Class masks by client
        self._classes: BoundedCache[int, Tensor] = BoundedCache(MAX_CACHED_CLASSES)
        self._attackable: set[PGD] = set()  # Attacks whose range has been checked
        # Seed, and positions shuffled by it, of each set.
        self._orders: dict[SampleSet, tuple[int, Tensor]] = {}
        # True: the samples are public ones, without targets and without owners.
        self._is_public = False
        # Public samples, and the engine that trains on them.
        self._public: tuple[Tensor, Self] | None = None
        # Shapes of the server's extras in the current round.
        self.extra_shapes: dict[str, torch.Size] = {}

    # --- the federation of the call in progress --------------------------------------------------

    @property
    def federation(self) -> Federation:
        """Return the federation of the call in progress."""
        assert self._federation is not None, "every call names its federation"
        return self._federation

    @property
    def world(self) -> World:
        """Return the world of the federation of the call in progress."""
        return self.federation.world

    @property
    def method(self) -> Method:
        """Return the method of the federation of the call in progress."""
        return self.federation.method

    @property
    def initial(self) -> Weights:
        """Return the federation's initial weights, by scope and name, on the engine's device."""
        return self.federation.initial_on(self.device)

    # --- payloads --------------------------------------------------------------------------------

    def payload(self, server: Server, job: Job, learner: Learner) -> Payload:
        """Return what the server sends for a job.

        Clients that get the same positions share the same tensors, which are cut once. Only a few
        cuts are cached, because those of a whole cohort may not fit in memory.

        Args:
            server: State that the sub-model is cut from.
            job: Client, round and sub-model.
            learner: Local training, which names the weights and state that a client receives.
        """
        if self._cut_from is not server.weights:
            self._cuts.clear()
            self._cut_from = server.weights
        member = self.world.family.member(job.submodel)
        weights = self._cut("", server.weights, job.submodel, learner.received(member))
        first: Weights = {}
        if learner.installs:
            names = first_names(self.federation, job, learner, memory_of(server, job))
            first = self._cut(_FIRST, self.initial, job.submodel, names)
        if not learner.state:
            return Payload(job.submodel, weights, first=first)
        check_downloads(server, job, learner)
        names = learner.slotted(member)
        down = learner.state.slots_down
        slots = {slot: self._cut(slot, server.slots[slot], job.submodel, names) for slot in down}
        extras = {name: server.extras[name] for name in learner.state.extras_down}
        coded = tuple(name for name in learner.state.coded_extras if name in extras)
        return Payload(job.submodel, weights, slots, extras, coded, first)

    def _cut(
        self, slot: str, weights: Weights, submodel: Submodel, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Return the named weights of a sub-model, or the values of a slot for them.

        The newest `MAX_CACHED_CUTS` results are cached, so that callers must not change the
        tensors.

        Args:
            slot: Name of the slot. "" means the weights themselves, and `_FIRST` weights that a
                client gets once.
            weights: Weights or slot values of the whole model.
            submodel: Positions to cut out.
            names: Weights to cut.
        """
        return self._cuts.get(
            (slot, submodel, names),
            lambda: self.world.family.cutter.gather(weights, submodel, names),
        )

    # --- batches ---------------------------------------------------------------------------------

    def keys(self, job: Job) -> tuple[int, int]:
        """Return two random seeds of a job: of its batch order, and of its noise.

        They depend on the world's seed, the client and the round. They do not depend on the
        sub-model, so that all nets of a client see equal batches.
        """
        words = (self.world.seed, job.client.id, job.round)
        return noise.key(noise.Stream.BATCH_ORDER, *words), noise.key(
            noise.Stream.STEP_NOISE, *words
        )

    def batches(self, job: Job, learner: Learner, extras: Extras | None = None) -> list[Tensor]:
        """Return the sample positions of every batch that a client trains on in a round, in order.

        They refer to the pool, or to the public samples if the learner has a teacher. The list
        covers all local epochs, up to `learner.max_batches`. It is empty if the client has no
        samples.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            extras: Extras of the client, from which the public samples of a teacher's outputs
                follow. None: the client has none.
        """
        if learner.teacher:
            part = self.teacher_rows(learner, extras or {}).positions
        else:
            part = self.data.parts[job.client.id]
        if not len(part):
            return []
        batches = itinerary(len(part), learner.local, self.keys(job)[0])
        if learner.max_batches:
            batches = batches[: learner.max_batches]
        return list(part[torch.cat(batches)].split_with_sizes([len(batch) for batch in batches]))

    def pass_batches(self, job: Job, learner: Learner, client_pass: ClientPass) -> list[Tensor]:
        """Return the sample positions of every batch that a pass runs on, each sample once.

        They refer to the pool, or to the public samples if the pass uses these. A client's own
        samples are in random order. Public samples are in ascending order and the same for all
        clients.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            client_pass: Pass to run.

        Raises:
            ConfigError: The pass uses public samples, and there are none.
        """
        size = client_pass.batch_size(learner.local)
        if client_pass.public:
            if self.world.public is None:
                raise ConfigError(
                    f"{type(self.method).__name__} was asked for, whose pass {client_pass.name!r} "
                    "runs on public samples; the data has none. data.public = 0.1 in a file, "
                    "pool.with_public(0.1) in Python, sets samples aside."
                )
            world = self.world
            positions = drawn_positions(world.seed, job.round, client_pass.draw, world.num_public)
            return batched(positions, size)
        part = self.data.parts[job.client.id]
        order = noise.order(self.pass_key(job, learner, client_pass), len(part))
        return batched(part[order], size)

    def pass_key(self, job: Job, learner: Learner, client_pass: ClientPass) -> int:
        """Return the random seed of the order of a pass's samples and of its noise.

        Args:
            job: Client, round and sub-model.
            learner: Local training, which has the pass.
            client_pass: Pass to run.
        """
        number = learner.passes.index(client_pass)
        return noise.key(noise.Stream.PASS_ORDER, self.world.seed, job.client.id, job.round, number)

    def pass_samples(self, client_pass: ClientPass, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a pass.

        Public samples have no targets, so that their targets are zeros of the shape of `rows`.

        Args:
            client_pass: Pass to run, which says whether its samples are public.
            rows: Positions of samples, of any shape.
        """
        if not client_pass.public:
            return self.data.samples(rows), self.data.targets[rows]
        assert self.world.public is not None
        return self.world.public[rows], torch.zeros_like(rows)

    def samples(self, spec: EvalSpec, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets at positions of the set that an evaluation uses.

        Args:
            spec: Forward pass, which says whether the samples are training or test samples.
            rows: Positions of samples, of any shape.
        """
        if spec.training:
            return self.data.samples(rows), self.data.targets[rows]
        return self.data.test_samples(rows), self.data.test_targets[rows]

    def teacher_rows(self, learner: Learner, extras: Extras) -> PublicRows:
        """Return a teacher's outputs for public samples, with the positions of these samples.

        They are empty if a client neither received nor stored them. The engine must be one over the
        public samples.

        Args:
            learner: Local training, which names the extra with the outputs.
            extras: Extras of the client.
        """
        empty_table = torch.zeros(
            self.table_shape(learner), dtype=self.world.dtype, device=self.device
        )
        return public_rows(learner.teacher, extras, self.world.seed, empty_table)

    def table_shape(self, learner: Learner) -> tuple[int, ...]:
        """Return the shape (public sample, …) of a teacher's outputs for all public samples.

        The engine must be one over the public samples.
        """
        return (len(self.data.targets), *self.extra_shapes[learner.teacher][1:])

    # --- samples of evaluations ------------------------------------------------------------------

    def eval_samples(self, job: EvalJob) -> EvalSamples:
        """Return an evaluation with the positions of its samples and the classes that count.

        At most `job.limit` samples are used. All classes count, unless the job asks for the classes
        that its client holds.
        """
        class_mask = None
        if job.own_classes and job.client is not None:
            class_mask = self.classes_present(job.client).to(self.device)
        return EvalSamples(
            job.label,
            job.nets,
            job.weights,
            self._eval_positions(job)[: job.limit],
            class_mask,
            job.absent,
            job.robustness,
            job.attack,
            training=job.on != "test",  # Validation samples are in the training set, too.
        )

    def _eval_positions(self, job: EvalJob) -> Tensor:
        """Return the positions of all samples of an evaluation.

        For "training" they are the client's or else those of all clients, in random order and at
        most `MAX_CALIBRATION_SAMPLES`. For "validation" they are the client's or else all. For
        "test" they are the client's test samples, or the whole test set if clients have none. Test
        positions refer to the test set, all others to the training set.
        """
        if job.on == "training":
            if job.client is None:
                return self.pooled
            # The order is that of `pooled` on the client's own device, which has no other samples.
            samples = self.data.parts[job.client]
            return samples[self._pooled_order(len(samples))][:MAX_CALIBRATION_SAMPLES]
        if job.on == "validation":
            validation_parts = self.data.validation_parts
            if job.client is None or validation_parts is None:
                return self.validation
            return validation_parts[job.client]
        parts = self.data.test_parts
        if job.client is not None and parts is not None:
            return parts[job.client]
        return torch.arange(len(self.data.test_targets))

    # --- samples of a client, and of all clients -------------------------------------------------

    def size(self, client: int) -> int:
        """Return the number of training samples of a client."""
        return self.data.size(client)

    def classes_present(self, client: int) -> Tensor:
        """Return a mask (class,) on the CPU that is True where the client has samples of the class.

        If targets are not classes, it is True for every output.
        """
        if self._is_public:
            return torch.ones(self.world.family.num_outputs, dtype=torch.bool)
        return self._classes.get(client, lambda: classes_present(self.world, self.data, client))

    def macs(self, client: int, learner: Learner, member: Member, sizes: Sequence[int]) -> int:
        """Return the multiply-accumulate operations of a client in one round.

        Args:
            client: Client id.
            learner: Local training, with the passes that are not training steps.
            member: Member that the client trains.
            sizes: Samples in each of its batches.
        """
        steps = learner.macs(member, sizes)
        if not learner.passes and learner.lesson is None:
            return steps
        public = self.world.num_public
        return (
            steps
            + learner.lesson_macs(member, public)
            + learner.pass_macs(member, self.data.size(client), public)
        )

    @property
    def pooled(self) -> Tensor:
        """Return the positions of all clients' training samples in random order.

        A batch is then a random sample of the whole. At most `MAX_CALIBRATION_SAMPLES` positions
        are returned, and their order is drawn once for each seed.
        """
        return self._shuffled("training", self.data.parts)[:MAX_CALIBRATION_SAMPLES]

    @property
    def validation(self) -> Tensor:
        """Return the positions in the training set of all validation samples, in random order."""
        parts = self.data.validation_parts
        assert parts is not None, "has_validation was asked first"
        return self._shuffled("validation", parts)

    def _shuffled(self, name: SampleSet, parts: Parts) -> Tensor:
        """Return the positions in the training set of all clients' samples, mixed at random.

        Samples of different clients are shuffled together. The order depends only on the world's
        seed. It is cached for each set, because shuffling the samples of a large fleet takes long.

        Args:
            name: Name of the set, by which the result is cached.
            parts: Positions of each client's samples in the set.
        """
        seed = self.world.seed
        if name not in self._orders or self._orders[name][0] != seed:
            samples = parts.order
            self._orders[name] = seed, samples[self._pooled_order(len(samples))]
        return self._orders[name][1]

    def _pooled_order(self, count: int) -> Tensor:
        """Return positions 0 to `count` − 1 in an order that depends only on the world's seed."""
        return noise.order(noise.key(noise.Stream.POOLED_ORDER, self.world.seed), count)

    def check_finite(self, job: Job, losses: Tensor, updates: Sequence[Tensor]) -> None:
        """Refuse losses and weights that are not finite, before they enter the server's state.

        Args:
            job: Client, round and sub-model.
            losses: Losses (step,).
            updates: Trained weights.

        Raises:
            DivergenceError: A loss or a weight is not finite.
            TrainingError: A loss is not finite because of the client's samples.
        """
        is_finite = losses.isfinite()
        if not bool(is_finite.all()):
            step = int((~is_finite).nonzero()[0])
            flaw = "" if self._is_public else self.data.flaw(job.client.id)
            kind = TrainingError if flaw else DivergenceError
            hint = flaw or "A smaller learning rate or gradient clipping (clip=1.0) would help"
            raise kind(
                f"client {job.client.id} (budget {job.client.budget}) had a loss of "
                f"{float(losses[step])} in round {job.round + 1}, step {step}. {hint}; the "
                "server's state is that of the round before."
            )
        check_sent(job, updates)


def check_downloads(server: Server, job: Job, learner: Learner) -> None:
    """Refuse a learner that downloads state which the server does not have.

    Args:
        server: State of the server.
        job: Client, round and sub-model, for the message.
        learner: Local training, which names the slots and extras to download.

    Raises:
        TrainingError: A slot or an extra is missing.
    """
    for kind, names, available in (
        ("slots", learner.state.slots_down, server.slots),
        ("extras", learner.state.extras_down, server.extras),
    ):
        if unknown := [name for name in names if name not in available]:
            raise TrainingError(
                f"client {job.client.id} (budget {job.client.budget}) was to receive the {kind} "
                f"{unknown} in round {job.round + 1}; the server has {sorted(available)}. "
                "Method.init has to give the server a first value."
            )


def classes_present(world: World, data: FederatedData, client: int) -> Tensor:
    """Return a mask (class,) on the CPU that is True where a client has samples of the class.

    If the task has no classes, it is True for every output.

    Args:
        world: Task and family.
        data: Samples of all clients.
        client: Client id.
    """
    if not world.task.has_classes:
        return torch.ones(world.family.num_outputs, dtype=torch.bool)
    return data.classes_present(client, world.family.num_outputs).cpu()
