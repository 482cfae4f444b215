"""Base class of methods: the steps of a round, in order.

The defaults are FedAvg, where each client trains the first channels that fit its budget.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from fedquilt.checks import one_of
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.dual import HOW_TO_CONDITION
from fedquilt.family.family import Rounding
from fedquilt.round.budgets import learner_of
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.labels import bounds_label, share_key, share_label, short_share
from fedquilt.round.merge import Mean
from fedquilt.round.optional_steps import OptionalSteps
from fedquilt.round.server_optimizers import Plain, ServerAdam, ServerMomentum, ServerYogi
from fedquilt.round.training.attacks import PGD
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.tasks import Task
from fedquilt.terms import (
    Arch,
    Budget,
    Client,
    Job,
    Server,
    Submodel,
    Submodels,
)

Presets = Mapping[str, Mapping[str, Any]]  # Settings of a method by preset and field.
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method(OptionalSteps):
    """Base class of a federated learning method.

    A method is a frozen dataclass. Its fields are the paper's hyper-parameters, and it overrides
    the steps that the paper changes. These are, in the order of a round:

    1. `plan` returns the sub-models that a client trains.
    2. `learner` describes how the client trains them, and what it sends and keeps.
    3. `fold` merges the updates of all clients into the server's state.
    4. `learn` trains nets of the server on public samples.
    5. `deploy` returns the nets that a device of some budget gets. They are also what is tested.

    Once before the first round, `adapt` prepares the family and `init` returns the server's state.
    The defaults are FedAvg, where a client trains the first channels that fit its budget. Steps
    that most methods do without, such as `learn`, are inherited from `OptionalSteps`.

    Steps depend on their arguments and on the fields alone, so that a resumed run continues in the
    same way. Random numbers come from `fedquilt.noise`. The cost of a plan is compared with the
    client's budget before training, and a plan that costs more is refused.

    Example:
        A client with half of the channels trains a window that moves by one channel each round. The
        net has a hidden axis of four channels, so that the window wraps in round 3:

        >>> from dataclasses import dataclass, replace
        >>> import torch
        >>> from fedquilt.methods.api import Budget, Client, Method, World, trace, windows
        >>> @dataclass(frozen=True)
        ... class Rolling(Method):
        ...     shift: int = 1  # Channels that the window moves each round. 0: it does not move
        ...
        ...     def plan(self, server, client, world):
        ...         member = self.fit(client.budget, world)
        ...         starts = {axis: server.round * self.shift for axis in member.sizes}
        ...         return [windows(member, starts, world.family.layout.sizes)]
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> world = World(trace(net, torch.zeros(2, 3)))
        >>> method = Rolling().with_local(epochs=2, lr=0.1)
        >>> server = replace(method.init(world), round=3)
        >>> (submodel,) = method.plan(server, Client(0, Budget(share=0.5)), world)
        >>> {axis: list(positions) for axis, positions in submodel.index.items()}
        {'layer.0': [3, 0]}
    """

    local: LocalTraining = LocalTraining()  # Settings of local training
    # Weight of a client in the mean: equal (uniform), its samples (data), its kernels (model), its
    # optimizer steps so far (updates), or kernels times steps (both)
    weighting: Weighting = "data"
    # Optimizer of the server, which steps towards the mean of the clients. plain takes the mean
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = Plain()

    paper: ClassVar[str] = ""  # Authors and year of the paper, for tables
    presets: ClassVar[Presets] = {}  # Settings that differ from the defaults, by name
    wire_factor: ClassVar[int] = 1  # Factor by which the bytes of payloads are charged
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
        """Set `ignores_budgets` to False for a subclass with its own `plan`.

        So its budgets are checked, even if the parent ignores them. A subclass that sets
        `ignores_budgets` itself keeps its value.
        """
        super().__init_subclass__(**options)
        if "plan" in vars(cls) and "ignores_budgets" not in vars(cls):
            cls.ignores_budgets = False

    def __post_init__(self) -> None:
        one_of(self, weighting=Weighting)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the method with a named set of settings, and further changes.

        The preset `released` has the settings of the authors' code where it differs from the paper.

        Args:
            name: Name of the preset, a key of `presets`.
            **changes: Fields of the method, which replace those of the preset.

        Raises:
            ConfigError: The method has no such preset.
        """
        if name not in cls.presets:
            names = ", ".join(cls.presets) or "none"
            raise ConfigError(f"{cls.__name__} has no preset {name!r}; known: {names}.")
        return cls(**{**cls.presets[name], **changes})

    @property
    def personal(self) -> bool:
        """Return True if clients have models of their own, because of the norm policy.

        Then each client's model is tested, and accuracy is a mean over clients.
        """
        return self.local.norm.personal

    @property
    def attack(self) -> PGD | None:
        """Return the attack that clients train against, or None if there is none."""
        return self.local.adversarial.attack if self.local.adversarial else None

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
        """Return a copy of the method with one epoch and batches of 4, for `fedquilt check`."""
        return self.with_local(epochs=1, batch_size=4)

    def initial(self, world: World) -> dict[str, Tensor]:
        """Return all weights before the first round, by scope and name, on the CPU.

        They depend on the random seed of the world only.
        """
        return world.family.init(world.seed, dtype=world.dtype)

    def init(self, world: World) -> Server:
        """Return the server's state before the first round.

        By default it has the initial weights of the family in `world`, and the norm statistics that
        the server averages. A method with slots or extras adds their first values.

        Raises:
            ConfigError: Adversarial training draws a weight for every sample, and the model has no
                conditioned norms.
        """
        family = world.family
        if self.local.adversarial and self.local.adversarial.draws and not family.conditioned:
            raise ConfigError(
                f"{type(self).__name__} was asked to draw a weight for every sample, which nets "
                f"need as an input; the model has no conditioned norms. {HOW_TO_CONDITION}"
            )
        if family.adjustable and self.local.adversarial is None:
            _log.warning(
                "the model has norms of two kinds, and %s attacks nothing in training: with a "
                "robustness above 0, norms would run with their initial weights. "
                "method.local.adversarial in a file, "
                "LocalTraining(adversarial=fq.attacks.AdversarialTraining()) in Python, trains "
                "both kinds.",
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

        Raises:
            BudgetError: Even the smallest member exceeds the budget.
        """
        return world.family.fit(budget, rounding, self._step_within(budget, world))

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the largest share of every axis with which a client can train, in (0, 1].

        Args:
            budget: Bounds of the client. A bound on memory is on the training step.
            world: The family, and the precision of the run.
            rounding: How a share of an axis is rounded to whole channels.
        """
        return world.family.share(budget, rounding, self._step_within(budget, world))

    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the largest share of every axis with which a device can run the net, in (0, 1].

        Args:
            budget: Budget of the device. Its memory is that of inference.
            world: World of the run, which has the family.
        """
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

        The model and the precision are those of `world`. For a narrower client, nested nets that
        are wider than its own are left out. Override this if narrower clients run nets that the
        learner of the whole model does not name.
        """
        job = Job(Client(0, Budget(share=1.0)), prefix(world.family.whole), 0)
        learner = learner_of(self, job, world)
        return learner.training_step(world.family.member(world.family.whole), world.precision)

    def client_submodels(self, server: Server, client: Client, world: World) -> Submodels:
        """Return a client's own nets, for a personal method: those that it trained last.

        By default this is the plan of the last round in which the client trained.

        Args:
            server: State of the server, which has the client states.
            client: Client whose nets are returned.
            world: The family, and the precision of the run.
        """
        return tuple(self.plan(replace(server, round=server.last(client.id)), client, world))

    def learner(self, job: Job, world: World) -> Learner:
        """Return the learner that trains a job.

        It must not depend on anything else, because a device builds the learner for itself.

        Args:
            job: Client, sub-model and round.
            world: Family, task and seed.
        """
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

        Args:
            job: Job of the client, which has its budget and its sub-model.
            world: World of the run, which has the family of the whole net.
        """
        if job.submodel.arch == world.family.whole:
            return 1.0
        return self.trainable_share(job.client.budget, world)

    def lr(self, round: int) -> float:
        """Return the clients' learning rate in a round, counted from 0.

        It is the optimizer's rate times the factor of the schedule over rounds.
        """
        return self.local.optimizer.lr * self.local.schedule(round)

    def fold(self, server: Server, world: World) -> Fold:
        """Return the fold that merges the updates of a round.

        By default it is a mean at each position over the clients that trained the position.

        Args:
            server: State at the start of the round.
            world: Family, task and seed.
        """
        plain = frozenset(world.family.statistics)
        return Mean(world.family.cutter, self.weighting, self.server_optimizer, plain=plain).begin(
            server
        )

    def label(self, budget: Budget, world: World) -> str:
        """Return the name that tables and logs show for the results of a budget.

        The keys of `accuracy` in records are shares in any case.

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
            f"masks the outputs of absent classes; {type(task).__name__} has no classes. "
            "local.masked = '' fits."
        )

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
    """Return the note, for readers of results, that all clients train the same `share`."""
    return f"every client trains share {share:g}, whatever its budget"


def narrower(member: Arch, limit: Arch) -> Arch:
    """Return a member whose axes are at most as wide as those of another member.

    Args:
        member: Member to narrow. Its variant stays the same.
        limit: Member that bounds the width of each axis.
    """
    widths = tuple((axis, min(width, limit.sizes[axis])) for axis, width in member.widths)
    return replace(member, widths=widths)
