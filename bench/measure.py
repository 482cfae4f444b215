"""Parts that benchmarks share: random data, a clock, and the line on the origin of numbers."""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # population.py times the import
    import torch
    from torch import nn

    from fedquilt.data import FederatedData

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
NUM_CLASSES = 10


@cache  # a client in another process makes them once
def images(count: int, *shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and a class for each."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (count,), generator=generator)


def versus(**own: Any) -> tuple[argparse.Namespace, list[Any]]:
    """What benchmarks of a cohort against one after another can be asked for, and the precisions to
    measure in.
    """
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="", help="tf32,bf16 on a GPU, fp32 elsewhere")
    parser.add_argument("--times", type=int, default=3)
    for name, default in own.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    print(machine())
    return asked, (asked.precision or ("tf32,bf16" if asked.device == "cuda" else "fp32")).split(
        ","
    )


class Clock:
    """Seconds by stage, as the wall has them and of CPU; a stage within another stops the outer
    one.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._since = (0.0, 0.0)
        self.reset()

    def reset(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._book()
        self._open.append(stage)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def __str__(self) -> str:
        return (
            ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.cpu.items()) + " of CPU"
        )

    def _book(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._open:
            self.wall[self._open[-1]] += now[0] - self._since[0]
            self.cpu[self._open[-1]] += now[1] - self._since[1]
        self._since = now


def machine() -> str:
    """Where and when, and how busy the machine was."""
    import torch

    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return (
        f"{gpu}{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, Python "
        f"{platform.python_version()}, "
        f"{datetime.date.today()}"
    )


def cohort(clients: int, images: int) -> FederatedData:
    """Clients with so many random pictures of 32×32 each."""
    import torch

    import fedquilt as fq

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * images, 3, 32, 32, generator=generator)
    y = torch.randint(NUM_CLASSES, (len(x),), generator=generator)
    return fq.FederatedData.of((x, y), (x[:100], y[:100]), list(torch.arange(len(x)).split(images)))


def median(step: Callable[[], object], times: int, warm: int = 3) -> float:
    """Milliseconds, warm; on a GPU until it is done."""
    import torch

    taken = []
    for count in range(times + warm):
        began = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if count >= warm:
            taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def batch_norms(net: nn.Module) -> nn.Module:
    """A net whose norms track nothing, as fedquilt's do while they train."""
    from torch import nn

    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return net
