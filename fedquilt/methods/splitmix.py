"""Split-Mix: narrow base nets that every device can train, mixed on demand (Hong et al., ICLR 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import refuse, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import windows
from fedquilt.family.dual import HOW_TO
from fedquilt.family.norms import Tracked
from fedquilt.methods.initial import own_range
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.splitmix_settings import CIFAR10, DIGITS, SPLITMIX_SGD, compared_presets
from fedquilt.round.attack import PGD, AdversarialTraining
from fedquilt.round.federation import World
from fedquilt.round.merge import Weighting
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import Local
from fedquilt.round.training.schedules import Cosine, Steps
from fedquilt.terms import Arch, Budget, Client, Job, Mix, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.family.family import Rounding

_DIGITS = replace(DIGITS, scaler=True)
_CIFAR10 = replace(CIFAR10, scaler=True)
# Released: steps of min(1.25·ε, ε + 4/255) / 7, on the net in evaluation mode. Paper: 2/255.
_RELEASED_ATTACK = AdversarialTraining(attack=PGD(size=10 / 255 / 7), search="evaluation")


def _robust(local: Local) -> dict[str, object]:
    """Track norm statistics, with both rescalings off, as the released adversarial runs do."""
    tracked = replace(local, norm=Tracked(), scaler=False)
    return {"local": tracked, "rescale_init": False, "robust": True}


@dataclass(frozen=True)
class SplitMix(Method):
    """M = floor(1/r) independent nets of share r, each a scope of the server's state.

    A client of share R trains floor(R/r) of them at the same time, others every round; a device of share R mixes the
    logits of the first floor(R/r).

    With `sort` the base nets are ordered by their accuracy before they are tested or deployed
    (algorithm 1, line 9). The paper measures it on validation data, which clients hold back with
    `FederatedData.with_validation(share)` or `data.validation`. Without such data it is measured on
    samples that clients train on.

    Presets that end in `released` are the settings of the authors' code. Its experiments also
    differ in what is not part of a method:

    - All clients train in every round.
    - Half of the Digits images are for validation, so that a client trains on 111 to 113. Of
      CIFAR-10 it is a tenth. `data.validation` holds back as many. The released code tests the
      checkpoint of the best validation accuracy, and fedquilt the last one.
    - Adversarial runs split CIFAR-10 iid. On Digits they train one base net of share 1.
      Tests attack with the steps of training: `Evaluation(attack=PGD(size=10 / 255 / 7))`.

    Two of its options are norm policies here. `lbn`, which keeps all of a norm on its client, is
    `norm="local-all"`; the presets average norms, as without that option. Norms that are measured
    afterwards are measured on each client's own data: `norm="post-own"`. With `norm="post"` it is
    the data of all clients. Under both of the former, clients have unequal nets, and accuracy is
    the mean over clients.
    """

    local: Local = Local(optimiser=SPLITMIX_SGD, scaler=True)
    weighting: Weighting = "data"
    base: float = 0.125  # r, the share of a base net; 1 gives FedAvg
    rescale_init: bool = True  # initial weights have the variance of the whole net's (section 4.2)
    sort: bool = (
        False  # Best base nets first, by validation or training samples (algorithm 1, line 9)
    )
    robust: bool = (
        False  # algorithm 4: attacked samples go through noised norms of their own (section 4.3)
    )
    paper = "Hong et al. 2022"
    presets: ClassVar[Presets] = {
        **compared_presets(scaler=True),
        "digits-released": {
            "local": replace(_DIGITS, optimiser=SPLITMIX_SGD, schedule=Cosine(300)),
        },
        "cifar10-released": {"local": replace(_CIFAR10, masked="batch", crop=4, flip=True)},
        "robust": _robust(Local(optimiser=SPLITMIX_SGD)),
        "digits-robust": _robust(_DIGITS),
        "digits-robust-released": {
            **_robust(replace(_DIGITS, schedule=Cosine(300), adversarial=_RELEASED_ATTACK)),
            "base": 1.0,
        },
        "cifar10-robust": _robust(_CIFAR10),
        "cifar10-robust-released": _robust(
            replace(
                _CIFAR10,
                optimiser=replace(SPLITMIX_SGD, lr=0.1),
                schedule=Steps((200, 300), 0.1),
                masked="",
                crop=4,
                flip=True,
                adversarial=_RELEASED_ATTACK,
            )
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, base="(0, 1]")
        if self.sort and self.personal:
            norm = self.local.norm.name
            why = (
                f"True was asked for with local.norm = {norm!r}, under which every client has nets of its own. One "
                "order of base nets for all is found where clients share them: local.norm = 'post' or 'tracked'; "
                "sort = false keeps the order."
            )
            refuse(self, {"sort": why})
        if self.robust and self.local.adversarial is None:
            object.__setattr__(
                self, "local", replace(self.local, adversarial=AdversarialTraining())
            )

    def init(self, world: World) -> Server:
        if self.robust and not world.family.dual:
            raise ConfigError(
                f"Split-Mix was asked to be robust; the model has no dual norms to train. {HOW_TO}"
            )
        return super().init(world)

    @property
    def count(self) -> int:
        """M, the number of base nets."""
        return _whole(1 / self.base)

    def initial(self, world: World) -> dict[str, Tensor]:
        """Cut every base net from a whole net of its own, so that all start independently.

        Weights and biases thus have the range of the whole net's fan-in (section 4.2). Without
        `rescale_init` they have the wider range of the base net's own fan-in.

        A traced function is called with another seed for every base net. A traced *module* cannot
        be drawn anew, because it brings one set of weights. Its base nets are neighbouring windows
        of these weights. They share what is not cut, such as the output bias, and start alike on
        axes with fewer channels than there are base nets.
        """
        family, member = world.family, self._member(world)
        weights: dict[str, Tensor] = {}
        for place in range(self.count):
            # The first has the seed of the run, so that a single base net starts as FedAvg does.
            seed = noise.key(45, world.seed, place) if place else world.seed
            whole = family.init(seed, dtype=world.dtype)
            starts = {axis: place * width for axis, width in member.widths}
            window = windows(member, starts, family.layout.sizes)
            cut = family.cutter.gather(whole, window, list(whole))
            gains = {} if self.rescale_init else own_range(cut, whole, family)
            own = {name: value * gains[name] for name, value in cut.items() if name in gains}
            own |= {name: value.clone() for name, value in cut.items() if name not in gains}
            weights |= {_scope(place) + name: own[name] for name in cut}
        return weights

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Algorithm 2: one base net in turn from a shuffled cycle that all clients share, and others by lot."""
        cycle, place = divmod(client.turn, self.count)
        first = int(noise.order(noise.key(43, world.seed, cycle), self.count)[place])
        others = [base for base in range(self.count) if base != first]
        key = noise.key(44, world.seed, client.id, server.round)
        drawn = noise.choose(key, self._trained(client, world) - 1, len(others))
        return [
            self._base(place, world)
            for place in sorted([first, *(others[place] for place in drawn)])
        ]

    def learner(self, job: Job, world: World) -> Learner:
        """Algorithm 3, or 4 where robust; the loss may be masked, but all rows of the output layer are averaged."""
        return replace(super().learner(job, world), class_rows=False)

    def divisor(self, job: Job, world: World) -> float:
        """Return the share of a base net (A.3)."""
        return self.base

    def candidates(self, server: Server, world: World) -> Mix:
        """Return the base nets if they are to be sorted (algorithm 1, line 9).

        They are scored on validation samples where clients hold some back. Without these, samples
        that clients train on take their place.
        """
        if not self.sort:
            return ()
        return tuple(self._base(place, world) for place in range(self.count))

    def arranged(self, server: Server, scores: Sequence[float], world: World) -> Server:
        """Sort the base nets by their accuracy, the best first (algorithm 1, line 9)."""
        best = sorted(range(self.count), key=lambda place: -scores[place])
        names = list(dict.fromkeys(name[name.rfind("/") + 1 :] for name in server.weights))
        weights = {
            _scope(to) + name: server.weights[_scope(place) + name]
            for to, place in enumerate(best)
            for name in names
        }
        return replace(server, weights=weights)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """Algorithm 1, line 11: the first floor(R/r) base nets."""
        return tuple(self._base(place, world) for place in range(self.affordable(budget, world)))

    def own(self, server: Server, client: Client, world: World) -> Mix:
        return tuple(self._base(place, world) for place in range(self._trained(client, world)))

    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the share that a client's base nets add up to, which fit where one net as wide may not."""
        if budget.macs is budget.params is budget.memory is None:
            return super().trainable_share(budget, world, rounding)
        return self.base * self.affordable(budget, world, self._step_within(budget, world))

    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the share that the base nets of a deployed device add up to."""
        return self.base * self.affordable(budget, world)

    def _trained(self, client: Client, world: World) -> int:
        """Return how many base nets a client trains at the same time."""
        return self.affordable(client.budget, world, self._step_within(client.budget, world))

    def affordable(self, budget: Budget, world: World, step: TrainingStep | None = None) -> int:
        """Return how many base nets a budget holds: floor(R/r) of a share, or what fits a bound.

        Args:
            budget: Bounds of a device.
            world: The family.
            step: The step with which all are trained at once. None: they run one after another.
        """
        one = world.family.cost(self._member(world), step or TrainingStep())
        room = budget.memory and (budget.memory if step else budget.memory - one.activations)
        bounds = [
            (budget.macs, one.macs),
            (budget.params, one.params),
            (room, one.memory if step else one.bytes),
            (budget.share, self.base),
        ]
        count = min(
            self.count, *(_whole(bound / each) for bound, each in bounds if bound is not None)
        )
        if count < 1:
            fits = world.family.share(budget, step=step)
            needs = f"train in {one.memory:,}" if step else f"run in {one.inference:,}"
            raise BudgetError(
                f"the budget {budget} was given; Split-Mix's base nets have a share of {self.base:g}, {one.params:,} "
                f"parameters and {one.macs:,} multiply-adds, and {needs} bytes. A smaller base fits: "
                f"method.base = {fits} in a file, SplitMix(base={fits}) in Python; or larger budgets, which clients "
                "have from the fleet (fleet.budgets)."
            )
        return count

    def _member(self, world: World) -> Arch:
        return world.family.fit(Budget(share=self.base))

    def _base(self, place: int, world: World) -> Submodel:
        """A base net is all that its scope holds."""
        return Submodel(self._member(world), Index(), _scope(place))


def _scope(place: int) -> str:
    return f"base{place}/"


def _whole(ratio: float) -> int:
    return math.floor(round(ratio, 9))  # 1 / 0.1 is 10, whatever its last digit
