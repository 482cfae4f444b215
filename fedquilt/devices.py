"""Between host and device."""

from __future__ import annotations

import torch
from torch import Tensor


def onto(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on a device, without waiting for what a GPU is doing at the moment."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
