"""The objective of adversarial training, on clean and attacked samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.family.net import Pass
from fedquilt.round.training.attacks import AdversarialTraining

if TYPE_CHECKING:
    from fedquilt.family.member import Member
from fedquilt.round.training.objectives import Objective, Passes, TaskLoss, Wrapping
from fedquilt.round.training.view import View


@dataclass(frozen=True)
class Adversarial(Wrapping):
    """Equation 1 of Split-Mix: (1 − λn)·L(x) + λn·L(x + δ), where an attack finds δ.

    Clean samples go through a net's clean norms. The attack and attacked samples go through the
    robust norms (algorithm 4). Without dual norms this is the adversarial training of Madry et al.
    (2018). If λn is drawn for every sample, the net gets it as an input, for the clean sample, the
    attacked sample and the attack (OAT).
    """

    how: AdversarialTraining = AdversarialTraining()  # Weight and attack
    raised: Objective = TaskLoss()  # Loss that the attack increases (algorithm 4, line 10)

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return the passes over clean and attacked samples, and those of the attack itself.

        Clean or attacked samples are left out if their weight is always 0.
        """
        kinds = self._clean + self._noised
        trained = tuple(net_passes.repeated(kinds) for net_passes in self.objective.passes(member))
        if not self._noised:
            return trained
        steps = self.how.attack.steps
        return (
            *trained,
            *(net_passes.searched(steps) for net_passes in self.raised.passes(member)),
        )

    @property
    @override
    def copies(self) -> frozenset[str]:
        return self.objective.copies | self.raised.copies

    @property
    @override
    def reads_its_nets_alone(self) -> bool:
        return self.objective.reads_its_nets_alone and self.raised.reads_its_nets_alone

    @override
    def __call__(self, view: View) -> Tensor:
        weight: float | Tensor = self.how.all[0]
        if self.how.draws:
            weight = self.how.draw(noise.fold_in(view.key, noise.Stream.SAMPLE_WEIGHT), view.inputs)
            view = replace(view, condition=weight)
        losses = []
        if self._clean:
            clean = view.through(0.0)
            losses.append(self._weighted(clean, 1 - weight))
            view.norm_statistics.update(clean.norm_statistics)
        if self._noised:
            noised = view.through(
                1.0, weights={**view.weights, **view.norm_statistics}, inputs=self._attacked(view)
            )
            losses.append(self._weighted(noised, weight))
            view.norm_statistics.update(noised.norm_statistics)
        return torch.stack(losses).sum()

    def _weighted(self, view: View, weight: float | Tensor) -> Tensor:
        """Return the objective's loss of a batch, times a weight.

        Args:
            view: The batch, clean or attacked. Its `importance` is set if there is a weight per
                sample.
            weight: One number for the batch, or (sample,) one for each sample.
        """
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
        """Return the samples of a batch, attacked for the view's present weights (sample, …).

        The attack runs on robust norms. No gradient flows through it.
        """
        start_noise = noise.uniform(
            noise.fold_in(view.key, noise.Stream.ATTACK_START), view.inputs.shape, view.inputs.dtype
        )
        weights = {**view.weights, **view.norm_statistics}  # Statistics of clean samples included.
        still = view.through(1.0, weights={name: value.detach() for name, value in weights.items()})
        still.mode = self._searching(still.mode)

        def loss(inputs: Tensor) -> Tensor:
            return self.raised(still.through(1.0, inputs=inputs))

        return self.how.attack(loss, view.inputs, start_noise)

    def _searching(self, mode: Pass) -> Pass:
        """Return how nets run while an attack searches, given how they run in training (`mode`).

        Norms do not track statistics then. With `search` "evaluation", dropout is off too, and
        norms that track use their stored statistics.
        """
        if self.how.search == "training":
            return replace(mode, statistics="batch")
        tracked = mode.statistics == "track"
        return replace(mode, train=False, statistics="stored" if tracked else "batch")
