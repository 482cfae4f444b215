"""Optimizers of clients: pure functions that compute, step for step, what torch.optim computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.hardware.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp,
    foreach_mul,
    foreach_sqrt,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)

State = dict[str, Tensor]  # Tensors by the name of the weight.
OptimizerState = dict[str, State]  # Slots of an optimizer, by slot and name.
Tensors = list[Tensor] | tuple[Tensor, ...]


class Optimizer(Protocol):
    """Contract of a client's optimizer.

    `update` returns new weights and slots, for one client's tensors or a stack of them. A learning
    rate in a tensor is () or (client,). The latter is for a stack, whose tensors have the clients
    in dimension 0.
    """

    lr: float  # Learning rate
    clip: float  # Bound on the norm of the whole gradient; 0: none
    ages: ClassVar[bool]  # True: a step depends on the number of steps before it

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the tensors that it keeps for every weight, such as `momentum`."""
        ...

    def update(
        self, weights: State, slots: OptimizerState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimizerState]:
        """Return new weights and slots. Arguments are not modified.

        Args:
            weights: Weights by name. Those without a gradient are ignored.
            slots: Tensors of the optimizer, by slot and name.
            grads: Gradients by name.
            lr: Learning rate: a number, or () or (client,) in a tensor.
            step: Number of steps before this one. It has no effect unless `ages` is True.
        """
        ...

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        """Update tensors in-place and in one kernel.

        Args:
            weights: Trained weights.
            slots: Slots by name, in the order of the weights.
            grads: Gradients, in the order of the weights.
            lr: () Learning rate.
            step: () Number of this step, counted from 1.
        """

    def effective_steps(self, factors: Sequence[float], lr: float, mu: float) -> float:
        """Return FedNova's effective step count ‖a_i‖₁ of a client's round.

        Args:
            factors: Factor of the learning rate in each step. 1 has no effect.
            lr: Learning rate η of the round.
            mu: Weight of the proximal term. 0: none.

        Raises:
            ConfigError: The count is not defined for this optimizer.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, equal to torch.optim.SGD."""

    lr: float = 0.05  # Learning rate
    momentum: float = 0.9  # Share of the last step that is kept; 0: none
    nesterov: bool = False  # Look ahead by the momentum
    weight_decay: float = 0.0  # Weight decay, added to the gradient; 0: none
    clip: float = 0.0  # Bound on the norm of the whole gradient; 0: none

    ages: ClassVar[bool] = False  # A step does not depend on its number

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", momentum="[0, 1)", weight_decay="[0, inf)", clip="[0, inf)")
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "SGD was asked for Nesterov steps without momentum; give it one, such as "
                "momentum=0.9."
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """Return `momentum`, or nothing if there is no momentum."""
        return ("momentum",) if self.momentum else ()

    def update(
        self, weights: State, slots: OptimizerState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimizerState]:
        """Return new weights and slots, as `Optimizer.update` describes."""
        names = list(grads)
        change = [grads[n] for n in names]
        values = [weights[n] for n in names]
        if self.weight_decay:
            change = list(foreach_add(change, values, alpha=self.weight_decay))
        new_slots: OptimizerState = {}
        if self.momentum:
            buffers = list(foreach_mul([slots["momentum"][n] for n in names], self.momentum))
            foreach_add_(buffers, change)
            new_slots["momentum"] = dict(zip(names, buffers, strict=True))
            if self.nesterov:
                change = list(foreach_add(change, buffers, alpha=self.momentum))
            else:
                change = buffers
        if isinstance(lr, Tensor):
            moved = foreach_add(values, _scaled(change, -lr))
        else:
            moved = foreach_add(values, change, alpha=-lr)
        return dict(zip(names, moved, strict=True)), new_slots

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        """Update tensors in-place and in one kernel, as `Optimizer.update_` describes."""
        fused_sgd_(
            weights,
            grads,
            slots.get("momentum", []),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            # Buffers start at zero, which gives the same first step as in torch.
            is_first_step=False,
        )

    def effective_steps(self, factors: Sequence[float], lr: float, mu: float) -> float:
        """Return FedNova's ‖a_i‖₁, the distance that unit gradients move a weight in a round.

        The unit of distance is the round's learning rate. Plain SGD at a constant rate gives the
        number of steps.

        A client's change is −η·G_i·a_i with any non-negative a_i (Wang et al. 2020). A learning
        rate that changes within the round enters a_i as a factor of each step, and η stays the same
        for all clients.

        Args:
            factors: Factor of the learning rate in each step. 1 has no effect.
            lr: Learning rate η of the round.
            mu: Weight of the proximal term; 0: none.
        """
        velocity = distance = 0.0
        for factor in factors:
            pull = 1.0 - lr * mu * distance  # Unit gradient minus the proximal term.
            velocity = self.momentum * velocity + pull
            distance += factor * (pull + self.momentum * velocity if self.nesterov else velocity)
        return distance


