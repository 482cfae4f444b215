"""Properties of a model that its layers do not show, and that are tested by running it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedquilt.errors import TraceError
from fedquilt.family.faithful import plain, run_seeded, unlike
from fedquilt.family.grouped import agrees
from fedquilt.family.net import Pass
from fedquilt.family.tracing.variant_runs import record_evaluation
from fedquilt.names import said
from fedquilt.terms import WHOLE, Weights

if TYPE_CHECKING:
    from fedquilt.family.family import Family

_INTEGER_HINT = (
    "Whole numbers are taken for tokens, which an embedding looks up, from 0 to one less than its "
    "size. For features give real numbers, such as inputs.astype('float32')."
)


def output_shape(family: Family) -> tuple[int, ...]:
    """Return the shape of the whole model's output for the example: (sample, class, …).

    Raises:
        TraceError: The model does not run on the example, or its output has one dimension only.
    """
    example = family.example_inputs[0].detach()
    try:
        shape = _whole_shape(family, example)
    except (RuntimeError, TypeError, LookupError) as error:
        hint = "" if example.is_floating_point() else f" {_INTEGER_HINT}"
        kind = str(example.dtype).removeprefix("torch.")
        raise TraceError(
            f"{family.title} does not run on the example of shape {tuple(example.shape)}, "
            f"{kind}: {said(error)}.{hint}"
        ) from error
    if len(shape) < 2:
        raise TraceError(
            f"{family.title} has an output of shape {tuple(shape)}; (sample, outputs) is "
            "needed, also where there is one output for each sample. Leave out the squeeze "
            "behind the last layer."
        )
    shape.insert(1, shape.pop(family.layout.class_dim))
    return tuple(shape)


def _whole_shape(family: Family, example: Tensor) -> list[int]:
    """Return the shape of the whole model's output for the example, as the model returns it.

    A model whose weights are on the meta device runs without data.
    """
    if not any(weight.is_meta for weight in family.parameters.values()):
        return list(_run_whole(family, _plain_state(family), plain(example)).shape)
    run = record_evaluation(family.traced_module, family.example_inputs, WHOLE)
    return list(run.output.shape)


def mixes_samples(family: Family) -> bool:
    """Return True if the output of a sample depends on the other samples of its batch.

    Norms use stored statistics, so that only the forward itself can mix samples. It is tested by
    replacing the other sample of a batch. If the test fails, the result is True, because evaluating
    batches as they are is correct for every net.
    """
    try:
        state = _plain_state(family)
        rows = plain(family.example_inputs[0].detach())  # (sample, …)
        sample = rows[:1]
        other_samples = [row for row in rows[1:].unsqueeze(1) if not torch.equal(row, sample)]
        # Samples that are larger and smaller are both needed, because a ReLU may hide one of them.
        # A model may refuse tokens that are not from its data.
        if sample.is_floating_point() or not other_samples:
            other_samples += unlike(sample)
        alone, *mixed = (
            _run_whole(family, state, torch.cat([sample, neighbor]))[:1]
            for neighbor in (sample, *other_samples)
        )
        return not all(agrees(logits, alone) for logits in mixed)
    except Exception:  # A user's forward may raise anything.
        return True


def _plain_state(family: Family) -> dict[str, Tensor]:
    """Return copies of all weights and buffers of the traced module, by name.

    They are on the CPU, with real numbers in float32.
    """
    state = family.traced_state(tuple(family.layout.dims))
    return {name: plain(value) for name, value in state.items()}


def _run_whole(family: Family, state: Weights, inputs: Tensor) -> Tensor:
    """Return the whole model's outputs in evaluation, on stored norm statistics.

    Args:
        family: The family.
        state: Weights and statistics of the whole model, by name.
        inputs: (sample, …)
    """
    with torch.no_grad():
        outputs, _ = family.member(family.whole).net(state, inputs, Pass(statistics="stored"))
    return outputs


def find_hidden_state(
    module: nn.Module, example_inputs: tuple[Any, ...], buffer_names: Collection[str]
) -> tuple[list[str], bool]:
    """Run a module twice on the same batch in training, and look for what it keeps.

    Args:
        module: The module. A copy of it runs.
        example_inputs: Inputs of its forward.
        buffer_names: Buffers that a forward should not change. Norm statistics are not among them.

    Returns:
        The names of the buffers that it wrote to, and True if the second output differs. If the
        module fails, they are empty and False, because training reports the cause.
    """
    try:
        inputs = tuple(
            plain(torch.cat([x, x])) if isinstance(x, Tensor) else x for x in example_inputs
        )
        module = copy.deepcopy(module).float().cpu().train()
        old_buffers = {
            name: value.clone() for name, value in module.named_buffers() if name in buffer_names
        }
        first = run_seeded(module, inputs)
        second = run_seeded(module, inputs)
        new_buffers = dict(module.named_buffers())
        written = [
            name for name, value in old_buffers.items() if not _is_close(value, new_buffers[name])
        ]
        return written, not _is_close(first, second, 0.0 if written else 1e-4)
    except Exception:  # A user's forward may raise anything.
        return [], False


def _is_close(first: Tensor, second: Tensor, rounding: float = 0.0) -> bool:
    """Return True if two tensors of one shape are equal up to rounding. NaNs are equal.

    Sums on several threads may differ by rounding.

    Args:
        first: A tensor.
        second: The other tensor.
        rounding: Largest relative difference. A hundredth of it is the largest absolute one.
    """
    return torch.allclose(first.float(), second.float(), rounding, rounding / 100, equal_nan=True)
