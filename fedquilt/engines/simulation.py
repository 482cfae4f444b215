"""Base class of engines that hold the samples of all clients."""

from __future__ import annotations

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
from fedquilt.engines.client_inputs import ClientInputs
from fedquilt.engines.data_checks import check_inputs, check_targets
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.samples import EvalSamples, split_by_domain, sum_scores
from fedquilt.errors import (
    ConfigError,
    FedquiltError,
    RecordError,
    SubmodelError,
    TrainingError,
)
from fedquilt.errors.faults import is_out_of_memory, memory_text
from fedquilt.family.net import Pass
from fedquilt.hardware.precision import DTYPES, computing
from fedquilt.names import said
from fedquilt.round.budgets import check_budgets, learner_of
from fedquilt.round.client import receive, untrained_upload
from fedquilt.round.client_state import memory_of
from fedquilt.round.engine import Outcome, Spent
from fedquilt.round.eval_jobs import EvalJob, EvalSpec
from fedquilt.round.federation import Federation, World
from fedquilt.round.norm_statistics import both_statistics
from fedquilt.round.scores import Score
from fedquilt.round.training.attacks import PGD
from fedquilt.round.training.batches import batched
from fedquilt.round.training.passes import GradientPass
from fedquilt.round.training.step import train_pass
from fedquilt.round.training.view import View
from fedquilt.terms import Job, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member
    from fedquilt.round.fold import Fold


MEASURE = Pass(statistics="measure")


