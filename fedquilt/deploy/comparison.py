"""Comparison of an exported model with torch's module, on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedquilt import noise
from fedquilt.deploy.formats import Forward
from fedquilt.errors import ExportError
from fedquilt.family import Family
from fedquilt.names import said

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun


# Largest difference between outputs of two runtimes, which sum in different orders. If outputs are
# larger than 1, it is relative to the largest one.
TOLERANCE = 1e-4
# Batch sizes at which outputs are compared. The module is exported with the first one.
BATCHES = (2, 1, 7, 32)


def comparison_batches(run: TrainedRun, sizes: Sequence[int]) -> tuple[list[Tensor], str]:
    """Return input batches on which the exported model is compared with torch, on the CPU.

    They are test samples of the run, repeated if there are too few. Without samples they are
    random.

    Args:
        run: A run, or what is left of it for deployment.
        sizes: Number of samples in each batch.

    Returns:
        The batches, and words on what they are, such as "test samples".
    """
    data, count = run.data, sum(sizes)
    if not run.absent and len(data.test_targets):
        rows = torch.arange(count) % len(data.test_targets)
        inputs, description = (
            data.test_samples(rows.to(run.engine.device)),
            f"{run.evaluation.on} samples",
        )
    else:
        inputs, description = _noise(run.world.family, count), "random samples"
    inputs = inputs.cpu().float() if inputs.is_floating_point() else inputs.cpu()
    return list(inputs.split_with_sizes(list(sizes))), description


def _noise(family: Family, count: int) -> Tensor:
    example, key = family.example_inputs[0], torch.tensor(noise.key(noise.Stream.EXPORTED_EXAMPLE))
    shape = (count, *example.shape[1:])
    if example.is_floating_point():
        return noise.normal(key, shape, torch.float32)
    classes = family.layout.axes["class"].size if "class" in family.layout.axes else 2
    return (noise.uniform(key, shape, torch.float32) * classes).to(example.dtype)


def largest_difference(
    module: nn.Module, exported: Forward, batches: Sequence[Tensor], kind: str
) -> float:
    """Return the largest absolute difference between two models' outputs over all batches.

    Args:
        module: Module in evaluation mode, on the CPU.
        exported: The exported model as a function of a batch.
        batches: (sample, …) Inputs on which both are compared.
        kind: Name of the format, for messages.

    Raises:
        ExportError: The exported model fails, or a difference is larger than rounding explains.
    """
    largest = 0.0
    for batch in batches:
        outputs = module(batch.clone())  # The first operation may be in-place.
        try:
            exported_outputs = exported(batch.clone())
        except Exception as error:
            raise ExportError(
                f"the model as {kind} failed on a batch of {len(batch)}: {said(error)}. Nothing "
                "was written."
            ) from error
        if outputs.shape != exported_outputs.shape:
            raise ExportError(
                f"the model as {kind} returns outputs for a batch of {len(batch)} of "
                f"{tuple(exported_outputs.shape)}, and torch with {tuple(outputs.shape)}. Nothing "
                "was written."
            )
        difference = float((outputs - exported_outputs).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(outputs.abs().max())):
            raise ExportError(
                f"the model as {kind} has other outputs than torch for a batch of {len(batch)}, by "
                f"{difference:.2g} where outputs are up to {float(outputs.abs().max()):.2g}; "
                f"{TOLERANCE:g} of that would be rounding. Nothing was written."
            )
        largest = max(largest, difference)
    return largest
