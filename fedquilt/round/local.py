"""Local training as pure functions: a learner is a list of phases, an optimiser, and what is sent and kept.

A phase is an objective and the positions it may move. Everything here is a frozen value, so clients that train alike
compare equal and are trained as one stack; the same functions run for one client and, under vmap, for many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedquilt import noise
from fedquilt.axes import Index, Positions
from fedquilt.checks import one_of, within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.net import Pass
from fedquilt.precision import Precision
from fedquilt.round.attack import AdversarialTraining
from fedquilt.round.cut import inside, prefix
from fedquilt.terms import Arch, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family import Family
    from fedquilt.family.laid import LaidNet

NormPolicy = Literal["batch", "tracked", "local", "post"]
LastBatch = Literal["keep", "drop", "merge"]
Masked = Literal["", "client", "batch"]
Freeze = Literal["update", "gradient"]
State = dict[str, Tensor]
_LOT = -4  # the site of the weights that samples draw
_START = -3  # the site an attack starts from; augmentation has the two before it, layers have those from 1 on
OptimiserState = dict[str, State]


# --- optimisers: pure, and step for step what torch.optim computes ----------------------------------------------


class Optimiser(Protocol):
    """`update` returns new weights and slots; it works alike on one client's tensors and on a stack of them."""

    lr: float
    clip: float
    ages: ClassVar[bool]

    @property
    def slots(self) -> tuple[str, ...]: ...

    def update(
        self, weights: State, slots: OptimiserState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimiserState]: ...

    def update_(
        self, weights: list[Tensor], slots: Mapping[str, list[Tensor]], grads: list[Tensor], lr: Tensor, step: Tensor
    ) -> None:
        """The same in place and in one kernel, for tensors that stay where they are; `step` counts from 1."""

    def pace(self, steps: int, lr: float, mu: float) -> float: ...


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD."""

    lr: float = 0.05  # learning rate
    momentum: float = 0.9  # what is kept of the last step; 0: none
    nesterov: bool = False  # look ahead by the momentum
    decay: float = 0.0  # weight decay, added to the gradient; 0: none
    clip: float = 0.0  # bound on the norm of the whole gradient; 0: none

    ages: ClassVar[bool] = False  # whether a step depends on how many came before it

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", momentum="[0, 1)", decay="[0, inf)", clip="[0, inf)")
        if self.nesterov and not self.momentum:
            raise ConfigError("SGD was asked for Nesterov steps without momentum; give it one, such as momentum=0.9.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self, weights: State, slots: OptimiserState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimiserState]:
        names = list(grads)
        change, values = [grads[n] for n in names], [weights[n] for n in names]
        if self.decay:
            change = list(torch._foreach_add(change, values, alpha=self.decay))
        new_slots: OptimiserState = {}
        if self.momentum:
            buffers = list(torch._foreach_mul([slots["momentum"][n] for n in names], self.momentum))
            torch._foreach_add_(buffers, change)
            new_slots["momentum"] = dict(zip(names, buffers, strict=True))
            change = list(torch._foreach_add(change, buffers, alpha=self.momentum)) if self.nesterov else buffers
        if isinstance(lr, Tensor):
            moved = torch._foreach_add(values, torch._foreach_mul(change, -lr))
        else:
            moved = torch._foreach_add(values, change, alpha=-lr)
        return dict(zip(names, moved, strict=True)), new_slots

    def update_(
        self, weights: list[Tensor], slots: Mapping[str, list[Tensor]], grads: list[Tensor], lr: Tensor, step: Tensor
    ) -> None:
        torch._fused_sgd_(
            weights,
            grads,
            slots.get("momentum", []),
            weight_decay=self.decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,  # buffers start at zero, which makes the first step the same as torch's
        )

    def pace(self, steps: int, lr: float, mu: float) -> float:
        """FedNova's a_i: how far `steps` unit gradients move a weight, in units of the learning rate."""
        velocity = distance = 0.0
        for _ in range(steps):
            pull = 1.0 - lr * mu * distance  # a unit gradient, less the proximal term's pull back
            velocity = self.momentum * velocity + pull
            distance += pull + self.momentum * velocity if self.nesterov else velocity
        return distance


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam."""

    lr: float = 1e-3  # learning rate
    beta1: float = 0.9  # what is kept of the mean gradient
    beta2: float = 0.999  # what is kept of the mean square
    eps: float = 1e-8  # added to its root
    decay: float = 0.0  # weight decay, added to the gradient; 0: none
    clip: float = 0.0  # bound on the norm of the whole gradient; 0: none

    ages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", beta1="[0, 1)", beta2="[0, 1)", eps="(0, inf)", decay="[0, inf)", clip="[0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def update(
        self, weights: State, slots: OptimiserState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimiserState]:
        assert not isinstance(lr, Tensor), "a learning rate on the device is for `update_`"
        names = list(grads)
        change, values = [grads[n] for n in names], [weights[n] for n in names]
        if self.decay:
            change = list(torch._foreach_add(change, values, alpha=self.decay))
        means = torch._foreach_lerp([slots["mean"][n] for n in names], change, 1 - self.beta1)
        squares = list(torch._foreach_mul([slots["square"][n] for n in names], self.beta2))
        torch._foreach_addcmul_(squares, change, change, 1 - self.beta2)
        bias1, bias2 = 1 - self.beta1 ** (step + 1), 1 - self.beta2 ** (step + 1)
        scale = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(scale, math.sqrt(bias2))
        torch._foreach_add_(scale, self.eps)
        moved = torch._foreach_addcdiv(values, means, scale, -lr / bias1)
        new_slots = {"mean": dict(zip(names, means, strict=True)), "square": dict(zip(names, squares, strict=True))}
        return dict(zip(names, moved, strict=True)), new_slots

    def update_(
        self, weights: list[Tensor], slots: Mapping[str, list[Tensor]], grads: list[Tensor], lr: Tensor, step: Tensor
    ) -> None:
        torch._fused_adam_(
            weights,
            grads,
            slots["mean"],
            slots["square"],
            [],
            [step] * len(weights),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def pace(self, steps: int, lr: float, mu: float) -> float:
        raise ConfigError(
            "FedNova was asked to normalise steps of Adam; its effective step count is defined for SGD. "
            "Use SGD locally, or another method."
        )


# --- learning rates over rounds ---------------------------------------------------------------------------------


class Schedule(Protocol):
    def __call__(self, round: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def __call__(self, round: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Steps:
    """The learning rate times `factor` at each milestone round."""

    milestones: tuple[int, ...]  # rounds, from 0
    factor: float = 0.1  # that the learning rate is multiplied by

    def __post_init__(self) -> None:
        within(self, milestones="[0, inf)", factor="(0, inf)")

    def __call__(self, round: int) -> float:
        return self.factor ** sum(round >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """The learning rate falls to 0 over `rounds` on half a cosine."""

    rounds: int  # over which it falls

    def __post_init__(self) -> None:
        within(self, rounds="[1, inf)")

    def __call__(self, round: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(round, self.rounds) / self.rounds))


# --- what may move ----------------------------------------------------------------------------------------------


class Region(Protocol):
    """Which positions of a member a phase may change. `mask` is True (all), False (none) or a boolean tensor."""

    def __hash__(self) -> int: ...

    def mask(self, family: Family, arch: Arch, name: str) -> Tensor | bool: ...


@dataclass(frozen=True)
class Everywhere:
    def mask(self, family: Family, arch: Arch, name: str) -> Tensor | bool:
        return True


@dataclass(frozen=True)
class Between:
    """Positions inside the sub-model of share `outer` and outside that of share `inner`; 0 leaves nothing out."""

    inner: float = 0.0
    outer: float = 1.0

    def mask(self, family: Family, arch: Arch, name: str) -> Tensor | bool:
        outer = _inside(family, arch, name, self.outer)
        return outer & ~_inside(family, arch, name, self.inner) if self.inner else outer


@dataclass(frozen=True)
class Part:
    """A named part of the model, such as `norm`, or everything but it."""

    name: str
    other: bool = False

    def mask(self, family: Family, arch: Arch, name: str) -> Tensor | bool:
        return (name in family.parts[self.name]) != self.other


def _inside(family: Family, arch: Arch, name: str, share: float) -> Tensor:
    """Which elements of a member's weight the sub-model of a smaller share has."""
    cut = family.cutter.rows(name, family.nested(arch, share).index, prefix(arch).index)
    return inside(cut, family.layout.shape(name, family.layout.sizes | arch.sizes))


