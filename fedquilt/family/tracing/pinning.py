"""Decide which dimensions may be cut, once all runs are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedquilt.errors import TraceError
from fedquilt.family.tracing.atoms import (
    Atom,
    Cat,
    Dim,
    Facts,
    atoms_in,
    fix,
    is_free,
    is_plain,
    pin,
    plain,
    resolve,
    size,
    unify,
)
from fedquilt.family.tracing.naming import output_dim
from fedquilt.family.tracing.rules.dispatch import apply
from fedquilt.family.tracing.run import AtenCall, RecordedRun, Value
from fedquilt.family.tracing.traced import Heads
from fedquilt.hardware.torch_internals import ConvNd


def apply_rules(
    runs: Sequence[RecordedRun], outputs: Mapping[str, tuple[str, Dim]], facts: Facts
) -> dict[str, AtenCall]:
    """Apply the rule of every call.

    Args:
        runs: Runs of all variants. The dimensions of their values are unified.
        outputs: Name and output dimension of each layer, by the name of its weight.
        facts: Takes what the rules find out.

    Returns:
        The first call after which the outputs of a layer cannot be cut, by the name of the layer's
        weight. Layers whose outputs can be cut are missing.
    """
    causes: dict[str, AtenCall] = {}
    free = {name: out_channels for name, (_, out_channels) in outputs.items()}
    for call in (call for run in runs for call in run.calls):
        apply(call, facts)
        for name in [name for name, out_channels in free.items() if is_plain(out_channels)]:
            causes[name] = call
            del free[name]
    return causes


def pin_unproduced(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str], facts: Facts
) -> None:
    """Pin channels that no layer produces, such as the coordinates in a layer's input table.

    They are part of the problem, like the colours of an image.

    Args:
        module: The module.
        weights: Dimensions of its weights, by name.
        used: Names of the weights that a run computes with.
        facts: Takes a note for each weight.
    """
    parameters = {name for name, _ in module.named_parameters()}
    produced: set[Atom] = set()
    for name in parameters & weights.keys():
        dims = weights[name]
        layer = module.get_submodule(name.rpartition(".")[0])
        if dims and isinstance(layer, (nn.Linear, ConvNd)):
            dims = (dims[output_dim(module, name)],)
        produced.update(channel_atom for dim in dims for channel_atom in atoms_in(dim))
    for name in used:
        for dim in weights.get(name, ()):
            if any(
                channel_atom not in produced and not channel_atom.fixed
                for channel_atom in atoms_in(dim)
            ):
                pin(dim)
                facts.notes.append(
                    f"no layer produces the {size(dim)} channels that {name} carries: never cut"
                )


def pin_projected(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], ties: Mapping[str, str]
) -> None:
    """Pin the hidden state of LSTMs with a projection.

    torch recognizes a projection by its being smaller than the hidden state, which must therefore
    keep its size.

    Args:
        module: The module.
        weights: Dimensions of its weights, by their first names.
        ties: First name of every tied weight, by its other names.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            name = f"{path}.weight_ih_l0"
            pin(weights[ties.get(name, name)][0])


def settle_output(
    runs: Sequence[RecordedRun], inputs: tuple[Any, ...], class_dim: int | None, facts: Facts
) -> int:
    """Unify the outputs of all runs, and return the number of the class dimension, from 0 on.

    All dimensions of the output keep their sizes. The class dimension keeps its axis if it is a
    single atom.

    Args:
        runs: Runs of all variants.
        inputs: Example inputs. Integers in the first one mean a model of tokens.
        class_dim: Dimension of the classes. None: it is 1, or the last one for models of tokens.
        facts: Takes a note if the classes are no axis.

    Raises:
        TraceError: The output has no such dimension.
    """
    output: Value = runs[0].output
    for run in runs[1:]:
        for position, dim in enumerate(run.output.dims):
            unify(
                dim, output.dims[position] if run.output.shape == output.shape else plain(size(dim))
            )
    ndim = len(output.shape)
    if class_dim is None:
        tokens = (
            bool(inputs) and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point()
        )
        class_dim = -1 if tokens and ndim != 2 else min(1, ndim - 1)
    if not -ndim <= class_dim < ndim:
        raise TraceError(
            f"class_dim={class_dim} was asked for, but the output has shape {output.shape}."
        )
    class_dim %= ndim
    for position, dim in enumerate(output.dims):
        if position != class_dim or len(resolve(dim)) != 1 or isinstance(resolve(dim)[0], Cat):
            pin(dim)
        fix(dim)
    if is_plain(output.dims[class_dim]):
        facts.notes.append(
            f"dimension {class_dim} of the output is no axis of its own: there is no axis 'class'"
        )
    return class_dim


def settle(facts: Facts, heads: Heads) -> None:
    """Decide what depends on all calls: slices of tables, split dimensions and nested groups.

    Dimensions that cannot be cut are marked in-place. Those of tables are pinned, which removes
    their axes. The others are fixed: they keep the names of their axes.

    Args:
        facts: Facts that the rules have collected.
        heads: Part of a split dimension that may be cut. "inside": its last free factor. "whole":
            its first one.
    """
    # If one range of a table is never cut, none is. An example is a table of positions, of which
    # the range up to the example's length is used.
    changed = True
    while changed:
        changed = False
        for pieces in facts.slices:
            if any(is_plain(piece) and size(piece) for piece in pieces) and any(
                map(is_free, pieces)
            ):
                changed = True
                for piece in pieces:
                    pin(piece)
    # Of a dimension that a view splits, one factor is cut: the inside of each head, or the heads.
    for pieces in facts.views:
        factors = [(factor,) for piece in pieces for factor in resolve(piece) if is_free((factor,))]
        for factor in factors[:-1] if heads == "inside" else factors[1:]:
            fix(factor)
    # Groups may contain groups, if norms of 16 and of 32 groups see the same channels. Then only
    # the outermost and the innermost are cut.
    for outer, _ in facts.groups:
        for factor in [(factor,) for factor in resolve(outer) if is_free((factor,))][1:]:
            fix(factor)


def inner_axes(axis_atom: Atom, facts: Facts, names: Mapping[Atom, str]) -> tuple[str, ...]:
    """Return the names of the axes inside the groups that an axis counts.

    The result is empty if the axis is fixed or counts no groups. Fixed axes inside are left out.

    Args:
        axis_atom: The axis.
        facts: Facts about groups.
        names: Names of the axes.
    """
    if axis_atom.fixed:
        return ()
    names_inside: dict[str, None] = {}
    for outer, inner in facts.groups:
        if axis_atom in list(atoms_in(outer)):
            names_inside.update(
                {
                    names[inner_atom]: None
                    for inner_atom in atoms_in(inner)
                    if inner_atom in names and not inner_atom.fixed
                }
            )
    return tuple(names_inside)
