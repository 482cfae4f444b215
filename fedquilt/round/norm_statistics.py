"""Norm statistics that are measured after training, as HeteroFL's static norm is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.data.parts import Array
from fedquilt.errors import ConfigError
from fedquilt.family.net import Pass
from fedquilt.hardware.precision import computing
from fedquilt.round.federation import Federation
from fedquilt.round.training.batches import batched
from fedquilt.terms import Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family import Family
    from fedquilt.round.engine import Engine


def mean_statistics(measured: Sequence[Weights], count: int) -> dict[str, Tensor]:
    """Return the mean of norm statistics over batches, which HeteroFL calls the static norm.

    Each batch counts once, whatever its size. It equals torch's cumulative average
    (`momentum=None`).

    Args:
        measured: Statistics of single batches, or sums over several batches, by name.
        count: Number of batches in all.
    """
    return {
        name: torch.stack([statistics[name] for statistics in measured]).sum(0) / count
        for name in measured[0]
    }


def both_statistics(clean: Weights, noised: Weights) -> dict[str, Tensor]:
    """Merge the norm statistics of clean and attacked samples, by name.

    Norms that saw both kinds get the mean of the two. Those of dual norms, which saw one kind, are
    copied.

    Args:
        clean: Statistics of a pass over clean samples.
        noised: Statistics of a pass over attacked samples.
    """
    return {
        **noised,
        **{name: (v + noised[name]) / 2 if name in noised else v for name, v in clean.items()},
    }


def measured_statistics(
    federation: Federation,
    nets: Sequence[tuple[Submodel, Weights]],
    engine: Engine,
    batch_size: int,
    client: int | None = None,
) -> list[dict[str, Tensor]]:
    """Measure the norm statistics of nets on the samples that the method's norm policy names.

    These are public samples if the policy needs them, else training samples of clients.

    Args:
        federation: Its method's norm policy measures statistics.
        nets: Sub-models and their weights. The weights are not changed.
        engine: It has the samples of clients.
        batch_size: Statistics are means over batches of this size.
        client: The client whose training samples are meant. None: those of all clients.

    Returns:
        Statistics by name for each net, in the order of `nets`.
    """
    world = federation.world
    if not federation.method.local.norm.needs_public:
        return engine.calibrate(federation, nets, batch_size, client)
    assert world.public is not None, (
        "a policy that needs public samples was refused where there are none"
    )
    with computing(world.precision, engine.device):
        return [
            measured(world.family, net, weights, world.public, batch_size) for net, weights in nets
        ]


def measured(
    family: Family, net: Submodel, state: Weights, samples: Array, batch_size: int
) -> dict[str, Tensor]:
    """Return a net's norm statistics over samples by name, as the mean over batches.

    Args:
        family: Family of the net.
        net: Sub-model.
        state: Its weights, by name.
        samples: (sample, …) Two or more inputs of the model.
        batch_size: Samples per batch.

    Raises:
        ConfigError: The samples have another shape than the model's inputs, or are fewer than two.
    """
    example = family.example_inputs[0]
    samples = torch.as_tensor(samples)
    if samples.shape[1:] != example.shape[1:] or len(samples) < 2:
        raise ConfigError(
            f"norms were to be measured over samples of shape {tuple(samples.shape)}; the model "
            f"takes two or more of shape {tuple(example.shape[1:])}."
        )
    weight = next(value for value in state.values() if value.is_floating_point())
    inputs = samples.to(
        weight.device, weight.dtype if samples.is_floating_point() else samples.dtype
    )

    def seen(robustness: float) -> dict[str, Tensor]:
        mode = Pass(statistics="measure", robustness=robustness)
        with torch.no_grad():  # Batches are copied, because a net may change its input in-place.
            batch_statistics = [
                family.member(net).net(state, batch.clone(), mode)[1]
                for batch in batched(inputs, batch_size)
            ]
        return mean_statistics(batch_statistics, len(batch_statistics))

    # Public samples have no labels, so that they cannot be attacked. Clean and robust norms see the
    # same samples.
    return both_statistics(seen(0.0), seen(1.0)) if family.adjustable else seen(0.0)