@dataclass(frozen=True)
class Adam:
    """Adam, equal to torch.optim.Adam."""

    lr: float = 1e-3  # Learning rate
    beta1: float = 0.9  # Share of the mean gradient that a step keeps
    beta2: float = 0.999  # Share of the mean square gradient that a step keeps
    eps: float = 1e-8  # Added to the root of the mean square
    weight_decay: float = 0.0  # Weight decay, added to the gradient; 0: none
    clip: float = 0.0  # Bound on the norm of the whole gradient; 0: none

    ages: ClassVar[bool] = True  # The bias correction depends on the number of the step

    def __post_init__(self) -> None:
        within(
            self,
            lr="(0, inf)",
            beta1="[0, 1)",
            beta2="[0, 1)",
            eps="(0, inf)",
            weight_decay="[0, inf)",
            clip="[0, inf)",
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """Return `mean` and `square`, the running means of gradients and of their squares."""
        return ("mean", "square")

    def update(
        self, weights: State, slots: OptimizerState, grads: State, lr: float | Tensor, step: int
    ) -> tuple[State, OptimizerState]:
        """Return new weights and slots, as `Optimizer.update` describes."""
        names = list(grads)
        values, change = self._decayed([weights[n] for n in names], [grads[n] for n in names], lr)
        means = foreach_lerp([slots["mean"][n] for n in names], change, 1 - self.beta1)
        squares = list(foreach_mul([slots["square"][n] for n in names], self.beta2))
        foreach_addcmul_(squares, change, change, 1 - self.beta2)
        bias1 = 1 - self.beta1 ** (step + 1)
        bias2 = 1 - self.beta2 ** (step + 1)
        scale = list(foreach_sqrt(squares))
        foreach_div_(scale, math.sqrt(bias2))
        foreach_add_(scale, self.eps)
        if isinstance(lr, Tensor):
            moved = foreach_add(values, foreach_div(_scaled(means, -lr / bias1), scale))
        else:
            moved = foreach_addcdiv(values, means, scale, -lr / bias1)
        new_slots = {
            "mean": dict(zip(names, means, strict=True)),
            "square": dict(zip(names, squares, strict=True)),
        }
        return dict(zip(names, moved, strict=True)), new_slots

    def _decayed(
        self, values: list[Tensor], change: list[Tensor], lr: float | Tensor
    ) -> tuple[Tensors, Tensors]:
        """Return weights and gradients after weight decay, before the rest of the step.

        Adam adds the decay to the gradients. Arguments are not modified.

        Args:
            values: Weights.
            change: Gradients, in the same order.
            lr: Learning rate. Adam does not use it here, but AdamW does.
        """
        if not self.weight_decay:
            return values, change
        return values, foreach_add(change, values, alpha=self.weight_decay)

    def update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        lr: Tensor,
        step: Tensor,
    ) -> None:
        """Update tensors in-place and in one kernel, as `Optimizer.update_` describes."""
        self._fused(
            weights,
            grads,
            slots["mean"],
            slots["square"],
            [],
            [step] * len(weights),
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    @property
    def _fused(self) -> Callable[..., object]:
        return fused_adam_

    def effective_steps(self, factors: Sequence[float], lr: float, mu: float) -> float:
        """Raise a ConfigError, because FedNova's count is defined for SGD only."""
        raise ConfigError(
            f"FedNova was asked to normalize steps of {type(self).__name__}; its effective step "
            "count is defined for SGD. Use SGD locally, or another method."
        )


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).

    Every step first shrinks the weights by `lr * weight_decay`. The decay does not enter the mean
    and the mean square of the gradients. With `weight_decay` 0 this is `Adam`.
    """

    # Weight decay, multiplied by the learning rate and the weights; 0: none
    weight_decay: float = 0.01

    def _decayed(
        self, values: list[Tensor], change: list[Tensor], lr: float | Tensor
    ) -> tuple[Tensors, Tensors]:
        if not self.weight_decay:
            return values, change
        return _scaled(values, 1 - lr * self.weight_decay), change

    @property
    def _fused(self) -> Callable[..., object]:
        return fused_adamw_


def _scaled(values: Tensors, factor: float | Tensor) -> tuple[Tensor, ...]:
    """Return tensors multiplied by one number, or by one number per client. They are new tensors.

    Args:
        values: Tensors. If `factor` has one number per client, clients are in dimension 0.
        factor: Number for all tensors, () or (client,).
    """
    if not isinstance(factor, Tensor):  # torch has separate overloads.
        return foreach_mul(values, factor)
    if not factor.dim():
        return foreach_mul(values, factor)
    return foreach_mul(values, [factor.view(-1, *[1] * (value.dim() - 1)) for value in values])
