"""ProgFed: models that grow while they train (Wang et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.family import Family, Rounding
from fedquilt.family.member import Member
from fedquilt.family.variants import joined, members_of
from fedquilt.methods.alignment import Alignment, align
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.method import Method, Presets
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Plain, ServerAdam, ServerMomentum, ServerYogi, Weighting
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import Local
from fedquilt.round.training.objectives import Passes, View, Wrapping
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Cosine
from fedquilt.round.training.server import TrainServer
from fedquilt.tasks import Task
from fedquilt.terms import WHOLE, Arch, Budget, Client, Extras, Job, Memory, Mix, Server, Submodel

Strategy = Literal["progressive", "end_to_end", "layerwise", "partial", "mixed", "random"]
_SITE = 48  # Random stream of the stages that `random` draws
_PROGRESSIVE = "theorem 1 is on the strategy 'progressive', with which alignment would work."


class Moment(NamedTuple):
    """Where a round is in the growth of the model."""

    stage: int  # The paper's s, from 1
    warm: bool  # True if the round is one of warm-up: only the new block and head move
    round: int  # Round that the learning-rate schedule is asked for


@dataclass(frozen=True)
class ProgFed(Method):
    """Train the first blocks of a model with a temporary head, then add block after block (algorithm 1).

    Stage s trains E_1..E_s and the head G_s (equation 2) for T_s rounds, and the last stage is the model itself
    (equation 1). All blocks and heads are in the server's state from the start, so that growing copies nothing. What is
    sent, trained and counted in a stage are the weights of its variant alone.

    `over` is the method that trains each stage; its plan, local training, merge and state are used as they are. With
    one stage ProgFed is that method.
    """

    local: Local = field(init=False, repr=False, compare=False, metadata={"setting": False})
    weighting: Weighting = field(init=False, repr=False, compare=False, metadata={"setting": False})
    server: Plain | ServerMomentum | ServerAdam | ServerYogi = field(
        init=False, repr=False, compare=False, metadata={"setting": False}
    )
    over: Method = FedAvg(
        weighting="uniform"
    )  # Method that trains every stage; line 20 is FedAvg with uniform weights
    # Modules whose outputs end the stages, a number of stages to be found, or the name of a growth that the model
    # declares. None: the growth that the model declares first; for a model that declares none, four stages are found.
    stages: int | str | tuple[str, ...] | None = None
    stage_rounds: int | tuple[int, ...] = (
        0  # T_s: rounds of every stage but the last, or of each; 0: T/2S
    )
    # Rounds after growing in which only the new block and its head move (line 13); 0: none. Strategies other than
    # progressive have no warm-up.
    warmup: int = 0
    extra_warmup: bool = (
        False  # Warm-up rounds are added to T_s and use the initial learning rate, as released
    )
    restart: bool = False  # Restart the learning-rate schedule at growth
    strategy: Strategy = (
        "progressive"  # What a stage trains (Table 5); end_to_end trains the whole model throughout
    )
    rounds: int = 0  # T, from which T_s follows; 0: the rounds of the run
    alignment: int = 0  # Training samples of all clients that alpha_t and q_t are measured on at evaluations; 0: not

    paper = "Wang et al. 2022"
    forwards: ClassVar[Mapping[str, str]] = {"local": "over", "weighting": "over", "server": "over"}
    presets: ClassVar[Presets] = {
        # The code released with the paper, with the rounds of CIFAR-100: one cosine, momentum kept per client.
        "released": {
            "over": FedAvg(
                local=Local(
                    optimiser=SGD(lr=0.1, momentum=0.9, decay=1e-4),
                    schedule=Cosine(3000),
                    keep_optimizer=True,
                ),
                weighting="uniform",
            ),
            "extra_warmup": True,
            "warmup": 25,
        },
    }

    def __post_init__(self) -> None:
        inner = self.over
        if not isinstance(inner, Method):
            problem = (
                f"{inner!r} was asked for; a method is needed, such as ProgFed(over=HeteroFL())."
            )
            refuse(self, {"over": problem})
        if isinstance(inner, ProgFed):
            problem = "ProgFed was asked for over ProgFed; a model grows once. Any other method would work."
            refuse(self, {"over": problem})
        shared = (
            "local",
            "weighting",
            "server",
            "copies",
            "ignores_budgets",
            "skips_clients",
            "keeps_nets",
        )
        for name in shared:  # Fields and attributes of the class that are the inner method's
            object.__setattr__(self, name, getattr(inner, name))
        super().__post_init__()
        if isinstance(self.stages, list):
            object.__setattr__(self, "stages", tuple(self.stages))
        if isinstance(self.stage_rounds, list):
            object.__setattr__(self, "stage_rounds", tuple(self.stage_rounds))
        within(
            self,
            stage_rounds="[0, inf)",
            warmup="[0, inf)",
            rounds="[0, inf)",
            alignment="[0, inf)",
        )
        one_of(self, strategy=Strategy)
        if self.alignment and self.strategy != "progressive":
            refuse(
                self,
                {
                    "alignment": f"{self.alignment} was asked for with strategy = {self.strategy!r}; {_PROGRESSIVE}"
                },
            )
        if isinstance(self.stages, int) and self.stages < 1:
            refuse(self, {"stages": f"{self.stages} was asked for; at least one stage is needed."})

    # --- the growth ------------------------------------------------------------------------------------------------

    def adapt(self, family: Family) -> Family:
        """Return the family with its stages as variants."""
        return self.over.adapt(family).staged(self.stages)

    def lengths(self, num_stages: int) -> tuple[int, ...]:
        """Return the rounds of every stage, warm-up included: T_1..T_S, which add up to T.

        Args:
            num_stages: The paper's S.

        Raises:
            ConfigError: No round is left for the whole model, or a warm-up is as long as its stage.
        """
        return _lengths(self, num_stages)

    def moment(self, round: int, num_stages: int) -> Moment:
        """Return the stage of a round, from 0, and where in it the round is."""
        start = 0
        lengths = self.lengths(num_stages)
        stage = 1
        while stage < num_stages and round >= start + lengths[stage - 1]:
            start += lengths[stage - 1]
            stage += 1
        warm = stage > 1 and round - start < self.warm_rounds
        scheduled = round - start if self.restart else round
        if self.extra_warmup:
            warmups = (
                min(1, stage - 1) if self.restart else stage - 1
            )  # that the schedule does not count
            scheduled = 0 if warm else scheduled - warmups * self.warm_rounds
        return Moment(stage, warm, scheduled)

    @property
    def warm_rounds(self) -> int:
        """Return the rounds of warm-up of every stage but the first."""
        return self.warmup if self.strategy == "progressive" else 0

    def variant(self, round: int, world: World) -> tuple[str, tuple[str, ...]]:
        """Return the variant that a round runs and the parts of it that are trained; (): all."""
        last = num_stages(world.family)
        moment = self.moment(round, last)
        stage = moment.stage
        blocks = tuple(f"stage{place}" for place in range(1, stage + 1))
        match self.strategy:
            case "end_to_end":
                return WHOLE, ()
            case "layerwise":  # "only updates the latest layer E_i while still passing the input through the whole"
                return WHOLE, (blocks[-1], f"head{last}")
            case (
                "partial"
            ):  # "similar to our method but acquires supervision signals from the last head"
                return WHOLE, () if stage == last else (*blocks, f"head{last}")
            case "mixed":  # "combines Partial and Ours"
                both = joined(WHOLE, _name(stage, last))
                return both, () if stage == last else (*blocks, f"head{stage}", f"head{last}")
            # Stages are drawn in the rounds in which others grow, and the whole model is trained after them. By the
            # paper's count that costs 0.89 of end-to-end training (Table 5: 0.88); drawing to the end would cost 0.7.
            case "random" if stage < last:
                drawn = 1 + int(noise.choose(noise.key(_SITE, world.seed, round), 1, last)[0])
                return _name(drawn, last), ()
        return _name(stage, last), (blocks[-1], f"head{stage}") if moment.warm else ()

    def _at(self, round: int, world: World) -> World:
        """Return the world as the inner method sees it in a round: a family of the stage's members."""
        return replace(world, family=world.family.at(*self.variant(round, world)))

    def _tested(self, server: Server, world: World) -> World:
        """Return the world of the model that was trained last, which is tested and handed out."""
        variant, _ = self.variant(max(0, server.round - 1), world)
        shown = variant if self.strategy == "progressive" else WHOLE
        return replace(world, family=world.family.at(shown))

    def turns(self, world: World) -> tuple[int, ...]:
        """Return the rounds in which a stage or the rounds after its warm-up begin; for `random`, the first of each."""
        lengths = self.lengths(num_stages(world.family))
        if self.strategy == "random":
            return self._first_rounds(sum(lengths[:-1]) + 1, world)
        starts = [0]
        begin = 0
        for length in lengths[:-1]:
            begin += length
            starts.append(begin)
            if self.warm_rounds:
                starts.append(begin + self.warm_rounds)
        return tuple(starts)

    def _first_rounds(self, rounds: int, world: World) -> tuple[int, ...]:
        """Return the first of a number of rounds that runs each variant."""
        first: dict[str, int] = {}
        for round in range(rounds):
            first.setdefault(self.variant(round, world)[0], round)
        return tuple(first.values())

    def status(self, round: int, world: World) -> str:
        last = num_stages(world.family)
        moment = self.moment(round, last)
        return f"stage {moment.stage} of {last}{', warm-up' if moment.warm else ''}"

    def settled(self, rounds: int) -> Self:
        return replace(self, rounds=self.rounds or rounds, over=self.over.settled(rounds))

    # --- the verbs of a round, which are the inner method's --------------------------------------------------------

    @property
    def personal(self) -> bool:
        return self.over.personal

    @property
    def note(self) -> str:
        return self.over.note

    def with_local(self, **changes: Any) -> Self:
        return replace(self, over=self.over.with_local(**changes))

    def initial(self, world: World) -> dict[str, Tensor]:
        return self.over.initial(world)

    def init(self, world: World) -> Server:
        if (
            num_stages(world.family) == 1
            and self.strategy != "end_to_end"
            and self.stages not in (None, 1)
        ):
            raise ConfigError(
                f"ProgFed was asked for with stages = {self.stages!r}; the model was traced without stages. "
                "fq.trace(fq.with_stages(module, stages=…), example) gives it some."
            )
        server = self.over.init(world)
        if self.alignment:
            _check_whole(server, world)
        return server

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return self.over.plan(server, client, self._at(server.round, world))

    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        return self.over.fit(budget, world, rounding)

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        return self.over.trainable_share(budget, world, rounding)

    def runnable_share(self, budget: Budget, world: World) -> float:
        return self.over.runnable_share(budget, world)

    def training_step(self, world: World) -> TrainingStep:
        return self.over.training_step(world)

    def own(self, server: Server, client: Client, world: World) -> Mix:
        nets = self.over.own(server, client, self._tested(server, world))
        return tuple(replace(net, arch=replace(net.arch, trains=())) for net in nets)

    def learner(self, job: Job, world: World) -> Learner:
        arch = job.submodel.arch
        inner = self.over.learner(
            job, replace(world, family=world.family.at(arch.variant, arch.trains))
        )
        learner = replace(inner, lr=self.lr(self.moment(job.round, num_stages(world.family)).round))
        variants = members_of(arch.variant)
        if len(variants) == 1:
            return learner
        if inner.drawn or inner.taught:
            raise ConfigError(
                f"ProgFed was asked for with strategy = 'mixed' over {type(self.over).__name__}, whose clients run "
                "nested nets; another strategy or a method without nested nets would work."
            )
        phases = tuple(
            replace(phase, objective=OfVariants(phase.objective, variants))
            for phase in inner.phases
        )
        return replace(learner, phases=phases)

    def divisor(self, job: Job, world: World) -> float:
        return self.over.divisor(job, world)

    def lr(self, round: int) -> float:
        return self.over.lr(round)

    def fold(self, server: Server, world: World) -> Fold:
        return self.over.fold(server, world)

    def label(self, budget: Budget, world: World) -> str:
        return self.over.label(budget, world)

    def key(self, budget: Budget, world: World) -> str:
        return self.over.key(budget, world)

    def resumed(self, job: Job, memory: Memory | None, world: World) -> None:
        self.over.resumed(job, memory, world)

    def kept_nets(self, memory: Memory, world: World) -> Mapping[str, Submodel]:
        return self.over.kept_nets(memory, world)

    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        return self.over.account(counts, world)

    def check_task(self, task: Task) -> None:
        self.over.check_task(task)

    def shortened(self) -> Self:
        return replace(self, over=self.over.shortened())

    @property
    def needs_public(self) -> bool:
        return self.over.needs_public

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Let the server learn as the inner method does, with the stage that was trained in this round."""
        return self.over.learn(server, outputs, self._tested(server, world), train)

    def candidates(self, server: Server, world: World) -> Mix:
        return self.over.candidates(server, self._tested(server, world))

    def arranged(self, server: Server, scores: Sequence[float], world: World) -> Server:
        return self.over.arranged(server, scores, self._tested(server, world))

    def figures(self, server: Server, world: World, gradients: Gradients) -> dict[str, float]:
        """Return the inner method's figures, and those of theorem 1 if they were asked for."""
        found = self.over.figures(server, world, gradients)
        if not self.alignment:
            return found
        measured = self.measure(server, world, gradients, self.alignment)
        return {**found, "alignment": measured.alpha, "norm_discrepancy": measured.q}

    def measure(
        self, server: Server, world: World, gradients: Gradients, samples: int
    ) -> Alignment:
        """Return alpha_t and q_t (equation 11) of the stage that was trained last.

        f^s is the mean loss of the stage's model and f that of the whole model, both at the whole width.

        Args:
            server: State x_t. Blocks that have not grown have their initial weights in it.
            world: Family, task and seed.
            gradients: Function that `figures` is given.
            samples: Training samples of all clients that both losses are means over.

        Raises:
            ConfigError: The strategy is not `progressive`, or the state has no single whole model.
        """
        if self.strategy != "progressive":
            raise ConfigError(
                f"alignment was asked for with strategy = {self.strategy!r}; {_PROGRESSIVE}"
            )
        _check_whole(server, world)
        last = num_stages(world.family)
        stage = self.moment(max(0, server.round - 1), last).stage
        variants = (_name(stage, last), WHOLE)
        nets = [prefix(world.family.at(variant).whole) for variant in dict.fromkeys(variants)]
        found = gradients(nets, samples)
        return align(stage, found[0], found[-1])

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        return self.over.deploy(server, budget, self._tested(server, world))


