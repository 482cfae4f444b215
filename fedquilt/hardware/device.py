"""Devices by name, and transfers of tensors between host and device."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt.errors import ConfigError


def device_of(name: str) -> torch.device:
    """Return the device that torch knows by this name.

    Raises:
        ConfigError: This machine does not have the device.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        available = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"device {name!r} was asked for; this machine has {available}. torch says: {reason}"
        ) from error
    return torch.device(name)


def to_device_async(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a tensor from the host to a device, without waiting for running kernels.

    On a CPU, the tensor itself is returned.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def channels_last(value: Tensor) -> Tensor:
    """Return images, or weights of a convolution, in the channels-last layout.

    Fast GPU kernels need this layout. Tensors on a CPU, and those without exactly four dimensions,
    are returned unchanged. On a CPU, torch's batch norm sums images with channels last one after
    another in float32, which gives errors of 1e-4.
    """
    if value.is_cuda and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
