"""Between host and device, and what a host does with its memory."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fedquilt.errors import ConfigError


def device_of(name: str) -> torch.device:
    """A device by torch's name for it, if this machine has it."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        here = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        told = str(error).split("\n")[0]
        raise ConfigError(
            f"device {name!r} was asked for; this machine has {here}. torch says: {told}"
        ) from error
    return torch.device(name)


def onto(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on a device, without waiting for what a GPU is doing at the moment."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def channels_last(value: Tensor) -> Tensor:
    """Images, or the kernels of a convolution, laid out as the fast kernels of a GPU want them.

    On a CPU they stay as they are: torch's batch norm sums images with channels last one after another in float32, and
    is off by 1e-4.
    """
    return (
        value.contiguous(memory_format=torch.channels_last)
        if value.is_cuda and value.dim() == 4
        else value
    )


def untransformed() -> AbstractContextManager[None]:
    """For tensors that are kept: what is made inside of `grad` belongs to it, and is of no use once it is over."""
    return torch._C._DisableFuncTorch()


def keep_pages() -> None:
    """Have the C library keep what is freed, for the whole process: training on a CPU is then up to a third faster.

    A net's activations are a few megabytes each. glibc gives such pieces back to the system and asks for them again at
    every operation, page by page. Where there is another C library nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(
        _M_MMAP_THRESHOLD, 32 << 20
    )  # the most glibc takes: larger pieces are still the system's
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
