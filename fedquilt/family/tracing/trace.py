"""The entry point of tracing: from a module and an example to a family."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fedquilt.errors import TraceError
from fedquilt.errors.faults import enough_memory
from fedquilt.family.family import Family
from fedquilt.family.origin import Tracing, as_factory, make_module
from fedquilt.family.stages import StageSource, usual_stages, with_stages
from fedquilt.family.tracing.tracer import trace_layout
from fedquilt.family.variants import VariantSource

_log = logging.getLogger(__name__)


@enough_memory("tracing the model")
def trace(
    module: nn.Module | Callable[[], nn.Module] | VariantSource,
    example_inputs: Tensor | tuple[Any, ...],
    *,
    fixed: Sequence[str] = (),
    parts: Mapping[str, Sequence[str]] | None = None,
    heads: Literal["inside", "whole"] = "inside",
    class_dim: int | None = None,
) -> Family:
    """Find the axes of a feed-forward module by running it once, on tensors without data.

    An axis is a group of channels that must be cut together, such as those of a residual stream.
    All smaller networks that can be cut along the axes are the members of the returned family. The
    module itself does not change.

    Args:
        module: The module, a function without arguments that makes one, or a module with stages
            (`fedquilt.with_stages`). A module brings its initial weights. A function is called
            again for every random seed.
        example_inputs: Inputs of the module's forward: one tensor, or a tuple for several
            arguments. The first dimension is the batch, of any size.
        fixed: Names of axes, layers or weights that are never cut. () has no effect.
        parts: Groups of weights by name, as lists of layers or weights: `{"head": ["fc"]}`. Methods
            and filters refer to them. None has no effect.
        heads: Treatment of attention. "inside" cuts channels inside each head and keeps all heads.
            "whole" cuts whole heads.
        class_dim: Dimension of the output that has the classes. None: it is 1, or the last one for
            models of tokens.

    Returns:
        The family of all members that can be cut from the module.

    Raises:
        TraceError: The module cannot be traced, does not return one tensor, or has members that do
            not follow the axes. The message says what to change.

    Example:
        >>> import fedquilt as fq
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> family = fq.trace(net, torch.zeros(5, 4))
        >>> family.axes["0.weight"], family.axes["2.weight"]
        ('layer.0 4', 'class layer.0')
        >>> half = family.fit(fq.Budget(share=0.5))
        >>> family.module(half)
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    if isinstance(module, VariantSource):
        factory = as_factory(module.resolve(inputs, class_dim))
    else:
        factory = as_factory(module)
    model = make_module(factory)
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"the function to be traced returned a {type(model).__name__}; an nn.Module is needed."
        )
    _check_names(model)

    layout = trace_layout(model, inputs, fixed=fixed, parts=parts, heads=heads, class_dim=class_dim)
    for note in layout.notes:
        _log.info("%s: %s", type(model).__name__, note)

    options = {"fixed": fixed, "parts": parts, "heads": heads, "class_dim": class_dim}
    source = module.module if isinstance(module, StageSource) else module
    tracing = Tracing(source, options, isinstance(module, VariantSource))
    return Family(model, layout, inputs, factory, _traced=tracing)


def _check_names(model: nn.Module) -> None:
    """Raise a TraceError if a weight or buffer has a slash in its name.

    A slash separates scopes in a server's state.
    """
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        if "/" in name:
            raise TraceError(
                f"{type(model).__name__} has a weight named {name!r}; in a federation's state '/' "
                "separates a net and its weights. Name the layer without it."
            )


def trace_stages(family: Family, stages: int | str | Sequence[str] | None) -> Family:
    """Trace a family's module again, with the stages of a growing model as variants.

    Args:
        family: The family, which does not change.
        stages: Stages as in `fedquilt.with_stages`. None: those that the model declares. For a
            model that declares none, up to four are found.

    Returns:
        A new family of the same module, traced with the same options.

    Raises:
        TraceError: The family was not traced in this process, or has other variants.
    """
    tracing = family.tracing
    if not isinstance(tracing, Tracing) or isinstance(tracing.source, VariantSource):
        variants = family.variants
        present = f"the variants {', '.join(variants)}" if len(variants) > 1 else "none"
        raise TraceError(
            f"stages of {family.title} were asked for; it has {present}, and cannot be traced "
            "again here. fq.trace(fq.with_stages(module, stages=…), example) gives it stages."
        )
    if stages is None:
        stages = usual_stages(family.traced_module, family.example_inputs)
    source = with_stages(tracing.source, stages)
    return trace(source, family.example_inputs, **tracing.options)