@lru_cache(maxsize=64)  # drawn phases have many, of the size of the net
def _masks(family: Family, arch: Arch, moves: Region, device: torch.device) -> dict[str, Tensor | bool]:
    masks = {name: moves.mask(family, arch, name) for name in family.trainable}
    return {name: mask.to(device) if isinstance(mask, Tensor) else mask for name, mask in masks.items()}


# --- objectives -------------------------------------------------------------------------------------------------


@dataclass
class View:
    """What an objective sees of one batch of one client."""

    family: Family
    arch: Arch
    weights: State
    inputs: Tensor
    targets: Tensor
    held: Tensor  # (class,) True where the client has samples of the class
    received: Weights  # what this round started from
    mode: Pass
    key: Tensor
    taught: Tensor | None = None  # the logits of the client's own net before this batch moved it, if anybody asks
    known: dict[float | None, Tensor] = field(default_factory=dict)  # logits of nets that have been run
    seen: State = field(default_factory=dict)  # norm statistics, of the widest net run
    condition: Tensor | None = None  # a robustness for each sample, instead of the pass's
    importance: Tensor | None = None  # what each sample's loss is multiplied by
    share: float | Tensor = 1.0  # of the client's net, which the scaler divides by

    def logits(self, share: float | None = None) -> Tensor:
        """Run the client's net on the batch, or the nested net of a smaller share of the whole model."""
        if share not in self.known:
            self.known[share] = self._run(share).movedim(self.family.layout.class_dim, 1)
        return self.known[share]

    def through(self, robustness: float, **changes: Any) -> View:
        """The same batch through the clean or the noised norms, if a net has both; or another batch."""
        return replace(self, mode=replace(self.mode, robustness=robustness), known={}, seen={}, **changes)

    def _run(self, share: float | None) -> Tensor:
        if share is None:
            net = self.family.net(self.arch)
            logits, self.seen = net(self.weights, self.inputs, self.mode, self.key, self.condition, self.share)
            return logits
        nested = self.family.nested(self.arch, share)
        narrowed = self.family.cutter.narrow(self.weights, prefix(self.arch).index, nested.index)
        return self.family.net(nested.arch)(narrowed, self.inputs, self.mode, self.key, self.condition, share)[0]

    def cross_entropy(self, logits: Tensor, ignore: int) -> Tensor:
        """The mean over the targets that count, by the samples' importance."""
        if self.importance is None:
            return F.cross_entropy(logits, self.targets, ignore_index=ignore)
        losses = F.cross_entropy(logits, self.targets, ignore_index=ignore, reduction="none")
        by_sample = self.importance.reshape(-1, *[1] * (losses.dim() - 1))
        return (losses * by_sample).sum() / (self.targets != ignore).sum()


