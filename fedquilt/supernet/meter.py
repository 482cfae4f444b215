"""Costs of configurations: multiply-adds, parameters, training memory and inference time, without building a net."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.supernet.latency import LatencyTable
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.space import Config, Space
from fedquilt.units import amount, size

MAX_CACHED_CONFIGS = 131_072  # configurations whose multiply-adds and parameters are kept


@dataclass(frozen=True)
class Costs:
    """The costs of a member."""

    macs: int  # multiply-adds of one sample's forward pass
    params: int  # number of parameters
    memory: int  # bytes of a training step
    milliseconds: float | None = (
        None  # predicted inference time of one sample; None: there is no table of blocks
    )

    def __str__(self) -> str:
        text = f"{amount(self.macs)} multiply-adds, {amount(self.params)} parameters, {size(self.memory)} to train"
        return text if self.milliseconds is None else f"{text}, {self.milliseconds:.3g} ms"


class Meter:
    """A counter of what configurations of a space cost.

    Multiply-adds, parameters and training memory are exact. Inference time is the sum over measured blocks.
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
        self.cost = lru_cache(MAX_CACHED_CONFIGS)(
            space.cost
        )  # multiply-adds and parameters of a configuration

    def costs(self, config: Config) -> Costs:
        """Return all costs of a configuration."""
        macs, params = self.cost(config)
        milliseconds = None if self.table is None else self.table.latency(self.space, config)
        return Costs(macs, params, self.space.training_memory(config, self.step), milliseconds)

    def value(self, config: Config, name: str) -> float:
        """Return one cost of a configuration by the name that `Limits` has for it.

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
        """Return the limits that a configuration exceeds, each with its value."""
        over = []
        cost = self.cost(config)
        for name, limit in limits.given.items():
            value = getattr(cost, name) if name in ("macs", "params") else self.value(config, name)
            if value > limit:
                over.append(f"{name} {limit:g}")
        return over
