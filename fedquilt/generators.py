"""Global random generators of Python, NumPy and torch, which belong to the user."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore their states afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(
        seed
    )  # and not `torch.manual_seed`, which would seed CUDA once it starts
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
