"""Base class of engines that hold the samples of all clients."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.data import FederatedData
from fedquilt.data.parts import Parts
from fedquilt.data.scale import Scale
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.samples import EvalSamples, pieces, summed
from fedquilt.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    FedquiltError,
    RecordError,
    SubmodelError,
    TrainingError,
)
from fedquilt.errors.faults import is_out_of_memory, memory_text
from fedquilt.errors.once import Once
from fedquilt.family.net import Pass
from fedquilt.hardware.precision import DTYPES, Precision, computing, unfit
from fedquilt.names import said
from fedquilt.round.budgets import check_budgets, learner_of
from fedquilt.round.client import check_sent, first_names, memory_of, receive, untrained_upload
from fedquilt.round.engine import Engine, Outcome, Spent
from fedquilt.round.evaluate import EvalJob, EvalSpec, SampleSet, Score, both_statistics
from fedquilt.round.federation import Federation, World
from fedquilt.round.training.attacks import PGD
from fedquilt.round.training.batches import batched, itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import View
from fedquilt.round.training.passes import ClientPass, GradientPass
from fedquilt.round.training.public import PublicRows, drawn_positions, public_rows
from fedquilt.round.training.server import MIN_PUBLIC
from fedquilt.round.training.step import train_pass
from fedquilt.terms import Extras, Job, Payload, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family import Family
    from fedquilt.family.member import Member
    from fedquilt.round.merge import Fold
    from fedquilt.round.method import Method

_log = logging.getLogger(__name__)
MEASURE = Pass(statistics="measure")
MAX_CACHED_CUTS = 16  # Cuts of the server's state that are kept at once.
MAX_CACHED_CLASSES = 4096  # Clients whose class masks are cached.
# Most samples on which norm statistics are measured. CIFAR and MNIST have fewer.
MAX_CALIBRATION_SAMPLES = 1 << 16
MAX_COMPARED = 256  # Samples whose mean absolute values are compared.
# Least ratio between the mean absolute values of public and training samples, either way.
MIN_SCALE_RATIO = 0.1
CPU = torch.device("cpu")
_FIRST = "/first"  # Key of the initial weights in the cache of cuts. No slot has this name.


@dataclass
class Simulation(Engine):
    """Engine that trains and evaluates clients whose samples are all in one process.

    Subclasses decide how many clients run at once, and on which machine.

    Args:
        data: Samples of all clients. They are moved to the device.
        device: Device on which clients are trained.
        precision: Precision of matrix products and convolutions. Weights and sums are kept in
            fp32, or in fp64 if that is asked for.
    """

    data: FederatedData
    device: torch.device = CPU
    precision: Precision = "fp32"

    outputs_may_leave: ClassVar[bool] = True

    @classmethod
    def check(cls) -> None:
        """Refuse an engine whose packages are not installed.

        This is called before anything expensive.
        """

    @classmethod
    def create(cls, data: FederatedData, options: EngineOptions) -> Self:
        """Return an engine with those of the options that apply to it."""
        return cls(data, options.device, options.precision)

    @property
    def engine_options(self) -> EngineOptions:
        """Return the options with which `create` returns an equal engine."""
        return EngineOptions(self.device, self.precision)

    def __post_init__(self) -> None:
        if why := unfit(self.precision, str(self.device)):
            raise ConfigError(f"precision = {why}")
        self._given = self.data
        self.data = self.data.to(self.device, DTYPES[self.precision])
        self._federation: Federation | None = None
        self.once = Once(_log)  # Logs each warning once per federation, which is one run
        self._cuts: dict[tuple[str, Submodel, tuple[str, ...]], dict[str, Tensor]] = {}
        self._cut_from: Weights | None = None
        self._classes: dict[int, Tensor] = {}
        self._attackable: set[PGD] = set()
        # Seed, and positions shuffled by it, of each set.
        self._orders: dict[SampleSet, tuple[int, Tensor]] = {}
        # True: the samples are public ones, without targets and without owners.
        self._is_public = False
        # Public samples, and the engine that trains on them.
        self._public: tuple[Tensor, Self] | None = None
        # Shapes of the server's extras in the current round.
        self.extra_shapes: dict[str, torch.Size] = {}

    def with_data(self, data: FederatedData) -> Self:
        """Return an engine with the same options for other samples, or this one if it has them."""
        if data is self._given or data is self.data:
            return self
        moved = data.to(self.device, DTYPES[self.precision])
        same = all(
            is_same(getattr(moved, data_field.name), getattr(self.data, data_field.name))
            for data_field in fields(moved)
        )
        return self if same else replace(self, data=data)

    def with_settings(self, settings: Mapping[str, bool | int | float | str]) -> Self:
        """Return an engine with other settings, or this one if it has them.

        Raises:
            RecordError: The engine has no setting of that name, as with a checkpoint of another
                version.
        """
        unknown = [name for name in settings if name not in self.settings]
        if unknown:
            raise RecordError(
                f"the engine {type(self).__name__} was to have the setting {unknown[0]!r} of a "
                "checkpoint; its "
                f"settings are {', '.join(self.settings) or 'none'}. The fedquilt version that "
                "wrote the checkpoint, "
                "which its manifest names, can resume it."
            )
        changed: dict[str, Any] = {
            name: value for name, value in settings.items() if self.settings.get(name) != value
        }
        return replace(self, **changed) if changed else self

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the options that affect the last digits of a result. Checkpoints store them."""
        options = {
            engine_field.name: getattr(self, engine_field.name)
            for engine_field in fields(self)
            if engine_field.name not in _CONSTRUCTED
        }
        return {
            name: value
            for name, value in options.items()
            if isinstance(value, (bool, int, float, str))
        }

    def size(self, client: int) -> int:
        """Return the number of training samples of a client."""
        return self.data.size(client)

    @property
    def tests_by_client(self) -> bool:
        """Return True if clients have test samples of their own."""
        return self.data.test_parts is not None

    @property
    def has_validation(self) -> bool:
        """Return True if clients hold back samples for validation."""
        return self.data.validation_parts is not None

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

    def begin(self, federation: Federation) -> None:
        """Begin a call for a federation.

        Values that were cached for another family are dropped.
        """
        previous = self._federation
        if previous is federation:
            return
        self._check_federation(federation)
        if previous is None or previous.world.family is not federation.world.family:
            self.forget_family()
        elif previous.world.task != federation.world.task:
            self._classes.clear()
        self.once.forget()
        self._federation = federation

    def forget_family(self) -> None:
        """Drop cached values that depend on the family."""
        self._classes.clear()

    def _check_federation(self, federation: Federation) -> None:
        """Refuse a federation that does not fit the engine's precision or data."""
        if federation.world.precision != self.precision:
            raise ConfigError(
                f"a federation in {federation.world.precision} was given to an engine in "
                f"{self.precision}; both must "
                "have the same precision."
            )
        previous = self._federation
        same_family = previous is not None and previous.world.family is federation.world.family
        if self._is_public:
            return
        if previous is None or not same_family or previous.world.task != federation.world.task:
            check_inputs(federation.world.family, self.data)
            check_targets(federation.world, self.data)
        if federation.method.attack is not None:
            self._check_range(federation.method.attack)

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which all training and evaluation runs."""
        return computing(self.precision, self.device)

    # --- the contract ----------------------------------------------------------------------------

    def train(
        self, federation: Federation, server: Server, jobs: Sequence[Job], fold: Fold
    ) -> Outcome:
        """Train a cohort: everything that clients do between `Method.plan` and `Method.finish`.

        Sub-models are cut, sent, trained, sent back and added to the fold.

        Args:
            federation: Method, world and link.
            server: State that clients start from.
            jobs: Clients with their sub-models.
            fold: Sum to which updates are added.
        """
        self._begin_round(federation, server, jobs)
        outcome = Outcome()
        try:
            # The fold adds in full precision, whatever precision clients train in. A mean that is
            # rounded to bf16 would lose small changes.
            with computing("fp32", self.device):
                self._train(server, jobs, fold, outcome)
        finally:
            self._cuts.clear()  # Cuts of the old state are not needed after the round.
            self._cut_from = None
        return outcome

    def foreseen(
        self, federation: Federation, server: Server, jobs: Sequence[Job]
    ) -> dict[int, Spent]:
        """Return the costs of clients before they train.

        Nothing is trained, but downloads are encoded. Uploads count if their length does not depend
        on the training. Extras of the method do not count.

        Args:
            federation: Method, world and link.
            server: State that clients would start from.
            jobs: Clients with their sub-models.

        Returns:
            Costs by client id.
        """
        self._begin_round(federation, server, jobs)
        outcome = Outcome()
        with computing("fp32", self.device):
            for job in jobs:
                client, member = job.client.id, self.world.family.member(job.submodel)
                learner = learner_of(self.method, job, self.world)
                payload = self.payload(server, job, learner)
                start = receive(
                    federation, job, learner, payload, memory_of(server, job), self.initial
                )
                sizes = [len(batch) for batch in self.batches(job, learner, start.extras)]
                up = 0
                if federation.link.has_fixed_length:
                    upload = learner.upload(member, job.submodel, self.held(client))
                    up = untrained_upload(federation, job, learner, upload, start)
                macs = self.macs(client, learner, member, sizes)
                outcome.charge(client, start.bytes, up, macs, start.first_bytes)
        return outcome.costs

    def _begin_round(self, federation: Federation, server: Server, jobs: Sequence[Job]) -> None:
        """Begin a round, or refuse its jobs."""
        self.begin(federation)
        scopes = server.scopes
        for submodel, job in {job.submodel: job for job in jobs}.items():
            client_name = f"client {job.client.id} (budget {job.client.budget})"
            if submodel.scope not in scopes:
                raise SubmodelError(
                    f"{client_name} was planned a net of the scope {submodel.scope!r}; the "
                    "server's state has "
                    f"{', '.join(map(repr, sorted(scopes)))}."
                )
            self.world.family.check(submodel, client_name)
        check_budgets(self.method, jobs, self.world)
        self.extra_shapes = {name: value.shape for name, value in server.extras.items()}

    @abstractmethod
    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Train jobs in the engine's precision, and add the updates to the fold outside of it."""

    def evaluate(
        self,
        federation: Federation,
        exams: Sequence[EvalJob],
        batch_size: int,
        by_domain: bool = False,
    ) -> list[Score]:
        """Return the score of every evaluation.

        Args:
            federation: Method, world and link.
            exams: Evaluations to run.
            batch_size: Samples in a batch.
            by_domain: Also return the scores of each domain, if test samples have domains.
        """
        self.begin(federation)
        for attack in {exam.attack for exam in exams if exam.attack}:
            self._check_range(attack)
        evaluations = [self._exam(exam) for exam in exams]
        with _failing("the evaluation failed"), self.computing():
            if not by_domain or self.data.test_domains is None:
                return self._evaluate(evaluations, batch_size)
            depends_on_batch = self.world.family.depends_on_batch(
                self.method.local.norm.evaluation_pass
            )
            cut = pieces(evaluations, self.data, depends_on_batch, batch_size)
            return summed(
                evaluations,
                cut,
                self._evaluate([piece.exam for piece in cut], batch_size),
                self.data,
            )

    @abstractmethod
    def _evaluate(self, exams: Sequence[EvalSamples], batch_size: int) -> list[Score]: ...

    def _exam(self, job: EvalJob) -> EvalSamples:
        """Return an evaluation with the positions of its samples and the classes that count."""
        class_mask = None
        if job.own_classes and job.client is not None:
            class_mask = self.held(job.client).to(self.device)
        return EvalSamples(
            job.label,
            job.nets,
            job.weights,
            self._positions(job)[: job.limit],
            class_mask,
            job.absent,
            job.robustness,
            job.attack,
            training=job.on != "test",  # Validation samples are in the training set, too.
        )

    def _positions(self, job: EvalJob) -> Tensor:
        """Return the positions of all samples of an evaluation.

        They refer to the training set or to the test set.
        """
        if job.on == "training":
            return self.pooled
        if job.on == "validation":
            validation_parts = self.data.validation_parts
            return (
                self.validation
                if job.client is None or validation_parts is None
                else validation_parts[job.client]
            )
        parts = self.data.test_parts
        if job.client is not None and parts is not None:
            return parts[job.client]
        return torch.arange(len(self.data.test_targets))

    def calibrate(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        client: int | None = None,
    ) -> list[dict[str, Tensor]]:
        """Measure the norm statistics of networks, which papers call static norms.

        Noised norms get the statistics of attacked samples, as in training. Conditioned norms see
        both kinds of samples. They get the mean of two statistics: clean samples at robustness 0,
        and attacked samples at robustness 1.

        Args:
            federation: Method, world and link.
            nets: Sub-models and their weights.
            batch_size: Samples in a batch.
            client: Client whose training samples are used. None: a mix of all clients' samples.

        Returns:
            Statistics by name, for each network.
        """
        self.begin(federation)
        samples = self.pooled if client is None else self.data.parts[client]
        batches = batched(samples.to(self.device), batch_size)

        def measured(mode: Pass, by: PGD | None) -> list[dict[str, Tensor]]:
            kinds = [
                (EvalSpec((Submodel(net.arch),), mode, by, training=True), weights)
                for net, weights in nets
            ]
            return self._calibrate(kinds, batches)

        with _failing("the calibration of norms failed"), self.computing():
            clean_statistics = measured(MEASURE, None)
            if not self.world.family.adjustable:
                return clean_statistics
            noised = measured(replace(MEASURE, robustness=1.0), self.method.attack)
            return [
                both_statistics(clean, attacked)
                for clean, attacked in zip(clean_statistics, noised, strict=True)
            ]

    @abstractmethod
    def _calibrate(
        self, nets: Sequence[tuple[EvalSpec, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        """Return the statistics of each net, as a mean over batches of training samples."""

    def pooled_gradients(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        samples: int,
    ) -> list[dict[str, Tensor]]:
        """Return the mean gradient of each network over samples of all clients.

        Args:
            federation: Method, world and link.
            nets: Sub-models and their weights.
            batch_size: Samples in a batch.
            samples: Number of samples.
        """
        self.begin(federation)
        batches = batched(self.pooled[:samples].to(self.device), batch_size)
        with _failing("the gradients over pooled samples failed"), self.computing():
            return [
                self._pooled_gradient(self.world.family.member(net), weights, batches)
                for net, weights in nets
            ]

    def _pooled_gradient(
        self, member: Member, weights: Weights, batches: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the mean of a net's gradients over batches.

        Each batch is weighted by its number of targets that count.
        """
        task = self.world.task
        every_class = torch.ones(
            self.world.family.num_outputs, dtype=torch.bool, device=self.device
        )
        sums = {name: torch.zeros_like(weights[name]) for name in member.trainable}
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(batches):
            targets = self.data.targets[rows]
            view = View(
                member,
                dict(weights),
                self.data.samples(rows),
                targets,
                every_class,
                received=weights,
                mode=train_pass(self.method.local),
                key=torch.tensor(noise.key(5, self.world.seed, number), device=self.device),
                task=task,
            )
            count = task.total(targets)
            for name, value in GradientPass()(view).items():
                sums[name] += value * count
            total += count
        return {name: value / total for name, value in sums.items()}

    # --- public samples --------------------------------------------------------------------------

    def on_public(self, world: World) -> Self:
        """Return an engine that trains on public samples.

        It is cached, together with its captured steps.
        """
        assert world.public is not None, (
            "methods that need public samples are refused where there are none"
        )
        if self._public is None or self._public[0] is not world.public:
            engine = self._over(_without_targets(self.data, world.public, world))
            engine._is_public = True
            self._public = world.public, engine
        return self._public[1]

    def teacher_rows(self, learner: Learner, extras: Extras) -> PublicRows:
        """Return a teacher's outputs for public samples.

        They are empty if a client neither received nor stored them.
        """
        empty_table = torch.zeros(
            self.table_shape(learner), dtype=self.world.dtype, device=self.device
        )
        return public_rows(learner.teacher, extras, self.world.seed, empty_table)

    def table_shape(self, learner: Learner) -> tuple[int, ...]:
        """Return the shape of a teacher's outputs for all public samples."""
        return (len(self.data.targets), *self.extra_shapes[learner.teacher][1:])

    def _over(self, data: FederatedData) -> Self:
        """Return an engine with the same options over other samples."""
        return replace(self, data=data)

    # --- samples and payloads of clients ---------------------------------------------------------

    def samples(self, kind: EvalSpec, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets at positions of the set that a kind of evaluation uses."""
        if kind.training:
            return self.data.samples(rows), self.data.targets[rows]
        return self.data.test_samples(rows), self.data.test_targets[rows]

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
        self, slot: str, whole: Weights, submodel: Submodel, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Return the named weights of a sub-model, or a slot for them.

        The slot "" stands for the weights themselves, and `_FIRST` for weights that a client gets
        once.
        """
        key = slot, submodel, names
        if key not in self._cuts:
            if len(self._cuts) >= MAX_CACHED_CUTS:
                self._cuts.pop(next(iter(self._cuts)))
            self._cuts[key] = self.world.family.cutter.gather(whole, submodel, names)
        return self._cuts[key]

    def keys(self, job: Job) -> tuple[int, int]:
        """Return the random seeds of a job's batch order and of its noise.

        All nets of a client see equal batches.
        """
        name = (self.world.seed, job.client.id, job.round)
        return noise.key(1, *name), noise.key(2, *name)

    def batches(self, job: Job, learner: Learner, extras: Extras | None = None) -> list[Tensor]:
        """Return the sample positions of every batch that a client trains on.

        They refer to the pool, or to the public samples if the learner has a teacher.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            extras: Extras of the client, which tell the public samples of a teacher's outputs.
                None: none.
        """
        is_own = not learner.teacher
        part = (
            self.data.parts[job.client.id]
            if is_own
            else self.teacher_rows(learner, extras or {}).positions
        )
        if not len(part):
            return []
        batches = itinerary(len(part), learner.local, self.keys(job)[0])
        if learner.max_batches:
            batches = batches[: learner.max_batches]
        return list(part[torch.cat(batches)].split_with_sizes([len(batch) for batch in batches]))

    def pass_batches(self, job: Job, learner: Learner, one: ClientPass) -> list[Tensor]:
        """Return the sample positions of every batch that a pass runs on.

        They refer to the pool, or to the public samples if the pass uses these.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            one: Pass to run.
        """
        size = one.batch_size(learner.local)
        if one.public:
            if self.world.public is None:
                raise ConfigError(
                    f"{type(self.method).__name__} was asked for, whose pass {one.name!r} runs on "
                    "public samples; the "
                    "data has none. data.public = 0.1 in a file, pool.with_public(0.1) in Python, "
                    "sets samples aside."
                )
            return batched(
                drawn_positions(self.world.seed, job.round, one.draw, self.world.num_public), size
            )
        part = self.data.parts[job.client.id]
        return batched(part[noise.order(self.pass_key(job, learner, one), len(part))], size)

    def pass_key(self, job: Job, learner: Learner, one: ClientPass) -> int:
        """Return the random seed of the order of a pass's samples and of its noise.

        Args:
            job: Client, round and sub-model.
            learner: Local training, which has the pass.
            one: Pass to run.
        """
        return noise.key(4, self.world.seed, job.client.id, job.round, learner.passes.index(one))

    def pass_samples(self, one: ClientPass, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a pass.

        Public samples have no targets, so that their targets are zeros.

        Args:
            one: Pass to run.
            rows: Positions of samples, of any shape.
        """
        if not one.public:
            return self.data.samples(rows), self.data.targets[rows]
        assert self.world.public is not None
        return self.world.public[rows], torch.zeros_like(rows)

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

    def held(self, client: int) -> Tensor:
        """Return a mask (class,) on the CPU that is True where the client has samples of the class.

        If targets are not classes, it is True for every output.
        """
        if self._is_public:
            return torch.ones(self.world.family.num_outputs, dtype=torch.bool)
        if client not in self._classes:
            if len(self._classes) >= MAX_CACHED_CLASSES:
                self._classes.pop(next(iter(self._classes)))
            self._classes[client] = classes_held(self.world, self.data, client)
        return self._classes[client]

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
        """Return the positions of all clients' samples in an order that depends only on the seed.

        Each set is shuffled once for each seed, because a fleet may be large.
        """
        seed = self.world.seed
        if name not in self._orders or self._orders[name][0] != seed:
            samples = parts.order
            self._orders[name] = seed, samples[noise.order(noise.key(3, seed), len(samples))]
        return self._orders[name][1]

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
        good = losses.isfinite()
        if not bool(good.all()):
            step = int((~good).nonzero()[0])
            flaw = "" if self._is_public else self.data.flaw(job.client.id)
            kind = TrainingError if flaw else DivergenceError
            hint = flaw or "A smaller learning rate or gradient clipping (clip=1.0) would help"
            raise kind(
                f"client {job.client.id} (budget {job.client.budget}) had a loss of "
                f"{float(losses[step])} in round "
                f"{job.round + 1}, step {step}. {hint}; the server's state is that of the round "
                "before."
            )
        check_sent(job, updates)

    def _check_range(self, attack: PGD) -> None:
        """Refuse data whose range an attack is not made for. Each attack is checked once."""
        if attack not in self._attackable:
            attack.check(self.data)
            self._attackable.add(attack)


def check_downloads(server: Server, job: Job, learner: Learner) -> None:
    """Refuse a learner that downloads state which the server does not have.

    Args:
        server: State of the server.
        job: Client, round and sub-model.
        learner: Local training, which names the slots and extras to download.
    """
    for kind, names, available in (
        ("slots", learner.state.slots_down, server.slots),
        ("extras", learner.state.extras_down, server.extras),
    ):
        if unknown := [name for name in names if name not in available]:
            raise TrainingError(
                f"client {job.client.id} (budget {job.client.budget}) was to receive the {kind} "
                f"{unknown} in round "
                f"{job.round + 1}; the server has {sorted(available)}. Method.init has to give the "
                "server a first value."
            )


def is_same(one: object, other: object) -> bool:
    """Return True if two fields of data are the same object, or small equal values."""
    if one is other:
        return True
    if isinstance(one, Scale) and isinstance(other, Scale):
        return one.mean.equal(other.mean) and one.std.equal(other.std)
    return isinstance(one, (str, int, tuple)) and one == other


def _without_targets(data: FederatedData, samples: Tensor, world: World) -> FederatedData:
    """Return data of one client that has these samples, with placeholder targets.

    The samples are inputs as the model receives them. All targets count, because tasks divide by
    the number of targets that count.
    """
    targets = world.task.blank_targets((len(samples), *world.family.output_shape[1:])).to(
        samples.device
    )
    return replace(
        data,
        inputs=samples,
        targets=targets,
        test_inputs=samples[:1],
        test_targets=targets[:1],
        clients=None,
        test_clients=None,
        domains=None,
        test_domains=None,
        public=None,
        scale=None,
        parts=Parts.split(torch.arange(len(samples)), torch.tensor([len(samples)])),
        test_parts=None,
        validation_parts=None,
    )


# Fields that are settings of the run, not of the engine.
_CONSTRUCTED = (
    "data",
    "device",
    "precision",
)


def classes_held(world: World, data: FederatedData, client: int) -> Tensor:
    """Return a mask (class,) on the CPU that is True where a client has samples of the class.

    If the task has no classes, it is True for every output.

    Args:
        world: Task and family.
        data: Samples of all clients.
        client: Client id.
    """
    if not world.task.has_classes:
        return torch.ones(world.family.num_outputs, dtype=torch.bool)
    return data.held(client, world.family.num_outputs).cpu()


def check_inputs(family: Family, data: FederatedData) -> None:
    """Refuse data that does not fit the inputs of a model."""
    if len(family.example_inputs) != 1:
        raise DataError(
            f"the model was traced with {len(family.example_inputs)} inputs; {data.name} has one a "
            "sample. Wrap the model in a module that takes one tensor, and trace that."
        )
    example, inputs = family.example_inputs[0], data.example
    if tuple(example.shape[1:]) != tuple(inputs.shape[1:]):
        raise DataError(
            f"the model was traced with inputs of shape {tuple(example.shape[1:])} a sample; "
            f"{data.name} has {tuple(inputs.shape[1:])}."
        )
    if example.is_floating_point() != inputs.is_floating_point():
        raise DataError(f"the model takes {example.dtype} inputs; {data.name} has {inputs.dtype}.")
    homes, tests = data.test_domains, len(data.test_targets)
    if homes is not None and len(homes) != tests:  # The test set was replaced.
        raise DataError(f"{data.name} has {tests} test samples and the domains of {len(homes)}.")


def check_public(asked_by: str, is_needed: bool, world: World, data: FederatedData) -> None:
    """Refuse public samples that do not fit the model, or their absence if they are needed.

    Args:
        asked_by: Name of the method.
        is_needed: True if the method needs public samples.
        world: Family, and the public samples as the model would see them.
        data: Samples of clients, with which the public ones are compared.

    Raises:
        ConfigError: The method needs public samples, and there are too few.
        DataError: Public samples differ from those of clients in shape, type or scale.
    """
    public, example = world.public, world.family.example_inputs[0]
    if is_needed and world.num_public < MIN_PUBLIC:
        raise ConfigError(
            f"{asked_by} was asked for, which needs at least {MIN_PUBLIC} public samples without "
            f"labels; {data.name} "
            f"has {world.num_public or 'none'}. data.public = 0.2 in a file, --set "
            "data.public=0.2, or "
            "pool.with_public(0.2) in Python makes a share of the training samples public. "
            "Pool.of(…, public=inputs) "
            "takes samples of your own, and .npz files have them as the array `public`."
        )
    if public is None:
        return
    if tuple(public.shape[1:]) != tuple(example.shape[1:]):
        raise DataError(
            f"{data.name} has public samples of shape {tuple(public.shape[1:])}; the model was "
            "traced with "
            f"{tuple(example.shape[1:])}. Samples of that shape would work."
        )
    if public.is_floating_point() != example.is_floating_point():
        raise DataError(
            f"{data.name} has public samples of {public.dtype}; the model takes {example.dtype}. "
            "Samples of that type "
            "would work."
        )
    if public.is_floating_point() and is_needed:
        _check_scale(public, data)


def _check_scale(public: Tensor, data: FederatedData) -> None:
    """Refuse public samples that are not finite or have another scale than clients' samples."""
    rows = torch.arange(min(MAX_COMPARED, len(data.targets)), device=data.targets.device)
    client_scale, public_scale = (
        float(values.double().abs().mean())
        for values in (data.samples(rows), public[:MAX_COMPARED])
    )
    if not MIN_SCALE_RATIO * client_scale <= public_scale <= client_scale / MIN_SCALE_RATIO:
        raise DataError(
            f"the public samples of {data.name} have a mean absolute value of {public_scale:.3g}, "
            f"and its training samples one of {client_scale:.3g}. Both must have the same scale, "
            "such as bytes, or numbers from 0 to 1."
        )


def check_targets(world: World, data: FederatedData) -> None:
    """Refuse targets that do not fit the task and the model's output.

    Targets of training and of test samples are checked.
    """
    task, outputs = world.task, world.family.num_outputs
    if task.has_classes and data.has_classes:
        classes = task.num_outputs(data.targets, data.num_classes)
        if classes > outputs:
            is_mask = data.targets.dim() > 2
            mask_hint = (
                f" If {classes - 1} marks pixels that do not count, task.ignore = "
                f"{classes - 1} would fit."
            )
            raise DataError(
                f"{data.name} has {classes} classes; the model's output has {outputs}. A model "
                f"with {classes} outputs would fit, or targets from 0 to "
                f"{outputs - 1}.{mask_hint if is_mask else ''}"
            )
    shape, tests = world.family.output_shape, f"the test set of {data.name}"
    task.check(data.targets, shape, data.name)
    task.check(data.test_targets, shape, tests)
    task.check_whole(data.targets, data.name)
    task.check_whole(data.test_targets, tests)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raise any error inside as a TrainingError that says what failed."""
    try:
        yield
    except FedquiltError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise TrainingError(f"{what}, because memory ran out. {memory_text(error)}") from error
        raise TrainingError(f"{what}: {said(error)}") from error
