"""Settings of local training that all methods have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.family.norms import BatchStatistics, NormPolicy, norm_policy
from fedquilt.names import nearest
from fedquilt.round.attack import AdversarialTraining
from fedquilt.round.training.augmentation import Intensity
from fedquilt.round.training.objectives import (
    Adversarial,
    MaskedCrossEntropy,
    Objective,
    TaskLoss,
    Wrapping,
    around,
    found_wrapper,
)
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.schedules import Constant, Cosine, Steps

LastBatch = Literal["keep", "drop", "merge"]
Masked = Literal["", "client", "batch"]


@dataclass(frozen=True)
class Local:
    """Settings of local training, the same for every method."""

    optimiser: SGD | Adam | AdamW = SGD()  # Optimizer that clients use
    schedule: Constant | Steps | Cosine = Constant()  # of its learning rate, over the rounds
    epochs: int = 1  # over its data, a round
    batch_size: int = 32  # samples a step
    last_batch: LastBatch = (
        "keep"  # one that is not full: trained on, left out, or joined to the one before
    )
    norm: NormPolicy = (
        BatchStatistics()
    )  # Norm policy: a name of `fedquilt list norms`, or file.py:Class
    scaler: bool = (
        False  # Divide the outputs of all cut hidden layers by the client's share, in training only
    )
    masked: Masked = ""  # mask the logits of classes absent from the client or the batch, where targets are classes
    crop: int = (
        0  # Pixels of padding on every side before a random crop of the old size. 0: no crops
    )
    flip: bool = False  # Flip images at random: left to right, or along `flip_axes`
    flip_axes: tuple[
        int, ...
    ] = ()  # Axes of images that `flip` mirrors, from 0 on. Empty: the last
    intensity: Intensity | None = None  # Random scale, offset and noise of inputs. None: no changes
    keep_optimizer: bool = (
        False  # Clients keep the state of their optimizer, such as momentum, between rounds
    )
    adversarial: AdversarialTraining | None = (
        None  # training on attacked samples too; None: on clean ones alone
    )
    objective: Wrapping | None = (
        None  # Objective that wraps the loss, by name or as file.py:Class; None: none
    )

    def __post_init__(self) -> None:
        within(self, epochs="[1, inf)", batch_size="[1, inf)", crop="[0, inf)")
        one_of(self, last_batch=LastBatch, masked=Masked)
        wrong = {}
        if self.flip_axes and not self.flip:
            axes = list(self.flip_axes)
            wrong["flip_axes"] = f"{axes} was asked for without flip = true, which it needs."
        if self.intensity is not None and not isinstance(self.intensity, Intensity):
            wrong["intensity"] = (
                f"{self.intensity!r} was asked for; fq.Intensity(scale=0.1) would work."
            )
        object.__setattr__(self, "flip_axes", tuple(self.flip_axes))  # A list has no hash
        try:
            object.__setattr__(self, "norm", norm_policy(self.norm))
        except ConfigError as error:
            wrong["norm"] = str(error)
        try:
            if self.objective is not None:
                object.__setattr__(self, "objective", found_wrapper(self.objective))
        except ConfigError as error:
            wrong["objective"] = str(error)
        refuse(self, wrong)

    def changed(self, **changes: Any) -> Self:
        """Return the settings with some of them changed. `lr` is short for the optimizer's learning rate."""
        names = [field.name for field in fields(self)]
        for name in changes:
            if name not in (*names, "lr"):
                raise ConfigError(
                    f"local training has no setting {name!r}.{nearest(name, (*names, 'lr'))}"
                )
        if "lr" in changes:
            optimiser = changes.get("optimiser", self.optimiser)
            changes["optimiser"] = replace(optimiser, lr=changes.pop("lr"))
        return replace(self, **changes)

    def build_objective(self, share: float | None = None) -> Objective:
        """Return what clients minimize: the loss, on attacked samples too if asked for, inside the user's wrapper.

        Args:
            share: Share of the whole model, for the loss of a nested net. None: the client's own net.
        """
        plain = TaskLoss(share)
        loss: Objective = MaskedCrossEntropy(self.masked, share) if self.masked else plain
        # With no weight on attacked samples nothing is to be attacked; of several, 0 is one that may be drawn.
        if self.adversarial is not None and any(self.adversarial.all):
            loss = Adversarial(loss, self.adversarial, plain)
        return loss if self.objective is None else around(self.objective, loss)