@dataclass(frozen=True)
class OfVariants(Wrapping):
    """The sum of another objective's losses, one for each of several variants of the client's net."""

    variants: tuple[str, ...] = (WHOLE,)

    def _nets(self, member: Member) -> list[Member]:
        return [member.at(variant) for variant in self.variants]

    def nets(self, member: Member) -> tuple[Member, ...]:
        found = (net for own in self._nets(member) for net in self.objective.nets(own))
        return tuple(dict.fromkeys(found))

    def passes(self, member: Member) -> tuple[Passes, ...]:
        return tuple(one for own in self._nets(member) for one in self.objective.passes(own))

    def __call__(self, view: View) -> Tensor:
        losses: list[Tensor] = []
        for net in self._nets(view.member):
            own = replace(view, member=net, seen={})
            losses.append(self.objective(own))
            view.seen |= {
                name: value for name, value in own.seen.items() if name in view.member.statistics
            }
        return torch.stack(losses).sum()


def num_stages(family: Family) -> int:
    """Return the paper's S: the stages that a family was traced with, the whole model included."""
    return 1 + sum(variant.startswith("stage") for variant in family.variants)


def _check_whole(server: Server, world: World) -> None:
    """Refuse a state that has several nets instead of one whole model."""
    whole = world.family.member(world.family.at(WHOLE).whole)
    missing = [name for name in whole.trainable if name not in server.weights]
    if missing:
        raise ConfigError(
            f"ProgFed was asked for alignment; the state has no single whole model, because it has no {missing[0]!r}. "
            "A method with one model at the server would work, such as FedAvg or HeteroFL."
        )


