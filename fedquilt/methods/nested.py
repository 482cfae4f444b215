"""Common parts of methods that train nested nets, with widths drawn for every batch.

FedResCuE, FedSeq, FedRush, FedSlim and FjORD use them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.family.member import Member
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.distillation import Distilled
from fedquilt.round.training.learner import Learner, Phase, nets_of
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Summed
from fedquilt.round.training.optimizers import SGD
from fedquilt.terms import Client, Job, Server, Submodel

# FedResCuE, Table 17. Norms share their affine weights and do not track statistics (A.3.1).
TABLE_17 = LocalTraining(
    optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4), batch_size=32
)
# Sets P of ratios. CIFAR-10: {0.1, 0.15, …, 1}, the default. Digits: steps of 1/8.
GRIDS: Presets = {
    "fedrescue-cifar10": {"smallest": 0.1, "granularity": 0.05},
    "fedrescue-digits": {"smallest": 0.125, "granularity": 0.125},
}
# The same settings for the methods without ratios that FedResCuE is compared with.
WITHOUT_RATIOS: Presets = {name: {"local": TABLE_17, "weighting": "uniform"} for name in GRIDS}


@dataclass(frozen=True)
class SampledWidths(Learner):
    """A learner that draws ratios for every step and builds its phases from them.

    Ratios depend on the round and the step but not on the client, so that clients can be trained
    as one stack.
    """

    ratios: tuple[float, ...] = ()  # Ratios to draw from: those below the client's share.
    count: int = 0  # Number of ratios to draw. If there are fewer, all are drawn.
    key: int = 0  # Key of the random numbers of the round.

    @property
    @override
    def drawn(self) -> bool:
        return self.count > 0 and bool(self.ratios)

    @staticmethod
    def of(kind: type[SampledWidths], base: Learner, **settings: Any) -> SampledWidths:
        """Return a learner with the settings of `base` and phases from drawn ratios.

        The phases are those of step 0. `phases_at` returns those of other steps.

        Args:
            kind: Class of the learner.
            base: Learner whose settings are copied.
            settings: Settings of `kind` beyond those of `base`.
        """
        learner = kind(
            **{field.name: getattr(base, field.name) for field in fields(base)} | settings
        )
        return replace(learner, phases=learner.phases_at(0))

    @override
    def phases_at(self, step: int) -> tuple[Phase, ...]:
        return _phases(replace(self, phases=(), lr=0.0, key=0), noise.key(self.key, step))

    def draw(self, key: int) -> tuple[float, ...]:
        """Draw `count` distinct ratios, or all if there are fewer, and return the smallest first.

        Args:
            key: Key of the random numbers. Equal keys give equal ratios.
        """
        count = max(0, min(self.count, len(self.ratios)))
        return tuple(
            sorted(self.ratios[position] for position in noise.choose(key, count, len(self.ratios)))
        )

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return nets_of(self.phases_of(self.ratios) if self.drawn else self.phases, member)

    @abstractmethod
    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]:
        """Return the phases of a batch for which ratios were drawn.

        Args:
            ratios: Drawn ratios, the smallest first.
        """

    @override
    def possible_phases(self, member: Member) -> tuple[Phase, ...]:
        """Return the phases of a few draws that together contain every ratio.

        They bound the memory of a step. A ratio whose net runs in every step adds no memory. Draws
        without such ratios come first, as far as possible, because they need the most.

        Args:
            member: Member that the client trains.
        """
        always = {net.share for net in nets_of(self.phases_of(()), member)}
        ratios = sorted(self.ratios, key=lambda ratio: ratio in always)
        count = max(0, min(self.count, len(ratios)))
        draws = [
            tuple(sorted(ratios[first : first + count])) for first in range(len(ratios) - count + 1)
        ]
        return tuple(phase for draw in draws for phase in self.phases_of(draw))

    @property
    @override
    def timeless(self) -> Self:
        return replace(
            self, lr=0.0, key=0, phases=_phases(replace(self, phases=(), lr=0.0, key=0), 0)
        )


@lru_cache(maxsize=4096)  # Every stack of clients asks for the steps of a round.
def _phases(learner: SampledWidths, key: int) -> tuple[Phase, ...]:
    return learner.phases_of(learner.draw(key))


@dataclass(frozen=True)
class Nested(Method):
    """A client of share p holds the first channels, as in HeteroFL, and also trains smaller nets.

    The smaller nets are nested in the client's net.
    """

    local: LocalTraining = TABLE_17
    weighting: Weighting = "uniform"
    samples: int = 4  # Ratios that are drawn for every batch, the paper's S. 0 gives HeteroFL.
    smallest: float = 0.1  # Smallest ratio that can be drawn.
    granularity: float = 0.05  # Difference between neighbouring ratios.
    presets: ClassVar[Presets] = GRIDS

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, samples="[0, inf)", smallest="(0, 1]", granularity="(0, 1]")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return all ratios that can be drawn, in ascending order. The paper's set P."""
        count = int(round((1 - self.smallest) / self.granularity, 9))
        grid = [round(self.smallest + step * self.granularity, 12) for step in range(count + 1)]
        return (*(ratio for ratio in grid if ratio < 1), 1.0)

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world))]

    def drawing(
        self,
        kind: type[SampledWidths],
        count: int,
        distils: bool,
        job: Job,
        world: World,
        **settings: Any,
    ) -> Learner:
        """Return a learner that draws ratios below the client's share.

        Args:
            kind: Class of the learner.
            count: Number of ratios to draw. 0: none.
            distils: True if drawn nets learn from the client's largest net.
            job: Client, sub-model and round.
            world: Family, task and random seed.
            settings: Further settings of `kind`.
        """
        share = self.trainable_share(job.client.budget, world)
        below = tuple(ratio for ratio in self.ratios if ratio < share)
        key = noise.key(noise.Stream.NESTED_WIDTHS, world.seed, job.round)
        taught = distils and count > 0 and bool(below)
        return SampledWidths.of(
            kind,
            Method.learner(self, job, world),
            ratios=below,
            count=count,
            key=key,
            taught=taught,
            **settings,
        )


@dataclass(frozen=True)
class Slimming(SampledWidths):
    """A learner whose steps sum the gradients of the whole net and of drawn nets.

    These are algorithms 3 and 4 of FedResCuE.
    """

    supervised: bool = False  # True: drawn nets learn from the labels too. False: teacher only.

    @override
    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]:
        objectives = [self.local.build_objective()]
        for ratio in ratios:
            objectives += [self.local.build_objective(ratio)] if self.supervised else []
            objectives.append(Distilled(ratio))
        return (Phase(Summed(tuple(objectives)) if ratios else self.local.build_objective()),)
