"""RaFL: a private net on every device, and a small knowledge net that travels (Yu et al. 2022)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.family import Family, Rounding, trace
from fedquilt.family.member import Member
from fedquilt.family.union import union
from fedquilt.family.variants import joined, members_of
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.students import teaching
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Weighting
from fedquilt.round.teachers import OUTPUTS, Combined, Teachers
from fedquilt.round.training.filters import All, Nothing, VariantWeights
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import Local
from fedquilt.round.training.mutual import Distance, Mutual
from fedquilt.round.training.objectives import FromTeacher, Imitation, Objective, View
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.regions import WithinVariant
from fedquilt.round.training.server import ServerTraining, TrainServer
from fedquilt.tasks import Task
from fedquilt.terms import WHOLE, Arch, Budget, Client, Extras, Job, Memory, Mix, Server, Submodel

Order = Literal["together", "in_turn"]
Limit = Literal["pair", "private"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Softened(FromTeacher):
    """The released code's loss of the server: T²/C · KL(σ(student / T) ‖ σ(t)) with t = σ(σ(teacher) / T).

    C is the number of classes and T the temperature. The arguments of KL are swapped. In place of its second one,
    which has to be logarithms, that code has the probabilities t. As logits they have the same gradient.
    """

    temperature: float = 20.0  # T of both nets

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        t = (rows.softmax(1) / self.temperature).softmax(1)
        student = (logits / self.temperature).log_softmax(1)
        return self.temperature**2 * (student.exp() * (student - t)).mean()


@dataclass(frozen=True)
class RaFL(Method):
    """Algorithms 1 and 2: clients train a private net and the knowledge net on each other, and send the latter.

    The family is a union of architectures (`fq.union`). Its first net is the knowledge net k, the others are private
    nets p_l. A client l has the private net with the most multiply-adds such that its limits hold. In a round it
    receives k, and trains both nets on every batch B (equations 2 to 5):

        L_p = CE(p; B) + KL(k ‖ p; B)
        L_k = CE(k; B) + KL(p ‖ k; B)

    It keeps p and sends k. With the clients S of the round, n_l samples of client l and N_S of all (equation 6):

        k = Σ_{l in S} n_l k_l / N_S

    With `distil` the server then trains k on batches of public samples (equation 7), at temperature 1:

        k ← k − η ∂ KL(σ(1/|S| Σ_{l in S} k_l(x)) ‖ σ(k(x))) / ∂k

    The settings of section 4.2 are (a) the defaults, with nets that are drawn from the seed; (b) `distil=True`; and
    (c) `transfer=True` with a union of modules that bring the weights of a supernet. In (a) and (b) a device draws its
    private net itself. In (c) it downloads it once, which is charged.

    A device trains both nets, so that its limits are limits of the pair. The paper's limits are those of the private
    net alone: `limit="private"`. The summary then says what pairs cost, and how many devices exceed their limits.

    With `mutual_weight=0` the nets do not learn from each other: the private nets are trained alone, and the knowledge
    net is FedAvg's. It is the baseline with the same nets, clients and batches.

    Accuracy is that of the server's knowledge net. Metrics of clients have the multiply-adds of the private net as
    keys, and are labelled with the limit: `private_accuracy` and `client_knowledge_accuracy` are means over clients
    on the whole test set, `local_private_accuracy` on the client's own test samples.

    The paper states neither optimizer nor epochs. The preset `released` has the losses of the released code: squared
    differences of logits in turn, whose gradient goes into both nets, and at the server the maximum of logits and
    `Softened`.
    That code starts from a knowledge net with the supernet's weights where all weights are said to be reset. Whoever
    makes the union decides that: `knowledge_pretrained` asks for it. Its learning rates fall by a factor of 0.9 after
    every local epoch, which the preset does not have.
    """

    weighting: Weighting = "data"  # What a client counts by in the mean of knowledge nets
    # When nets move. together: both losses are computed before either net moves. in_turn: the private net moves first,
    # and the knowledge net learns from the net that has moved (algorithm 1, lines 7 and 8)
    order: Order = "together"
    distance: Distance = "divergence"  # How far nets are from each other: KL, or the mean squared difference of logits
    mutual_weight: float = (
        1.0  # Weight of KL in equations 4 and 5. 0: each net learns from the labels alone
    )
    detach: bool = (
        True  # Each net takes the other one's output as a constant. False: gradients go into it too
    )
    distil: bool = (
        False  # The server learns from the clients' nets on public samples. False: it needs none
    )
    server_training: ServerTraining = (
        ServerTraining()
    )  # How the server trains on public samples, with `distil`
    ensemble: Combined = (
        "mean"  # How the clients' logits become the teacher's: their mean, or the maximum
    )
    softened: bool = False  # The server has the released code's loss instead of equation 7
    transfer: bool = (
        False  # Nets bring weights of a supernet, so that a device downloads its private net once
    )
    knowledge_pretrained: bool = (
        False  # The knowledge net brings such weights although private nets do not
    )
    limit: Limit = "pair"  # What a device's limits are limits of: of both nets that it trains, or the private one alone
    keep_knowledge: bool = (
        True  # Clients keep the knowledge net that they trained too, so that it can be tested
    )

    paper = "Yu et al. 2022"
    # Nets of the space `tiny`, which have 53,000 to 277,000 multiply-adds; a device trains two of them.
    demo_federation: ClassVar[Mapping[str, Any]] = {
        "model": {"name": "searched"},
        "fleet": {
            "sample": 0.5,
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
            "local": Local(optimiser=SGD(lr=0.05, momentum=0.0), batch_size=64, epochs=25),
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, order=Order, distance=Distance, ensemble=Combined, limit=Limit)
        within(self, mutual_weight="[0, inf)")
        if self.local.norm.personal:
            problem = (
                f"{self.local.norm.name!r} was asked for, under which norms stay on clients. The knowledge net travels "
                "with all of its weights: 'batch', 'tracked' or 'post' would work."
            )
            refuse(self, {"local.norm": problem})
        object.__setattr__(self, "ignores_budgets", self.limit == "private")

    @property
    def note(self) -> str:
        told = "accuracy is that of the knowledge net; private nets stay on clients"
        return (
            f"{told}; limits are those of the private net alone"
            if self.limit == "private"
            else told
        )

    @property
    def needs_supernet(self) -> bool:
        return self.transfer or self.knowledge_pretrained

    @property
    def starts_pretrained(self) -> bool:
        return self.transfer

    def shortened(self) -> Self:
        """Return the method with little training. The server has SGD, because Adam amplifies rounding errors."""
        few = replace(self.server_training, optimiser=SGD(lr=0.05), batch_size=4, check_every=2)
        return replace(super().shortened(), server_training=replace(few, steps=min(4, few.steps)))

    def adapt(self, family: Family) -> Family:
        """Return the family as it is. It has to be a union."""
        if not family.layout.nets or len(family.variants) < 2:
            raise ConfigError(
                f"RaFL was asked for with {family.title}, which is one architecture; it needs a knowledge net and at "
                "least one private net. --model searched finds nets for the fleet's limits, --model A B names them, "
                'and in Python fq.union({"knowledge": fq.trace(…), "private": fq.trace(…)}) would work.'
            )
        return family

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if self.distance == "divergence":
            needs_divergences(task)
        if self.softened and not task.has_classes:
            raise ConfigError(
                f"RaFL was asked for with softened = True, a loss of probabilities of classes; {type(task).__name__} "
                "has no classes. softened = False would work."
            )

    @property
    def needs_public(self) -> bool:
        return self.distil and self.server_training.steps > 0

    def init(self, world: World) -> Server:
        """Return the state before the first round: the knowledge net alone."""
        server = super().init(world)
        if not self.transfer:
            _warn_of_brought(world)
        own = set(world.family.member(knowledge_net(world.family)).names)
        return replace(
            server, weights={name: value for name, value in server.weights.items() if name in own}
        )

    # --- limits ------------------------------------------------------------------------------------------------------

    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        """Return the pair of the knowledge net and the largest private net that the limits allow."""
        return world.family.at(joined(WHOLE, self.private_for(budget, world))).whole

    def private_for(self, budget: Budget, world: World) -> str:
        """Return the name of the private net with the most multiply-adds such that the limits hold.

        Raises:
            BudgetError: The limits are a share below 1, or allow none of the nets.
        """
        if budget.share is not None and budget.share < 1:
            raise BudgetError(
                f"a share of {budget.share:g} was asked for; RaFL gives a device one of several whole nets, and cuts "
                "none of them. Limits of macs, params or memory would work, such as Budget(macs=28e6), or a share of 1."
            )
        step = self._step_within(budget, world)
        for name in private_nets(world.family):
            if not world.family.excess([self._limited(name, world)], budget, step):
                return name
        raise BudgetError(self._too_tight(budget, step, world))

    def _limited(self, private: str, world: World) -> Member:
        """Return what a device's limits are limits of, if it has this private net."""
        variant = private if self.limit == "private" else joined(WHOLE, private)
        return world.family.member(world.family.at(variant).whole)

    def _too_tight(self, budget: Budget, step: TrainingStep | None, world: World) -> str:
        name = private_nets(world.family)[-1]
        member = self._limited(name, world)
        kind = "private net" if self.limit == "private" else "pair of nets"
        memory = f" and trains in {member.training_memory(step):,} bytes" if step else ""
        least = f"the smallest {kind} ({name}) has {member.macs:,} multiply-adds and {member.count:,} parameters{memory}"
        other = (
            ""
            if self.limit == "private"
            else ", or limit = 'private', by which limits are those of one net"
        )
        return f"no {kind} is within the budget {budget}: {least}. Larger limits or smaller nets would work{other}."

    def training_step(self, world: World) -> TrainingStep:
        """Describe the local step of a pair."""
        pair = world.family.at(joined(WHOLE, private_nets(world.family)[0])).whole
        job = Job(Client(0, Budget(share=1.0)), prefix(pair), 0)
        return self.learner(job, world).training_step(world.family.member(pair), world.precision)

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return 1, because no net is cut."""
        return 1.0

    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return 1, because no net is cut."""
        return 1.0

    def key(self, budget: Budget, world: World) -> str:
        """Return 1 for the knowledge net, and for a limit the multiply-adds of the private net that it allows."""
        if budget == Budget(share=1.0):
            return "1.0"
        return str(float(_macs(world.family, self.private_for(budget, world))))

    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        """Return the utilisation of limits, what pairs cost, and how many devices exceed their limits.

        The utilisation is the mean of the private nets' multiply-adds over the mean limit. Beside it is that of one
        common net, the largest that all devices can have. Devices without a limit of multiply-adds are left out.
        """
        family, limited = (
            world.family,
            {budget: count for budget, count in counts.items() if budget.macs},
        )
        step = self.training_step(world) if any(budget.memory for budget in counts) else None
        pairs = {budget: family.member(self.fit(budget, world)) for budget in counts}
        total = sum(counts.values())
        found: dict[str, Any] = {
            "pair_macs": sum(pairs[budget].macs * count for budget, count in counts.items())
            / total,
            "over_limit": sum(
                count
                for budget, count in counts.items()
                if family.excess([pairs[budget]], budget, step)
            ),
        }
        if not limited:
            return found
        limits = sum((budget.macs or 0.0) * count for budget, count in limited.items())
        used = sum(
            _macs(family, self.private_for(budget, world)) * count
            for budget, count in limited.items()
        )
        found["utilisation"] = used / limits
        common = next(
            (name for name in private_nets(family) if self._fits_all(name, limited, step, world)),
            None,
        )
        if common is not None:
            found["common_utilisation"] = _macs(family, common) * sum(limited.values()) / limits
        return found

    def _fits_all(
        self, private: str, budgets: Mapping[Budget, int], step: TrainingStep | None, world: World
    ) -> bool:
        member = self._limited(private, world)
        return not any(world.family.excess([member], budget, step) for budget in budgets)

    # --- a round -----------------------------------------------------------------------------------------------------

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return the pair, which is one sub-model."""
        return [prefix(self.fit(client.budget, world))]

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
        """Return the updates of a batch: one of both nets (equations 4 and 5), or one after the other."""
        pair = (private, knowledge)
        both = Mutual(
            loss, pair, distance=self.distance, detach=self.detach, weight=self.mutual_weight
        )
        if self.order == "together":
            return (Phase(both),)
        first = replace(both, learns=(private,), detach=True)
        second = replace(both, learns=(knowledge,))
        return Phase(first, WithinVariant(private)), Phase(second, WithinVariant(knowledge))

    def fold(self, server: Server, world: World) -> Fold:
        """Average the knowledge nets (equation 6), and let them predict the public samples if the server learns."""
        mean = super().fold(server, world)
        if not self.needs_public:
            return mean
        statistics: Literal["stored", "batch"] = "stored" if self.local.norm.tracks else "batch"
        return Teachers(mean, world, server, statistics, combined=self.ensemble, variant=WHOLE)

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Train the knowledge net on public samples (equation 7)."""
        if OUTPUTS not in outputs:  # Nobody has answered, or the server does not learn.
            return server
        loss = Softened() if self.softened else Imitation()
        students = (prefix(knowledge_net(world.family)),)
        return train(
            server, teaching(self, students, outputs[OUTPUTS], loss, self.server_training, world)
        )

    # --- nets that clients keep --------------------------------------------------------------------------------------

    def resumed(self, job: Job, memory: Memory | None, world: World) -> None:
        """Warn of a client that begins with a new private net although it has one of another architecture."""
        if memory is None:
            return
        stored, planned = _private(memory.submodel), _private(job.submodel)
        own = world.family.member(world.family.at(planned).whole).trainable
        if stored != planned and not any(name in memory.weights for name in own):
            _log.warning(
                "client %d (budget %s) has the private net %r in its state, and %r is planned for it in round %d. "
                "It keeps the old net, and begins with a new one.",
                job.client.id,
                job.client.budget,
                stored,
                planned,
                job.round + 1,
            )

    def kept_nets(self, memory: Memory, world: World) -> Mapping[str, Submodel]:
        """Return the private net of a client, and the knowledge net that it trained last if it keeps it."""
        nets = {"private": private_net(world.family, _private(memory.submodel))}
        knowledge = prefix(knowledge_net(world.family))
        if all(name in memory.weights for name in world.family.member(knowledge).trainable):
            nets["client_knowledge"] = knowledge
        return nets

    def own(self, server: Server, client: Client, world: World) -> Mix:
        """Return the private net of a client: the one in its state, or that of its limits before it trains."""
        memory = server.memory.get((client.id, ""))
        name = _private(memory.submodel) if memory else self.private_for(client.budget, world)
        return (private_net(world.family, name),)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """Return the knowledge net, which is all that the server has."""
        return (prefix(knowledge_net(world.family)),)

    def trial(self, family: Family) -> tuple[Family, tuple[Budget, ...]]:
        """Return a union of three nets that are cut from one, and limits that allow the larger and the smaller."""
        nets = {
            name: _cut_out(family, share)
            for name, share in (("knowledge", 0.25), ("small", 0.25), ("big", 0.5))
        }
        found = union(nets)
        pairs = [found.member(found.at(joined(WHOLE, name)).whole) for name in ("big", "small")]
        return found, (Budget(share=1.0), *(Budget(macs=float(pair.macs)) for pair in pairs))