class Objective(Protocol):
    """A loss of one batch. Frozen, so that equal objectives compare equal."""

    @property
    def shares(self) -> tuple[float | None, ...]:
        """The nets it runs, by share of the whole model; None is the client's own."""

    def __call__(self, view: View) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross-entropy; `share` evaluates it on the nested net of that share of the whole model."""

    share: float | None = None
    ignore: int = -100  # targets with this value do not count (padding)

    @property
    def shares(self) -> tuple[float | None, ...]:
        return (self.share,)

    def __call__(self, view: View) -> Tensor:
        return view.cross_entropy(view.logits(self.share), self.ignore)


@dataclass(frozen=True)
class MaskedCrossEntropy:
    """Cross-entropy with the logits of absent classes set to 0 (HeteroFL).

    Absent from the client, as HeteroFL has it, or from the batch, as Split-Mix's released code has it.
    """

    by: Literal["client", "batch"] = "client"
    share: float | None = None
    ignore: int = -100

    @property
    def shares(self) -> tuple[float | None, ...]:
        return (self.share,)

    def __call__(self, view: View) -> Tensor:
        logits = view.logits(self.share)
        if self.by == "client":
            present = view.held
        else:
            classes = torch.arange(logits.shape[1], device=logits.device)
            present = (view.targets.reshape(-1, 1) == classes).any(0)
        present = present.reshape([1, -1] + [1] * (logits.dim() - 2))
        return view.cross_entropy(torch.where(present, logits, 0.0), self.ignore)


@dataclass(frozen=True)
class Proximal:
    """Another objective plus mu/2 · ‖w − w_received‖² (FedProx)."""

    objective: Objective
    mu: float

    @property
    def shares(self) -> tuple[float | None, ...]:
        return self.objective.shares

    def __call__(self, view: View) -> Tensor:
        loss = self.objective(view)
        if not self.mu:
            return loss
        drift = sum((view.weights[name] - view.received[name]).square().sum() for name in view.family.trainable)
        return loss + 0.5 * self.mu * drift


@dataclass(frozen=True)
class Adversarial:
    """Equation 1 of Split-Mix: (1 − λn)·L(x) + λn·L(x + δ), δ found by an attack.

    Clean samples go through a net's clean norms; attack and attacked samples go through the noised ones (algorithm 4).
    With single norms it is adversarial training as Madry et al. (2018) have it. Where every sample draws a λn of its
    own the net is told it, for both samples and the attack (OAT).
    """

    objective: Objective  # L
    how: AdversarialTraining = AdversarialTraining()
    raised: Objective = CrossEntropy()  # what δ raises, on the same nets (algorithm 4, line 10)

    @property
    def shares(self) -> tuple[float | None, ...]:
        return self.objective.shares

    def __call__(self, view: View) -> Tensor:
        weight: float | Tensor = self.how.all[0]
        if self.how.draws:
            weight = self.how.draw(noise.fold_in(view.key, _LOT), view.inputs)
            view = replace(view, condition=weight)
        losses = []
        if self._clean:
            clean = view.through(0.0)
            losses.append(self._weighted(clean, 1 - weight))
            view.seen.update(clean.seen)
        if self._noised:
            noised = view.through(1.0, weights={**view.weights, **view.seen}, inputs=self._attacked(view))
            losses.append(self._weighted(noised, weight))
            view.seen.update(noised.seen)
        return torch.stack(losses).sum()

    def _weighted(self, view: View, weight: float | Tensor) -> Tensor:
        """The objective with one weight for the batch, or one for each sample."""
        if not isinstance(weight, Tensor):
            return weight * self.objective(view)
        view.importance = weight
        return self.objective(view)

    @property
    def _clean(self) -> bool:
        return any(weight < 1 for weight in self.how.all)

    @property
    def _noised(self) -> bool:
        return any(weight > 0 for weight in self.how.all)

    def _attacked(self, view: View) -> Tensor:
        """The worst samples found for the weights as they are: no gradient goes through the search."""
        drawn = noise.uniform(noise.fold_in(view.key, _START), view.inputs.shape, view.inputs.dtype)
        now = {**view.weights, **view.seen}  # single norms have seen the clean samples already
        still = view.through(1.0, weights={name: value.detach() for name, value in now.items()})
        still.mode = self._searching(still.mode)

        def loss(inputs: Tensor) -> Tensor:
            return self.raised(still.through(1.0, inputs=inputs))

        return self.how.attack(loss, view.inputs, drawn)

    def _searching(self, mode: Pass) -> Pass:
        """Return how nets run while an attack is searched. Nothing seen there is tracked."""
        if self.how.search == "training":
            return replace(mode, statistics="batch")
        tracked = mode.statistics == "track"
        return replace(mode, train=False, statistics="stored" if tracked else "batch")

    @property
    def kinds(self) -> int:
        """Return how many kinds of samples, clean and attacked, a backward pass goes through."""
        return self._clean + self._noised

    @property
    def passes(self) -> int:
        """What it takes, in passes through the net; a step of the attack goes back to the samples alone."""
        return 3 * self.kinds + 2 * self.how.attack.steps * self._noised


@dataclass(frozen=True)
class Distilled:
    """weight · KL(teacher ‖ nested net); the teacher is the client's own net before this batch (FedResCuE)."""

    share: float
    weight: float = 1.0
    ignore: int = -100

    @property
    def shares(self) -> tuple[float | None, ...]:
        return (self.share,)

    def __call__(self, view: View) -> Tensor:
        assert view.taught is not None, "a learner with `taught` has the logits from before the batch"
        teacher, student = F.log_softmax(view.taught, 1), F.log_softmax(view.logits(self.share), 1)
        divergence = (teacher.exp() * (teacher - student)).sum(1)
        counted = view.targets != self.ignore
        return self.weight * (divergence * counted).sum() / counted.sum()


