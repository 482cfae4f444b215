"""Global random generators of Python, NumPy and torch, whose states belong to the user."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Draws:
    """Detector of global random generators that a block of code draws from."""

    def __init__(self) -> None:
        # Libraries whose generators were drawn from, in the order in which this was detected.
        self.names: dict[str, None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Add the libraries to `names` whose generators the block draws from.

        The states of the generators before and after the block are compared. They are not restored.
        """
        old_states = _states()
        yield
        for name, state in _states().items():
            if state != old_states[name]:
                self.names[name] = None


def _states() -> dict[str, object]:
    """Return comparable states of the global generators, by the name of the library."""
    kind, keys, *counters = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": (kind, np.asarray(keys).tobytes(), *counters),
        "Python": random.getstate(),
    }


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, and restore them after the block.

    Generators of GPUs are included if CUDA is in use.

    Args:
        seed: Seed of all generators.
    """
    old_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu: list[torch.Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_gpu = torch.cuda.get_rng_state_all()
    random.seed(seed)
    np.random.seed(seed)
    # `torch.manual_seed` would also seed CUDA as soon as it starts.
    torch.default_generator.manual_seed(seed)
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(old_states[0])
        np.random.set_state(old_states[1])
        torch.set_rng_state(old_states[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
