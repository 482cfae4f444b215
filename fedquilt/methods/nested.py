"""What methods share whose clients train nested nets of ratios drawn for every batch (FedResCuE and its relatives)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.family.member import Member
from fedquilt.methods.method import Method, Presets
from fedquilt.round.federation import World
from fedquilt.round.merge import Weighting
from fedquilt.round.training.learner import Learner, Phase, nets_of
from fedquilt.round.training.local import Local
from fedquilt.round.training.objectives import Distilled, Summed
from fedquilt.round.training.optimizers import SGD
from fedquilt.terms import Client, Job, Server, Submodel

# FedResCuE, Table 17; norms share their affine weights and track nothing (A.3.1).
TABLE_17 = Local(optimiser=SGD(lr=0.1, momentum=0.9, nesterov=True, decay=1e-4), batch_size=32)
# CIFAR-10: P = {0.1, 0.15, …, 1}, the default. Digits: steps of an eighth.
GRIDS: Presets = {
    "fedrescue-cifar10": {"smallest": 0.1, "granularity": 0.05},
    "fedrescue-digits": {"smallest": 0.125, "granularity": 0.125},
}
# The same settings for the methods without ratios that FedResCuE is compared with.
WITHOUT_RATIOS: Presets = {name: {"local": TABLE_17, "weighting": "uniform"} for name in GRIDS}


@dataclass(frozen=True)
class Drawn(Learner):
    """A learner whose phases are made of ratios, drawn by round and step and not by client, so that clients stack."""

    ratios: tuple[float, ...] = ()  # to draw from: those below the client's own share
    count: int = 0  # that are drawn, as far as there are so many
    key: int = 0  # of the round

    @property
    def drawn(self) -> bool:
        return self.count > 0 and bool(self.ratios)  # else there is nothing to draw

    @staticmethod
    def of(kind: type[Drawn], base: Learner, **own: Any) -> Drawn:
        """A learner that trains as another does, but for its phases."""
        learner = kind(**{field.name: getattr(base, field.name) for field in fields(base)} | own)
        return replace(learner, phases=learner.phases_at(0))

    def phases_at(self, step: int) -> tuple[Phase, ...]:
        return _phases(replace(self, phases=(), lr=0.0, key=0), noise.key(self.key, step))

    def draw(self, key: int) -> tuple[float, ...]:
        """So many distinct ratios, the smallest first."""
        count = max(0, min(self.count, len(self.ratios)))
        return tuple(
            sorted(self.ratios[place] for place in noise.choose(key, count, len(self.ratios)))
        )

    def nets(self, member: Member) -> tuple[Member, ...]:
        return nets_of(self.phases_of(self.ratios) if self.drawn else self.phases, member)

    @abstractmethod
    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]: ...

    def possible_phases(self, member: Member) -> tuple[Phase, ...]:
        """Return the phases of draws that have every ratio among them.

        A ratio whose net runs in any case adds nothing to what a step keeps in memory, so that draws
        without such ratios are among these as far as there are any.
        """
        always = {net.share for net in nets_of(self.phases_of(()), member)}
        ratios = sorted(self.ratios, key=lambda ratio: ratio in always)
        count = max(0, min(self.count, len(ratios)))
        draws = [
            tuple(sorted(ratios[first : first + count])) for first in range(len(ratios) - count + 1)
        ]
        return tuple(phase for draw in draws for phase in self.phases_of(draw))

    @property
    def timeless(self) -> Self:
        return replace(
            self, lr=0.0, key=0, phases=_phases(replace(self, phases=(), lr=0.0, key=0), 0)
        )


@lru_cache(maxsize=4096)  # a round's steps are looked at by every stack
def _phases(learner: Drawn, key: int) -> tuple[Phase, ...]:
    return learner.phases_of(learner.draw(key))


@dataclass(frozen=True)
class Nested(Method):
    """A client of share p holds the first channels, as in HeteroFL, and trains nets nested in its own on the way."""

    local: Local = TABLE_17
    weighting: Weighting = "uniform"
    samples: int = 4  # the paper's S: ratios drawn for every batch; 0 gives HeteroFL
    smallest: float = 0.1  # ratio that is drawn
    granularity: float = 0.05  # between ratios
    presets: ClassVar[Presets] = GRIDS

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, samples="[0, inf)", smallest="(0, 1]", granularity="(0, 1]")

    @property
    def ratios(self) -> tuple[float, ...]:
        """The paper's P."""
        count = int(round((1 - self.smallest) / self.granularity, 9))
        inside = [round(self.smallest + place * self.granularity, 12) for place in range(count + 1)]
        return (*(ratio for ratio in inside if ratio < 1), 1.0)

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world))]

    def drawing(
        self, kind: type[Drawn], count: int, distils: bool, job: Job, world: World, **own: Any
    ) -> Learner:
        """A learner that draws so many of the ratios below the client's share."""
        share = self.trainable_share(job.client.budget, world)
        below = tuple(ratio for ratio in self.ratios if ratio < share)
        key, taught = noise.key(41, world.seed, job.round), distils and count > 0 and bool(below)
        return Drawn.of(
            kind,
            Method.learner(self, job, world),
            ratios=below,
            count=count,
            key=key,
            taught=taught,
            **own,
        )


@dataclass(frozen=True)
class Slimming(Drawn):
    """One step on the summed gradients of the whole net's loss and the drawn nets' (FedResCuE, algorithms 3 and 4)."""

    supervised: bool = False  # drawn nets see the labels too, not only the teacher

    def phases_of(self, ratios: tuple[float, ...]) -> tuple[Phase, ...]:
        objectives = [self.local.build_objective()]
        for ratio in ratios:
            objectives += [self.local.build_objective(ratio)] if self.supervised else []
            objectives.append(Distilled(ratio))
        return (Phase(Summed(tuple(objectives)) if ratios else self.local.build_objective()),)