@dataclass(frozen=True)
class Summed:
    """Several objectives, one gradient: slimmable training (Yu et al. 2018) sums over the widths."""

    objectives: tuple[Objective, ...]

    @property
    def shares(self) -> tuple[float | None, ...]:
        return tuple(dict.fromkeys(share for objective in self.objectives for share in objective.shares))

    def __call__(self, view: View) -> Tensor:
        return torch.stack([objective(view) for objective in self.objectives]).sum()


def _parts(objective: Objective) -> list[Objective]:
    """What an objective is a sum of, without what is added to it that runs no net."""
    parts = objective.objectives if isinstance(objective, Summed) else (objective,)
    return [part.objective if isinstance(part, Proximal) else part for part in parts]


def attacks(objective: Objective) -> bool:
    """Whether an objective attacks its samples."""
    return any(isinstance(part, Adversarial) for part in _parts(objective))


def passes(objective: Objective) -> list[tuple[float | None, int]]:
    """The nets an objective runs, and what their gradient takes in forward passes: a backward pass costs two."""
    parts = _parts(objective)
    plain = dict.fromkeys(share for part in parts if not isinstance(part, Adversarial) for share in part.shares)
    attacked = [(share, part.passes) for part in parts if isinstance(part, Adversarial) for share in part.shares]
    return [*((share, 3) for share in plain), *attacked]


