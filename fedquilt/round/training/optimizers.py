"""Optimizers of clients: pure functions that compute, step for step, what torch.optim computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedquilt.checks import within
from fedquilt.errors import ConfigError

State = dict[str, Tensor]
OptimiserState = dict[str, State]


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
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
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
            raise ConfigError(
                "SGD was asked for Nesterov steps without momentum; give it one, such as momentum=0.9."
            )

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
            change = (
                list(torch._foreach_add(change, buffers, alpha=self.momentum))
                if self.nesterov
                else buffers
            )
        if isinstance(lr, Tensor):
            moved = torch._foreach_add(values, torch._foreach_mul(change, -lr))
        else:
            moved = torch._foreach_add(values, change, alpha=-lr)
        return dict(zip(names, moved, strict=True)), new_slots

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
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
        within(
            self,
            lr="(0, inf)",
            beta1="[0, 1)",
            beta2="[0, 1)",
            eps="(0, inf)",
            decay="[0, inf)",
            clip="[0, inf)",
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def update(
        self, weights: State, slots: OptimiserState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimiserState]:
        assert not isinstance(lr, Tensor), "a learning rate on the device is for `update_`"
        if self.decay:
            decayed = torch._foreach_add(
                list(grads.values()), [weights[n] for n in grads], alpha=self.decay
            )
            grads = dict(zip(grads, decayed, strict=True))
        return _adam_step(self, weights, slots, grads, lr, step)

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
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
        raise _no_pace("Adam")


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).

    Every step first shrinks the weights by `lr * decay`. The decay does not enter the mean and the mean square of the
    gradients. With decay 0 this is `Adam`.
    """

    lr: float = 1e-3  # Learning rate
    beta1: float = 0.9  # Share of the mean gradient that a step keeps
    beta2: float = 0.999  # Share of the mean square gradient that a step keeps
    eps: float = 1e-8  # Added to the root of the mean square
    decay: float = 0.01  # Weight decay, multiplied by the learning rate and the weights; 0: none
    clip: float = 0.0  # Bound on the norm of the whole gradient; 0: none

    ages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within(
            self,
            lr="(0, inf)",
            beta1="[0, 1)",
            beta2="[0, 1)",
            eps="(0, inf)",
            decay="[0, inf)",
            clip="[0, inf)",
        )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def update(
        self, weights: State, slots: OptimiserState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimiserState]:
        assert not isinstance(lr, Tensor), "a learning rate on the device is for `update_`"
        if self.decay:
            decayed = torch._foreach_mul([weights[n] for n in grads], 1 - lr * self.decay)
            weights = dict(zip(grads, decayed, strict=True))
        return _adam_step(self, weights, slots, grads, lr, step)

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        torch._fused_adamw_(
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
        raise _no_pace("AdamW")


def _adam_step(
    optimizer: Adam | AdamW,
    weights: State,
    slots: OptimiserState,
    grads: State,
    lr: float,
    step: int,
) -> tuple[State, OptimiserState]:
    """Return weights and slots after Adam's step with bias correction, without weight decay.

    Args:
        optimizer: Provides beta1, beta2 and eps.
        weights: Weights before the step, by name. Names that `grads` lacks are left out.
        slots: Mean and mean square of the gradients, by name.
        grads: Gradients by name.
        lr: Learning rate of this step.
        step: Number of steps before this one.
    """
    names = list(grads)
    change, values = [grads[n] for n in names], [weights[n] for n in names]
    means = torch._foreach_lerp([slots["mean"][n] for n in names], change, 1 - optimizer.beta1)
    squares = list(torch._foreach_mul([slots["square"][n] for n in names], optimizer.beta2))
    torch._foreach_addcmul_(squares, change, change, 1 - optimizer.beta2)
    bias1, bias2 = 1 - optimizer.beta1 ** (step + 1), 1 - optimizer.beta2 ** (step + 1)
    scale = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(scale, math.sqrt(bias2))
    torch._foreach_add_(scale, optimizer.eps)
    moved = torch._foreach_addcdiv(values, means, scale, -lr / bias1)
    new_slots = {
        "mean": dict(zip(names, means, strict=True)),
        "square": dict(zip(names, squares, strict=True)),
    }
    return dict(zip(names, moved, strict=True)), new_slots


def _no_pace(name: str) -> ConfigError:
    return ConfigError(
        f"FedNova was asked to normalise steps of {name}; its effective step count is defined for SGD. "
        "Use SGD locally, or another method."
    )
