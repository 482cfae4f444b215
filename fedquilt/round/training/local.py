"""Settings of local training that all methods have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import ConfigError
from fedquilt.family.norms import BatchStatistics, NormPolicy, norm_policy
from fedquilt.names import nearest
from fedquilt.round.training.adversarial import Adversarial
from fedquilt.round.training.attacks import AdversarialTraining
from fedquilt.round.training.augmentation import Intensity
from fedquilt.round.training.objectives import (
    MaskedCrossEntropy,
    Objective,
    TaskLoss,
    Wrapping,
    around,
    resolve_wrapper,
)
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.schedules import Constant, Cosine, Steps, WithinRound

LastBatch = Literal["keep", "drop", "merge"]  # Treatment of a last batch that is not full.
Masked = Literal["", "client", "batch"]  # Samples whose missing classes are masked. Empty: no mask.


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training, which every method has as `local`.

    A client trains `epochs` times over its samples in every round. It shuffles them in each epoch,
    and takes one optimizer step per batch. `Method.with_local` changes settings of a method.

    Example:
        >>> import fedquilt as fq
        >>> local = fq.LocalTraining(optimizer=fq.optimizers.Adam(), epochs=2)
        >>> local.changed(lr=0.01, batch_size=64).optimizer.lr
        0.01
    """

    optimizer: SGD | Adam | AdamW = SGD()  # Optimizer that clients use
    # Schedule of the learning rate over the rounds
    schedule: Constant | Steps | Cosine = Constant()
    # Schedule of the learning rate over the steps of a round, multiplied by the rate of the round
    within_round: WithinRound = WithinRound()
    epochs: int = 1  # Epochs that a client trains in a round
    batch_size: int = 32  # Samples per step
    # Treatment of a last batch that is not full: keep it, drop it, or merge it with the one before
    last_batch: LastBatch = "keep"
    # Norm policy: a name of `fedquilt list norms`, or file.py:Class
    norm: NormPolicy = BatchStatistics()
    # Divide the outputs of all cut hidden layers by the client's share, in training only
    scaler: bool = False
    # Mask the logits of classes that the client or the batch lacks. Empty: no mask
    masked: Masked = ""
    # Pixels of padding on every side before a random crop to the old size. 0: no crops
    crop: int = 0
    flip: bool = False  # Flip images at random: left to right, or along `flip_axes`
    # Axes of images along which `flip` mirrors, counted from 0. Empty: the last axis
    flip_axes: tuple[int, ...] = ()
    intensity: Intensity | None = None  # Random scale, offset and noise of inputs. None: no changes
    # Clients keep the state of their optimizer, such as momentum, between rounds
    keep_optimizer: bool = False
    # Training on attacked samples too. None: on clean samples only
    adversarial: AdversarialTraining | None = None
    # Objective that wraps the loss, by name or as file.py:Class. None: no wrapper
    objective: Wrapping | None = None

    def __post_init__(self) -> None:
        within(self, epochs="[1, inf)", batch_size="[1, inf)", crop="[0, inf)")
        one_of(self, last_batch=LastBatch, masked=Masked)
        problems = {}
        if self.flip_axes and not self.flip:
            axes = list(self.flip_axes)
            problems["flip_axes"] = f"{axes} was asked for without flip = true, which it needs."
        if self.intensity is not None and not isinstance(self.intensity, Intensity):
            problems["intensity"] = (
                f"{self.intensity!r} was asked for; fq.methods.api.Intensity(scale=0.1) would work."
            )
        if not isinstance(self.within_round, WithinRound):
            problems["within_round"] = (
                f"{self.within_round!r} was asked for; fq.schedules.WithinRound(shape='cosine') "
                "would work."
            )
        object.__setattr__(self, "flip_axes", tuple(self.flip_axes))  # Lists are not hashable.
        try:
            object.__setattr__(self, "norm", norm_policy(self.norm))
        except ConfigError as error:
            problems["norm"] = str(error)
        try:
            if self.objective is not None:
                object.__setattr__(self, "objective", resolve_wrapper(self.objective))
        except ConfigError as error:
            problems["objective"] = str(error)
        refuse(self, problems)

    def changed(self, **changes: Any) -> Self:
        """Return a copy of the settings with some of them changed.

        Args:
            **changes: New values by field. `lr` is short for the learning rate of the optimizer.

        Raises:
            ConfigError: A name is no field, or a value is not allowed.
        """
        names = [field.name for field in fields(self)]
        for name in changes:
            if name not in (*names, "lr"):
                raise ConfigError(
                    f"local training has no setting {name!r}.{nearest(name, (*names, 'lr'))}"
                )
        if "lr" in changes:
            optimizer = changes.get("optimizer", self.optimizer)
            changes["optimizer"] = replace(optimizer, lr=changes.pop("lr"))
        return replace(self, **changes)

    def build_objective(self, share: float | None = None) -> Objective:
        """Return the objective that clients minimize.

        It is the task's loss, masked and on attacked samples if the settings say so, inside the
        user's wrapper.

        Args:
            share: Share of the whole model, for the loss of a nested net. None: the client's own
                net.
        """
        plain = TaskLoss(share)
        loss: Objective = MaskedCrossEntropy(self.masked, share) if self.masked else plain
        # If all weights of attacked samples are 0, there is nothing to attack.
        if self.adversarial is not None and any(self.adversarial.all):
            loss = Adversarial(loss, self.adversarial, plain)
        return loss if self.objective is None else around(self.objective, loss)