def needs_received(objective: Objective) -> bool:
    """Return True if an objective reads the weights that the round started from."""
    parts = objective.objectives if isinstance(objective, Summed) else (objective,)
    return any(isinstance(part, Proximal) and part.mu > 0 for part in parts)


def saving(objective: Objective) -> list[float | None]:
    """Return the shares of the nets whose activations a backward pass needs, one for each run."""
    parts = _parts(objective)
    plain = dict.fromkeys(share for part in parts if not isinstance(part, Adversarial) for share in part.shares)
    attacked = [share for part in parts if isinstance(part, Adversarial) for share in part.shares * part.kinds]
    return [*plain, *attacked]


def apart(objective: Objective) -> tuple[Objective, ...]:
    """A sum as parts that run nets of their own: their gradients can be taken one after another, and added."""
    if not isinstance(objective, Summed):
        return (objective,)
    by_nets: dict[tuple[float | None, ...], list[Objective]] = {}
    for one in objective.objectives:
        by_nets.setdefault(one.shares, []).append(one)
    return tuple(some[0] if len(some) == 1 else Summed(tuple(some)) for some in by_nets.values())


# --- the learner ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One update of a batch: what is minimised, and which positions it may move."""

    objective: Objective = CrossEntropy()
    moves: Region = Everywhere()
    # Elsewhere the update is withheld, or only the gradient: then momentum and decay move what should stay.
    freeze: Freeze = "update"


class Filter(Protocol):
    """Which of the weights are meant, by name."""

    def names(self, family: Family) -> frozenset[str]: ...


@dataclass(frozen=True)
class All:
    def names(self, family: Family) -> frozenset[str]:
        return frozenset((*family.trainable, *family.statistics))


@dataclass(frozen=True)
class Nothing:
    def names(self, family: Family) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class Parts:
    """The weights of the named parts, or all others."""

    parts: tuple[str, ...]
    other: bool = False

    def names(self, family: Family) -> frozenset[str]:
        named = frozenset(name for part in self.parts for name in family.parts.get(part, ()))
        return All().names(family) - named if self.other else named


@dataclass(frozen=True)
class Local:
    """How clients train, in every method alike."""

    optimiser: SGD | Adam = SGD()  # of a client
    schedule: Constant | Steps | Cosine = Constant()  # of its learning rate, over the rounds
    epochs: int = 1  # over its data, a round
    batch_size: int = 32  # samples a step
    last_batch: LastBatch = "keep"  # one that is not full: trained on, left out, or joined to the one before
    norm: NormPolicy = "batch"  # statistics: the batch's, tracked and sent, tracked and kept, or measured afterwards
    scaler: bool = False  # Divide the outputs of all cut hidden layers by the client's share, in training only
    masked: Masked = ""  # mask the logits of classes absent from the client or the batch
    crop: int = 0  # random crops after padding by so many pixels
    flip: bool = False  # random left-right flips
    adversarial: AdversarialTraining | None = None  # training on attacked samples too; None: on clean ones alone

    def __post_init__(self) -> None:
        within(self, epochs="[1, inf)", batch_size="[1, inf)", crop="[0, inf)")
        one_of(self, norm=NormPolicy, last_batch=LastBatch, masked=Masked)

    @property
    def objective(self) -> Objective:
        return self.objective_at(None)

    def objective_at(self, share: float | None) -> Objective:
        """The loss of the client's own net, or of the nested net of a share."""
        plain = CrossEntropy(share)
        objective = MaskedCrossEntropy(self.masked, share) if self.masked else plain
        # With no weight on attacked samples nothing is to be attacked; of several, 0 is one that may be drawn.
        if self.adversarial is None or not any(self.adversarial.all):
            return objective
        return Adversarial(objective, self.adversarial, plain)


