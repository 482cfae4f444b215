"""Axes and weights that the user names: `fixed`, `parts`, and the weights of variants."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fedquilt.axes import axes_in
from fedquilt.errors import TraceError
from fedquilt.family.dual import NORMS
from fedquilt.family.layout import Layout
from fedquilt.family.tracing.atoms import Dim
from fedquilt.family.tracing.naming import output_dim
from fedquilt.family.tracing.run import RecordedRun
from fedquilt.family.variants import Variants, names_of
from fedquilt.terms import WHOLE


def fix_axes(layout: Layout, fixed: Sequence[str], module: nn.Module) -> Layout:
    """Return the layout with the axes of named layers or weights fixed.

    Args:
        layout: The layout.
        fixed: Names of axes, layers or weights. Of a layer or weight, the outputs are fixed.
        module: The module that was traced.

    Raises:
        TraceError: A name is none of these.
    """
    axes = dict(layout.axes)
    for name in fixed:
        if name in axes:
            pinned = {name}
        else:
            inner_weights = list(_under(layout, name))
            if not inner_weights:
                choices = [
                    *axes,
                    *(path for path, _ in module.named_modules() if path),
                    *layout.dims,
                ]
                raise TraceError(
                    f"fixed={name!r} names no axis, layer or weight.{_nearest(name, choices)}"
                )
            pinned = {
                axis
                for weight in inner_weights
                if layout.dims[weight]
                for axis in axes_in(layout.dims[weight][output_dim(module, weight)])
            }
        for axis in pinned:
            axes[axis] = replace(axes[axis], fixed=True)
    return replace(layout, axes=axes)


def _under(layout: Layout, name: str) -> Iterator[str]:
    """Yield the names of the weights that a layer contains, or the weight of this name itself.

    A tied weight is yielded by its first name, which may occur several times. Nothing is yielded if
    `name` is neither a layer with weights nor a weight.
    """
    for weight, first in (*((w, w) for w in layout.dims), *layout.ties.items()):
        if weight == name or weight.startswith(f"{name}."):
            yield first


def _nearest(name: str, choices: Sequence[str]) -> str:
    """Return a sentence with the up to three most similar names, for the end of a message.

    If none is similar, the sentence lists the first eight choices. It begins with a space.

    Args:
        name: Name that was not found.
        choices: Names that exist.
    """
    choices = list(dict.fromkeys(choices))
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.4)
    if close:
        return f" Nearest: {', '.join(map(repr, close))}."
    return f" There are {', '.join(map(repr, choices[:8]))}."


def weights_of_variants(
    module: nn.Module, runs: Sequence[RecordedRun], weights: Mapping[str, tuple[Dim, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights of every variant, by variant.

    Weights that no run computes with belong to the whole model, as they do without variants.

    Args:
        module: The module.
        runs: Runs of all variants.
        weights: Dimensions of the weights, by name. The result has the same order.

    Returns:
        Names by variant. It is empty if the module has no variant besides the whole model.
    """
    variants = names_of(module)
    if len(variants) == 1:
        return {}
    used: dict[str, set[str]] = {variant: set() for variant in variants}
    for run in runs:
        used[run.variant].update(run.weights)
    used[WHOLE] |= set(weights).difference(*used.values())
    return {
        variant: tuple(name for name in weights if name in used[variant]) for variant in variants
    }


def weights_of_parts(
    module: nn.Module,
    layout: Layout,
    parts_by_user: Mapping[str, Sequence[str]],
    runs: Sequence[RecordedRun],
) -> dict[str, tuple[str, ...]]:
    """Return the weights of every part: norms, the user's groups, and parts of stages.

    Args:
        module: The module.
        layout: Its layout.
        parts_by_user: Names of layers or weights, by the name of a part.
        runs: Runs of all variants.

    Raises:
        TraceError: A name is no layer or weight, or a part has the name of a part of the stages.
    """
    norms = [path for path, layer in module.named_modules() if isinstance(layer, NORMS)]
    requests = {"norm": norms, **parts_by_user}
    parts: dict[str, tuple[str, ...]] = {}
    for part, prefixes in requests.items():
        weights: dict[str, None] = {}
        for prefix in prefixes:
            members = dict.fromkeys(_under(layout, prefix) if prefix else layout.dims)
            if not members and part in parts_by_user:
                choices = [*(path for path, _ in module.named_modules() if path), *layout.dims]
                raise TraceError(
                    f"parts[{part!r}] names {prefix!r}, no layer or "
                    f"weight.{_nearest(prefix, choices)}"
                )
            weights.update(members)
        parts[part] = tuple(weights)
    if isinstance(module, Variants):
        declared = module.variant_parts({run.variant: run for run in runs if not run.train})
        # Counters of batches are among a module's buffers, and are no weights.
        grown = {
            part: tuple(name for name in names if name in layout.dims)
            for part, names in declared.items()
        }
        if clashes := sorted(grown.keys() & parts.keys()):
            raise TraceError(
                f"parts[{clashes[0]!r}] was asked for; that is the name of a part of the stages. "
                "Another name would work."
            )
        parts |= grown
    return parts
