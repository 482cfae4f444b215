"""RaFL: a private net on every device, and a small knowledge net that travels (Yu et al. 2022)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor
from typing_extensions import override

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.family import Family, Rounding
from fedquilt.family.member import Member
from fedquilt.family.union import union
from fedquilt.family.variants import joined, members_of
from fedquilt.methods.rafl_nets import (
    cut_out,
    knowledge_net,
    macs_of,
    needs_divergences,
    private_name,
    private_net,
    private_nets,
    warn_of_fixed_weights,
)
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.students import teaching
from fedquilt.round.teachers import OUTPUTS, Combined, Teachers
from fedquilt.round.training.distillation import FromTeacher, Imitation
from fedquilt.round.training.filters import All, Nothing, VariantWeights
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.mutual import Distance, Mutual
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.regions import WithinVariant
from fedquilt.round.training.server import ServerTraining, TrainServer
from fedquilt.round.training.view import View
from fedquilt.tasks import Task
from fedquilt.terms import (
    WHOLE,
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

Order = Literal["together", "in_turn"]  # Order of the updates of two nets on a batch.
Limit = Literal["pair", "private"]  # Nets that a device's limits apply to.
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Softened(FromTeacher):
    """Loss of the server in the released code, with the temperature T and C classes.

        T²/C · KL(σ(student / T) ‖ σ(t)),   t = σ(σ(teacher) / T)

    The arguments of KL are swapped in that code. It passes the probabilities t where KL expects
    logarithms. Read as logits they give the same gradient.
    """

    temperature: float = 20.0  # Temperature T of both nets.

    @override
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        t = (rows.softmax(1) / self.temperature).softmax(1)
        student = (logits / self.temperature).log_softmax(1)
        return self.temperature**2 * (student.exp() * (student - t)).mean()


@dataclass(frozen=True)
class RaFL(Method):
    """Clients train a private net and a knowledge net on each other, and send the knowledge net.

    These are algorithms 1 and 2. The family is a union of architectures (`fq.union`). Its first net
    is the knowledge net k, the others are private nets p_l. A client l has the private net with the
    most multiply-adds within its limits. In a round it receives k, and trains both nets on every
    batch B (equations 2 to 5):

        L_p = CE(p; B) + KL(k ‖ p; B)
        L_k = CE(k; B) + KL(p ‖ k; B)

    It keeps p and sends k. The server averages over the clients S of the round, where client l has
    n_l samples and all of S have N_S (equation 6):

        k = Σ_{l in S} n_l k_l / N_S

    With `distil` the server then trains k on batches of public samples (equation 7), at temperature
    1:

        k ← k − η ∂ KL(σ(1/|S| Σ_{l in S} k_l(x)) ‖ σ(k(x))) / ∂k

    Section 4.2 has three settings:

    - (a) The defaults. All nets are drawn from the random seed.
    - (b) `distil=True`.
    - (c) `transfer=True` with a union of modules that have the weights of a supernet.

    In (a) and (b) a device draws the weights of its private net itself. In (c) it downloads them
    once, which counts as communication.

    A device trains both nets, so that its limits apply to the pair. The paper's limits apply to the
    private net alone (`limit="private"`). The summary then reports the cost of pairs, and how many
    devices exceed their limits.

    With `mutual_weight=0` the nets do not learn from each other. Private nets are then trained
    locally, and the knowledge net by FedAvg. This is the baseline with the same nets, clients and
    batches.

    The reported accuracy is that of the server's knowledge net. Metrics of clients have the
    multiply-adds of the private net as keys, and are labelled with the limit. `private_accuracy`
    and `client_knowledge_accuracy` are means over clients on the whole test set.
    `local_private_accuracy` is measured on the client's own test samples. With
    `evaluation.training`, `training_private_accuracy` is measured on its training samples.

    The paper states neither optimizer nor epochs. The preset `released` has the losses of the
    released code. Clients use squared differences of logits, one net after the other, and the
    gradient flows into both nets. The server uses the maximum of the logits, and `Softened`.

    The released code starts from a knowledge net with the supernet's weights, where the paper says
    that all weights are reset. `knowledge_pretrained` requests this when the union is created. In
    that code learning rates fall by a factor of 0.9 after every local epoch. The preset has no such
    schedule.
    """

    weighting: Weighting = "data"  # Weights of the clients in the mean of knowledge nets.
    # Order of the two updates of a batch. together: both losses are computed before either net is
    # updated. in_turn: the private net is updated first, and the knowledge net learns from the
    # updated net (algorithm 1, lines 7 and 8).
    order: Order = "together"
    # Distance between the outputs of both nets: KL divergence, or mean squared error of logits.
    distance: Distance = "divergence"
    # Weight of KL in equations 4 and 5. 0: each net learns from the labels alone.
    mutual_weight: float = 1.0
    # Each net takes the other net's output as a constant. False: gradients flow into both nets.
    detach: bool = True
    # The server learns from the clients' nets on public samples. False: no public samples needed.
    distil: bool = False
    # Server training on public samples. It has no effect unless `distil` is true.
    server_training: ServerTraining = ServerTraining()
    # Combination of the clients' logits to those of a teacher: their mean, or their maximum.
    ensemble: Combined = "mean"
    softened: bool = False  # Use the released code's loss on the server instead of equation 7.
    # Nets start from the weights of a supernet, so that a device downloads its private net once.
    transfer: bool = False
    # The knowledge net starts from the weights of a supernet, although private nets do not.
    knowledge_pretrained: bool = False
    # Nets that a device's limits apply to: pair (private and knowledge net), or private alone.
    limit: Limit = "pair"
    # Clients also keep the knowledge net that they trained, so that it can be evaluated.
    keep_knowledge: bool = True

    paper = "Yu et al. 2022"
    # Nets of the space `tiny`, which have 53,000 to 277,000 multiply-adds; a device trains two of
    # them.
    demo_federation: ClassVar[Mapping[str, Any]] = {
        "model": {"name": "searched"},
        "fleet": {
            "cohort": 0.5,
            "budgets": {"name": "flop_limited", "mean": 240e3, "spread": 0.5, "levels": 3},
        },
    }
    serves_one_net = True
    trains_pairs = True
    keeps_nets = True
    presets: ClassVar[Presets] = {
        "released": {
            "order": "in_turn",
            "distance": "logits",
            "detach": False,
            "ensemble": "maximum",
            "softened": True,
            "knowledge_pretrained": True,
            "local": LocalTraining(optimizer=SGD(lr=0.05, momentum=0.0), batch_size=64, epochs=25),
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, order=Order, distance=Distance, ensemble=Combined, limit=Limit)
        within(self, mutual_weight="[0, inf)")
        if self.local.norm.personal:
            problem = (
                f"{self.local.norm.name!r} was asked for, under which norms stay on clients. The "
                "knowledge net travels with all of its weights: 'batch', 'tracked' or 'post' would "
                "work."
            )
            refuse(self, {"local.norm": problem})
        object.__setattr__(self, "ignores_budgets", self.limit == "private")

    @property
    @override
    def note(self) -> str:
        text = "accuracy is that of the knowledge net; private nets stay on clients"
        if self.limit == "private":
            return f"{text}; limits are those of the private net alone"
        return text

    @property
    @override
    def needs_supernet(self) -> bool:
        return self.transfer or self.knowledge_pretrained

    @property
    @override
    def starts_pretrained(self) -> bool:
        return self.transfer

    @override
    def shortened(self) -> Self:
        """Return the method with little training on clients and on the server, for tests."""
        return replace(super().shortened(), server_training=self.server_training.shortened())

    @override
    def adapt(self, family: Family) -> Family:
        """Return the family unchanged. Refuse a family that is not a union."""
        if not family.layout.nets or len(family.variants) < 2:
            raise ConfigError(
                f"RaFL was asked for with {family.title}, which is one architecture; it needs a "
                "knowledge net and at least one private net. --model searched finds nets for the "
                "fleet's limits, --model A B names them, "
                'and in Python fq.union({"knowledge": fq.trace(…), "private": fq.trace(…)}) would '
                "work."
            )
        return family

    @override
    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if self.distance == "divergence":
            needs_divergences(task)
        if self.softened and not task.has_classes:
            raise ConfigError(
                "RaFL was asked for with softened = True, a loss of probabilities of classes; "
                f"{type(task).__name__} has no classes. softened = False would work."
            )

    @property
    @override
    def needs_public(self) -> bool:
        return self.distil and self.server_training.steps > 0

    @override
    def init(self, world: World) -> Server:
        """Return the state before the first round, which has only the knowledge net."""
        server = super().init(world)
        if not self.transfer:
            warn_of_fixed_weights(world)
        knowledge_names = set(world.family.member(knowledge_net(world.family)).names)
        return replace(
            server,
            weights={
                name: value for name, value in server.weights.items() if name in knowledge_names
            },
        )

    # --- limits ----------------------------------------------------------------------------------

    @override
    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        """Return a pair: the knowledge net and the largest private net within the limits.

        The result has the weights of both nets. A forward pass runs the knowledge net.

        Args:
            budget: Limits of the client.
            world: World with a union.
            rounding: It has no effect, because no net is cut.

        Raises:
            BudgetError: The limits are a share below 1, or allow none of the private nets.
        """
        return world.family.at(joined(WHOLE, self.private_for(budget, world))).whole

    def private_for(self, budget: Budget, world: World) -> str:
        """Return the name of the private net with the most multiply-adds within the limits.

        Args:
            budget: Limits of the device for a training step.
            world: World of the run, whose family has the private nets.

        Raises:
            BudgetError: The limits are a share below 1, or allow none of the nets.
        """
        if budget.share is not None and budget.share < 1:
            raise BudgetError(
                f"a share of {budget.share:g} was asked for; RaFL gives a device one of several "
                "whole nets, and cuts none of them. Limits of macs, params or memory would work, "
                "such as Budget(macs=28e6), or a share of 1."
            )
        step = self._step_within(budget, world)
        for name in private_nets(world.family):
            if not world.family.excess([self._limited(name, world)], budget, step):
                return name
        raise BudgetError(self._too_tight(budget, step, world))

    def _limited(self, private: str, world: World) -> Member:
        """Return what limits apply to: `private`, and by `limit="pair"` also the knowledge net."""
        variant = private if self.limit == "private" else joined(WHOLE, private)
        return world.family.member(world.family.at(variant).whole)

    def _too_tight(self, budget: Budget, step: TrainingStep | None, world: World) -> str:
        """Return the error message for limits that allow no net. It names the smallest one."""
        name = private_nets(world.family)[-1]
        member = self._limited(name, world)
        kind = "private net" if self.limit == "private" else "pair of nets"
        memory = f" and trains in {member.training_memory(step):,} bytes" if step else ""
        smallest = (
            f"the smallest {kind} ({name}) has {member.macs:,} multiply-adds and {member.count:,} "
            f"parameters{memory}"
        )
        alternative = ""
        if self.limit == "pair":
            alternative = ", or limit = 'private', by which limits are those of one net"
        return (
            f"no {kind} is within the budget {budget}: {smallest}. Larger limits or smaller nets "
            f"would work{alternative}."
        )

    @override
    def training_step(self, world: World) -> TrainingStep:
        """Describe the local training step of a pair of nets, for counting its memory."""
        pair = world.family.at(joined(WHOLE, private_nets(world.family)[0])).whole
        job = Job(Client(0, Budget(share=1.0)), prefix(pair), 0)
        return self.learner(job, world).training_step(world.family.member(pair), world.precision)

    @override
    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return 1, because no net is cut."""
        return 1.0

    @override
    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return 1, because no net is cut."""
        return 1.0

    @override
    def key(self, budget: Budget, world: World) -> str:
        """Return the key of a budget's results in records.

        It is "1.0" for the knowledge net, else the multiply-adds of the private net within the
        limits.
        """
        if budget == Budget(share=1.0):
            return "1.0"
        return str(float(macs_of(world.family, self.private_for(budget, world))))

    @override
    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        """Return the utilisation of limits, the cost of pairs, and the devices over their limit.

        The utilisation is the mean of the private nets' multiply-adds divided by the mean limit.
        `common_utilisation` is that of one net for all, the largest that every device can have.
        Devices without a limit on multiply-adds are left out of both.

        Args:
            counts: Number of devices with each budget.
            world: World with a union.
        """
        family = world.family
        limited = {budget: count for budget, count in counts.items() if budget.macs}
        step = self.training_step(world) if any(budget.memory for budget in counts) else None
        pairs = {budget: family.member(self.fit(budget, world)) for budget in counts}
        total = sum(counts.values())
        figures: dict[str, Any] = {
            "pair_macs": sum(pairs[budget].macs * count for budget, count in counts.items())
            / total,
            "over_limit": sum(
                count
                for budget, count in counts.items()
                if family.excess([pairs[budget]], budget, step)
            ),
        }
        if not limited:
            return figures
        limits = sum((budget.macs or 0.0) * count for budget, count in limited.items())
        used = sum(
            macs_of(family, self.private_for(budget, world)) * count
            for budget, count in limited.items()
        )
        figures["utilisation"] = used / limits
        common = next(
            (name for name in private_nets(family) if self._fits_all(name, limited, step, world)),
            None,
        )
        if common is not None:
            figures["common_utilisation"] = macs_of(family, common) * sum(limited.values()) / limits
        return figures

    def _fits_all(
        self, private: str, budgets: Mapping[Budget, int], step: TrainingStep | None, world: World
    ) -> bool:
        member = self._limited(private, world)
        return not any(world.family.excess([member], budget, step) for budget in budgets)

    # --- a round ---------------------------------------------------------------------------------

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return the pair, which is one sub-model."""
        return [prefix(self.fit(client.budget, world))]

    @override
    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        keep = All() if self.keep_knowledge else Nothing()
        stays = replace(
            base, keep=keep, private=VariantWeights(WHOLE, other=True), installs=self.transfer
        )
        variants = members_of(job.submodel.arch.variant)
        if len(variants) == 1:  # One net of a pair, as it is tested or deployed.
            return stays
        knowledge, private = variants
        phases = self._phases(private, knowledge, base.phases[0].objective)
        leaks = self.order == "in_turn" and not self.detach
        return replace(stays, phases=phases, taught=leaks, taught_by=private if leaks else "")

    def _phases(self, private: str, knowledge: str, loss: Objective) -> tuple[Phase, ...]:
        """Return the updates of a batch: one of both nets (equations 4 and 5), or one of each.

        `private` and `knowledge` are the nets' names, and `loss` is the one on labels.
        """
        pair = (private, knowledge)
        mutual = Mutual(
            loss, pair, distance=self.distance, detach=self.detach, weight=self.mutual_weight
        )
        if self.order == "together":
            return (Phase(mutual),)
        first = replace(mutual, learns=(private,), detach=True)
        second = replace(mutual, learns=(knowledge,))
        return Phase(first, WithinVariant(private)), Phase(second, WithinVariant(knowledge))

    @override
    def fold(self, server: Server, world: World) -> Fold:
        """Average the knowledge nets (equation 6).

        If the server learns, the received nets also predict the public samples.
        """
        mean = super().fold(server, world)
        if not self.needs_public:
            return mean
        statistics: Literal["stored", "batch"] = "stored" if self.local.norm.tracks else "batch"
        return Teachers(mean, world, server, statistics, combined=self.ensemble, variant=WHOLE)

    @override
    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Train the knowledge net on public samples (equation 7).

        Args:
            server: State after the merge.
            outputs: Outputs that the fold collected, by name.
            world: World with a union.
            train: Function that trains nets of the server.
        """
        if OUTPUTS not in outputs:  # No client has sent a net, or the server does not learn.
            return server
        loss = Softened() if self.softened else Imitation()
        students = (prefix(knowledge_net(world.family)),)
        return train(
            server, teaching(self, students, outputs[OUTPUTS], loss, self.server_training, world)
        )

    # --- nets that clients keep ------------------------------------------------------------------

    @override
    def resumed(self, job: Job, memory: ClientState | None, world: World) -> None:
        """Warn if a client starts a new private net because the planned architecture changed.

        Args:
            job: Client, planned sub-model and round.
            memory: State that the client kept. None: it has none.
            world: World with a union.
        """
        if memory is None:
            return
        stored = private_name(memory.submodel)
        planned = private_name(job.submodel)
        trainable_names = world.family.member(world.family.at(planned).whole).trainable
        if stored != planned and not any(name in memory.weights for name in trainable_names):
            _log.warning(
                "client %d (budget %s) has the private net %r in its state, and %r is planned for "
                "it in round %d. It keeps the old net, and begins with a new one.",
                job.client.id,
                job.client.budget,
                stored,
                planned,
                job.round + 1,
            )

    @override
    def kept_nets(self, memory: ClientState, world: World) -> Mapping[str, Submodel]:
        """Return the private net of a client, and its last knowledge net if it keeps that too."""
        nets = {"private": private_net(world.family, private_name(memory.submodel))}
        knowledge = prefix(knowledge_net(world.family))
        if all(name in memory.weights for name in world.family.member(knowledge).trainable):
            nets["client_knowledge"] = knowledge
        return nets

    @override
    def client_submodels(self, server: Server, client: Client, world: World) -> Submodels:
        """Return the private net of a client.

        It is the net in the client's state. Before its first training it is the net for its limits.

        Args:
            server: State with the memory of clients.
            client: Client.
            world: World with a union.
        """
        memory = server.memory.get((client.id, ""))
        name = private_name(memory.submodel) if memory else self.private_for(client.budget, world)
        return (private_net(world.family, name),)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the knowledge net, the only net that the server has."""
        return (prefix(knowledge_net(world.family)),)

    @override
    def trial(self, family: Family) -> tuple[Family, tuple[Budget, ...]]:
        """Return a union of three nets cut from one family, and budgets for both private nets.

        Tests use them to try the method on any family.
        """
        nets = {
            name: cut_out(family, share)
            for name, share in (("knowledge", 0.25), ("small", 0.25), ("big", 0.5))
        }
        nets_union = union(nets)
        pairs = [
            nets_union.member(nets_union.at(joined(WHOLE, name)).whole) for name in ("big", "small")
        ]
        return nets_union, (Budget(share=1.0), *(Budget(macs=float(pair.macs)) for pair in pairs))
