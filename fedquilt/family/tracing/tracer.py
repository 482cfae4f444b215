"""Find the axes of any module by following every dimension through a run of it.

The module runs on tensors without data, in evaluation and in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedquilt.axes import Axis, axes_in
from fedquilt.errors import TraceError
from fedquilt.family.layout import Layout
from fedquilt.family.tracing.atoms import Dim, Facts, atom, is_plain, pin
from fedquilt.family.tracing.check import check_members
from fedquilt.family.tracing.naming import expression, first_uses, layer_outputs, name_axes
from fedquilt.family.tracing.pinning import (
    apply_rules,
    inner_axes,
    pin_projected,
    pin_unproduced,
    settle,
    settle_output,
)
from fedquilt.family.tracing.record import rehearse
from fedquilt.family.tracing.run import AtenCall, RecordedRun, layer_name
from fedquilt.family.tracing.selection import fix_axes, weights_of_parts, weights_of_variants
from fedquilt.family.tracing.sizes import Trail
from fedquilt.family.tracing.solver import solve_sizes
from fedquilt.family.tracing.traced import Heads, Traced
from fedquilt.family.tracing.variant_runs import record_variant
from fedquilt.family.variants import names_of
from fedquilt.hardware.torch_internals import NormBase


def trace_layout(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    fixed: Sequence[str] = (),
    parts: Mapping[str, Sequence[str]] | None = None,
    heads: Heads = "inside",
    class_dim: int | None = None,
    check: bool = True,
) -> Layout:
    """Return the axes of a module, and the dimensions of its weights as expressions of axes.

    Args:
        module: The module, which does not change.
        example_inputs: Inputs of its forward.
        fixed: Names of axes, layers or weights that are never cut. () has no effect.
        parts: Names of weights or layers, by the name of a group. None: no groups besides `norm`.
        heads: "inside": attention is cut inside each head. "whole": whole heads are cut.
        class_dim: Dimension of the output that has the classes. None: it is guessed.
        check: True: members are built, and all that they compute is compared with the axes.

    Raises:
        TraceError: The module cannot be traced, or its members do not follow the axes.
    """
    traced = trace_runs(module, example_inputs, heads, class_dim)
    layout = fix_axes(traced.layout, fixed, module)
    layout = replace(layout, parts=weights_of_parts(module, layout, parts or {}, traced.runs))
    return check_members(module, example_inputs, traced, layout, fixed) if check else layout


def trace_runs(
    module: nn.Module, inputs: tuple[Any, ...], heads: Heads, class_dim: int | None
) -> Traced:
    """Run every variant of a module on tensors without data, and derive its axes from the runs.

    Every dimension of every weight starts as an axis of its own, an atom. The calls of the runs say
    which of them must be cut together (they are unified) and which must not be cut (they are
    pinned). The atoms that remain are the axes. No member is built to check them.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        heads: "inside": attention is cut inside each head. "whole": whole heads are cut.
        class_dim: Dimension of the output that has the classes. None: it is guessed from the
            inputs.

    Raises:
        TraceError: The module cannot be traced.
    """
    # 1. Run the module, with an atom for each dimension of a weight.
    _refuse(module)
    rehearse(module, inputs)
    ties = _ties(module)
    counters = _counters(module)
    weights = {
        name: tuple(atom(n) for n in weight.shape)
        for name, weight in (*module.named_parameters(), *module.named_buffers())
        if name not in counters
    }
    trail, facts = Trail(), Facts()
    runs = _runs(module, weights, inputs, trail, facts)
    used = first_uses(runs)

    # 2. Unify dimensions that must be cut together.
    outputs = layer_outputs(module, weights)
    causes = apply_rules(runs, outputs, facts)
    pin_projected(module, weights, ties)
    sizes = solve_sizes(module, weights, trail, facts)

    # 3. Pin dimensions that must not be cut.
    class_dim = settle_output(runs, inputs, class_dim, facts)
    for name, dims in weights.items():
        if name not in used:
            for dim in dims:
                pin(dim)
    settle(facts, heads)
    pin_unproduced(module, weights, used, facts)

    # 4. Name the atoms that remain, and write all dimensions as expressions of them.
    names = name_axes(module, runs[0].output.dims[class_dim], weights, used)
    axes = {
        name: Axis(
            name,
            axis_atom.size,
            axis_atom.fixed,
            axis_atom.coupled,
            inner_axes(axis_atom, facts, names),
        )
        for axis_atom, name in names.items()
    }
    free = {name for name, axis in axes.items() if not axis.fixed}
    attributes = {path: expression(dim, names) for path, dim in sizes.items()}
    notes = [
        *facts.notes,
        *_unused_notes(module, runs[0], used),
        *_uncut_notes(outputs, used, causes),
    ]
    layout = Layout(
        axes=axes,
        dims={
            name: tuple(expression(dim, names) for dim in dims) for name, dims in weights.items()
        },
        ties=ties,
        attributes={path: expr for path, expr in attributes.items() if free & set(axes_in(expr))},
        variants=weights_of_variants(module, runs, weights),
        class_dim=class_dim,
        notes=tuple(dict.fromkeys(notes)),
    )
    return Traced(layout, runs, names, facts.unlike)


def _unused_notes(module: nn.Module, run: RecordedRun, used: Sequence[str]) -> list[str]:
    """Return sentences about constants that Python reads, and about parameters without a use.

    Args:
        module: The module.
        run: Run whose reads of constants are listed, with one sentence for each.
        used: Names of the weights that a run computes with. One sentence lists all other
            parameters.
    """
    notes = [
        f"Python reads a constant in {line}: every member takes that branch" for line in run.reads
    ]
    unused = ", ".join(name for name, _ in module.named_parameters() if name not in used)
    if unused:
        notes.append(f"nothing is computed from {unused}: never cut")
    return notes


def _uncut_notes(
    outputs: Mapping[str, tuple[str, Dim]], used: Sequence[str], causes: Mapping[str, AtenCall]
) -> list[str]:
    """Return one sentence about the layers whose outputs are never cut, or an empty list.

    Args:
        outputs: Name and output dimension of each layer, by the name of its weight.
        used: Names of the weights that a run computes with.
        causes: Call that pinned the outputs of a layer, by the name of its weight.
    """
    layers = []
    for name, (layer, out_channels) in outputs.items():
        if name in used and is_plain(out_channels):
            cause = f" (because of {causes[name]})" if name in causes else ""
            layers.append(f"{layer}{cause}")
    if not layers:
        return []
    return [f"no axis reaches the outputs of {', '.join(layers)}: every member has all of them"]


def _refuse(module: nn.Module) -> None:
    """Raise a TraceError for lazy, scripted or parallel modules, which cannot be traced."""
    kind = type(module).__name__
    if any(is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
        raise TraceError(f"{kind} has lazy layers: run it once, so that they know their sizes.")
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is compiled by torch.jit, which hides its code and "
                "fixes its sizes. Trace the module it was compiled from."
            )
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is a {type(layer).__name__}: trace the network "
                "inside it, its `.module`."
            )


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the first name of every tied parameter or buffer, by each of its other names.

    Tensors with a single name are left out.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, weight in named:
        if first.setdefault(id(weight), name) != name:
            ties[name] = first[id(weight)]
    return ties


def _counters(module: nn.Module) -> set[str]:
    """Return the full names of `num_batches_tracked` in norms, which are no weights."""
    names = set()
    for path, layer in module.named_modules():
        if isinstance(layer, NormBase):
            names.add(f"{path}.num_batches_tracked" if path else "num_batches_tracked")
    return names


def _runs(
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    trail: Trail,
    facts: Facts,
) -> tuple[RecordedRun, ...]:
    """Return the runs of every variant in evaluation and in training. The whole model comes first.

    In training a module may use heads and noise that evaluation does not have. A run in training
    that cannot be recorded is left out. Runs share their atoms, so that axes are common to all
    variants.

    Args:
        module: The module, which does not change.
        weights: Dimensions of its weights, by name.
        inputs: Example inputs.
        trail: Follows the sizes that Python reads in the runs.
        facts: Takes a note about every run that is left out.
    """
    runs: list[RecordedRun] = []
    for variant in names_of(module):
        runs += record_variant(module, inputs, variant, weights, trail, facts)
    return tuple(runs)
