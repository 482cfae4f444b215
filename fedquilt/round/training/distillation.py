"""Objectives of distillation: a net learns from the outputs of a teacher."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from fedquilt.family.member import Member
from fedquilt.round.training.objectives import Objective, net_at
from fedquilt.round.training.view import View


@dataclass(frozen=True)
class Distilled(Objective):
    """Distillation loss weight · KL(teacher ‖ nested net) (FedResCuE).

    The teacher is the client's own net before this batch. For tasks without classes,
    `Task.divergences` replaces KL.
    """

    share: float  # Share of the nested net that learns
    weight: float = 1.0  # Factor of the loss. 0: no effect

    reads_its_nets_alone = True

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return (net_at(member, self.share),)

    @override
    def __call__(self, view: View) -> Tensor:
        assert view.taught is not None, (
            "a learner with `taught` has the logits from before the batch"
        )
        logits = view.logits(net_at(view.member, self.share))
        divergences = view.task.divergences(logits, view.taught, view.targets)
        # If no target counts, the sum is 0, and so is the mean.
        return self.weight * divergences.sum() / view.task.counted(view.targets).sum().clamp(min=1)


@dataclass(frozen=True)
class FromTeacher(Objective):
    """Base class of losses on public samples, with the teacher's rows as `View.taught`."""

    reads_its_nets_alone = True

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return (member,)

    @override
    def __call__(self, view: View) -> Tensor:
        assert view.taught is not None, "a learner with a `teacher` has its rows"
        return self.loss(view, view.logits(), view.taught)

    @abstractmethod
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            view: The batch.
            logits: (sample, class, …) Logits of the net.
            rows: (sample, …) Rows of the teacher for the samples of the batch.
        """


@dataclass(frozen=True)
class Imitation(FromTeacher):
    """KL(teacher ‖ net) at temperature 1, where the teacher's rows are logits (FedDF).

    For tasks without classes, `Task.divergences` gives the distance instead, such as the squared
    error for a regression.
    """

    @override
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        divergences = view.task.divergences(logits, rows, view.targets)
        return divergences.sum() / view.task.counted(view.targets).sum().clamp(min=1)


@dataclass(frozen=True)
class SoftLabels(FromTeacher):
    """Cross-entropy −Σ p·log q, where the teacher's rows p are probabilities over classes (DS-FL).

    A row of zeros has no effect.
    """

    @override
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        return -(rows * logits.log_softmax(1)).sum(1).mean()
