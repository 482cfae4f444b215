"""Server optimizers: options of the mean that step from the old weights towards it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import within


class ServerOptimizer(Protocol):
    """Contract of a server optimizer, which turns the mean change of clients into a step."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the tensors that it keeps for every weight, such as `momentum`."""
        ...

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the step from the old weights, and the new slots.

        Args:
            change: (value,) Mean of the clients' weights minus the old weights.
            slots: (value,) Slots of the last round by name. They start at zero.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """No server optimizer: the server takes the mean of the clients' weights."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Return an empty tuple, because nothing is kept between rounds."""
        return ()

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change itself, so that the server takes the mean, and no slots."""
        return change, {}


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM (Hsu et al. 2019). A learning rate of 1 and momentum 0 give the plain mean."""

    lr: float = 1.0  # Learning rate of the server
    momentum: float = 0.9  # Fraction of the last step that is added to the next one

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", momentum="[0, 1)")

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the name of its only slot, `momentum`: the velocity."""
        return ("momentum",)

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return lr · v with the velocity v ← momentum · v + Δ, which is the new slot.

        Δ is `change`, and the old v is in the slot `momentum`.
        """
        velocity = self.momentum * slots["momentum"] + change
        return self.lr * velocity, {"momentum": velocity}


@dataclass(frozen=True)
class ServerAdam:
    """FedAdam (Reddi et al. 2021, algorithm 2), without bias correction as published.

        m ← β1 m + (1 − β1) Δ
        v ← β2 v + (1 − β2) Δ²
        x ← x + η m / (√v + τ)

    Δ is the change from the server's weights to the mean. The paper starts v at τ² or more. Here m
    and v start at 0.
    """

    lr: float = 0.01  # Learning rate η of the server
    beta1: float = 0.9  # Share of the mean change that is kept
    beta2: float = 0.99  # Share of the mean square that is kept
    # Constant added to the root of the mean square. Larger values make steps less adaptive
    tau: float = 1e-3

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", beta1="[0, 1)", beta2="[0, 1)", tau="(0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of its slots, `mean` (m) and `square` (v)."""
        return ("mean", "square")

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return η m / (√v + τ), and the new m and v as slots.

        Δ is `change`, and the old m and v are in `slots`.
        """
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * change
        square = self.mean_square(slots["square"], change.square())
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}

    def mean_square(self, square: Tensor, squared: Tensor) -> Tensor:
        """Return the new mean square v.

        Args:
            square: Mean square of the round before.
            squared: Δ² of this round, of the same shape.
        """
        return self.beta2 * square + (1 - self.beta2) * squared


@dataclass(frozen=True)
class ServerYogi(ServerAdam):
    """FedYogi (Reddi et al. 2021, algorithm 2), which is `ServerAdam` with another mean square.

        v ← v − (1 − β2) Δ² sign(v − Δ²)

    The mean square v decreases by at most (1 − β2) Δ² in a step, so that it falls more slowly than
    in `ServerAdam`.
    """

    beta2: float = 0.99  # One minus the rate at which the mean square changes

    @override
    def mean_square(self, square: Tensor, squared: Tensor) -> Tensor:
        """Return the new mean square v. Arguments are those of `ServerAdam.mean_square`."""
        return square - (1 - self.beta2) * squared * torch.sign(square - squared)


@dataclass(frozen=True)
class ServerStep:
    """A step towards the mean, scaled by the learning rate. A rate of 1 gives the plain mean."""

    lr: float = 1.0  # Learning rate of the server

    @property
    def slots(self) -> tuple[str, ...]:
        """Return an empty tuple, because nothing is kept between rounds."""
        return ()

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return lr · Δ, where Δ is `change`, and no slots."""
        return self.lr * change, {}
