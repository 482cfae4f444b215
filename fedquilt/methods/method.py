"""What a method is: five verbs, in the round's order. The defaults are FedAvg of the first channels that fit."""

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
from fedquilt.round.attack import PGD
from fedquilt.round.budgets import learner_of
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import World
from fedquilt.round.labels import bounds_label, share_key, share_label, short_share
from fedquilt.round.merge import (
    Fold,
    Mean,
    Plain,
    ServerAdam,
    ServerMomentum,
    ServerYogi,
    Weighting,
)
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import Local
from fedquilt.round.training.server import TrainServer
from fedquilt.tasks import Task
from fedquilt.terms import Arch, Budget, Client, Extras, Job, Memory, Mix, Server, Submodel

Presets = Mapping[str, Mapping[str, Any]]
TRIAL_SHARES = (1.0, 0.5, 0.25, 0.125)  # Shares of the devices of `fedquilt check`
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """How a federation learns. Fields are the paper's hyper-parameters; a method overrides the verbs it changes.

    What `plan` gives a client is compared with the client's budget before it is trained, and refused
    if it costs more.
    """

    local: Local = Local()
    weighting: Weighting = (
        "data"  # What a client counts by in the mean; updates: its optimizer steps in all rounds
    )
    server: Plain | ServerMomentum | ServerAdam | ServerYogi = (
        Plain()
    )  # takes the mean, or steps towards it

    paper: ClassVar[str] = ""
    presets: ClassVar[Presets] = {}  # settings that depart from the defaults, by name
    copies: ClassVar[int] = (
        1  # how many times a payload's size the method is charged for on the wire
    )
    ignores_budgets: ClassVar[bool] = False  # True: plans may exceed budgets; runs say for how many
    skips_clients: ClassVar[bool] = False  # True: an empty plan leaves a client out of a round
    serves_one_net: ClassVar[bool] = (
        False  # True: the server has one net for devices of all budgets
    )
    trains_pairs: ClassVar[bool] = (
        False  # True: clients train the first net of a union and one of the others
    )
    keeps_nets: ClassVar[bool] = (
        False  # True: clients keep nets of their own, which `kept_nets` names
    )
    demo: ClassVar[
        Mapping[str, Any]
    ] = {}  # Settings of its own in the demo, whose devices have shares 1, 1/2 and 1/4
    # Model and fleet that the demo has in place of its own, for methods that need others. Empty: the demo's
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
        """The method in a named setting, such as `released` where the authors' code departs from their paper."""
        if name not in cls.presets:
            known = ", ".join(cls.presets) or "none"
            raise ConfigError(f"{cls.__name__} has no preset {name!r}; known: {known}.")
        return cls(**{**cls.presets[name], **changes})

    @property
    def personal(self) -> bool:
        """Whether the result lives on the clients: then accuracy is the mean of theirs."""
        return self.local.norm.personal

    @property
    def attack(self) -> PGD | None:
        """The attack that clients train against, if they do."""
        return self.local.adversarial.attack if self.local.adversarial else None

    @property
    def note(self) -> str:
        """What readers of its results must know: who trains what, if that is not what fits a budget; "": nothing."""
        return ""

    @property
    def needs_supernet(self) -> bool:
        """Return True if searched nets have to start from the weights of a supernet."""
        return False

    @property
    def starts_pretrained(self) -> bool:
        """Return True if nets besides the first start from the weights that a supernet brings, if there is one."""
        return True

    def with_local(self, **changes: Any) -> Self:
        """Return the method with other local settings. Those that are not named stay as they are.

        Args:
            **changes: Fields of `Local`. `lr` is short for the learning rate of the optimizer.

        Raises:
            ConfigError: A name is no field of `Local`.
        """
        return replace(self, local=self.local.changed(**changes))

    def shortened(self) -> Self:
        """Return the method with so little training that `fedquilt check` is quick: one epoch with batches of 4."""
        return self.with_local(epochs=1, batch_size=4)

    def adapt(self, family: Family) -> Family:
        """Return the family as the method trains it, such as with stages. It is called once before a run."""
        return family

    def turns(self, world: World) -> tuple[int, ...]:
        """Return the rounds, from 0, in which plans begin to differ from those before.

        Budgets and nets are checked for each of them before the first round.
        """
        return (0,)

    def status(self, round: int, world: World) -> str:
        """Return a few words on a round, from 0, for progress lines; "": nothing beside its number."""
        return ""

    def initial(self, world: World) -> dict[str, Tensor]:
        """Return all weights before the first round, by scope and name, on the CPU. The seed decides them."""
        return world.family.init(world.seed, dtype=world.dtype)

    def init(self, world: World) -> Server:
        """The state before the first round."""
        family = world.family
        if self.local.adversarial and self.local.adversarial.draws and not family.conditioned:
            raise ConfigError(
                f"{type(self).__name__} was asked to draw a weight for every sample, which nets have to be told; the "
                f"model has no conditioned norms. {HOW_TO_CONDITION}"
            )
        if family.adjustable and self.local.adversarial is None:
            _log.warning(
                "the model has norms of two kinds, and %s attacks nothing in training: a robustness above 0 would be "
                "that of norms as they began. method.local.adversarial in a file, Local(adversarial=fq."
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
        """Return what a client trains this round; several nets are trained at the same time."""
        return [prefix(self.fit(client.budget, world))]

    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        """Return the largest member that a client can train with this method's local step.

        Args:
            budget: Bounds of the client. A bound on memory is on the training step.
            world: The family, and the precision of the run.
            rounding: Of a share of an axis, to whole channels.
        """
        return world.family.fit(budget, rounding, self._step_within(budget, world))

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the share of every axis that a client can train; arguments as for `fit`."""
        return world.family.share(budget, rounding, self._step_within(budget, world))

    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the share of every axis that a device can run, with a bound on inference memory."""
        return world.family.share(budget)

    def without_memory(self, budget: Budget, world: World, trains: bool) -> Budget:
        """Return a budget with what its bound on memory allows in place of the bound.

        A device may run a larger net than it can train, so that memory has two meanings.

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
        """Describe the local step of a client with the whole model as far as memory depends on it.

        Nested nets wider than a client's own are left out for it. Override this where narrower clients
        run nets that the learner of the whole model does not name.
        """
        job = Job(Client(0, Budget(share=1.0)), prefix(world.family.whole), 0)
        learner = learner_of(self, job, world)
        return learner.training_step(world.family.member(world.family.whole), world.precision)

    def own(self, server: Server, client: Client, world: World) -> Mix:
        """The nets that are a client's, where results live on clients: what it trained last."""
        return tuple(self.plan(replace(server, round=server.last(client.id)), client, world))

    def learner(self, job: Job, world: World) -> Learner:
        """How it trains it; a pure function of the job and the configuration."""
        # A client that never saw a class has nothing to say about its output row (HeteroFL).
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
        """Return the share of the client's net, by which `local.scaler` divides the outputs of its hidden layers.

        The whole net has share 1, whatever the client's budget.
        """
        if job.submodel.arch == world.family.whole:
            return 1.0
        return self.trainable_share(job.client.budget, world)

    def lr(self, round: int) -> float:
        return self.local.optimiser.lr * self.local.schedule(round)

    def fold(self, server: Server, world: World) -> Fold:
        """How what comes back is put together."""
        plain = frozenset(world.family.statistics)
        return Mean(world.family.cutter, self.weighting, self.server, plain=plain).begin(server)

    def label(self, budget: Budget, world: World) -> str:
        """Return how tables and logs name the results of a budget; the keys of `accuracy` are shares all the same.

        Args:
            budget: Budget of a device. It is named by its bounds with units, or by its share if it has no bounds.
            world: The family, and the precision of the run.
        """
        return bounds_label(budget) or short_share(share_label(self, budget, world))

    def key(self, budget: Budget, world: World) -> str:
        """Return the key of a client's budget in records, a number: the share of every axis that it can train.

        Args:
            budget: Budget of a device.
            world: The family, and the precision of the run.
        """
        return share_key(self.trainable_share(budget, world), budget)

    def settled(self, rounds: int) -> Self:
        """Return the method with all that depends on the number of rounds fixed.

        It is called once before a run, and its result is what config.toml has. A run that goes on, to
        more rounds or not, calls it again, so that a method which is settled must stay as it is.

        Args:
            rounds: Rounds of the run.
        """
        return self

    def check_task(self, task: Task) -> None:
        """Refuse a task that the method's settings do not fit. It is called once before a run.

        A masked loss and the rows of single classes need classes. A mask that is the method's own
        default, as HeteroFL's, holds where targets are classes, and nothing is masked elsewhere.
        Any other mask has been asked for, and is refused.

        Raises:
            ConfigError: A setting needs classes, and the task has none.
        """
        (usual,) = (one.default for one in fields(self) if one.name == "local")
        assert isinstance(usual, Local), "every method has default settings of local training"
        if task.has_classes or self.local.masked in ("", usual.masked):
            return
        raise ConfigError(
            f"{type(self).__name__} was asked for with local.masked = {self.local.masked!r}, which masks the outputs "
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
            outputs: What the fold found out about the public samples (`Merged.outputs`).
            world: Family, task, seed and public samples.
            train: Function `train(server, teaching)`. It trains nets of a state on public samples, and returns the
                state with the trained nets.
        """
        return server

    def candidates(self, server: Server, world: World) -> Mix:
        """Return nets that are to be scored before the state is tested or handed out; () if none are.

        Their scores are the task's main figure, negative where lower is better. So a higher score
        is always better. It is measured on validation samples where clients hold some back
        (`FederatedData.with_validation`), else on samples that clients train on.
        """
        return ()

    def arranged(self, server: Server, scores: Sequence[float], world: World) -> Server:
        """Return the state as it is tested and handed out, given the scores of the candidates in their order."""
        return server

    def figures(self, server: Server, world: World, gradients: Gradients) -> dict[str, float]:
        """Return further figures of the server's state by name, which records have beside the metrics.

        It is called after every evaluation. By default there are none.

        Args:
            server: The state that was evaluated.
            world: Family, task and seed.
            gradients: Function `gradients(submodels, samples)`. It returns each sub-model's gradient of the mean loss
                over that many training samples of all clients, by the weight's name.
        """
        return {}

    def resumed(self, job: Job, memory: Memory | None, world: World) -> None:
        """Look at what a client remembers before it trains, such as to log a warning. By default nothing is done.

        It is called once for every job of a round, on the server, if `keeps_nets` is set.

        Args:
            job: What the client is asked to train.
            memory: What it kept from earlier rounds. None: nothing.
            world: Family, task and seed.
        """

    def kept_nets(self, memory: Memory, world: World) -> Mapping[str, Submodel]:
        """Return nets in a client's memory that are tested besides, by the name that their metrics begin with.

        The net `private` gives `private_accuracy`, the mean over clients on the whole test set, and
        `local_private_accuracy` on the client's own test samples, by the keys of the clients' budgets. By default
        there are none, and `keeps_nets` is False.

        Args:
            memory: What the client kept from earlier rounds.
            world: Family, task and seed.
        """
        return {}

    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        """Return figures of a fleet that `summary.json` has besides, as plain values. By default there are none.

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

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """The sub-model for a device of this budget, once trained; several give the mean of their logits."""
        return (prefix(world.family.fit(budget)),)


def whatever_the_budget(share: float) -> str:
    """The note of a method whose clients all train the same."""
    return f"every client trains share {share:g}, whatever its budget"


def narrower(one: Arch, other: Arch) -> Arch:
    """The smaller width of two members on every axis."""
    limit = other.sizes
    return replace(one, widths=tuple((axis, min(width, limit[axis])) for axis, width in one.widths))