@dataclass(frozen=True)
class Learner:
    """All a client does in one round; rebuilt on the client from the job and the configuration alone."""

    phases: tuple[Phase, ...]  # of a batch; where they are drawn, those of the first
    local: Local
    lr: float
    send: Filter = All()
    keep: Filter = Nothing()
    keep_slots: bool = False
    class_rows: bool = False  # of weights with a class axis, send only the rows of classes the client holds
    times: int = 1  # that the client counts in the merge; 1 has no effect
    counts_steps: bool = False  # the client remembers its optimizer steps over all rounds, which the merge weights by
    paced: bool = False  # FedNova: report the effective step count
    mu: float = 0.0  # the proximal weight, which changes that count
    taught: bool = False  # objectives ask for the logits that the client's net gave before the batch
    # Share of the client's net, which the scaler divides by. Learners that differ in it alone are equal, so that
    # clients of unequal shares and equal members still train as one stack, each with its own share.
    share: float = field(default=1.0, compare=False)

    @property
    def drawn(self) -> bool:
        """Whether phases differ from step to step."""
        return type(self).phases_at is not Learner.phases_at

    def phases_at(self, step: int) -> tuple[Phase, ...]:
        """The phases of one batch; learners that draw them do so by round and step, so that clients stack."""
        return self.phases

    def moves(self, steps: int) -> int:
        """The optimiser steps behind so many batches; every batch has the same number of phases."""
        return steps * len(self.phases)

    @property
    def nested_shares(self) -> tuple[float, ...]:
        """Return the shares of the nested nets that a batch of the round may run."""
        return shares_of(self.phases)

    @property
    def kinds(self) -> int:
        """How many kinds of a sample are on their way through a net at once: clean ones, and attacked ones."""
        return 2 if any(attacks(phase.objective) for phase in self.phases) else 1

    def training_step(self, precision: Precision) -> TrainingStep:
        """Describe the largest step as far as memory depends on it.

        Phases run one after another, so that the one that needs most counts. Nested nets of a phase
        without the client's own are counted as if they had its size. Logits of a teacher are small,
        and not counted.
        """
        found = []
        for phase in self.phases:
            nets = saving(phase.objective)
            nested = tuple(share for share in nets if share is not None) if None in nets else ()
            found.append((len(nets) - len(nested), nested))
        passes, nested = max(found, key=lambda one: one[0] + len(one[1]))
        local = self.local
        anchored = any(needs_received(phase.objective) for phase in self.phases)
        slots = len(local.optimiser.slots) + anchored
        # A last batch that is not full may be joined to the one before it.
        batch_size = 2 * local.batch_size - 1 if local.last_batch == "merge" else local.batch_size
        return TrainingStep(batch_size, slots, precision, passes, nested)

    @property
    def timeless(self) -> Self:
        """Without what changes from round to round: what has been recorded of one round serves the next."""
        return replace(self, lr=0.0)

    def moved(self, family: Family) -> tuple[str, ...]:
        """The weights that training changes, and the statistics it tracks."""
        return (*family.trainable, *(family.statistics if self.local.norm in ("tracked", "local") else ()))

    def names(self, family: Family) -> tuple[str, ...]:
        """The weights a client holds while it trains: what changes, and what is carried along."""
        return (*self.moved(family), *family.carried)

    def sent(self, family: Family) -> tuple[str, ...]:
        """The weights that travel to the server."""
        chosen = self.send.names(family)
        if self.local.norm == "local":
            chosen -= set(family.statistics)
        return tuple(name for name in self.names(family) if name in chosen)

    def received(self, family: Family) -> tuple[str, ...]:
        """The weights that travel to the client: those it will send back, and constants that are cut with them."""
        return (*self.sent(family), *family.carried)

    def kept(self, family: Family) -> tuple[str, ...]:
        """The weights that stay on the client for its next round."""
        chosen = self.keep.names(family)
        if self.local.norm == "local":
            chosen |= set(family.statistics)
        return tuple(name for name in self.names(family) if name in chosen)

    def upload(self, family: Family, submodel: Submodel, held: Tensor) -> Submodel:
        """Return the positions that are sent."""
        rows = {}
        if self.class_rows and family.class_rows:
            rows["class"] = Positions.chosen(held.nonzero().flatten().tolist())
        return replace(submodel, index=Index({**submodel.index, **rows}))

    def masks(self, family: Family, arch: Arch, phase: Phase, device: torch.device) -> Mapping[str, Tensor | bool]:
        """Where a phase may move each weight of a member; worked out once."""
        return _masks(family, arch, phase.moves, device)

    def pace(self, steps: int) -> float:
        """FedNova's a_i, for methods that ask; 1 for the others."""
        return self.local.optimiser.pace(steps, self.lr, self.mu) if self.paced else 1.0

    def macs(self, family: Family, arch: Arch, sizes: Sequence[int]) -> int:
        """Multiply-adds of training on batches of these sizes; a backward pass costs two forward ones."""
        if not self.drawn:
            return sum(sizes) * self._macs(family, arch, self.phases)
        return sum(size * self._macs(family, arch, self.phases_at(step)) for step, size in enumerate(sizes))

    def _macs(self, family: Family, arch: Arch, phases: tuple[Phase, ...]) -> int:
        runs = [run for phase in phases for run in passes(phase.objective)]
        nets = [(arch if share is None else family.nested(arch, share).arch, times) for share, times in runs]
        teaching = family.macs(arch) if self.taught else 0
        return teaching + sum(times * family.macs(net) for net, times in nets)

    def start_slots(self, weights: State, family: Family) -> OptimiserState:
        """Empty optimiser slots."""
        return {
            slot: {name: torch.zeros_like(weights[name]) for name in family.trainable}
            for slot in self.local.optimiser.slots
        }