def _name(stage: int, last: int) -> str:
    """Return the variant of a stage."""
    return WHOLE if stage == last else f"stage{stage}"


@lru_cache(maxsize=256)
def _lengths(method: ProgFed, num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return (method.rounds,)
    if not method.rounds:
        raise ConfigError(
            "ProgFed was prepared without a number of rounds, on which the length of its stages depends. "
            "method.settled(rounds) gives it; fq.run and the command line do that."
        )
    warmup = method.warm_rounds
    added = warmup * (num_stages - 1) if method.extra_warmup else 0
    total = method.rounds - added
    given = method.stage_rounds
    if isinstance(given, tuple) and len(given) not in (num_stages - 1, num_stages):
        raise ConfigError(
            f"ProgFed was asked for with stage_rounds = {list(given)}, rounds of {len(given)} stages; the model has "
            f"{num_stages}. A number for each would work, or for each but the last, which takes the rest."
        )
    each = given or max(1, total // (2 * num_stages))
    growing = each[: num_stages - 1] if isinstance(each, tuple) else (each,) * (num_stages - 1)
    rest = total - sum(growing)
    if isinstance(given, tuple) and len(given) == num_stages and given[-1] != rest:
        raise ConfigError(
            f"ProgFed was asked for with stage_rounds = {list(given)}, which are {sum(given)} rounds; the run has "
            f"{total}. Rounds of all stages but the last would work, which takes the rest."
        )
    lengths = (*growing, rest)
    if min(lengths) < 1:
        raise ConfigError(
            f"ProgFed was asked for with {method.rounds} rounds, of which {sum(growing) + added} are for the first "
            f"{num_stages - 1} of {num_stages} stages{' and warm-up' if added else ''}; at least one is needed for "
            "each stage and for the whole model. More rounds, smaller stage_rounds or fewer stages"
            f"{' or a shorter warmup' if added else ''} would work."
        )
    if method.extra_warmup:
        return (lengths[0], *(length + warmup for length in lengths[1:]))
    shortest = min(lengths[1:])
    if shortest <= warmup:
        raise ConfigError(
            f"ProgFed was asked for with warmup = {warmup}, and a stage has {shortest} rounds; in a warm-up only the "
            f"new block moves, so that it has to end before its stage. Up to {shortest - 1} would work, or "
            "extra_warmup, which adds rounds to the stages."
        )
    return lengths
