"""ProgFed: models that grow while they train (Wang et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import prefix
from fedquilt.family.family import Family, Rounding
from fedquilt.family.variants import joined, members_of
from fedquilt.methods.alignment import Alignment, align
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.progfed_stages import (
    Moment,
    OfVariants,
    num_stages,
    stage_lengths,
    stage_name,
)
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.server_optimizers import Plain, ServerAdam, ServerMomentum, ServerYogi
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Cosine
from fedquilt.round.training.server import TrainServer
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

# Parts of the model that a stage trains (Table 5).
Strategy = Literal["progressive", "end_to_end", "layerwise", "partial", "mixed", "random"]
_THEOREM_1 = ("alignment", "norm_discrepancy")  # Names of alpha_t and q_t in records
_PROGRESSIVE = "theorem 1 is on the strategy 'progressive', with which alignment would work."


@dataclass(frozen=True)
class ProgFed(Method):
    """A model that grows: its first blocks train with a temporary head, then blocks are added.

    This is algorithm 1. Stage s trains E_1..E_s and the head G_s (equation 2) for T_s rounds. The
    last stage is the model itself (equation 1). All blocks and heads are in the server's state from
    the start, so that growing copies nothing. In a stage, only the weights of its variant are sent,
    trained and counted.

    `over` is the method that trains each stage. Its plan, local training, merge and state are used
    without change. With one stage, ProgFed is that method.
    """

    local: LocalTraining = field(init=False, repr=False, compare=False, metadata={"setting": False})
    weighting: Weighting = field(init=False, repr=False, compare=False, metadata={"setting": False})
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = field(
        init=False, repr=False, compare=False, metadata={"setting": False}
    )
    # Method that trains every stage. The paper's line 20 is FedAvg with uniform weights.
    over: Method = FedAvg(weighting="uniform")
    # Modules whose outputs end the stages, a number of stages, or the name of a growth that the
    # model declares. None: the first growth that the model declares, or four stages if it declares
    # none.
    stages: int | str | tuple[str, ...] | None = None
    # Rounds T_s of every stage but the last, or a list with the rounds of each stage. 0: T/2S.
    stage_rounds: int | tuple[int, ...] = 0
    # Rounds after growing in which only the new block and its head are trained (line 13). 0: none.
    # Only the strategy progressive has a warm-up.
    warmup: int = 0
    # Add warm-up rounds to T_s, with the initial learning rate, as the released code does.
    extra_warmup: bool = False
    restart: bool = False  # Restart the learning-rate schedule when the model grows.
    # Parts that a stage trains (Table 5). end_to_end trains the whole model in all rounds.
    strategy: Strategy = "progressive"
    rounds: int = 0  # Number of rounds T that sets T_s. 0: the rounds of the run.
    # Training samples on which alpha_t and q_t are measured at evaluations. 0: not measured.
    alignment: int = 0

    paper = "Wang et al. 2022"
    forwards: ClassVar[Mapping[str, str]] = {
        "local": "over",
        "weighting": "over",
        "server_optimizer": "over",
    }
    presets: ClassVar[Presets] = {
        # Settings of the released code with the rounds of CIFAR-100: one cosine schedule, and every
        # client keeps its momentum.
        "released": {
            "over": FedAvg(
                local=LocalTraining(
                    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
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
            problem = (
                "ProgFed was asked for over ProgFed; a model grows once. Any other method would "
                "work."
            )
            refuse(self, {"over": problem})
        shared = (
            "local",
            "weighting",
            "server_optimizer",
            "wire_factor",
            "ignores_budgets",
            "skips_clients",
            "keeps_nets",
        )
        for name in shared:  # Fields and class attributes that are copied from the inner method.
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
                    "alignment": (
                        f"{self.alignment} was asked for with strategy = {self.strategy!r}; "
                        f"{_PROGRESSIVE}"
                    )
                },
            )
        if isinstance(self.stages, int) and self.stages < 1:
            refuse(self, {"stages": f"{self.stages} was asked for; at least one stage is needed."})

    # --- the growth ------------------------------------------------------------------------------

    @override
    def adapt(self, family: Family) -> Family:
        """Return the family, as the inner method adapts it, with its stages as variants.

        Raises:
            ConfigError: Clients of the inner method train pairs of nets.
            TraceError: The model does not have these stages.
        """
        if self.over.trains_pairs:
            name = type(self.over).__name__
            raise ConfigError(
                f"ProgFed was asked for over {name}, whose clients train pairs of nets; a pair has "
                "no common stages, so that it cannot grow. Any other method would work over one "
                f"model, and {name} works by itself."
            )
        return self.over.adapt(family).staged(self.stages)

    def lengths(self, num_stages: int) -> tuple[int, ...]:
        """Return the rounds of every stage with its warm-up, T_1..T_S. Their sum is T.

        Args:
            num_stages: Number of stages, the paper's S.

        Raises:
            ConfigError: No round is left for the whole model, or a warm-up is as long as its stage.
        """
        return stage_lengths(
            num_stages, self.rounds, self.stage_rounds, self.warm_rounds, self.extra_warmup
        )

    def moment(self, round: int, num_stages: int) -> Moment:
        """Return the position of a round in the growth of the model.

        Args:
            round: Round, from 0.
            num_stages: Number of stages, the paper's S.
        """
        start = 0
        lengths = self.lengths(num_stages)
        stage = 1
        while stage < num_stages and round >= start + lengths[stage - 1]:
            start += lengths[stage - 1]
            stage += 1
        warm = stage > 1 and round - start < self.warm_rounds
        scheduled = round - start if self.restart else round
        if self.extra_warmup:
            # Number of warm-ups whose rounds the schedule does not count.
            warmups = min(1, stage - 1) if self.restart else stage - 1
            scheduled = 0 if warm else scheduled - warmups * self.warm_rounds
        return Moment(stage, warm, scheduled)

    @property
    def warm_rounds(self) -> int:
        """Return the warm-up rounds of every stage but the first. Only `progressive` has some."""
        return self.warmup if self.strategy == "progressive" else 0

    def variant(self, round: int, world: World) -> tuple[str, tuple[str, ...]]:
        """Return the variant that a round runs, and the parts of it that are trained.

        An empty tuple of parts means that all are trained.

        Args:
            round: Round, from 0.
            world: World of the run, whose family has the stages and whose seed draws them.
        """
        last = num_stages(world.family)
        moment = self.moment(round, last)
        stage = moment.stage
        blocks = tuple(f"stage{block}" for block in range(1, stage + 1))
        match self.strategy:
            case "end_to_end":
                return WHOLE, ()
            # "only updates the latest layer E_i while still passing the input through the whole"
            case "layerwise":
                return WHOLE, (blocks[-1], f"head{last}")
            # "similar to our method but acquires supervision signals from the last head"
            case "partial":
                return WHOLE, () if stage == last else (*blocks, f"head{last}")
            case "mixed":  # "combines Partial and Ours"
                parts = () if stage == last else (*blocks, f"head{stage}", f"head{last}")
                return joined(WHOLE, stage_name(stage, last)), parts
            # Stages are drawn in the rounds in which the other strategies grow. After them the
            # whole model is trained. By the paper's count that costs 0.89 of end-to-end training
            # (Table 5: 0.88). Drawing in all rounds would cost 0.7.
            case "random" if stage < last:
                key = noise.key(noise.Stream.PROGFED_STAGE, world.seed, round)
                (position,) = noise.choose(key, 1, last)
                return stage_name(1 + position, last), ()
        return stage_name(stage, last), (blocks[-1], f"head{stage}") if moment.warm else ()

    def _at(self, round: int, world: World) -> World:
        """Return the world that the inner method gets in a round. Its family is the stage's."""
        return replace(world, family=world.family.at(*self.variant(round, world)))

    def _tested(self, server: Server, world: World) -> World:
        """Return the world of the model that is tested and deployed.

        Its family is that of the stage trained last. For other strategies it is the whole model.
        """
        variant, _ = self.variant(max(0, server.round - 1), world)
        shown = variant if self.strategy == "progressive" else WHOLE
        return replace(world, family=world.family.at(shown))

    @override
    def turns(self, world: World) -> tuple[int, ...]:
        """Return the rounds in which the set of trained weights changes.

        A stage begins in these rounds, or its warm-up has just ended. For the strategy `random`
        they are the first round of each stage.
        """
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
        """Return the first round of each variant that occurs in the first `rounds` rounds."""
        first: dict[str, int] = {}
        for round in range(rounds):
            first.setdefault(self.variant(round, world)[0], round)
        return tuple(first.values())

    @override
    def status(self, round: int, world: World) -> str:
        if self.strategy == "end_to_end":
            return ""
        last = num_stages(world.family)
        moment = self.moment(round, last)
        stage = moment.stage
        if self.strategy == "random":
            drawn, _ = self.variant(round, world)
            stage = last if drawn == WHOLE else int(drawn.removeprefix("stage"))
        return f"stage {stage} of {last}{', warm-up' if moment.warm else ''}"

    @override
    def settled(self, rounds: int) -> Self:
        return replace(self, rounds=self.rounds or rounds, over=self.over.settled(rounds))

    # --- steps of a round, which the inner method does -------------------------------------------

    @property
    @override
    def personal(self) -> bool:
        return self.over.personal

    @property
    @override
    def note(self) -> str:
        return self.over.note

    @property
    @override
    def inner_method(self) -> Method:
        return self.over

    @property
    @override
    def figure_names(self) -> tuple[str, ...]:
        own = _THEOREM_1 if self.alignment else ()
        return (*self.over.figure_names, *own)

    @override
    def with_local(self, **changes: Any) -> Self:
        return replace(self, over=self.over.with_local(**changes))

    @override
    def initial(self, world: World) -> dict[str, Tensor]:
        return self.over.initial(world)

    @override
    def init(self, world: World) -> Server:
        if (
            num_stages(world.family) == 1
            and self.strategy != "end_to_end"
            and self.stages not in (None, 1)
        ):
            raise ConfigError(
                f"ProgFed was asked for with stages = {self.stages!r}; the model was traced "
                "without stages. fq.trace(fq.with_stages(module, stages=…), example) gives it some."
            )
        server = self.over.init(world)
        if self.alignment:
            _check_whole(server, world)
        return server

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return self.over.plan(server, client, self._at(server.round, world))

    @override
    def fit(self, budget: Budget, world: World, rounding: Rounding = "floor") -> Arch:
        return self.over.fit(budget, world, rounding)

    @override
    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        return self.over.trainable_share(budget, world, rounding)

    @override
    def runnable_share(self, budget: Budget, world: World) -> float:
        return self.over.runnable_share(budget, world)

    @override
    def training_step(self, world: World) -> TrainingStep:
        return self.over.training_step(world)

    @override
    def client_submodels(self, server: Server, client: Client, world: World) -> Submodels:
        nets = self.over.client_submodels(server, client, self._tested(server, world))
        return tuple(replace(net, arch=replace(net.arch, trains=())) for net in nets)

    @override
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
                f"ProgFed was asked for with strategy = 'mixed' over {type(self.over).__name__}, "
                "whose clients run nested nets; another strategy or a method without nested nets "
                "would work."
            )
        phases = tuple(
            replace(phase, objective=OfVariants(phase.objective, variants))
            for phase in inner.phases
        )
        return replace(learner, phases=phases)

    @override
    def divisor(self, job: Job, world: World) -> float:
        return self.over.divisor(job, world)

    @override
    def lr(self, round: int) -> float:
        return self.over.lr(round)

    @override
    def fold(self, server: Server, world: World) -> Fold:
        return self.over.fold(server, world)

    @override
    def label(self, budget: Budget, world: World) -> str:
        return self.over.label(budget, world)

    @override
    def key(self, budget: Budget, world: World) -> str:
        return self.over.key(budget, world)

    @override
    def resumed(self, job: Job, memory: ClientState | None, world: World) -> None:
        self.over.resumed(job, memory, world)

    @override
    def kept_nets(self, memory: ClientState, world: World) -> Mapping[str, Submodel]:
        return self.over.kept_nets(memory, world)

    @override
    def account(self, counts: Mapping[Budget, int], world: World) -> dict[str, Any]:
        return self.over.account(counts, world)

    @override
    def check_task(self, task: Task) -> None:
        self.over.check_task(task)

    @override
    def shortened(self) -> Self:
        return replace(self, over=self.over.shortened())

    @property
    @override
    def needs_public(self) -> bool:
        return self.over.needs_public

    @property
    @override
    def clients_need_public(self) -> bool:
        return self.over.clients_need_public

    @override
    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        """Let the inner method train the server's net of the stage that this round trained.

        Args:
            server: State after the merge.
            outputs: Outputs that the fold collected, by name.
            world: Family, task and random seed.
            train: Function that trains nets of the server.
        """
        return self.over.learn(server, outputs, self._tested(server, world), train)

    @override
    def candidates(self, server: Server, world: World) -> Submodels:
        return self.over.candidates(server, self._tested(server, world))

    @override
    def ranked(self, server: Server, scores: Sequence[float], world: World) -> Server:
        return self.over.ranked(server, scores, self._tested(server, world))

    @override
    def figures(self, server: Server, world: World, gradients: Gradients) -> dict[str, float]:
        """Return the inner method's figures, and two of theorem 1 if `alignment` is above 0.

        They are alpha_t (`alignment`) and q_t (`norm_discrepancy`) of the paper's equation 11. Both
        compare the gradient of the stage that was trained last with that of the whole model.
        `measure` computes them on as many training samples as the setting `alignment` says.

        Args:
            server: State x_t, after t rounds.
            world: Family, task and random seed.
            gradients: Function that returns gradients of nets on training samples.
        """
        figures = self.over.figures(server, world, gradients)
        if not self.alignment:
            return figures
        measured = self.measure(server, world, gradients, self.alignment)
        return figures | dict(zip(_THEOREM_1, (measured.alpha, measured.q), strict=True))

    def measure(
        self, server: Server, world: World, gradients: Gradients, samples: int
    ) -> Alignment:
        """Return alpha_t and q_t (equation 11) of the stage that was trained last.

        f^s is the mean loss of the stage's model and f that of the whole model, both at the whole
        width.

        Args:
            server: State x_t. Blocks that have not grown have their initial weights in it.
            world: Family, task and random seed.
            gradients: Function that returns gradients of nets, as `figures` gets it.
            samples: Number of training samples of all clients on which both losses are computed.

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
        variants = (stage_name(stage, last), WHOLE)
        nets = [prefix(world.family.at(variant).whole) for variant in dict.fromkeys(variants)]
        net_gradients = gradients(nets, samples)
        return align(stage, net_gradients[0], net_gradients[-1])

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        return self.over.deploy(server, budget, self._tested(server, world))


def _check_whole(server: Server, world: World) -> None:
    """Refuse a server state that has several nets instead of one whole model.

    Raises:
        ConfigError: A weight of the whole model is not in the state.
    """
    whole_net = world.family.member(world.family.at(WHOLE).whole)
    missing = [name for name in whole_net.trainable if name not in server.weights]
    if missing:
        raise ConfigError(
            "ProgFed was asked for alignment; the state has no single whole model, because it has "
            f"no {missing[0]!r}. A method with one model at the server would work, such as FedAvg "
            "or HeteroFL."
        )
