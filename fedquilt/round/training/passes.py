"""Passes of a client over samples before or after its training, without optimizer steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad
from typing_extensions import override

from fedquilt.family.net import Pass
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Objective, Passes, TaskLoss
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.view import View
from fedquilt.terms import Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member


@dataclass(frozen=True)
class ClientPass(ABC):
    """A computation over a client's samples, batch by batch, or over the public samples.

    Learners list passes in `before` and `after`. Every engine runs them, and their results reach
    `MethodState.finish` as `Trained.passes[name]`. Subclasses are frozen dataclasses.
    """

    name: str  # Name of the result. Passes of one learner have different names.

    @property
    def public(self) -> bool:
        """Return True if it runs on the public samples instead of the client's own."""
        return False

    @property
    def draw(self) -> int:
        """Return the number of public samples that are drawn for each round; 0: all."""
        return 0

    def batch_size(self, local: LocalTraining) -> int:
        """Return the number of samples that run at once.

        By default it is that of `local`, the client's training.
        """
        return local.batch_size

    def mode(self, local: LocalTraining) -> Pass:
        """Return how nets run. By default they run as in a training step of `local`."""
        return local.norm.training_pass(local.scaler)

    @abstractmethod
    def __call__(self, view: View) -> State:
        """Return the named tensors that one batch gives. `view` has the batch and runs nets on it.

        `merged` combines the results of all batches. The function must be pure, because it may be
        called under `vmap`.
        """

    @abstractmethod
    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return how often it runs each net of `member` on a batch, which gives its cost."""

    def merged(self, parts: Sequence[Weights], sizes: Sequence[int]) -> State:
        """Return the result over all batches, by the names that each batch has.

        By default it is the mean over samples, so that a batch counts by its size.

        Args:
            parts: Results of the batches.
            sizes: Number of samples of each batch.
        """
        total = sum(sizes)
        weights = [size / total for size in sizes]
        return {
            name: torch.stack(
                [weight * part[name] for weight, part in zip(weights, parts, strict=True)]
            ).sum(0)
            for name in parts[0]
        }

    def macs(self, member: Member) -> int:
        """Return the multiply-adds of this pass for one sample, over all nets that it runs.

        The nets are `member` or nested in it.
        """
        return sum(net_passes.macs for net_passes in self.passes(member))


@dataclass(frozen=True)
class GradientPass(ClientPass):
    """Gradient of an objective, by weight: its mean over the client's samples."""

    name: str = "gradient"
    objective: Objective = TaskLoss()  # Objective whose gradient is taken

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        return self.objective.passes(member)

    @override
    def __call__(self, view: View) -> State:
        moving = {name: view.weights[name] for name in view.member.trainable}

        def loss_of(weights: State) -> Tensor:
            return self.objective(
                replace(
                    view, weights={**view.weights, **weights}, logits_by_net={}, norm_statistics={}
                )
            )

        gradients: State = grad(loss_of)(moving)
        return gradients


@dataclass(frozen=True)
class LossPass(ClientPass):
    """Value of an objective, as `loss`: its mean over the client's samples."""

    name: str = "loss"
    objective: Objective = TaskLoss()  # Objective that is evaluated

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        # No gradient of weights is needed. Passes of an attack on the samples are still counted.
        return tuple(
            replace(net_passes, backward=0) for net_passes in self.objective.passes(member)
        )

    @override
    def __call__(self, view: View) -> State:
        return {"loss": self.objective(view)}


@dataclass(frozen=True)
class LogitsPass(ClientPass):
    """Logits of the client's net on the public samples, as `logits` (sample, class, …).

    Norms use tracked statistics if the policy tracks them, else those of each batch.
    """

    name: str = "logits"
    samples: int = 0  # Public samples that are drawn for each round; 0: all
    size: int = 0  # Samples that run at once; 0: as many as in training

    @property
    @override
    def draw(self) -> int:
        return self.samples

    @override
    def batch_size(self, local: LocalTraining) -> int:
        return self.size or local.batch_size

    @property
    @override
    def public(self) -> bool:
        return True

    @override
    def mode(self, local: LocalTraining) -> Pass:
        return Pass(train=False, statistics="stored" if local.norm.tracks else "batch")

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        return (Passes(member, backward=0),)

    @override
    def __call__(self, view: View) -> State:
        return {"logits": view.logits()}

    @override
    def merged(self, parts: Sequence[Weights], sizes: Sequence[int]) -> State:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class StatisticsPass(ClientPass):
    """Norm statistics that the client's samples give, by name: their plain mean over batches.

    That is torch's cumulative average. A net without norms has none.
    """

    name: str = "statistics"

    @override
    def mode(self, local: LocalTraining) -> Pass:
        return Pass(statistics="measure")

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        return (Passes(member, backward=0),)

    @override
    def __call__(self, view: View) -> State:
        view.logits()
        return dict(view.norm_statistics)

    @override
    def merged(self, parts: Sequence[Weights], sizes: Sequence[int]) -> State:
        return super().merged(parts, [1] * len(parts))
