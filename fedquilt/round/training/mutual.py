"""Deep mutual learning: two nets of a client that learn from its samples and from each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import one_of, within
from fedquilt.round.training.objectives import Passes, Wrapping, together
from fedquilt.round.training.view import View
from fedquilt.terms import WHOLE

if TYPE_CHECKING:
    from fedquilt.family.member import Member

# Distance between outputs: the task's divergence, or squares.
Distance = Literal["divergence", "logits"]


@dataclass(frozen=True)
class Mutual(Wrapping):
    """Sum of the losses of two variants of the client's net, which teach each other.

    With the nets p and k and a batch B (RaFL, equations 4 and 5; Zhang et al. 2018):

        L_p = L(p; B) + w D(k ‖ p; B)
        L_k = L(k; B) + w D(p ‖ k; B)

    L is the wrapped objective, such as cross-entropy. D is the task's mean divergence: KL at
    temperature 1 where targets are classes. The weight w is 1 in the papers.

    Each loss treats the other net's output as a constant. So one backward pass through the sum
    gives every weight the gradient of its own net's loss, as
    `test_one_backward_pass_gives_the_gradients_of_equations_4_and_5_on_separate_nets` shows. Both
    losses are computed before either net changes.
    """

    pair: tuple[str, str] = (WHOLE, WHOLE)  # Variants that learn together
    # Variants of the pair that learn. The other one is a fixed teacher. Empty: both learn
    learns: tuple[str, ...] = ()
    # Distance D: the task's divergence, or the mean squared difference of logits
    distance: Distance = "divergence"
    # True: the teacher's output is a constant. False: gradients also flow into it. If only one net
    # learns, the gradient of the other net's loss before the batch (`View.taught`) is then added,
    # as in code that lets gradients accumulate.
    detach: bool = True
    weight: float = 1.0  # Weight w of D. 0: each net learns from the samples only

    def __post_init__(self) -> None:
        one_of(self, distance=Distance)
        within(self, weight="[0, inf)")

    @property
    def students(self) -> tuple[str, ...]:
        """Return the variants of the pair that learn: those of `learns`, or both if it is empty."""
        return self.learns or self.pair

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        pair = [member.at(variant) for variant in self.pair]
        wrapped = [
            net for variant in self.students for net in self.objective.nets(member.at(variant))
        ]
        return tuple(dict.fromkeys((*pair, *wrapped)))

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return the passes of both nets on a batch. A fixed teacher only runs forward.

        Args:
            member: Pair of nets that the client trains.
        """
        passes: list[Passes] = []
        for variant in self.pair:
            net = member.at(variant)
            if variant in self.students:
                passes += (Passes(net), *self.objective.passes(net))
            else:
                passes.append(Passes(net, backward=0, saved=0))
        return together(passes)

    @override
    def __call__(self, view: View) -> Tensor:
        losses: list[Tensor] = []
        for variant in self.students:
            (other_variant,) = (name for name in self.pair if name != variant)
            student = view.member.at(variant)
            teacher = self._teacher(view, other_variant)
            outputs = view.logits(student)
            student_view = replace(view, member=student, norm_statistics={})
            losses += (self.objective(student_view), self._apart(view, outputs, teacher))
            view.norm_statistics |= student_view.norm_statistics
            if not self.detach and len(self.students) == 1:
                assert view.taught is not None, (
                    "a learner with `taught` has the logits from before the batch"
                )
                losses.append(self._apart(view, view.taught, outputs))
        return torch.stack(losses).sum()

    def _teacher(self, view: View, variant: str) -> Tensor:
        """Return the logits (sample, class, …) of the net from which the other one learns.

        They are a constant, unless `detach` is False and the net itself learns too.

        Args:
            view: The batch.
            variant: Variant of the net.
        """
        net = view.member.at(variant)
        if variant in self.students:
            outputs = view.logits(net)
            return outputs.detach() if self.detach else outputs
        with torch.no_grad():
            return view.logits(net)

    def _apart(self, view: View, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return w D(teacher ‖ outputs), averaged over the batch.

        D is the mean squared difference if `distance` is "logits", else the task's divergence.

        Args:
            view: The batch, with targets that say which values count.
            outputs: (sample, class, …) Logits of the net that learns.
            teacher: (sample, class, …) Logits that it is compared with.
        """
        if not self.weight:
            return outputs.new_zeros(())
        if self.distance == "logits":
            return self.weight * (outputs - teacher).square().mean()
        divergences = view.task.divergences(outputs, teacher, view.targets)
        # If no target counts, the sum is 0, and so is the mean.
        return self.weight * divergences.sum() / view.task.counted(view.targets).sum().clamp(min=1)
