"""Check of a search space: its rules are tested on random configurations."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt.errors import ConfigError
from fedquilt.supernet.space import HEAD, Config, Space


def check_space(space: Space, num_samples: int = 20, seed: int = 0) -> None:
    """Check that members of a space can share the weights of its largest net.

    Args:
        space: Search space to check.
        num_samples: Random configurations to test besides the largest and the smallest. 0: none.
        seed: Random seed of the configurations.

    Raises:
        ConfigError: A rule of `fedquilt.supernet.space` is broken. Up to five cases are listed.
    """
    generator = torch.Generator().manual_seed(seed)
    configs = [
        space.largest,
        space.smallest,
        *(space.sample(generator) for _ in range(num_samples)),
    ]
    largest = _weights(space, space.largest)
    problems = []
    for config in configs:
        problems += _problems(space, config, largest)
    if problems:
        raise ConfigError(
            f"{space.name} is no space whose members share weights: {'; '.join(problems[:5])}.",
        )


def _weights(space: Space, config: Config) -> dict[str, Tensor]:
    with torch.device("meta"):
        return space.member(config).state_dict()


def _problems(space: Space, config: Config, largest: dict[str, Tensor]) -> list[str]:
    """Return a text for each rule that one member breaks. Empty: it breaks none.

    Args:
        space: Search space.
        config: Configuration of the member.
        largest: Tensors of the largest member by name, whose shapes are compared.
    """
    blocks = space.blocks(config)
    problems = []
    if list(blocks)[-1] != HEAD or blocks[HEAD].out_channels != space.num_classes:
        problems.append(f"the last block is not called {HEAD!r} with {space.num_classes} outputs")
    kernels = {f"{name}.{block.elastic_kernel}" for name, block in blocks.items()}
    member = _weights(space, config)
    for name, tensor in member.items():
        largest_tensor = largest.get(name)
        if largest_tensor is None:
            problems.append(f"{name} is in {config} but not in the largest net")
        elif not _is_within(tensor.shape, largest_tensor.shape):
            problems.append(
                f"{name} is {tuple(tensor.shape)} in {config}, {tuple(largest_tensor.shape)} in "
                "the largest",
            )
        elif name not in kernels and tensor.shape[2:] != largest_tensor.shape[2:]:
            problems.append(
                f"{name} changes its kernel in {config} but is no elastic_kernel of its block",
            )
    counted = sum(parameter.numel() for parameter in _parameters(space, config))
    if counted != space.cost(config).params:
        problems.append(
            f"{config} has {counted} parameters and its layers list {space.cost(config).params}",
        )
    return problems


def _is_within(shape: torch.Size, limit: torch.Size) -> bool:
    """Return True if a tensor of `shape` can be the first part of a tensor of shape `limit`.

    Both have the same number of dimensions, and no dimension is longer than that of `limit`.
    """
    return len(shape) == len(limit) and all(a <= b for a, b in zip(shape, limit, strict=True))


def _parameters(space: Space, config: Config) -> list[Tensor]:
    with torch.device("meta"):
        return list(space.member(config).parameters())
