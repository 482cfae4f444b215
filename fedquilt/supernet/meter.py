"""Costs of configurations, counted without building a net.

They are multiply-adds, parameters, training memory and inference time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.supernet.latency import LatencyTable
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.space import Config, Space
from fedquilt.units import amount, size

MAX_CACHED_CONFIGS = 131_072  # Configurations whose multiply-adds and parameters are cached.


@dataclass(frozen=True)
class Costs:
    """The costs of a member."""

    macs: int  # Multiply-adds of one sample's forward pass.
    params: int  # Number of parameters.
    memory: int  # Bytes of a training step.
    # Predicted inference time of one sample. None: there is no table of measured blocks.
    milliseconds: float | None = None

    def __str__(self) -> str:
        text = (
            f"{amount(self.macs)} multiply-adds, {amount(self.params)} parameters, "
            f"{size(self.memory)} to train"
        )
        return text if self.milliseconds is None else f"{text}, {self.milliseconds:.3g} ms"


class Meter:
    """A counter of the costs of configurations.

    Multiply-adds, parameters and training memory are exact. Inference time is the sum over measured
    blocks.
    """

    def __init__(
        self, space: Space, step: TrainingStep = TrainingStep(), table: LatencyTable | None = None
    ) -> None:
        """Prepare counting.

        Args:
            space: Space of the configurations.
            step: Training step whose memory is limited. The default is a batch of 32 with momentum.
            table: Measured times of the space's blocks. None: inference time is not known.
        """
        self.space = space
        self.step = step
        self.table = table
        # Returns multiply-adds and parameters of a configuration.
        self.cost = lru_cache(MAX_CACHED_CONFIGS)(space.cost)

    def costs(self, config: Config) -> Costs:
        """Return all costs of a configuration, with no milliseconds if there is no table."""
        macs, params = self.cost(config)
        milliseconds = None if self.table is None else self.table.latency(self.space, config)
        return Costs(macs, params, self.space.training_memory(config, self.step), milliseconds)

    def value(self, config: Config, name: str) -> float:
        """Return one cost of a configuration.

        Args:
            config: Configuration of the space.
            name: Name of the cost, a field of `Limits`.

        Raises:
            ConfigError: Milliseconds were asked for, and there is no table of blocks.
        """
        if name == "memory":
            return self.space.training_memory(config, self.step)
        if name == "milliseconds":
            if self.table is None:
                raise ConfigError(
                    "a limit in milliseconds was given without a table of measured blocks; "
                    f"`fedquilt probe --space {self.space.name} --out table.json` measures one."
                )
            return self.table.latency(self.space, config)
        return float(getattr(self.cost(config), name))

    def exceeded(self, config: Config, limits: Limits) -> list[str]:
        """Return the limits that a configuration exceeds, as texts such as `macs 1e+06`.

        The list is empty if the configuration is within all limits.

        Args:
            config: Configuration of the space.
            limits: Limits of a device. Those that are not set are not counted.
        """
        exceeded = []
        cost = self.cost(config)
        for name, limit in limits.given.items():
            value = getattr(cost, name) if name in ("macs", "params") else self.value(config, name)
            if value > limit:
                exceeded.append(f"{name} {limit:g}")
        return exceeded
