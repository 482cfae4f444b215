"""Alignment and norm discrepancy of a ProgFed run in its current state (theorem 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquilt.errors import ConfigError
from fedquilt.methods.alignment import Alignment
from fedquilt.methods.progfed import ProgFed
from fedquilt.round.evaluate import gradients_at

if TYPE_CHECKING:
    from fedquilt.runs.run import Run

MAX_SAMPLES = 1 << 16  # Largest number of training samples that engines pool


def measure_alignment(run: Run, samples: int = MAX_SAMPLES) -> Alignment:
    """Return alpha_t and q_t of theorem 1 (equation 11) for the current state of a ProgFed run.

    Args:
        run: A run of `ProgFed` with the strategy `progressive`, at any round.
        samples: Largest number of training samples to measure on. At most 65,536 are used.

    Raises:
        ConfigError: The run is of another method or strategy, or its state has no single whole
            model.

    Example:
        >>> import torch, fedquilt as fq
        >>> from fedquilt.runs.alignment import measure_alignment
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> family = fq.trace(fq.with_stages(net, ["0", "1"]), torch.randn(5, 4))
        >>> data = fq.data.Pool.of((torch.randn(20, 4), torch.arange(20) % 2)).partition(2)
        >>> run = fq.run(fq.methods.ProgFed(), family, data, fq.Fleet.of((1.0,), 2), rounds=4)
        >>> measure_alignment(run)
        Alignment(stage=2, alpha=1.0, q=1.0)
    """
    method = run.method
    if not isinstance(method, ProgFed):
        raise ConfigError(
            f"measure_alignment was asked for a run of {type(method).__name__}; one of ProgFed "
            "would work."
        )
    gradients = gradients_at(run.federation, run.server, run.evaluator, run.evaluation)
    return method.measure(run.server, run.world, gradients, samples)
