"""Split-Mix: narrow base nets that are combined as budgets allow (Hong et al., ICLR 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import refuse, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.cut import windows
from fedquilt.family.dual import HOW_TO
from fedquilt.family.norms import Tracked
from fedquilt.methods.initial import own_range
from fedquilt.methods.splitmix_settings import CIFAR10, DIGITS, SPLITMIX_SGD, compared_presets
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.attacks import PGD, AdversarialTraining
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.schedules import Cosine, Steps
from fedquilt.terms import Arch, Budget, Client, Job, Server, Submodel, Submodels

if TYPE_CHECKING:
    from fedquilt.family.family import Rounding

_DIGITS = replace(DIGITS, scaler=True)
_CIFAR10 = replace(CIFAR10, scaler=True)
# The released attack takes steps of min(1.25·ε, ε + 4/255) / 7 on the net in evaluation mode. The
# paper has steps of 2/255.
_RELEASED_ATTACK = AdversarialTraining(attack=PGD(step_size=10 / 255 / 7), search="evaluation")


def _robust(local: LocalTraining) -> dict[str, object]:
    """Return a preset for adversarial training as in the released code.

    It tracks norm statistics, and rescales neither layers nor initial weights.

    Args:
        local: Local training, whose norm policy and scaler are replaced.
    """
    tracked = replace(local, norm=Tracked(), scaler=False)
    return {"local": tracked, "rescale_init": False, "robust": True}


@dataclass(frozen=True)
class SplitMix(Method):
    """The model is split into M = floor(1/r) independent base nets of share r.

    Each base net has its own scope in the server's state. A client of share R trains floor(R/r) of
    them at the same time, and different ones every round. A device of share R averages the logits
    of the first floor(R/r).

    With `sort` the base nets are ordered by their accuracy before they are tested or deployed
    (algorithm 1, line 9). The paper measures it on validation data, which clients hold back with
    `FederatedData.with_validation(share)` or `data.validation`. Without such data it is measured on
    samples that clients train on.

    Presets that end in `released` are the settings of the authors' code. Its experiments also
    differ in settings that are not part of a method:

    - All clients train in every round.
    - Half of the Digits images and a tenth of CIFAR-10 are for validation, so that a client of
      Digits trains on 111 to 113 images. `data.validation` holds back the same numbers. The
      released code tests the checkpoint with the best validation accuracy, and fedquilt the last
      one. `run.deploy(round="best")` returns the best one.
    - Adversarial runs split CIFAR-10 iid. On Digits they train one base net of share 1.
      Tests attack with the steps of training: `Evaluation(attack=PGD(step_size=10 / 255 / 7))`.

    Two options of that code are norm policies here. `lbn`, which keeps norms on their client, is
    `norm="per_client-all"`. The presets average norms, as the code does without that option. Norm
    statistics that are measured after training on each client's own data are `norm="post-own"`.
    `norm="post"` measures them on the data of all clients. With "per_client-all" and "post-own"
    clients have different nets, and accuracy is the mean over clients.
    """

    local: LocalTraining = LocalTraining(optimizer=SPLITMIX_SGD, scaler=True)
    weighting: Weighting = "data"
    base: float = 0.125  # Share r of a base net. 1 gives FedAvg.
    rescale_init: bool = True  # Draw initial weights with the variance of the whole net's (4.2).
    # Order base nets by accuracy on validation or training samples (algorithm 1, line 9).
    sort: bool = False
    # Train on attacked samples too, with separate norms for them (algorithm 4, section 4.3).
    robust: bool = False
    paper = "Hong et al. 2022"
    presets: ClassVar[Presets] = {
        **compared_presets(scaler=True),
        "digits-released": {
            "local": replace(_DIGITS, optimizer=SPLITMIX_SGD, schedule=Cosine(300)),
        },
        "cifar10-released": {"local": replace(_CIFAR10, masked="batch", crop=4, flip=True)},
        "robust": _robust(LocalTraining(optimizer=SPLITMIX_SGD)),
        "digits-robust": _robust(_DIGITS),
        "digits-robust-released": {
            **_robust(replace(_DIGITS, schedule=Cosine(300), adversarial=_RELEASED_ATTACK)),
            "base": 1.0,
        },
        "cifar10-robust": _robust(_CIFAR10),
        "cifar10-robust-released": _robust(
            replace(
                _CIFAR10,
                optimizer=replace(SPLITMIX_SGD, lr=0.1),
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
                f"True was asked for with local.norm = {norm!r}, under which every client has nets "
                "of its own. One order of base nets for all is found where clients share them: "
                "local.norm = 'post' or 'tracked'; sort = false keeps the order."
            )
            refuse(self, {"sort": why})
        if self.robust and self.local.adversarial is None:
            object.__setattr__(
                self, "local", replace(self.local, adversarial=AdversarialTraining())
            )

    @override
    def init(self, world: World) -> Server:
        if self.robust and not world.family.dual:
            raise ConfigError(
                f"Split-Mix was asked to be robust; the model has no dual norms to train. {HOW_TO}"
            )
        return super().init(world)

    @property
    def count(self) -> int:
        """Return the number of base nets, M."""
        return _whole(1 / self.base)

    @override
    def initial(self, world: World) -> dict[str, Tensor]:
        """Cut every base net from a different random initialization of the whole net.

        Weights and biases thus have the range of the whole net's fan-in (section 4.2). Without
        `rescale_init` they have the wider range of the base net's own fan-in.

        A traced function is called with a different seed for every base net. A traced *module* has
        only one set of weights. Its base nets are neighbouring windows of these weights. They share
        weights that are not cut, such as the output bias, and are equal on axes with fewer channels
        than there are base nets.
        """
        family = world.family
        member = self._member(world)
        weights: dict[str, Tensor] = {}
        for index in range(self.count):
            # The first has the seed of the run, so that a single base net starts as FedAvg does.
            seed = world.seed
            if index:
                seed = noise.key(noise.Stream.SPLITMIX_INITIAL, world.seed, index)
            full_weights = family.init(seed, dtype=world.dtype)
            starts = {axis: index * width for axis, width in member.widths}
            window = windows(member, starts, family.layout.sizes)
            cut = family.cutter.gather(full_weights, window, list(full_weights))
            gains = {} if self.rescale_init else own_range(cut, full_weights, family)
            base_weights = {
                name: value * gains[name] for name, value in cut.items() if name in gains
            }
            base_weights |= {
                name: value.clone() for name, value in cut.items() if name not in gains
            }
            weights |= {_scope(index) + name: base_weights[name] for name in cut}
        return weights

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        """Return the base nets that a client trains (algorithm 2).

        The first is the next one of a shuffled cycle that all clients share. The others are drawn
        at random.
        """
        cycle, index = divmod(client.turn, self.count)
        cycle_key = noise.key(noise.Stream.SPLITMIX_CYCLE, world.seed, cycle)
        first = int(noise.order(cycle_key, self.count)[index])
        other_bases = [base for base in range(self.count) if base != first]
        key = noise.key(noise.Stream.SPLITMIX_BASES, world.seed, client.id, server.round)
        drawn_positions = noise.choose(key, self._trained(client, world) - 1, len(other_bases))
        return [
            self._base(index, world)
            for index in sorted([first, *(other_bases[index] for index in drawn_positions)])
        ]

    @override
    def learner(self, job: Job, world: World) -> Learner:
        """Return the local training of algorithm 3, or of algorithm 4 if `robust` is set.

        All rows of the output layer are averaged, even if the loss is masked.
        """
        return replace(super().learner(job, world), class_rows=False)

    @override
    def divisor(self, job: Job, world: World) -> float:
        """Return the share of a base net, by which `local.scaler` divides outputs (A.3)."""
        return self.base

    @override
    def candidates(self, server: Server, world: World) -> Submodels:
        """Return all base nets if they are to be sorted (algorithm 1, line 9), else nothing.

        They are scored on validation samples if clients hold some back, else on training samples.
        """
        if not self.sort:
            return ()
        return tuple(self._base(index, world) for index in range(self.count))

    @override
    def ranked(self, server: Server, scores: Sequence[float], world: World) -> Server:
        """Return the state with base nets sorted by accuracy, the best first (algorithm 1, line 9).

        Weights are assigned to other scopes. `server` is not changed.

        Args:
            server: State with the base nets.
            scores: Accuracy of each base net, in the order of `candidates`.
            world: Family, task and random seed.
        """
        best = sorted(range(self.count), key=lambda index: -scores[index])
        names = list(dict.fromkeys(name[name.rfind("/") + 1 :] for name in server.weights))
        weights = {
            _scope(to) + name: server.weights[_scope(index) + name]
            for to, index in enumerate(best)
            for name in names
        }
        return replace(server, weights=weights)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the first floor(R/r) base nets (algorithm 1, line 11).

        R is the share that a device with the budget can run. Its outputs are the mean of their
        logits.

        Args:
            server: State of the server.
            budget: Budget of the device.
            world: Family, task and random seed.
        """
        return tuple(self._base(index, world) for index in range(self.affordable(budget, world)))

    @override
    def client_submodels(self, server: Server, client: Client, world: World) -> Submodels:
        return tuple(self._base(index, world) for index in range(self._trained(client, world)))

    @override
    def trainable_share(self, budget: Budget, world: World, rounding: Rounding = "floor") -> float:
        """Return the sum of the shares of a client's base nets.

        They may fit a budget that a single net of this share exceeds.

        Args:
            budget: Budget of the client.
            world: Family, task and random seed.
            rounding: Rounding of a share. It has no effect if the budget has another bound.
        """
        if budget.macs is budget.params is budget.memory is None:
            return super().trainable_share(budget, world, rounding)
        return self.base * self.affordable(budget, world, self._step_within(budget, world))

    @override
    def runnable_share(self, budget: Budget, world: World) -> float:
        """Return the sum of the shares of the base nets that a device can run."""
        return self.base * self.affordable(budget, world)

    def _trained(self, client: Client, world: World) -> int:
        """Return the number of base nets that a client's budget lets it train at the same time."""
        return self.affordable(client.budget, world, self._step_within(client.budget, world))

    def affordable(self, budget: Budget, world: World, step: TrainingStep | None = None) -> int:
        """Return the number of base nets that fit into a budget. For a share R it is floor(R/r).

        It is at most the number of all base nets.

        Args:
            budget: Bounds of a device.
            world: World with the family.
            step: Training step of all base nets at once. None: they run one after another.

        Raises:
            BudgetError: Not even one base net fits.
        """
        base_cost = world.family.cost(self._member(world), step or TrainingStep())
        room = budget.memory and (budget.memory if step else budget.memory - base_cost.activations)
        bounds = [
            (budget.macs, base_cost.macs),
            (budget.params, base_cost.params),
            (room, base_cost.memory if step else base_cost.bytes),
            (budget.share, self.base),
        ]
        count = min(
            self.count, *(_whole(bound / each) for bound, each in bounds if bound is not None)
        )
        if count < 1:
            fits = world.family.share(budget, step=step)
            needs = f"train in {base_cost.memory:,}" if step else f"run in {base_cost.inference:,}"
            raise BudgetError(
                f"the budget {budget} was given; Split-Mix's base nets have a share of "
                f"{self.base:g}, {base_cost.params:,} parameters and {base_cost.macs:,} "
                f"multiply-adds, and {needs} bytes. A smaller base fits: method.base = {fits} in a "
                f"file, SplitMix(base={fits}) in Python; or larger budgets, which clients have "
                "from the fleet (fleet.budgets)."
            )
        return count

    def _member(self, world: World) -> Arch:
        return world.family.fit(Budget(share=self.base))

    def _base(self, index: int, world: World) -> Submodel:
        """Return the base net of an index from 0, with all weights of its scope, as `base0/`."""
        return Submodel(self._member(world), Index(), _scope(index))


def _scope(index: int) -> str:
    return f"base{index}/"


def _whole(ratio: float) -> int:
    return math.floor(round(ratio, 9))  # Rounding first makes 1 / 0.1 exactly 10.
