"""Capture of an action on static tensors as a CUDA graph.

On a GPU, a client's step consists of hundreds of kernels of a few microseconds each. Launching them
one by one costs more than running them. A captured graph launches all of them at once.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedquilt.errors import FedquiltError

# Number of streams that the GPU serves at once. CUDA's default of 8 makes unequal groups wait for
# each other: a step of ten clients of five sizes on an H200 takes 4.8 ms instead of 3.6 ms. CUDA
# reads the variable when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

WARMUP_RUNS = 3  # Number of runs of an action before it is captured
# The allocator cache is emptied before a capture if less than this share of GPU memory is free.
MIN_FREE_SHARE = 1 / 4


class CaptureError(FedquiltError):
    """Error for a step that cannot be captured as a CUDA graph."""


def capture(
    action: Callable[[], None],
    stream: torch.cuda.Stream,
    pool: Any = None,
    warmup_runs: int = WARMUP_RUNS,
) -> torch.cuda.CUDAGraph:
    """Capture an action on static tensors as a CUDA graph.

    The action runs `warmup_runs` times before the capture.

    Args:
        action: Function without arguments that launches kernels.
        stream: Stream on which the action is captured.
        pool: Memory pool of the graph. Graphs may share one if they never run at the same time.
            None: a new pool.
        warmup_runs: Number of runs before the capture, in which kernels are chosen and workspace is
            allocated.

    Raises:
        CaptureError: The action cannot be captured.
    """
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(warmup_runs):
                action()
        torch.cuda.synchronize()
        _make_room()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _no_garbage_collection():
            graph.capture_begin(pool)
            try:
                action()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        raise CaptureError(str(error).splitlines()[0]) from error
    torch.cuda.synchronize()
    return graph


def _make_room() -> None:
    """Empty torch's CUDA cache if little GPU memory is free.

    A graph cannot use the workspace of other graphs. Emptying the cache is slow, so it is done only
    if needed.
    """
    free, total = torch.cuda.mem_get_info()
    if free < MIN_FREE_SHARE * total:
        torch.cuda.empty_cache()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection.

    Destroying a graph while another one is captured would invalidate the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def unsearched() -> Iterator[None]:
    """Let cuDNN choose kernels by heuristics instead of benchmarks.

    With many different shapes, benchmarking takes longer than it saves.
    """
    was_benchmarking = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = was_benchmarking
