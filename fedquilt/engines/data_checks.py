"""Checks that data fits the model, the task and the method, before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.data import FederatedData
from fedquilt.errors import (
    ConfigError,
    DataError,
)
from fedquilt.round.federation import World
from fedquilt.round.training.server import MIN_PUBLIC

if TYPE_CHECKING:
    from fedquilt.family import Family


MAX_COMPARED = 256  # Samples whose scales are compared.
# Least ratio between the scales of public and training samples, either way.
MIN_SCALE_RATIO = 0.1


def check_inputs(family: Family, data: FederatedData) -> None:
    """Refuse data whose samples do not have the shape and type of a model's example input.

    Raises:
        DataError: The shape or type differs, or the model takes several inputs. It is also raised
            if the number of test domains is not that of test samples.
    """
    if len(family.example_inputs) != 1:
        raise DataError(
            f"the model was traced with {len(family.example_inputs)} inputs; {data.name} has one a "
            "sample. Wrap the model in a module that takes one tensor, and trace that."
        )
    example, inputs = family.example_inputs[0], data.example
    if tuple(example.shape[1:]) != tuple(inputs.shape[1:]):
        raise DataError(
            f"the model was traced with inputs of shape {tuple(example.shape[1:])} a sample; "
            f"{data.name} has {tuple(inputs.shape[1:])}."
        )
    if example.is_floating_point() != inputs.is_floating_point():
        raise DataError(f"the model takes {example.dtype} inputs; {data.name} has {inputs.dtype}.")
    homes, tests = data.test_domains, len(data.test_targets)
    if homes is not None and len(homes) != tests:  # The test set was replaced.
        raise DataError(f"{data.name} has {tests} test samples and the domains of {len(homes)}.")


def check_public(asked_by: str, is_needed: bool, world: World, data: FederatedData) -> None:
    """Refuse public samples that do not fit the model, or their absence if they are needed.

    Args:
        asked_by: Name of the method.
        is_needed: True if the method needs public samples.
        world: Family, and the public samples as the model would see them.
        data: Samples of clients, with which the public ones are compared.

    Raises:
        ConfigError: The method needs public samples, and there are too few.
        DataError: Public samples differ from those of clients in shape, type or scale.
    """
    public, example = world.public, world.family.example_inputs[0]
    if is_needed and world.num_public < MIN_PUBLIC:
        raise ConfigError(
            f"{asked_by} was asked for, which needs at least {MIN_PUBLIC} public samples without "
            f"labels; {data.name} has {world.num_public or 'none'}. data.public = 0.2 in a file, "
            "--set data.public=0.2, or pool.with_public(0.2) in Python makes a share of the "
            "training samples public. Pool.of(…, public=inputs) takes samples of your own, and "
            ".npz files have them as the array `public`."
        )
    if public is None:
        return
    if tuple(public.shape[1:]) != tuple(example.shape[1:]):
        raise DataError(
            f"{data.name} has public samples of shape {tuple(public.shape[1:])}; the model was "
            f"traced with {tuple(example.shape[1:])}. Samples of that shape would work."
        )
    if public.is_floating_point() != example.is_floating_point():
        raise DataError(
            f"{data.name} has public samples of {public.dtype}; the model takes {example.dtype}. "
            "Samples of that type would work."
        )
    if public.is_floating_point() and is_needed:
        _check_scale(public, data)


def _check_scale(public: Tensor, data: FederatedData) -> None:
    """Refuse public samples that are not finite or have another scale than clients' samples.

    The mean absolute values and the standard deviations of the first `MAX_COMPARED` samples of both
    are compared. Normalised images from 0 to 1 among normalised bytes have a usual mean absolute
    value, and a deviation near 0.

    Args:
        public: Public samples, as the model would see them.
        data: Samples of clients.

    Raises:
        DataError: One figure is more than ten times the other, or values are not finite.
    """
    if not bool(public.isfinite().all()):
        raise DataError(
            f"{data.name} has public samples with values that are not finite. Samples without NaN "
            "and infinity would work."
        )
    rows = torch.arange(min(MAX_COMPARED, len(data.targets)), device=data.targets.device)
    samples = data.samples(rows).double(), public[:MAX_COMPARED].double()
    figures = {
        "mean absolute value": [float(values.abs().mean()) for values in samples],
        "standard deviation": [float(values.std(correction=0)) for values in samples],
    }
    for name, (of_clients, of_public) in figures.items():
        if not MIN_SCALE_RATIO * of_clients <= of_public <= of_clients / MIN_SCALE_RATIO:
            raise DataError(
                f"the public samples of {data.name} have a {name} of {of_public:.3g}, and its "
                f"training samples one of {of_clients:.3g}. Both must have the same scale, such as "
                "bytes, or numbers from 0 to 1."
            )


def check_targets(world: World, data: FederatedData) -> None:
    """Refuse targets that do not fit the task and the model's output.

    Targets of training and of test samples are checked.

    Args:
        world: Task, and the family of the model.
        data: Samples of all clients.

    Raises:
        DataError: There are more classes than outputs, or the task refuses the targets.
        ConfigError: A metric of the task does not fit the output.
    """
    task, outputs = world.task, world.family.num_outputs
    if task.has_classes and data.has_classes:
        classes = task.num_outputs(data.targets, data.num_classes)
        if classes > outputs:
            is_mask = data.targets.dim() > 2
            mask_hint = (
                f" If {classes - 1} marks pixels that do not count, task.ignore = {classes - 1} "
                "would fit."
            )
            raise DataError(
                f"{data.name} has {classes} classes; the model's output has {outputs}. A model "
                f"with {classes} outputs would fit, or targets from 0 to "
                f"{outputs - 1}.{mask_hint if is_mask else ''}"
            )
    shape, tests = world.family.output_shape, f"the test set of {data.name}"
    task.check(data.targets, shape, data.name)
    task.check(data.test_targets, shape, tests)
    task.check_whole(data.targets, data.name)
    task.check_whole(data.test_targets, tests)
