"""Attacks on samples, as pure functions of (loss, samples, noise).

They work on one net, a stack of nets, and an average of nets.
"""

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

Search = Literal["training", "evaluation"]  # Mode in which a net runs while it is attacked.
_CHUNK = 4096  # Samples that are checked at once.
_ROUNDING = 1e-6  # Tolerance for rounding, as when bytes become real numbers.


@dataclass(frozen=True)
class PGD:
    """Projected gradient descent (Madry et al. 2018): bounded sign steps that increase the loss.

    The defaults are those of Split-Mix, section 5.2, in training and in tests.
    """

    eps: float = 8 / 255  # Largest change of each value of a sample. 0: samples do not change
    steps: int = 7  # Number of steps along the sign of the gradient
    step_size: float = 2 / 255  # Change of each value in one step
    start: bool = True  # Start at a random point around the sample. False: at the sample itself
    low: float = 0.0  # Smallest value that a sample may have
    high: float = 1.0  # Largest value that a sample may have

    def __post_init__(self) -> None:
        within(
            self,
            eps="[0, inf)",
            steps="[0, inf)",
            step_size="[0, inf)",
            low="(-inf, inf)",
            high="(-inf, inf)",
        )
        if not self.low < self.high:
            raise ConfigError(
                f"PGD was asked to stay between low = {self.low:g} and high = {self.high:g}: no "
                "range."
            )

    def __call__(
        self, loss: Callable[[Tensor], Tensor], inputs: Tensor, start_noise: Tensor
    ) -> Tensor:
        """Return the attacked samples, which differ from `inputs` by at most `eps` in each value.

        They stay within [low, high], and have no gradient.

        Args:
            loss: Function of samples. It may be a mean or a sum over samples, because only the sign
                of its gradient is used.
            inputs: (sample, …) Samples to attack.
            start_noise: (sample, …) Random numbers in [0, 1) that give the starting point.
        """
        return self._climbed(grad(loss), inputs, start_noise)

    def _climbed(
        self, slope: Callable[[Tensor], Tensor], inputs: Tensor, start_noise: Tensor
    ) -> Tensor:
        lower, upper = (
            (inputs + offset).clamp(self.low, self.high) for offset in (-self.eps, self.eps)
        )
        attacked = inputs
        if self.start:
            attacked = (inputs + self.eps * (2 * start_noise - 1)).clamp(self.low, self.high)
        for _ in range(self.steps):
            attacked = torch.minimum(
                torch.maximum(attacked + self.step_size * slope(attacked).sign(), lower), upper
            )
        return attacked.detach()

    def on(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        seed: int = 0,
        task: Task = Classification(),
    ) -> Tensor:
        """Return samples attacked for a plain module, such as one of `run.deploy`.

        The module runs in its present mode. In training mode its norms update their statistics, as
        in any forward pass.

        Args:
            module: Module to attack.
            inputs: (sample, …) Samples within [low, high].
            targets: (sample, …) Their targets.
            seed: Random seed of the starting point.
            task: Task whose loss is increased.
        """
        self._refuse(inputs, "the samples given", "Give them as they are without normalization")
        key = torch.tensor(noise.key(seed), device=inputs.device)
        start_noise = noise.uniform(key, inputs.shape, inputs.dtype)
        dtypes = (
            value.dtype
            for value in (*module.parameters(), *module.buffers())
            if value.is_floating_point()
        )
        kind = next(dtypes, inputs.dtype)

        def slope(x: Tensor) -> Tensor:
            """Return the gradient of the loss at the samples `x`, by plain autograd.

            torch.func does not allow modules to write to themselves, as norms do in training.
            """
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                # The input is copied, because the module may change it in-place.
                loss = task.mean_loss(module(x.to(kind, copy=True)), targets)
                # Adding 0 · x gives a zero gradient if the loss does not depend on the samples.
                (gradient,) = torch.autograd.grad(loss + 0 * x.sum(), x)
            return gradient

        return self._climbed(slope, inputs, start_noise)

    def check(self, data: FederatedData) -> None:
        """Refuse data with samples outside of [low, high], which an attack would first clamp.

        All training and test samples of `data` are looked at.

        Raises:
            DataError: Some are outside, or samples are not real numbers.
        """
        for set_name, count, samples in (
            ("training", len(data.targets), data.samples),
            ("test", len(data.test_targets), data.test_samples),
        ):
            for first in range(0, count, _CHUNK):
                chunk = samples(torch.arange(first, min(first + _CHUNK, count)))
                self._refuse(
                    chunk,
                    f"the {set_name} samples of {data.name}",
                    "Load the data with normalize = 'none'",
                )

    def _refuse(self, samples: Tensor, whose: str, remedy: str) -> None:
        if not samples.is_floating_point():
            raise DataError(
                f"an attack was asked for; it moves real numbers, and {whose} are {samples.dtype}."
            )
        if not samples.numel():
            return
        lowest = float(samples.min())
        highest = float(samples.max())
        if lowest < self.low - _ROUNDING or highest > self.high + _ROUNDING:
            raise DataError(
                f"an attack was asked for that keeps samples in [{self.low:g}, {self.high:g}]; "
                f"among {whose} are numbers from {lowest:.4g} to {highest:.4g}. {remedy}, or set "
                "the attack's low, high, eps and step_size in the data's unit."
            )


