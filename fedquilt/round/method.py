"""Base class of methods: the steps of a round, in order.

The defaults are FedAvg, where each client trains the first channels that fit its budget.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from fedquilt.checks import one_of
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.dual import HOW_TO_CONDITION
from fedquilt.family.family import Family, Rounding
from fedquilt.round.budgets import learner_of
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.labels import bounds_label, share_key, share_label, short_share
from fedquilt.round.merge import Mean
from fedquilt.round.server_optimizers import Plain, ServerAdam, ServerMomentum, ServerYogi
from fedquilt.round.training.attacks import PGD
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.server import TrainServer
from fedquilt.tasks import Task
from fedquilt.terms import (
    Arch,
    Budget,
    Client,
    ClientState,
    Extras,
    Job,
    Server,
    Submodel,
    Submodels,
)

Presets = Mapping[str, Mapping[str, Any]]
TRIAL_SHARES = (1.0, 0.5, 0.25, 0.125)  # Shares of the devices of `fedquilt check`
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """Base class of a federated learning method.

    Fields are the paper's hyper-parameters. A method overrides the steps that it changes. The cost
    of a client's plan is compared with its budget before training, and a plan that costs more is
    refused.
    """

    local: LocalTraining = LocalTraining()  # Settings of local training
    # Weight of a client in the mean: equal, samples, kernels, optimizer steps, or the last two
    weighting: Weighting = "data"
    # Optimizer of the server, which takes the mean or steps towards it
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = Plain()

    paper: ClassVar[str] = ""
    presets: ClassVar[Presets] = {}  # Settings that differ from the defaults, by name
    copies: ClassVar[int] = 1  # Factor by which the bytes of payloads are charged
    ignores_budgets: ClassVar[bool] = False  # True: plans may exceed budgets; runs report how many
    skips_clients: ClassVar[bool] = False  # True: an empty plan leaves a client out of a round
    serves_one_net: ClassVar[bool] = False  # True: devices of all budgets get the same net
    # True: clients train the first net of a union and one of the others
    trains_pairs: ClassVar[bool] = False
    # True: clients keep nets of their own, which `kept_nets` names
    keeps_nets: ClassVar[bool] = False
    # Settings of this method in the demo, whose devices have shares 1, 1/2 and 1/4
    demo: ClassVar[Mapping[str, Any]] = {}
    # Model and fleet that replace the demo's, for methods that need others. Empty: the demo's
    demo_federation: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the budgets of a subclass with its own `plan`, unless it opts out itself."""
        super().__init_subclass__(**options)
        if "plan" in vars(cls) and "ignores_budgets" not in vars(cls):
            cls.ignores_budgets = False

    def __post_init__(self) -> None:
        one_of(self, weighting=Weighting)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the method with a named set of settings, and further changes.

        The preset `released` has the settings of the authors' code where it differs from the paper.
        """
        if name not in cls.presets:
            names = ", ".join(cls.presets) or "none"
            raise ConfigError(f"{cls.__name__} has no preset {name!r}; known: {names}.")
        return cls(**{**cls.presets[name], **changes})

    @property
    def personal(self) -> bool:
        """Return True if clients have their own models, so that accuracy is a mean over them."""
        return self.local.norm.personal

    @property
    def attack(self) -> PGD | None:
        """Return the attack that clients train against, or None if there is none."""
        return self.local.adversarial.attack if self.local.adversarial else None

    @property
    def note(self) -> str:
        """Return a note for readers of results, or an empty text.

        It says what clients train if that does not depend on their budgets.
        """
        return ""

    @property
    def needs_supernet(self) -> bool:
        """Return True if searched nets have to start from the weights of a supernet."""
        return False

    @property
    def starts_pretrained(self) -> bool:
        """Return True if nets other than the first start from the supernet's weights.

        It has no effect without a supernet.
        """
        return True

    def with_local(self, **changes: Any) -> Self:
        """Return the method with changed settings of local training.

        Args:
            **changes: Fields of `LocalTraining`. `lr` is short for the learning rate of the
                optimizer.

        Raises:
            ConfigError: A name is no field of `LocalTraining`.
        """
        return replace(self, local=self.local.changed(**changes))

    def shortened(self) -> Self:
        """Return the method with one epoch and batches of 4, so that `fedquilt check` is quick."""
        return self.with_local(epochs=1, batch_size=4)

    def adapt(self, family: Family) -> Family:
        """Return the family in the form that the method trains, such as with stages.

        It is called once before a run.
        """
        return family

    def turns(self, world: World) -> tuple[int, ...]:
        """Return the rounds, counted from 0, in which plans change.

        Budgets and nets are checked for each of them before the first round.
        """
        return (0,)

    def status(self, round: int, world: World) -> str:
        """Return a short text on a round, counted from 0, for progress lines. It may be empty."""
        return ""

    def initial(self, world: World) -> dict[str, Tensor]:
        """Return all weights before the first round, by scope and name, on the CPU.

        They depend on the random seed only.
        """
        return world.family.init(world.seed, dtype=world.dtype)

    def init(self, world: World) -> Server:
        """Return the server's state before the first round."""
        family = world.family
        if self.local.adversarial and self.local.adversarial.draws and not family.conditioned:
            raise ConfigError(
                f"{type(self).__name__} was asked to draw a weight for every sample, which nets "
                "have to be told; the "
                f"model has no conditioned norms. {HOW_TO_CONDITION}"
            )
        if family.adjustable and self.local.adversarial is None:
            _log.warning(
                "the model has norms of two kinds, and %s attacks nothing in training: a "
                "robustness above 0 would be "
                "that of norms as they began. method.local.adversarial in a file, "
                "LocalTraining(adversarial=fq."
                "AdversarialTraining()) in Python, trains both.",
                type(self).__name__,
            )
        statistics = family.statistics if self.local.norm.has_server_statistics else ()
        names = {*family.trainable, *statistics, *family.carried}
        initial = self.initial(world).items()
        return Server(
            0, {name: value for name, value in initial if name[name.rfind("/") + 1 :] in names}
        )

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return the sub-models that a client trains in this round, all at the same time.

        Args:
            server: State at the start of the round.
            client: Client to plan for.
            world: The family, and the precision of the run.
        """
        return [prefix(self.fit(client.budget, world))]

    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        """Return the largest member that a client can train with this method's local step.

        Args:
            budget: Bounds of the client. A bound on memory is on the training step.
            world: The family, and the precision of the run.
            rounding: How a share of an axis is rounded to whole channels.
        """
        return world.family.fit(budget, rounding, self._step_within(budget, world))

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the share of every axis that a client can train. Arguments are those of `fit`."""
        return world.family.share(budget, rounding, self._step_within(budget, world))

    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the share of every axis that a device can run. Memory is that of inference."""
        return world.family.share(budget)

    def without_memory(self, budget: Budget, world: World, trains: bool) -> Budget:
        """Return a budget whose bound on memory is replaced by the share that it allows.

        A device may run a larger net than it can train, so that the bound has two meanings.

        Args:
            budget: Budget of a device, with a bound on memory.
            world: The family, and the precision of the run.
            trains: True: the bound is on the training step. False: it is on inference.
        """
        share = (
            self.trainable_share(budget, world) if trains else self.runnable_share(budget, world)
        )
        return budget.without_memory(share)

    def _step_within(self, budget: Budget, world: World) -> TrainingStep | None:
        return None if budget.memory is None else self.training_step(world)

    def training_step(self, world: World) -> TrainingStep:
        """Return the quantities of a local step with the whole model that memory depends on.

        For a narrower client, nested nets that are wider than its own are left out. Override this
        if narrower clients run nets that the learner of the whole model does not name.
        """
        job = Job(Client(0, Budget(share=1.0)), prefix(world.family.whole), 0)
        learner = learner_of(self, job, world)
        return learner.training_step(world.family.member(world.family.whole), world.precision)

    def own(self, server: Server, client: Client, world: World) -> Submodels:
        """Return a client's own nets, for a personal method: those that it trained last.

        Args:
            server: State of the server.
            client: Client whose nets are returned.
            world: The family, and the precision of the run.
        """
        return tuple(self.plan(replace(server, round=server.last(client.id)), client, world))

    def learner(self, job: Job, world: World) -> Learner:
        """Return the learner that trains a job. It depends on the job and the settings only."""
        # A client without samples of a class does not train its output row (HeteroFL).
        rows = self.local.masked == "client" and world.task.has_classes
        phases = (Phase(self.local.build_objective()),)
        share = self.divisor(job, world) if self.local.scaler else 1.0
        counts = self.weighting in ("updates", "both")
        return Learner(
            phases,
            self.local,
            self.lr(job.round),
            class_rows=rows,
            keep_slots=self.local.keep_optimizer,
            counts_steps=counts,
            share=share,
            task=world.task,
        )

    def divisor(self, job: Job, world: World) -> float:
        """Return the share of the client's net, by which `local.scaler` divides hidden outputs.

        The whole net has share 1, whatever the client's budget.
        """
        if job.submodel.arch == world.family.whole:
            return 1.0
        return self.trainable_share(job.client.budget, world)

    def lr(self, round: int) -> float:
        """Return the clients' learning rate in a round, counted from 0."""
        return self.local.optimizer.lr * self.local.schedule(round)

    def fold(self, server: Server, world: World) -> Fold:
        """Return the fold that merges the updates of a round."""
        plain = frozenset(world.family.statistics)
        return Mean(world.family.cutter, self.weighting, self.server_optimizer, plain=plain).begin(
            server
        )

    def label(self, budget: Budget, world: World) -> str:
        """Return the name that tables and logs show for the results of a budget.

        The keys of `accuracy` are shares in any case.

        Args:
            budget: Budget of a device. It is named by its bounds with units, or by its share if it
                has no bounds.
            world: The family, and the precision of the run.
        """
        return bounds_label(budget) or short_share(share_label(self, budget, world))

    def key(self, budget: Budget, world: World) -> str:
        """Return the key of a client's budget in records: the share that the client can train.

        Args:
            budget: Budget of a device.
            world: The family, and the precision of the run.
        """
        return share_key(self.trainable_share(budget, world), budget)

    def settled(self, rounds: int) -> Self:
        """Return the method with all settings fixed that depend on the number of rounds.

        It is called once before a run, and config.toml stores its result. A resumed run calls it
        again, possibly with more rounds, so that settings that are already fixed must not change.

        Args:
            rounds: Rounds of the run.
        """
        return self

    def check_task(self, task: Task) -> None:
        """Refuse a task that the method's settings do not fit. It is called once before a run.

        A masked loss and the rows of single classes need classes. If a mask is the method's
        default, as in HeteroFL, it is ignored for tasks without classes. If the user has set the
        mask, it is refused.

        Raises:
            ConfigError: A setting needs classes, and the task has none.
        """
        (default,) = (setting.default for setting in fields(self) if setting.name == "local")
        assert isinstance(default, LocalTraining), (
            "every method has default settings of local training"
        )
        if task.has_classes or self.local.masked in ("", default.masked):
            return
        raise ConfigError(
            f"{type(self).__name__} was asked for with local.masked = {self.local.masked!r}, which "
            "masks the outputs "
            f"of absent classes; {type(task).__name__} has no classes. local.masked = '' fits."
        )

    @property
    def needs_public(self) -> bool:
        """Return True if the method needs public samples. Runs without them are then refused."""
        return False

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Return the state after the server has learnt, between the merge and the evaluation.

        By default the server does not learn.

        Args:
            server: State after the merge.
            outputs: Outputs of teachers on public samples (`Merged.outputs`).
            world: Family, task, seed and public samples.
            train: Function `train(server, teaching)`. It trains nets of a state on public samples,
                and returns the state with the trained nets.
        """
        return server

    def candidates(self, server: Server, world: World) -> Submodels:
        """Return nets to score before the state is tested or deployed. By default there are none.

        A score is the task's main figure, negated if lower is better, so that a higher score is
        always better. It is measured on validation samples (`FederatedData.with_validation`), or on
        training samples if clients hold back none.
        """
        return ()

    def ranked(self, server: Server, scores: Sequence[float], world: World) -> Server:
        """Return the state that is tested and deployed, given the scores of the candidates.

        Args:
            server: State of the server.
            scores: Score of each net that `candidates` returned.
            world: Family, task and seed.
        """
        return server

    def figures(self, server: Server, world: World, gradients: Gradients) -> dict[str, float]:
        """Return further figures of the server's state by name, which records store too.

        It is called after every evaluation. By default there are none.

        Args:
            server: The state that was evaluated.
            world: Family, task and seed.
            gradients: Function `gradients(submodels, samples)`. It returns each sub-model's
                gradient of the mean loss over that many training samples of all clients, by the
                weight's name.
        """
        return {}

    def resumed(self, job: Job, memory: ClientState | None, world: World) -> None:
        """Inspect a client's memory before it trains, such as to log a warning.

        By default nothing is done.

        It is called once for every job of a round, on the server, if `keeps_nets` is set.

        Args:
            job: What the client is asked to train.
            memory: What it kept from earlier rounds. None: nothing.
            world: Family, task and seed.
        """

    def kept_nets(self, memory: ClientState, world: World) -> Mapping[str, Submodel]:
        """Return nets in a client's memory to test, by the prefix of their metrics' names.

        A net named `private` gives the metric `private_accuracy`, a mean over clients on the whole
        test set. It also gives `local_private_accuracy` on each client's own test samples. Both are
        grouped by the keys of the clients' budgets. By default there are no such nets, and
        `keeps_nets` is False.

        Args:
            memory: What the client kept from earlier rounds.
            world: Family, task and seed.
        """
        return {}

    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        """Return further figures of a fleet for `summary.json`, as plain values.

        By default there are none.

        Args:
            counts: Number of clients that have each budget.
            world: Family, task and seed.
        """
        return {}

    def trial(self, family: Family) -> tuple[Family, tuple[Budget, ...]]:
        """Return the family and the budgets on which `fedquilt check` tries the method.

        Args:
            family: A small net. By default it is used as it is, with shares from 1 to 1/8.
        """
        return family, tuple(Budget(share=share) for share in TRIAL_SHARES)

    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the sub-models that a device of this budget gets after training.

        If there are several, their logits are averaged.

        Args:
            server: State of the server.
            budget: Budget of the device. A bound on memory is on inference.
            world: The family, and the precision of the run.
        """
        return (prefix(world.family.fit(budget)),)


def whatever_the_budget(share: float) -> str:
    """Return the note of a method whose clients all train the same share."""
    return f"every client trains share {share:g}, whatever its budget"


def narrower(one: Arch, other: Arch) -> Arch:
    """Return the member that has the smaller width of two members on every axis."""
    limit = other.sizes
    return replace(one, widths=tuple((axis, min(width, limit[axis])) for axis, width in one.widths))
