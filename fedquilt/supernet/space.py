"""Search spaces: the configurations of a supernet, their nets and what these cost.

A space lists the choices of each stage (`StageOptions`) and describes the net of a configuration as
blocks (`Space.blocks`). All else follows from these two: sampling, mutation, features for a
predictor, multiply-adds, parameters and the net itself.

To write your own space, subclass `Space`, give it a `name` and implement `stages` and `blocks`:

1. `blocks(config)` maps a name to a description of each block, in the order of the forward pass.
   Names are module paths such as "stage1.0". The same block has the same name in every net.
2. Depth keeps the first blocks of a stage. Expansion and width may only change numbers of channels,
   so that a smaller net has the first channels of the largest one.
3. A kernel choice may only change the kernel of a block with an `elastic_kernel`.
4. The last block is called "head" and its `out_channels` is `num_classes`.

`check_space` builds random members and reports where these rules are broken.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.supernet.blocks import BlockSpec, MemberCost
from fedquilt.supernet.memory import saved_bytes

HEAD = "head"  # Name of the block that classifies.


@dataclass(frozen=True)
class Config:
    """One net of a space: the option that each choice takes.

    Blocks are numbered through all stages of the largest net. Choices of blocks that are not kept
    have no effect; `Space.canonical` sets them to their smallest option.
    """

    depths: tuple[int, ...]  # Blocks kept, by stage.
    expansions: tuple[float, ...] = ()  # Hidden channels over the block's own, by block.
    kernels: tuple[int, ...] = ()  # Kernel sizes, by block. Empty if there is no choice.
    widths: tuple[float, ...] = ()  # Kept share of channels, by stage. Empty: no choice.

    def to_json(self) -> dict[str, list[float]]:
        """Return the configuration as lists that JSON can represent, by the names of its fields."""
        return {kind: list(getattr(self, kind)) for kind in KINDS}

    @classmethod
    def from_json(cls, value: Any) -> Config:
        """Create a configuration from the result of `to_json`.

        Raises:
            ConfigError: `value` is no table of lists of numbers with these names.
        """
        if not isinstance(value, Mapping) or "depths" not in value or not set(value) <= set(KINDS):
            raise ConfigError(f"A configuration is a table of {', '.join(KINDS)}; found {value!r}.")
        for kind, numbers in value.items():
            if not isinstance(numbers, list | tuple) or not all(map(_is_number, numbers)):
                raise ConfigError(
                    f"{kind} of a configuration is a list of numbers; found {numbers!r}.",
                )
        return cls(**{kind: tuple(numbers) for kind, numbers in value.items()})


# fields of `Config`, in the order of `choices`
KINDS = (
    "depths",
    "expansions",
    "kernels",
    "widths",
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class StageOptions:
    """The options of one stage, each in ascending order."""

    depths: tuple[int, ...]  # Numbers of blocks that may be kept.
    expansions: tuple[float, ...] = (1,)  # Expansions that each block may have.
    kernels: tuple[int, ...] = ()  # Kernels that each block may have. Empty if there is no choice.
    widths: tuple[float, ...] = ()  # Shares of the stage's channels. Empty if there is no choice.


@dataclass(frozen=True)
class SpaceChoice:
    """One choice of a space: an entry of one field of `Config`."""

    kind: str  # Field of `Config`: depths, expansions, kernels or widths.
    index: int  # Position in that field.
    options: tuple[float, ...]  # Values that it may take, ascending.
    stage: int  # Stage to which the choice belongs.
    # Position of the block in its stage. None: the choice is one of the whole stage.
    block: int | None = None

    @property
    def name(self) -> str:
        """Return a name that is unique in the space, such as "kernels.3"."""
        return f"{self.kind}.{self.index}"


class BlockChoice(NamedTuple):
    """The options that one block takes."""

    expansion: float  # Hidden channels over the block's own.
    kernel: int  # Kernel size. 0 if the space has no kernel choice.


@dataclass(frozen=True)
class Space(ABC):
    """A set of configurations, each of which describes a net."""

    image_size: int = 32  # Height and width of the images.
    in_channels: int = 3  # Channels of the images.
    num_classes: int = 10  # Classes that members tell apart.

    name: ClassVar[str]  # name in `SPACES`

    @property
    @abstractmethod
    def stages(self) -> tuple[StageOptions, ...]:
        """Return the options of each stage, in the order of the forward pass."""

    @abstractmethod
    def blocks(self, config: Config) -> dict[str, BlockSpec]:
        """Describe the net of a configuration, block by block in the order of the forward pass.

        Args:
            config: A configuration of the space.

        Returns:
            Descriptions by name. A name is the module path of the block in the member.
        """

    def kept_blocks(self, config: Config) -> list[list[BlockChoice]]:
        """Return the expansion and kernel of the blocks that are kept: a list for each stage.

        Blocks that the depth of a stage leaves out are not listed.
        """
        choices_by_stage: list[list[BlockChoice]] = []
        first = 0
        for stage, depth in zip(self.stages, config.depths, strict=True):
            stop = first + depth
            expansions = config.expansions[first:stop]
            kernels = config.kernels[first:stop] if config.kernels else (0,) * depth
            choices_by_stage.append(
                [BlockChoice(*pair) for pair in zip(expansions, kernels, strict=True)]
            )
            first += stage.depths[-1]
        return choices_by_stage

    # --- choices ---------------------------------------------------------------------------------

    @property
    def choices(self) -> tuple[SpaceChoice, ...]:
        """Return all choices: depths of stages, expansions and kernels of blocks, then widths."""
        return _choices(self.stages)

    def flat(self, config: Config) -> tuple[float, ...]:
        """Return the options that a configuration takes, in the order of `choices`."""
        return (*config.depths, *config.expansions, *config.kernels, *config.widths)

    def unflat(self, values: Sequence[float]) -> Config:
        """Return the canonical configuration with these options, given in the order of `choices`.

        Raises:
            ConfigError: There are too many or too few values, or one is no option of its choice.
        """
        if len(values) != len(self.choices):
            raise ConfigError(
                f"{len(values)} values were given for a configuration of {self.name}, "
                f"which has {len(self.choices)} choices.",
            )
        return self.canonical(self._config(values))

    @property
    def largest(self) -> Config:
        """Return the configuration with the largest option everywhere."""
        return self.unflat([choice.options[-1] for choice in self.choices])

    @property
    def smallest(self) -> Config:
        """Return the configuration with the smallest option everywhere."""
        return self.unflat([choice.options[0] for choice in self.choices])

    @property
    def num_configs(self) -> int:
        """Return the number of different nets. Choices of blocks that are not kept do not count."""
        total = 1
        for stage in self.stages:
            per_block = len(stage.expansions) * max(1, len(stage.kernels))
            total *= max(1, len(stage.widths)) * sum(per_block**depth for depth in stage.depths)
        return total

    def is_kept(self, choice: SpaceChoice, config: Config) -> bool:
        """Return True if a choice has an effect on the net of a configuration.

        Choices of a whole stage always have one. Those of a block have one if the block is kept.
        """
        return choice.block is None or choice.block < config.depths[choice.stage]

    def canonical(self, config: Config) -> Config:
        """Return a configuration with the smallest option for choices of blocks that are not kept.

        Two configurations have the same net exactly if their canonical forms are equal.

        Raises:
            ConfigError: The configuration is outside of the space.
        """
        self.check(config)
        values = []
        for choice, value in zip(self.choices, self.flat(config), strict=True):
            is_kept = self.is_kept(choice, config)
            values.append(_option(choice, value) if is_kept else choice.options[0])
        return self._config(values)

    def _config(self, values: Sequence[float]) -> Config:
        """Return the configuration with these options, in the order of `choices`, unchecked."""
        options: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for choice, value in zip(self.choices, values, strict=True):
            options[choice.kind].append(value)
        return Config(**{kind: tuple(entries) for kind, entries in options.items()})

    def check(self, config: Config) -> None:
        """Refuse a configuration that is outside of the space.

        Raises:
            ConfigError: The message lists every choice that is wrong, with its options.
        """
        problems = []
        for kind in KINDS:
            values = getattr(config, kind)
            choices = [choice for choice in self.choices if choice.kind == kind]
            if len(values) != len(choices):
                problems.append(f"{kind} has {len(values)} values and {len(choices)} are needed")
                continue
            for choice, value in zip(choices, values, strict=True):
                if value not in choice.options:
                    options = ", ".join(map(str, choice.options))
                    problems.append(f"{choice.name} is {value}, which is none of {options}")
        if problems:
            raise ConfigError(
                f"A configuration is outside of the space {self.name}: {'; '.join(problems)}.",
            )

    # --- drawing ---------------------------------------------------------------------------------

    def sample(self, generator: torch.Generator) -> Config:
        """Draw every choice uniformly from its options, and return the canonical configuration."""
        draws = torch.rand(len(self.choices), generator=generator, dtype=torch.float64).tolist()
        return self.unflat(
            [_drawn(choice, draw) for choice, draw in zip(self.choices, draws, strict=True)],
        )

    def mutate(self, config: Config, generator: torch.Generator, probability: float) -> Config:
        """Draw some choices of a configuration again, and return the canonical result.

        Choices of blocks that `config` does not keep are always drawn again, in case the depth
        grows.

        Args:
            config: Configuration to start from.
            generator: Source of random numbers.
            probability: Probability with which each choice is drawn again. 0 returns `config`.
        """
        count = len(self.choices)
        changes = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
        draws = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
        values = []
        for i, (choice, value) in enumerate(zip(self.choices, self.flat(config), strict=True)):
            # A block that was not kept has no options to inherit.
            redraw = changes[i] < probability or not self.is_kept(choice, config)
            values.append(_drawn(choice, draws[i]) if redraw else value)
        return self.unflat(values)

    def cross(self, a: Config, b: Config, generator: torch.Generator) -> Config:
        """Take every choice from one of two configurations, each with probability 1/2.

        Choices of a block that only one of them keeps come from that one. The result is canonical.

        Args:
            a: First configuration.
            b: Second configuration.
            generator: Source of random numbers.
        """
        picks = torch.rand(len(self.choices), generator=generator, dtype=torch.float64).tolist()
        values = []
        for i, (choice, of_a, of_b) in enumerate(
            zip(self.choices, self.flat(a), self.flat(b), strict=True),
        ):
            kept_by_a, kept_by_b = self.is_kept(choice, a), self.is_kept(choice, b)
            from_a = kept_by_a > kept_by_b or (kept_by_a == kept_by_b and picks[i] < 0.5)
            values.append(of_a if from_a else of_b)
        return self.unflat(values)

    def encode(self, config: Config) -> list[float]:
        """Return features for a predictor, one for each choice.

        A feature is the option divided by the largest option, or 0 for a block that is not kept.
        """
        features = []
        for choice, value in zip(self.choices, self.flat(config), strict=True):
            features.append(value / choice.options[-1] if self.is_kept(choice, config) else 0.0)
        return features

    # --- nets ------------------------------------------------------------------------------------

    def cost(self, config: Config) -> MemberCost:
        """Count multiply-adds of one sample and parameters of a configuration.

        The net is not built.
        """
        costs = [block.cost for block in self.blocks(config).values()]
        return MemberCost(sum(cost.macs for cost in costs), sum(cost.params for cost in costs))

    def training_memory(self, config: Config, step: TrainingStep) -> int:
        """Return the bytes of a training step, without building the net.

        They are weights, gradients and optimizer state, and the activations that the backward pass
        reads.

        Args:
            config: A configuration of the space.
            step: Batch size, optimizer slots and precision. Nested nets are not counted.
        """
        activations = saved_bytes(self.blocks(config).values(), step.batch_size)
        return step.memory(4 * self.cost(config).params, [activations] * step.passes)

    def member(self, config: Config) -> nn.Module:
        """Build the net of a configuration as a plain module with fresh random weights.

        The module consists of ordinary layers, so that `fedquilt.trace` takes it like any other.

        Raises:
            ConfigError: The configuration is outside of the space.
        """
        config = self.canonical(config)
        return nested({name: block.build() for name, block in self.blocks(config).items()})

    def with_classes(self, num_classes: int) -> Space:
        """Return a copy of the space with another number of classes."""
        return replace(self, num_classes=num_classes)


def nested(blocks: Mapping[str, nn.Module]) -> nn.Sequential:
    """Arrange modules by their dotted names in nested `nn.Sequential`s, in the given order.

    The module "stage1.0" becomes the child "0" of the child "stage1".
    """
    groups: OrderedDict[str, Any] = OrderedDict()
    for path, module in blocks.items():
        first, _, inner_path = path.partition(".")
        if inner_path:
            groups.setdefault(first, {})[inner_path] = module
        else:
            groups[first] = module
    ranked = OrderedDict[str, nn.Module]()
    for name, entry in groups.items():
        ranked[name] = nested(entry) if isinstance(entry, dict) else entry
    return nn.Sequential(ranked)


@lru_cache(64)
def _choices(stages: tuple[StageOptions, ...]) -> tuple[SpaceChoice, ...]:
    choices = [SpaceChoice("depths", i, stage.depths, i) for i, stage in enumerate(stages)]
    for kind in ("expansions", "kernels"):
        index = 0
        for i, stage in enumerate(stages):
            for block in range(stage.depths[-1] if getattr(stage, kind) else 0):
                choices.append(SpaceChoice(kind, index, getattr(stage, kind), i, block))
                index += 1
    with_widths = [i for i, stage in enumerate(stages) if stage.widths]
    choices += [SpaceChoice("widths", k, stages[i].widths, i) for k, i in enumerate(with_widths)]
    return tuple(choices)


def _drawn(choice: SpaceChoice, draw: float) -> float:
    return choice.options[math.floor(draw * len(choice.options))]


def _option(choice: SpaceChoice, value: float) -> float:
    """Return the option that equals `value`, so that 4 and 4.0 make equal JSON."""
    return choice.options[choice.options.index(value)]