def knowledge_net(family: Family) -> Arch:
    """Return the net of a union that travels, which is its first."""
    return family.at(WHOLE).whole


def private_net(family: Family, name: str) -> Submodel:
    """Return one of the nets of a union that stay on clients."""
    return prefix(family.at(name).whole)


@lru_cache(maxsize=16)
def private_nets(family: Family) -> tuple[str, ...]:
    """Return the names of the nets of a union that stay on clients, those with the most multiply-adds first."""
    names = [variant for variant in family.variants if variant != WHOLE]
    return tuple(sorted(names, key=lambda name: -_macs(family, name)))


def needs_divergences(task: Task) -> None:
    """Refuse a task that does not say how far outputs are from a teacher's."""
    if type(task).divergences is Task.divergences:
        nothing = torch.zeros(1, 1)
        task.divergences(nothing, nothing, nothing)  # It says what is missing.


def _warn_of_brought(world: World) -> None:
    """Warn if a private net has the same weights for every seed: a device that has to draw them could not."""
    family = world.family
    one, other = (family.init(seed) for seed in (world.seed, world.seed + 1))
    for name in private_nets(family):
        drawn = [
            key for key in family.member(family.at(name).whole).trainable if one[key].dim() > 1
        ]
        if drawn and all(torch.equal(one[key], other[key]) for key in drawn):
            _log.warning(
                "the private net %r has the same weights for every seed, so that devices cannot draw them. "
                "transfer = True charges a device for downloading them; a union of functions that make the nets draws "
                "new ones.",
                name,
            )
            return


def _macs(family: Family, name: str) -> int:
    return family.member(family.at(name).whole).macs


def _private(submodel: Submodel) -> str:
    """Return the name of the private net of a pair, or of a private net by itself."""
    return members_of(submodel.arch.variant)[-1]


def _cut_out(family: Family, share: float) -> Family:
    """Return the family of a net that has a share of another family's channels, drawn from the seed as that is."""
    arch = family.fit(Budget(share=share))
    return trace(
        lambda: family.module(arch, family.init(torch.initial_seed())), family.example_inputs
    )