def shares_of(phases: Sequence[Phase]) -> tuple[float, ...]:
    """Return the shares of the nested nets that phases run."""
    runs = dict.fromkeys(share for phase in phases for share in phase.objective.shares)
    return tuple(share for share in runs if share is not None)


@dataclass(frozen=True)
class Batch:
    """One batch of one client, or of a stack of clients with a leading dimension."""

    inputs: Tensor
    targets: Tensor
    held: Tensor
    key: Tensor
    share: Tensor = field(default_factory=lambda: torch.ones(()))  # of the client's net, for the scaler
    taught: Tensor | None = None


def train_pass(local: Local) -> Pass:
    """How nets run in training."""
    tracks = local.norm in ("tracked", "local")
    return Pass(train=True, statistics="track" if tracks else "batch", scaler=local.scaler)


def teach(family: Family, arch: Arch, local: Local, state: State, batch: Batch) -> Tensor:
    """The logits that a client's own net gives before a batch moves it. May be vmapped."""
    with torch.no_grad():
        logits, _ = family.net(arch)(state, batch.inputs, train_pass(local), batch.key, share=batch.share)
    return logits.movedim(family.layout.class_dim, 1)


def gradient(
    learner: Learner, family: Family, arch: Arch, objective: Objective, state: State, received: State, batch: Batch
) -> tuple[State, tuple[Tensor, State]]:
    """One client's gradient of one objective, with the loss and the norm statistics seen. May be vmapped."""
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in family.trainable}
    rest = {name: value for name, value in state.items() if name not in moving}

    def loss_of(weights: State) -> tuple[Tensor, tuple[Tensor, State]]:
        own = {**weights, **rest}
        sample = batch.inputs, batch.targets, batch.held
        view = View(family, arch, own, *sample, received, mode, batch.key, batch.taught, share=batch.share)
        loss = objective(view)
        return loss, (loss.detach(), {name: value.detach() for name, value in view.seen.items()})

    grads, aux = grad(loss_of, has_aux=True)(moving)
    return grads, aux


