"""Runs of a module's variants, in evaluation and in training."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from fedquilt.errors import FedquiltError, TraceError
from fedquilt.family.tracing.atoms import Dim, Facts
from fedquilt.family.tracing.record import RunOptions, record
from fedquilt.family.tracing.recorder import MAX_CONSTANT_SIZE
from fedquilt.family.tracing.rules.dispatch import find_rule
from fedquilt.family.tracing.run import RecordedRun, RunError, Value, layer_name
from fedquilt.family.tracing.sizes import Trail
from fedquilt.hardware.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    NormBase,
)


def record_variant(
    module: nn.Module,
    inputs: tuple[Any, ...],
    variant: str,
    weights: Mapping[str, tuple[Dim, ...]] = MappingProxyType({}),
    trail: Trail | None = None,
    facts: Facts | None = None,
) -> tuple[RecordedRun, ...]:
    """Return the run of a variant in evaluation, and the one in training if it can be recorded.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        variant: Name of the variant.
        weights: Dimensions of the weights, by name. All other weights have plain sizes.
        trail: Follows the sizes that Python reads. None: nothing follows them.
        facts: Takes a note if the run in training cannot be recorded. None: nothing is noted.

    Raises:
        TraceError: It does not run in evaluation, or does not return one tensor.
    """
    evaluation = record_evaluation(module, inputs, variant, weights, trail)
    try:
        training = record(
            module,
            inputs,
            RunOptions(
                has_rule, weights, trail, small_constants(module), train=True, variant=variant
            ),
        )
    except RunError as failure:
        location = f"{layer_name(failure.layer)}, {failure.where}"
        cause = failure.__cause__
        reason = "Python reads a tensor's values" if _reads_data(cause) else first_line(cause)
        if facts is not None:
            facts.notes.append(
                f"followed in evaluation only, since in training ({location}): {reason}"
            )
        return (evaluation,)
    _require_one_tensor(training, type(module).__name__)
    return evaluation, training


def _reads_data(cause: BaseException | None) -> bool:
    """Return True if a run failed because Python needed the values of a tensor."""
    needs_values = isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException))
    return needs_values or ".numpy()" in str(cause)


def record_evaluation(
    module: nn.Module,
    inputs: tuple[Any, ...],
    variant: str,
    weights: Mapping[str, tuple[Dim, ...]] = MappingProxyType({}),
    trail: Trail | None = None,
) -> RecordedRun:
    """Return the run of a variant in evaluation.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        variant: Name of the variant.
        weights: Dimensions of the weights, by name. All other weights have plain sizes.
        trail: Follows the sizes that Python reads. None: nothing follows them.

    Raises:
        TraceError: It does not run, or does not return one tensor.
    """
    kind = type(module).__name__
    try:
        run = record(
            module,
            inputs,
            RunOptions(has_rule, weights, trail, small_constants(module), variant=variant),
        )
    except RunError as failure:
        cause = failure.__cause__
        # A model of fedquilt says what is wrong with its inputs.
        if isinstance(cause, FedquiltError):
            raise cause from None
        location = f"{layer_name(failure.layer)}, {failure.where}"
        if _reads_data(cause):
            raise TraceError(
                f"{kind} reads a tensor's values in Python ({location}), so what it computes "
                "depends on the data and its axes cannot be traced. Compute with tensors instead "
                "(torch.where, masks, .amax()), or take the decision in __init__ or outside of "
                "forward."
            ) from cause
        raise TraceError(
            f"{kind} does not run on tensors that have the example inputs' shapes but no data "
            f"({location}): {str(cause).rstrip('.')}. Either the example inputs are not what its "
            "forward takes, or it needs gradients or data while it runs."
        ) from cause
    _require_one_tensor(run, kind)
    return run


def _require_one_tensor(run: RecordedRun, kind: str) -> None:
    """Raise a TraceError if the module of a run does not return exactly one tensor.

    Args:
        run: Run of the module.
        kind: Name of the module's class, for the message.
    """
    if not isinstance(run.output, Value):
        raise TraceError(
            f"{kind} returns a {type(run.output).__name__}{' in training' if run.train else ''}, "
            "not one tensor. Wrap "
            "it in a module whose forward returns the logits alone, and trace that."
        )


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def small_constants(module: nn.Module) -> dict[str, Tensor]:
    """Return the small buffers by name, such as masks, without those of norms.

    A buffer is small if it has at most `MAX_CONSTANT_SIZE` elements. All buffers of batch and
    instance norms are left out, and so are buffers without data.
    """
    small = {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.numel() <= MAX_CONSTANT_SIZE and not buffer.is_meta
    }
    norms = {path for path, layer in module.named_modules() if isinstance(layer, NormBase)}
    return {name: buffer for name, buffer in small.items() if name.rpartition(".")[0] not in norms}


def has_rule(op: Any) -> bool:
    """Return True if an ATen operation has a rule of its own or is point-wise."""
    return find_rule(op) is not None
