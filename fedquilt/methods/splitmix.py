"""Split-Mix: narrow base nets that every device can train, mixed on demand (Hong et al., ICLR 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.dual import HOW_TO
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.splitmix_settings import CIFAR10, DIGITS, SPLITMIX_SGD, compared_presets
from fedquilt.round.attack import AdversarialTraining
from fedquilt.round.cut import windows
from fedquilt.round.local import Cosine, Learner, Local, batched
from fedquilt.round.merge import Weighting
from fedquilt.round.serve import exam_pass, mixed, ready, right
from fedquilt.terms import Arch, Budget, Client, Job, Mix, Server, Submodel, World

if TYPE_CHECKING:
    from fedquilt.engines import Engine

_DIGITS = replace(DIGITS, scaler=True)
_CIFAR10 = replace(CIFAR10, scaler=True)


def _robust(local: Local) -> dict[str, object]:
    """Adversarial training goes without both rescalings."""
    return {"local": replace(local, scaler=False), "rescale_init": False, "robust": True}


@dataclass(frozen=True)
class SplitMix(Method):
    """M = floor(1/r) independent nets of share r, each a scope of the server's state.

    A client of share R trains floor(R/r) of them at the same time, others every round; a device of share R mixes the
    logits of the first floor(R/r).
    """

    local: Local = Local(optimiser=SPLITMIX_SGD, scaler=True)
    weighting: Weighting = "data"
    base: float = 0.125  # r, the share of a base net; 1 gives FedAvg
    rescale_init: bool = True  # initial weights have the variance of the whole net's (section 4.2)
    sort: bool = False  # the best base nets come first, by their accuracy on training samples (algorithm 1, line 9)
    robust: bool = False  # algorithm 4: attacked samples go through noised norms of their own (section 4.3)
    paper = "Hong et al. 2022"
    presets: ClassVar[Presets] = {
        **compared_presets(scaler=True),
        "digits-released": {"local": replace(_DIGITS, optimiser=SPLITMIX_SGD, schedule=Cosine(300))},
        "cifar10-released": {"local": replace(_CIFAR10, masked="batch")},
        "robust": _robust(Local(optimiser=SPLITMIX_SGD)),
        "digits-robust": _robust(_DIGITS),
        "cifar10-robust": _robust(_CIFAR10),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, base="(0, 1]")
        if self.robust and self.local.adversarial is None:
            object.__setattr__(self, "local", replace(self.local, adversarial=AdversarialTraining()))

    def init(self, world: World) -> Server:
        if self.robust and not world.family.dual:
            raise ConfigError(f"Split-Mix was asked to be robust; the model has no dual norms to train. {HOW_TO}")
        return super().init(world)

    @property
    def count(self) -> int:
        """M, the number of base nets."""
        return _whole(1 / self.base)

    def initial(self, world: World) -> dict[str, Tensor]:
        """Neighbouring pieces of one whole net: they are independent, and vary as its weights do.

        Kaiming's method draws from a range that falls with the width a layer reads from. Without `rescale_init` base
        nets have the range of their own width.
        """
        whole, family = super().initial(world), world.family
        member, sizes = self._member(world), family.layout.sizes
        weights: dict[str, Tensor] = {}
        for place in range(self.count):
            starts = {axis: place * width for axis, width in member.widths}
            cut = family.cutter.gather(whole, windows(member, starts, sizes), list(whole))
            own = {name: value.clone() for name, value in cut.items()}
            weights |= {_scope(place) + name: value for name, value in self._scaled(own, whole).items()}
        return weights

    def _scaled(self, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.rescale_init:
            return own
        gain = {
            name: math.sqrt(whole[name][0].numel() / value[0].numel()) for name, value in own.items() if value.dim() > 1
        }
        return {name: value * gain.get(name, 1.0) for name, value in own.items()}

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Algorithm 2: one base net in turn from a shuffled cycle that all clients share, and others by lot."""
        cycle, place = divmod(client.turn, self.count)
        first = int(noise.order(noise.key(43, world.seed, cycle), self.count)[place])
        others = [base for base in range(self.count) if base != first]
        key = noise.key(44, world.seed, client.id, server.round)
        drawn = noise.choose(key, self.affordable(client.budget, world) - 1, len(others))
        return [self._base(place, world) for place in sorted([first, *(others[place] for place in drawn)])]

    def learner(self, job: Job, world: World) -> Learner:
        """Algorithm 3, or 4 where robust; the loss may be masked, but all rows of the output layer are averaged."""
        return replace(super().learner(job, world), class_rows=False)

    def arranged(self, server: Server, engine: Engine) -> Server:
        """Algorithm 1, line 9. Nobody holds back a validation set: samples that clients train on take its place."""
        if not self.sort or self.personal:
            return server
        found = ready(self, server, [self._base(place, engine.world) for place in range(self.count)], engine, _EXAM)
        rows, data = engine.pooled[:_VALIDATION], engine.data
        scores = []
        with engine.computing(), torch.no_grad():
            for net, weights in found.items():
                own = {net.scope + name: value for name, value in weights.items()}
                hits = [
                    right(
                        mixed(engine.world.family, (net,), own, data.samples(some), exam_pass(self.local.norm)),
                        data.targets[some],
                        None,
                    )
                    for some in batched(rows, _EXAM)
                ]
                scores.append(int(torch.stack(hits)[:, 0].sum()))
        best = sorted(range(self.count), key=lambda place: -scores[place])
        names = list(dict.fromkeys(name[name.rfind("/") + 1 :] for name in server.weights))
        weights = {
            _scope(to) + name: server.weights[_scope(place) + name] for to, place in enumerate(best) for name in names
        }
        return replace(server, weights=weights)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """Algorithm 1, line 11: the first floor(R/r) base nets."""
        return tuple(self._base(place, world) for place in range(self.affordable(budget, world)))

    def own(self, server: Server, client: Client, world: World) -> Mix:
        return self.deploy(server, client.budget, world)

    def affordable(self, budget: Budget, world: World) -> int:
        """How many base nets a budget holds: floor(R/r) of a share, as many as fit a bound on their sum."""
        one = world.family.cost(self._member(world))
        bounds = {"macs": one.macs, "params": one.params, "memory": one.memory}
        most = [_whole(getattr(budget, name) / cost) for name, cost in bounds.items() if getattr(budget, name)]
        count = min([self.count, *most, *([] if budget.share is None else [_whole(budget.share / self.base)])])
        if count < 1:
            fits = world.family.share(budget)
            raise BudgetError(
                f"the budget {budget} was given; Split-Mix's base nets have a share of {self.base:g}, {one.params:,} "
                f"parameters and {one.macs:,} multiply-adds, and train in {one.memory:,} bytes. A smaller base fits: "
                f"method.base = {fits} in a file, SplitMix(base={fits}) in Python; or larger budgets, which clients "
                "have from the fleet (fleet.budgets)."
            )
        return count

    def _member(self, world: World) -> Arch:
        return world.family.fit(Budget(share=self.base))

    def _base(self, place: int, world: World) -> Submodel:
        """A base net is all that its scope holds."""
        return Submodel(self._member(world), Index(), _scope(place))


_VALIDATION = 2000  # samples that base nets are sorted by
_EXAM = 100  # of them at once


def _scope(place: int) -> str:
    return f"base{place}/"


def _whole(ratio: float) -> int:
    return math.floor(round(ratio, 9))  # 1 / 0.1 is 10, whatever its last digit
