"""Normalisation of stored samples for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquilt.errors import ConfigError

Normalize = Literal["auto", "channel", "none"]
_CHUNK = 1024  # Samples that are converted to float64 at a time to measure statistics.
_CHUNK_VALUES = 2**24  # Values converted at a time at most, for large images and volumes.


@dataclass(frozen=True, eq=False)
class Scale:
    """Normalisation of stored samples for a model: (x − mean) / std in each channel.

    It is applied to batches, so that images stay bytes in memory. Bytes take a quarter of the
    memory of float32.
    """

    mean: Tensor  # Mean in stored units, in a shape that broadcasts: (channel, 1, 1).
    std: Tensor  # Standard deviation, in the same shape.

    @staticmethod
    def of(
        inputs: Tensor,
        normalize: Normalize = "auto",
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        counted: Tensor | None = None,
    ) -> Scale | None:
        """Return the normalisation of inputs. None: a model gets the stored values.

        Mean and standard deviation are those that are given, or else those of the inputs. Given
        numbers refer to values from 0 to 1 where inputs are bytes. Nothing is normalised here.

        Args:
            inputs: (sample, channel, …) Stored samples.
            normalize: Kind of normalisation. docs/data.md has a table.
            mean: Mean of each channel. Empty: measured.
            std: Standard deviation of each channel, together with `mean`.
            counted: (sample, …) False at positions that are not measured, because they are padding.
                None: all positions are measured.
        """
        unit = 255.0 if inputs.dtype == torch.uint8 else 1.0
        if bool(mean) != bool(std):
            raise ConfigError("mean and std go together; only one of them was given.")
        if not mean and (normalize == "none" or (normalize == "auto" and unit == 1)):
            return None if unit == 1 else Scale(torch.zeros(1), torch.full((1,), unit))
        if unit == 1 and not inputs.is_floating_point():
            raise ConfigError(
                f"normalize was asked for inputs of {inputs.dtype}; only bytes and real numbers "
                "have it."
            )
        channels = inputs.shape[1] if inputs.dim() > 1 else 1
        if mean and not ({len(mean), len(std)} <= {1, channels}):
            raise ConfigError(
                f"{len(mean)} means and {len(std)} stds were given; a sample has {channels} "
                "channels."
            )
        if mean:
            center, spread = unit * torch.tensor(mean), unit * torch.tensor(std)
        else:
            center, spread = _moments(inputs, counted)
        if not bool((spread > 0).all()):
            raise ConfigError(f"std = {tuple(std)} was asked for; every one must be above 0.")
        shape = (-1, *[1] * (inputs.dim() - 2)) if inputs.dim() > 1 else (1,)
        return Scale(center.float().reshape(shape), spread.float().reshape(shape))

    def __call__(self, stored: Tensor) -> Tensor:
        """Return stored samples (sample, channel, …) as real numbers: (stored − mean) / std."""
        return (stored.to(self.mean.dtype) - self.mean) / self.std

    def to(self, device: torch.device, dtype: torch.dtype) -> Scale:
        """Return the normalisation on a device, in the floating-point type `dtype`."""
        return Scale(self.mean.to(device, dtype), self.std.to(device, dtype))


def _moments(inputs: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of every channel, each (channel,) in float64.

    The standard deviation of a constant channel is 1, so that dividing by it has no effect.

    Args:
        inputs: (sample, channel, …)
        counted: (sample, …) False at positions that are left out. None: all positions count.
    """
    total, square = torch.zeros(2, inputs.shape[1] if inputs.dim() > 1 else 1, dtype=torch.float64)
    step = max(1, min(_CHUNK, _CHUNK_VALUES // max(1, inputs[:1].numel())))
    for start in range(0, len(inputs), step):
        chunk = inputs[start : start + step]
        values = chunk.double().reshape(len(chunk), len(total), -1)
        if counted is not None:
            values = values * counted[start : start + step].reshape(len(chunk), 1, -1)
        total += values.sum((0, 2))
        square += values.square().sum((0, 2))
    count = inputs.numel() / len(total) if counted is None else max(1, int(counted.sum()))
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt()
    return mean, torch.where(std > 0, std, 1.0)