def clipped(grads: State, clip: float) -> State:
    """Bound the norm of one client's whole gradient: torch.nn.utils.clip_grad_norm_, with its small constant."""
    if not clip:
        return grads
    total = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    factor = (clip / (total + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def laid_gradient(
    learner: Learner,
    family: Family,
    arch: Arch,
    objective: Objective,
    net: LaidNet,
    state: State,
    received: State,
    batch: Batch,
) -> tuple[State, tuple[Tensor, State]]:
    """What `vmap(gradient)` gives, with the clients' own net run side by side instead of stacked."""
    mode = train_pass(learner.local)
    moving = {name: state[name] for name in family.trainable}
    rest = {name: value for name, value in state.items() if name not in moving}

    def one(
        weights: State,
        received: State,
        own: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        taught: Tensor | None,
        logits: Tensor | None,
    ) -> Tensor:
        inputs, targets, held, key, share = own
        known: dict[float | None, Tensor] = {} if logits is None else {None: logits}
        sample = inputs, targets, held
        return objective(View(family, arch, weights, *sample, received, mode, key, taught, known, share=share))

    def loss_of(weights: State) -> tuple[Tensor, Tensor]:
        logits = None
        if None in objective.shares:
            shares = batch.share if mode.scaler else None
            logits = net({**weights, **rest}, batch.inputs, family.layout.class_dim, shares)
        own = (batch.inputs, batch.targets, batch.held, batch.key, batch.share)
        dims = (0, 0, 0, None if batch.taught is None else 0, None if logits is None else 0)
        losses = vmap(one, dims)({**weights, **rest}, received, own, batch.taught, logits)
        return losses.sum(), losses.detach()  # a client's weights enter its own loss alone

    grads, losses = grad(loss_of, has_aux=True)(moving)
    return grads, (losses, {})


def move(
    learner: Learner,
    phase: Phase,
    state: State,
    slots: OptimiserState,
    grads: State,
    masks: Mapping[str, Tensor | bool],
    step: int,
) -> tuple[State, OptimiserState]:
    """Apply one phase's gradient where the phase may move; elsewhere weights *and slots* stay, bit for bit.

    Masking gradients would not do: momentum and weight decay move a weight whose gradient is zero.
    """
    if phase.freeze == "gradient":
        grads = {name: g if masks[name] is True else g * masks[name] for name, g in grads.items()}
        masks = dict.fromkeys(grads, True)
    free = {name: g for name, g in grads.items() if masks[name] is not False}
    if not free:
        return state, slots
    moved, new_slots = learner.local.optimiser.update(state, slots, free, learner.lr, step)
    for name in free:
        mask = masks[name]
        if isinstance(mask, Tensor):
            moved[name] = torch.where(mask, moved[name], state[name])
            for slot, values in new_slots.items():
                values[name] = torch.where(mask, values[name], slots[slot][name])
    return {**state, **moved}, {slot: {**slots[slot], **values} for slot, values in new_slots.items()}


# --- batches ----------------------------------------------------------------------------------------------------


def batched(samples: Tensor, batch_size: int, last_batch: LastBatch = "keep") -> list[Tensor]:
    """Samples, or their positions, in batches. A tail of one sample joins the batch before it."""
    edges = list(range(0, len(samples), batch_size))
    if len(edges) > 1 and (tail := len(samples) - edges[-1]) < batch_size:
        if last_batch == "drop":
            samples = samples[: edges.pop()]
        elif last_batch == "merge" or tail == 1:
            edges.pop()
    return [samples[start:stop] for start, stop in pairwise([*edges, len(samples)])]


def itinerary(size: int, local: Local, key: int) -> list[Tensor]:
    """The samples of each batch a client goes through in one round, epoch after epoch, in an order of its own."""
    batches = []
    for epoch in range(local.epochs):
        order = noise.order(noise.key(key, epoch), size)
        batches += batched(order, local.batch_size, local.last_batch)
    return batches


def augment(inputs: Tensor, local: Local, key: Tensor) -> Tensor:
    """Random crops and flips of a batch of images, drawn from the key. Pure: may be vmapped."""
    if (local.crop or local.flip) and inputs.dim() != 4:
        raise ConfigError(
            f"crop = {local.crop} and flip = {local.flip} were asked for; they are for images (channel, height, "
            f"width), and a sample has shape {tuple(inputs.shape[1:])}."
        )
    if local.crop:
        pad = local.crop
        height, width = inputs.shape[-2:]
        if pad >= min(height, width):
            raise ConfigError(
                f"crop = {pad} was asked for; images are {height}×{width}, so that some crops would be of padding "
                f"alone. Up to {min(height, width) - 1} fits."
            )
        padded = F.pad(inputs, (pad,) * 4)
        shift = noise.uniform(noise.fold_in(key, -1), (2, len(inputs)), torch.float32)
        top, left = (shift * (2 * pad + 1)).long()
        rows = top[:, None] + torch.arange(height, device=inputs.device)
        columns = left[:, None] + torch.arange(width, device=inputs.device)
        padded = torch.take_along_dim(padded, rows[:, None, :, None], -2)
        inputs = torch.take_along_dim(padded, columns[:, None, None, :], -1)
    if local.flip:
        flipped = noise.uniform(noise.fold_in(key, -2), (len(inputs),), torch.float32) < 0.5
        inputs = torch.where(flipped.reshape([-1] + [1] * (inputs.dim() - 1)), inputs.flip(-1), inputs)
    return inputs