@dataclass(frozen=True)
class AdversarialTraining:
    """Training on both clean and attacked samples (Split-Mix, equation 1).

    With several weights, one is drawn for every sample, and conditioned norms get it as an input
    (OAT, Wang et al. 2020).

    Attacks increase the task's plain loss, even if the trained loss is masked (algorithm 4, line
    10). The paper does not say in which mode the net runs during the attack. With "training", norms
    use the statistics of the attacked batch. With "evaluation", as in Split-Mix's released code,
    tracked norms use their stored statistics, and dropout and scaler are off.
    """

    # Weight λn of the attacked samples' loss. 0: clean samples only. Several: drawn per sample
    weight: float | tuple[float, ...] = 0.5
    attack: PGD = PGD()  # Attack on every batch
    search: Search = "training"  # Mode of the net while it is attacked

    def __post_init__(self) -> None:
        within(self, weight="[0, 1]")
        one_of(self, search=Search)
        if self.weight == ():
            raise ConfigError(
                "adversarial training was given no weights to draw from; (0, 0.5, 1) would fit."
            )

    @property
    def draws(self) -> bool:
        """Return True if a weight λn is drawn for every sample, False if all have the same."""
        return isinstance(self.weight, tuple)

    @property
    def all(self) -> tuple[float, ...]:
        """Return all weights λn as a tuple, of one if there is one for all samples."""
        return self.weight if isinstance(self.weight, tuple) else (self.weight,)

    def draw(self, key: Tensor, like: Tensor) -> Tensor:
        """Draw a weight for each sample of a batch, each with the same probability.

        Args:
            key: Random key of the step.
            like: (sample, …) Tensor with the number of samples and the dtype of the result.

        Returns:
            Weights (sample,).
        """
        choice = (noise.uniform(key, (len(like),), torch.float32) * len(self.all)).long()
        # Weights are constants in a sum, because a tensor of them would be copied to the device.
        return torch.stack(
            [(choice == index).to(like.dtype) * weight for index, weight in enumerate(self.all)]
        ).sum(0)


def by_sample(key: int, rows: Tensor, like: Tensor) -> Tensor:
    """Draw random numbers in [0, 1) that depend on a sample's row, not on the rest of its batch.

    Args:
        key: Random key, the same for all samples.
        rows: (sample,) Rows of the samples in their set.
        like: (sample, …) Tensor whose shape and type the result has.
    """
    # The key is written on the device, so that a CUDA graph can capture it.
    keys = noise.fold_in(torch.full_like(rows, key), rows)
    return vmap(lambda sample_key: noise.uniform(sample_key, like.shape[1:], like.dtype))(keys)