@dataclass
class Simulation(ClientInputs):
    """Engine that trains and evaluates clients whose samples are all in one process.

    Subclasses decide how many clients run at once, and on which machine.

    Args:
        data: Samples of all clients. They are moved to the device.
        device: Device on which clients are trained.
        precision: Precision of matrix products and convolutions. Weights and sums are kept in
            fp32, or in fp64 if that is asked for.
    """

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

    def with_data(self, data: FederatedData) -> Self:
        """Return an engine with the same options for other samples, or this one if it has them.

        Samples are the same if all tensors of the data are the same objects after the move to the
        device.
        """
        if data is self._unmoved_data or data is self.data:
            return self
        moved = data.to(self.device, DTYPES[self.precision])
        same = all(
            is_same(getattr(moved, data_field.name), getattr(self.data, data_field.name))
            for data_field in fields(moved)
        )
        return self if same else replace(self, data=data)

    def with_settings(self, settings: Mapping[str, bool | int | float | str]) -> Self:
        """Return an engine with other settings, or this one if it has them.

        Args:
            settings: New values by name, as `settings` returns them. Other settings keep their
                values.

        Raises:
            RecordError: The engine has no setting of that name, as with a checkpoint of another
                version.
        """
        unknown = [name for name in settings if name not in self.settings]
        if unknown:
            raise RecordError(
                f"the engine {type(self).__name__} was to have the setting {unknown[0]!r} of a "
                f"checkpoint; its settings are {', '.join(self.settings) or 'none'}. The fedquilt "
                "version that wrote the checkpoint, which its manifest names, can resume it."
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

    @property
    def tests_by_client(self) -> bool:
        """Return True if clients have test samples of their own."""
        return self.data.test_parts is not None

    @property
    def has_validation(self) -> bool:
        """Return True if clients hold back samples for validation."""
        return self.data.validation_parts is not None

    # --- the federation of the call in progress --------------------------------------------------

    def begin(self, federation: Federation) -> None:
        """Make a federation the one of the call in progress.

        Values that were cached for another family are dropped. If the federation is already in
        progress, nothing happens.

        Args:
            federation: Method, world and link.

        Raises:
            ConfigError: The federation has another precision than the engine.
            DataError: The engine's samples do not fit the federation's model or task.
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
        """Refuse a federation that does not fit the engine's precision or data.

        Data is checked only if the family or the task is new. An engine over public samples checks
        the precision alone.
        """
        if federation.world.precision != self.precision:
            raise ConfigError(
                f"a federation in {federation.world.precision} was given to an engine in "
                f"{self.precision}; both must have the same precision."
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

    def _check_range(self, attack: PGD) -> None:
        """Refuse data whose range an attack is not made for. Each attack is checked once."""
        if attack not in self._attackable:
            attack.check(self.data)
            self._attackable.add(attack)

    def computing(self) -> AbstractContextManager[None]:
        """Return a context that computes in the engine's precision, for training and evaluation."""
        return computing(self.precision, self.device)

    # --- the contract ----------------------------------------------------------------------------

    def train(
        self, federation: Federation, server: Server, jobs: Sequence[Job], fold: Fold
    ) -> Outcome:
        """Train a cohort: everything that clients do between `Method.plan` and `Method.finish`.

        Sub-models are cut, sent, trained, sent back and added to the fold.

        Args:
            federation: Method, world and link.
            server: State that clients start from. It does not change.
            jobs: Clients with their sub-models.
            fold: Sum to which updates are added.

        Returns:
            Costs, losses and new client states of the round.
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
                    upload = learner.upload(member, job.submodel, self.classes_present(client))
                    up = untrained_upload(federation, job, learner, upload, start)
                macs = self.macs(client, learner, member, sizes)
                outcome.charge(client, start.bytes, up, macs, start.first_bytes)
        return outcome.costs

    def _begin_round(self, federation: Federation, server: Server, jobs: Sequence[Job]) -> None:
        """Begin a round, and check all its jobs.

        Raises:
            SubmodelError: A job has a scope that the server's state lacks, or positions that do not
                fit.
            BudgetError: A job exceeds its client's budget.
        """
        self.begin(federation)
        scopes = server.scopes
        for submodel, job in {job.submodel: job for job in jobs}.items():
            client_name = f"client {job.client.id} (budget {job.client.budget})"
            if submodel.scope not in scopes:
                raise SubmodelError(
                    f"{client_name} was planned a net of the scope {submodel.scope!r}; the "
                    f"server's state has {', '.join(map(repr, sorted(scopes)))}."
                )
            self.world.family.check(submodel, client_name)
        check_budgets(self.method, jobs, self.world)
        self.extra_shapes = {name: value.shape for name, value in server.extras.items()}

    @abstractmethod
    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Train jobs in the engine's precision, and add the updates to the fold outside of it.

        Args:
            server: State that the clients start from.
            jobs: Clients with their sub-models.
            fold: Fold to which updates are added.
            outcome: Outcome to which costs, losses and client states are added.
        """

    def evaluate(
        self,
        federation: Federation,
        eval_jobs: Sequence[EvalJob],
        batch_size: int,
        by_domain: bool = False,
    ) -> list[Score]:
        """Return the score of every evaluation.

        Args:
            federation: Method, world and link.
            eval_jobs: Evaluations to run.
            batch_size: Samples in a batch.
            by_domain: Also return the scores of each domain, if test samples have domains.
        """
        self.begin(federation)
        for attack in {job.attack for job in eval_jobs if job.attack}:
            self._check_range(attack)
        evaluations = [self.eval_samples(job) for job in eval_jobs]
        with _failing("the evaluation failed"), self.computing():
            if not by_domain or self.data.test_domains is None:
                return self._evaluate(evaluations, batch_size)
            depends_on_batch = self.world.family.depends_on_batch(
                self.method.local.norm.evaluation_pass
            )
            pieces = split_by_domain(evaluations, self.data, depends_on_batch, batch_size)
            scores = self._evaluate([piece.evaluation for piece in pieces], batch_size)
            return sum_scores(evaluations, pieces, scores, self.data)

    @abstractmethod
    def _evaluate(self, evaluations: Sequence[EvalSamples], batch_size: int) -> list[Score]:
        """Return the score of every evaluation in order. The caller has set the precision."""

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

        def measured(mode: Pass, attack: PGD | None) -> list[dict[str, Tensor]]:
            specs = [
                (EvalSpec((Submodel(net.arch),), mode, attack, training=True), weights)
                for net, weights in nets
            ]
            return self._calibrate(specs, batches)

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
        """Return the norm statistics of each net by name, as a mean over batches.

        Args:
            nets: Forward pass and weights of each net.
            batches: Positions of samples in the training set, one tensor for each batch.
        """

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
            samples: Number of samples, which are the first of `pooled`.

        Returns:
            Gradients by weight name, for each network. They contain trainable weights only.
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
        """Return the mean of a net's gradients over batches, by weight name.

        Each batch is weighted by its number of targets that count.

        Args:
            member: Member whose trainable weights have gradients.
            weights: Weights and buffers of the member. They do not change.
            batches: Positions of samples in the training set, one tensor for each batch.
        """
        task = self.world.task
        every_class = torch.ones(
            self.world.family.num_outputs, dtype=torch.bool, device=self.device
        )
        sums = {name: torch.zeros_like(weights[name]) for name in member.trainable}
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(batches):
            targets = self.data.targets[rows]
            key = noise.key(noise.Stream.POOLED_GRADIENT, self.world.seed, number)
            view = View(
                member,
                dict(weights),
                self.data.samples(rows),
                targets,
                every_class,
                received=weights,
                mode=train_pass(self.method.local),
                key=torch.tensor(key, device=self.device),
                task=task,
            )
            count = task.total(targets)
            for name, value in GradientPass()(view).items():
                sums[name] += value * count
            total += count
        return {name: value / total for name, value in sums.items()}

    # --- public samples --------------------------------------------------------------------------

    def on_public(self, world: World) -> Self:
        """Return an engine of the same kind that trains on the world's public samples.

        Its data is a single client with all public samples and placeholder targets. It is cached,
        together with its captured steps.
        """
        assert world.public is not None, (
            "methods that need public samples are refused where there are none"
        )
        if self._public is None or self._public[0] is not world.public:
            engine = self._over(_without_targets(self.data, world.public, world))
            engine._is_public = True
            self._public = world.public, engine
        return self._public[1]

    def _over(self, data: FederatedData) -> Self:
        """Return a new engine with the same options over other samples."""
        return replace(self, data=data)


# Fields that are settings of the run, not of the engine.
_CONSTRUCTED = (
    "data",
    "device",
    "precision",
)


def is_same(first: object, second: object) -> bool:
    """Return True if two fields of data are the same object, or small equal values.

    Tensors that are equal but not the same object give False, except in a `Scale`.
    """
    if first is second:
        return True
    if isinstance(first, Scale) and isinstance(second, Scale):
        return first.mean.equal(second.mean) and first.std.equal(second.std)
    return isinstance(first, (str, int, tuple)) and first == second


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


@contextmanager
def _failing(message: str) -> Iterator[None]:
    """Raise any error inside as a TrainingError that begins with a message.

    Errors of fedquilt itself are raised unchanged.
    """
    try:
        yield
    except FedquiltError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise TrainingError(
                f"{message}, because memory ran out. {memory_text(error)}"
            ) from error
        raise TrainingError(f"{message}: {said(error)}") from error
