"""Inference time of members, predicted from a table of measured times of blocks."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedquilt.errors import ConfigError
from fedquilt.supernet.blocks import BlockSpec
from fedquilt.supernet.space import Config, Space

FORMAT = 1  # Version of the file format.
MAX_CACHED_KEYS = 65_536  # Distinct blocks whose names are cached.
WARM_UP = 2  # Forward passes before a block is timed.
# Random configurations whose blocks are timed besides those of the regular configurations.
SAMPLED_CONFIGS = 100
Watch = Callable[[int, int], None]  # Gets the number of timed blocks and the number of all blocks.


@dataclass(frozen=True)
class LatencyTable:
    """Times of blocks for one sample at a time, measured on one machine.

    The time of a member is predicted as the sum over its blocks. It includes neither work between
    blocks nor the time that caches save when blocks follow one another.
    """

    space: str  # Name of the space whose blocks were timed.
    milliseconds: Mapping[str, float]  # Time of each block, by its description.
    machine: str  # Name of the processor or GPU.
    device: str  # Device as torch names it.
    threads: int  # Number of threads that torch used.
    date: str  # Date of the measurement, as ISO 8601 in UTC.

    def latency(self, space: Space, config: Config) -> float:
        """Return the milliseconds of one sample's inference: the sum over the member's blocks.

        Args:
            space: Space of the configuration.
            config: Configuration of the member.

        Raises:
            ConfigError: A block of the member is not in the table.
        """
        blocks = space.blocks(config).values()
        try:
            return sum(self.milliseconds[key(block)] for block in blocks)
        except KeyError as error:
            raise ConfigError(
                f"the inference time of a member of {space.name} was asked for; the table of "
                f"{self.space} has no block {error.args[0]}. Measure the space with the same "
                f"image size and classes: fedquilt probe --space {space.name}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values that JSON can represent, with its format and unit."""
        return {"format": FORMAT, "unit": "milliseconds", **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the table as JSON to a file. An existing file is replaced."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> LatencyTable:
        """Read a table that `save` wrote.

        Raises:
            ConfigError: The file cannot be read, or is no such table.
        """
        request = f"the table of blocks {str(path)!r} was asked for"
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{request}; it cannot be read: {error}.") from error
        expected = {"format", "unit", *LatencyTable.__dataclass_fields__}
        if (
            not isinstance(content, dict)
            or set(content) != expected
            or not _are_times(content["milliseconds"])
        ):
            raise ConfigError(f"{request}; it is no table that `fedquilt probe --space` wrote.")
        if content.pop("format") != FORMAT:
            raise ConfigError(
                f"{request}; it was written by another version. Measure the space again."
            )
        content.pop("unit")
        return LatencyTable(**content)


@lru_cache(MAX_CACHED_KEYS)
def key(block: BlockSpec) -> str:
    """Return the name of a block in a table: its class and sizes as text.

    Blocks that compute the same have the same name.
    """
    return str(block)


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(milliseconds, int | float) and milliseconds >= 0
        for milliseconds in value.values()
    )


def distinct_blocks(space: Space, seed: int = 0) -> list[BlockSpec]:
    """Return the different blocks of a space's members, each once, without building them.

    A block depends on its own choices and on the width of the stage before it. In a regular
    configuration all blocks have the same expansion and kernel, and stages alternate between two
    widths. Random configurations are added for spaces that are built in other ways.

    Args:
        space: Search space.
        seed: Random seed of the random configurations.
    """
    generator = torch.Generator().manual_seed(seed)
    configs = [*_regular(space), *(space.sample(generator) for _ in range(SAMPLED_CONFIGS))]
    return list(
        dict.fromkeys(block for config in configs for block in space.blocks(config).values())
    )


def _regular(space: Space) -> Iterable[Config]:
    counts = dict.fromkeys(("expansions", "kernels", "widths"), 0)
    for choice in space.choices:
        if choice.kind in counts:
            counts[choice.kind] = max(counts[choice.kind], len(choice.options))
    ranges = {kind: range(max(1, count)) for kind, count in counts.items()}
    for expansion, kernel, even, odd in product(
        ranges["expansions"], ranges["kernels"], ranges["widths"], ranges["widths"]
    ):
        places = {
            "expansions": (expansion, expansion),
            "kernels": (kernel, kernel),
            "widths": (even, odd),
        }
        values = []
        for choice in space.choices:
            last = len(choice.options) - 1
            position = places[choice.kind][choice.stage % 2] if choice.kind in places else last
            values.append(choice.options[min(position, last)])
        yield space.unflat(values)


def measure_blocks(
    space: Space, device: str = "cpu", seconds: float = 0.05, watch: Watch | None = None
) -> LatencyTable:
    """Time every distinct block of a space on this machine.

    Args:
        space: Space with the size of the images and the number of classes that members will have.
        device: Device as torch names it.
        seconds: Time for each block, besides the warm-up. The median of the passes counts.
        watch: Function that is called after each block. None: no calls.
    """
    torch_device = torch.device(device)
    blocks = distinct_blocks(space)
    times: dict[str, float] = {}
    for count, block in enumerate(blocks, start=1):
        times[key(block)] = _milliseconds(block, torch_device, seconds)
        if watch:
            watch(count, len(blocks))
    is_cuda = torch_device.type == "cuda"
    machine = (
        torch.cuda.get_device_name(torch_device)
        if is_cuda
        else platform.processor() or platform.machine()
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return LatencyTable(space.name, times, machine, device, torch.get_num_threads(), date)


def _milliseconds(block: BlockSpec, device: torch.device, seconds: float) -> float:
    module: nn.Module = block.build().to(device).eval()
    inputs = torch.randn(1, block.in_channels, block.size, block.size, device=device)
    passes: list[float] = []
    with torch.inference_mode():
        for _ in range(WARM_UP):
            module(inputs)
        until = time.perf_counter() + seconds
        while not passes or time.perf_counter() < until:
            _synchronize(device)
            began = time.perf_counter()
            module(inputs)
            _synchronize(device)
            passes.append(time.perf_counter() - began)
    return 1000 * sorted(passes)[len(passes) // 2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
