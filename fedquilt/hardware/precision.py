"""Precision by name: the type in which weights are stored, and that of products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp64"]

# Types of weights, slots and sums. tf32 and bf16 only round the factors of products. Values that
# are kept between steps are float32.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
}


def unfit(precision: Precision, device: str) -> str:
    """Return the reason why a device cannot compute in a precision, or an empty string.

    Only the name of the device is checked.
    """
    if precision == "tf32" and not device.startswith("cuda"):
        return (
            f"'tf32' was asked for on {device}; only NVIDIA GPUs have it. 'fp32', 'bf16' or 'fp64' "
            "would fit."
        )
    return ""


@contextmanager
def computing(precision: Precision, device: torch.device, search: bool = True) -> Iterator[None]:
    """Compute in a precision within the block, and restore torch's global settings afterwards.

    Only matrix products and convolutions are affected. Rounded parameters are not cached, because
    an optimizer may change parameters within the block.

    Args:
        precision: Precision of products. "fp32" and "fp64" round nothing.
        device: Device whose products "bf16" rounds.
        search: True if cuDNN searches for its fastest kernels, unless torch must be deterministic.
            The search is repeated for every new shape.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old_settings = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    cudnn.benchmark = search and not torch.are_deterministic_algorithms_enabled()
    try:
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
        ):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = old_settings
