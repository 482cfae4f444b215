"""Attacks on samples: pure functions of (loss, samples, noise), the same for one net, a stack of them and a mixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.errors import ConfigError, DataError
from fedquilt.tasks import Classification, Task

if TYPE_CHECKING:
    from fedquilt.data import FederatedData

Search = Literal["training", "evaluation"]
_CHUNK = 4096  # samples that are looked at at once
_ROUNDING = 1e-6  # of bytes that became real numbers


@dataclass(frozen=True)
class PGD:
    """Projected gradient descent (Madry et al. 2018): sign steps up the loss that stay near a sample and in its range.

    The defaults are those of Split-Mix, section 5.2, in training and in tests.
    """

    eps: float = 8 / 255  # how far a number may be moved
    steps: int = 7  # of the gradient's sign
    size: float = 2 / 255  # of a step
    start: bool = True  # from a random point around the sample, else from the sample itself
    low: float = 0.0  # the range of the numbers in a sample
    high: float = 1.0

    def __post_init__(self) -> None:
        within(
            self,
            eps="[0, inf)",
            steps="[0, inf)",
            size="[0, inf)",
            low="(-inf, inf)",
            high="(-inf, inf)",
        )
        if not self.low < self.high:
            raise ConfigError(
                f"PGD was asked to stay between low = {self.low:g} and high = {self.high:g}: no range."
            )

    def __call__(self, loss: Callable[[Tensor], Tensor], inputs: Tensor, drawn: Tensor) -> Tensor:
        """The attacked samples. `drawn` are numbers in [0, 1), shaped as the samples, that the start is taken from.

        `loss` may be the mean or the sum over samples: only the gradient's sign counts.
        """
        return self._climbed(grad(loss), inputs, drawn)

    def _climbed(self, slope: Callable[[Tensor], Tensor], inputs: Tensor, drawn: Tensor) -> Tensor:
        least, most = ((inputs + by).clamp(self.low, self.high) for by in (-self.eps, self.eps))
        found = (
            (inputs + self.eps * (2 * drawn - 1)).clamp(self.low, self.high)
            if self.start
            else inputs
        )
        for _ in range(self.steps):
            found = torch.minimum(
                torch.maximum(found + self.size * slope(found).sign(), least), most
            )
        return found.detach()

    def on(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        seed: int = 0,
        task: Task = Classification(),
    ) -> Tensor:
        """The samples as they are worst for a plain module, one of `run.deploy` or any other, as it runs now.

        In training mode its norms keep the statistics of what they see on the way, as in any forward.
        """
        self._refuse(inputs, "the samples given", "Give them as they are without normalisation")
        key = torch.tensor(noise.key(seed), device=inputs.device)
        drawn = noise.uniform(key, inputs.shape, inputs.dtype)
        kept = (
            value.dtype
            for value in (*module.parameters(), *module.buffers())
            if value.is_floating_point()
        )
        kind = next(kept, inputs.dtype)

        def slope(x: Tensor) -> Tensor:
            """By plain autograd: torch.func forbids what a module writes into itself, as norms do in training."""
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                loss = task.mean_loss(
                    module(x.to(kind, copy=True)), targets
                )  # it may begin in place
                (found,) = torch.autograd.grad(
                    loss + 0 * x.sum(), x
                )  # zero where no slope reaches the samples
            return found

        return self._climbed(slope, inputs, drawn)

    def check(self, data: FederatedData) -> None:
        """Refuse samples outside of the range: an attack would first of all move them into it."""
        for what, count, samples in (
            ("training", len(data.targets), data.samples),
            ("test", len(data.test_targets), data.test_samples),
        ):
            for first in range(0, count, _CHUNK):
                seen = samples(torch.arange(first, min(first + _CHUNK, count)))
                self._refuse(
                    seen,
                    f"the {what} samples of {data.name}",
                    "Load the data with normalise = 'none'",
                )

    def _refuse(self, samples: Tensor, whose: str, remedy: str) -> None:
        if not samples.is_floating_point():
            raise DataError(
                f"an attack was asked for; it moves real numbers, and {whose} are {samples.dtype}."
            )
        if not samples.numel():
            return
        lowest, highest = float(samples.min()), float(samples.max())
        if lowest < self.low - _ROUNDING or highest > self.high + _ROUNDING:
            raise DataError(
                f"an attack was asked for that keeps samples in [{self.low:g}, {self.high:g}]; among {whose} are "
                f"numbers from {lowest:.4g} to {highest:.4g}. {remedy}, or set the attack's low, high, eps and size "
                "in the data's unit."
            )


@dataclass(frozen=True)
class AdversarialTraining:
    """Training on attacked samples beside clean ones (Split-Mix, equation 1).

    With several weights every sample draws one, which conditioned norms are told (OAT, Wang et al. 2020).

    Attacks raise the task's plain loss, even where the trained loss is masked (algorithm 4, line
    10). The paper does not say in which mode the net is meanwhile. With "training", norms use the
    statistics of the attacked batch. With "evaluation", as in Split-Mix's released code, tracked
    norms use their stored statistics, and dropout and scaler are off.
    """

    weight: float | tuple[float, ...] = (
        0.5  # of attacked samples' loss (λn): 0 none, 1 all; several: drawn by sample
    )
    attack: PGD = PGD()  # on every batch
    search: Search = "training"  # Mode of the net while an attack is searched

    def __post_init__(self) -> None:
        within(self, weight="[0, 1]")
        one_of(self, search=Search)
        if self.weight == ():
            raise ConfigError(
                "adversarial training was given no weights to draw from; (0, 0.5, 1) would fit."
            )

    @property
    def draws(self) -> bool:
        """Whether every sample draws its own."""
        return isinstance(self.weight, tuple)

    @property
    def all(self) -> tuple[float, ...]:
        return self.weight if isinstance(self.weight, tuple) else (self.weight,)

    def draw(self, key: Tensor, like: Tensor) -> Tensor:
        """A weight for each sample of a batch, all of them as likely."""
        place = (noise.uniform(key, (len(like),), torch.float32) * len(self.all)).long()
        # Summed up from what is known: a list of numbers would have to be copied to the device.
        return torch.stack(
            [(place == at).to(like.dtype) * weight for at, weight in enumerate(self.all)]
        ).sum(0)


def by_sample(key: int, rows: Tensor, like: Tensor) -> Tensor:
    """Numbers in [0, 1) for samples at positions: a sample's are its own, whoever is in its batch."""
    keys = noise.fold_in(
        torch.full_like(rows, key), rows
    )  # filled on the device: it may be recorded
    return vmap(lambda one: noise.uniform(one, like.shape[1:], like.dtype))(keys)
