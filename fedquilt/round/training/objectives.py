"""Objectives: losses of one batch, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedquilt import noise
from fedquilt.family.net import Pass
from fedquilt.round.attack import AdversarialTraining
from fedquilt.round.cut import prefix
from fedquilt.round.training.optimizers import State
from fedquilt.terms import Arch, Weights

if TYPE_CHECKING:
    from fedquilt.family import Family

_LOT = -4  # the site of the weights that samples draw
_START = -3  # the site an attack starts from; augmentation has the two before it, layers have those from 1 on


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
