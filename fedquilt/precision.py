"""Precision by name: what weights are kept in, and what products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp64"]

# Of weights, slots and sums. tf32 and bf16 round the factors of products; what is kept between steps is float32.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.float32,
    "fp64": torch.float64,
}


def unfit(precision: Precision, device: str) -> str:
    """Why a device cannot compute in a precision; "" if it can, as far as its name tells."""
    if precision == "tf32" and not device.startswith("cuda"):
        return f"'tf32' was asked for on {device}; only NVIDIA GPUs have it. 'fp32', 'bf16' or 'fp64' would fit."
    return ""


@contextmanager
def computing(precision: Precision, device: torch.device) -> Iterator[None]:
    """The precision asked for, and no other afterwards: torch keeps these settings globally."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
