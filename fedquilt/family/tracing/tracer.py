"""Find the axes of any module by following every dimension through a run of it.

The module runs on tensors without data, in evaluation and in training.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor, prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from fedquilt.axes import Axis, Expr, Product, Sum, axes_in
from fedquilt.errors import FedquiltError, TraceError
from fedquilt.family.build import build
from fedquilt.family.dual import NORMS
from fedquilt.family.layout import Layout
from fedquilt.family.tracing import rules
from fedquilt.family.tracing.atoms import (
    Atom,
    Cat,
    Dim,
    Facts,
    Terms,
    atom,
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
from fedquilt.family.tracing.record import (
    SMALL,
    Call,
    Run,
    RunError,
    Value,
    layer_name,
    record,
    rehearse,
)
from fedquilt.family.tracing.sizes import Trail, solve_sizes
from fedquilt.family.variants import Variants, names_of
from fedquilt.hardware.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from fedquilt.terms import WHOLE

Heads = Literal["inside", "whole"]
CLASS = "class"


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
    layout = _fix(traced.layout, fixed, module)
    layout = replace(layout, parts=_parts(module, layout, parts or {}, traced.runs))
    return _checked(module, example_inputs, traced, layout, fixed) if check else layout


@dataclass(frozen=True)
class Traced:
    """A layout together with the runs that it was derived from."""

    layout: Layout
    runs: tuple[Run, ...]
    names: Mapping[Atom, str]
    unlike: Sequence[tuple[Terms, Terms]]  # Sizes that Python compared and that were unequal

    def predict(self, dim: Dim, widths: Mapping[str, int]) -> int:
        """Return the length that a dimension of the run has in a member of these widths."""
        total = 1
        for factor in resolve(dim):
            match factor:
                case int():
                    total *= factor
                case Atom():
                    total *= widths[self.names[factor]] if factor in self.names else factor.size
                case Cat(terms):
                    total *= sum(self.predict(term, widths) for term in terms)
        return total

    def evaluate(self, terms: Terms, widths: Mapping[str, int]) -> int:
        """Return a size that Python computes in a member. Quotients are rounded down."""
        total = Fraction(0)
        for factor, powers in terms:
            for dim, power in powers:
                factor *= Fraction(self.predict(dim, widths)) ** power
            total += factor
        return floor(total)


def trace_runs(
    module: nn.Module, inputs: tuple[Any, ...], heads: Heads, class_dim: int | None
) -> Traced:
    """Run every variant of a module symbolically, and derive its axes from the runs.

    No member is built to check them.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        heads: "inside": attention is cut inside each head. "whole": whole heads are cut.
        class_dim: Dimension of the output that has the classes. None: it is guessed from the
            inputs.
    """
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
    outputs = _layer_outputs(module, weights)
    causes = _apply_rules(runs, outputs, facts)
    _pin_projected(module, weights, ties)
    sizes = solve_sizes(module, weights, trail, facts)
    class_dim = _settle_output(runs, inputs, class_dim, facts)
    used = _first_uses(runs)
    for dim in (dim for name, dims in weights.items() if name not in used for dim in dims):
        pin(dim)
    _settle(facts, heads)
    _pin_unproduced(module, weights, used, facts)
    facts.notes += [
        f"Python reads a constant in {line}: every member takes that branch"
        for line in runs[0].reads
    ]
    unused = ", ".join(name for name, _ in module.named_parameters() if name not in used)
    facts.notes += [f"nothing is computed from {unused}: never cut"] if unused else []
    names = _name_axes(module, runs[0].output.dims[class_dim], weights, used)
    axes = {
        name: Axis(
            name,
            axis_atom.size,
            axis_atom.fixed,
            axis_atom.coupled,
            _inner(axis_atom, facts, names),
        )
        for axis_atom, name in names.items()
    }
    free = {name for name, axis in axes.items() if not axis.fixed}
    uncut = ", ".join(
        f"{layer} (because of {causes[name]})" if name in causes else layer
        for name, (layer, out_channels) in outputs.items()
        if name in used and is_plain(out_channels)
    )
    facts.notes += (
        [f"no axis reaches the outputs of {uncut}: every member has all of them"] if uncut else []
    )
    attributes = {path: _expression(dim, names) for path, dim in sizes.items()}
    layout = Layout(
        axes=axes,
        dims={
            name: tuple(_expression(dim, names) for dim in dims) for name, dims in weights.items()
        },
        ties=ties,
        attributes={path: expr for path, expr in attributes.items() if free & set(axes_in(expr))},
        variants=_variants(module, runs, weights),
        class_dim=class_dim,
        notes=tuple(dict.fromkeys(facts.notes)),
    )
    return Traced(layout, runs, names, facts.unlike)


def _refuse(module: nn.Module) -> None:
    """Refuse modules that cannot be traced: lazy, compiled or parallel ones."""
    kind = type(module).__name__
    if any(is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
        raise TraceError(f"{kind} has lazy layers: run it once, so that they know their sizes.")
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is compiled by torch.jit, which hides its code and "
                "fixes its sizes. "
                "Trace the module it was compiled from."
            )
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is a {type(layer).__name__}: trace the network "
                "inside it, its `.module`."
            )


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the first name of every tied weight, by its other names."""
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
    """Return the names of the batch counters of norms, which are no weights."""
    names = set()
    for path, layer in module.named_modules():
        if isinstance(layer, _NormBase):
            names.add(f"{path}.num_batches_tracked" if path else "num_batches_tracked")
    return names


def _runs(
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    trail: Trail,
    facts: Facts,
) -> tuple[Run, ...]:
    """Return the runs of every variant in evaluation and in training. The whole model comes first.

    In training a module may use heads and noise that evaluation does not have. Runs share their
    atoms, so that axes are common to all variants.
    """
    runs: list[Run] = []
    for variant in names_of(module):
        runs += variant_runs(module, inputs, variant, weights, trail, facts)
    return tuple(runs)


def variant_runs(
    module: nn.Module,
    inputs: tuple[Any, ...],
    variant: str,
    weights: Mapping[str, tuple[Dim, ...]] = MappingProxyType({}),
    trail: Trail | None = None,
    facts: Facts | None = None,
) -> tuple[Run, ...]:
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
            module, weights, inputs, _known, trail, _constants(module), train=True, variant=variant
        )
    except RunError as failure:
        location = f"{layer_name(failure.layer)}, {failure.where}"
        cause = failure.__cause__
        reason = "Python reads a tensor's values" if _reads_data(cause) else _first_line(cause)
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
) -> Run:
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
        run = record(module, weights, inputs, _known, trail, _constants(module), variant=variant)
    except RunError as failure:
        cause = failure.__cause__
        # A model of fedquilt says what is wrong with its inputs.
        if isinstance(cause, FedquiltError):
            raise cause from None
        location = f"{layer_name(failure.layer)}, {failure.where}"
        if _reads_data(cause):
            raise TraceError(
                f"{kind} reads a tensor's values in Python ({location}), so what it computes "
                "depends on the data and its "
                "axes cannot be traced. Compute with tensors instead (torch.where, masks, "
                ".amax()), or take the "
                "decision in __init__ or outside of forward."
            ) from cause
        raise TraceError(
            f"{kind} does not run on tensors that have the example inputs' shapes but no data "
            f"({location}): "
            f"{str(cause).rstrip('.')}. "
            "Either the example inputs are not what its forward takes, or it needs gradients or "
            "data while it runs."
        ) from cause
    _require_one_tensor(run, kind)
    return run


def _require_one_tensor(run: Run, kind: str) -> None:
    """Refuse a module that does not return one tensor."""
    if not isinstance(run.output, Value):
        raise TraceError(
            f"{kind} returns a {type(run.output).__name__}{' in training' if run.train else ''}, "
            "not one tensor. Wrap "
            "it in a module whose forward returns the logits alone, and trace that."
        )


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return the small buffers that are no norm statistics, such as masks."""
    small = {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.numel() <= SMALL and not buffer.is_meta
    }
    norms = {path for path, layer in module.named_modules() if isinstance(layer, _NormBase)}
    return {name: buffer for name, buffer in small.items() if name.rpartition(".")[0] not in norms}


def _known(op: Any) -> bool:
    """Return True if an operation has a rule."""
    return rules.find_rule(op) is not None


# --- what may be cut ----------------------------------------------------------------------------


def _apply_rules(
    runs: Sequence[Run], outputs: Mapping[str, tuple[str, Dim]], facts: Facts
) -> dict[str, Call]:
    """Apply the rule of every call.

    Returns:
        The call that pinned the outputs of a layer, by the name of the layer's weight.
    """
    causes: dict[str, Call] = {}
    free = {name: out_channels for name, (_, out_channels) in outputs.items()}
    for call in (call for run in runs for call in run.calls):
        rules.apply(call, facts)
        for name in [name for name, out_channels in free.items() if is_plain(out_channels)]:
            causes[name] = call
            del free[name]
    return causes


def _pin_unproduced(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str], facts: Facts
) -> None:
    """Pin channels that no layer produces, such as the coordinates in a layer's input table.

    They are part of the problem, like the colours of an image.
    """
    parameters = {name for name, _ in module.named_parameters()}
    produced: set[Atom] = set()
    for name in parameters & weights.keys():
        dims = weights[name]
        layer = module.get_submodule(name.rpartition(".")[0])
        if dims and isinstance(layer, (nn.Linear, _ConvNd)):
            dims = (dims[_output_dim(module, name)],)
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


def _pin_projected(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], ties: Mapping[str, str]
) -> None:
    """Pin the hidden state of LSTMs with a projection.

    torch recognizes a projection by its being smaller than the hidden state, which must therefore
    keep its size.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            name = f"{path}.weight_ih_l0"
            pin(weights[ties.get(name, name)][0])


def _settle_output(
    runs: Sequence[Run], inputs: tuple[Any, ...], class_dim: int | None, facts: Facts
) -> int:
    """Unify the outputs of all runs, and return the dimension of the classes.

    All dimensions of the output keep their sizes. The class dimension keeps its axis.
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


def _settle(facts: Facts, heads: Heads) -> None:
    """Decide what depends on all calls: slices of tables, split dimensions and nested groups."""
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


def _inner(one: Atom, facts: Facts, names: Mapping[Atom, str]) -> tuple[str, ...]:
    """Return the names of the axes inside the groups that an axis counts."""
    if one.fixed:
        return ()
    names_inside: dict[str, None] = {}
    for outer, inner in facts.groups:
        if one in list(atoms_in(outer)):
            names_inside.update(
                {
                    names[inner_atom]: None
                    for inner_atom in atoms_in(inner)
                    if inner_atom in names and not inner_atom.fixed
                }
            )
    return tuple(names_inside)


# --- names --------------------------------------------------------------------------------------


def _first_uses(runs: Sequence[Run]) -> list[str]:
    """Return the names of the weights, in the order in which they are first used."""
    uses = (value.weight for run in runs for call in run.calls for value in call.inputs)
    return list(
        dict.fromkeys([name for name in uses if name is not None] + [runs[0].output.weight or ""])
    )


def _name_axes(
    module: nn.Module, class_dim: Dim, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str]
) -> dict[Atom, str]:
    """Name each axis after the first layer whose weight has it.

    Layers that have the axis in their outputs are preferred.
    """
    names: dict[Atom, str] = {}
    used_names: set[str] = {CLASS}

    def give(one: Atom, wanted: str) -> None:
        name, count = wanted, 1
        while name in used_names:
            count += 1
            name = f"{wanted}.{count}"
        used_names.add(name)
        names[one] = name

    outputs = [
        (_base_name(module, name), weights[name], _output_dim(module, name))
        for name in used
        if weights.get(name)  # A scalar has no dimensions.
    ]
    classes = set(atoms_in(class_dim))
    first = [(base, dims[out_dim]) for base, dims, out_dim in outputs]
    for base, dim in (*first, *((base, dim) for base, dims, _ in outputs for dim in dims)):
        dim_atoms = list(atoms_in(dim))
        for position, one in enumerate(dim_atoms):
            if one in names:
                continue
            if one in classes:
                names[one] = CLASS
            elif one.fixed and not one.role:
                one.bound = plain(one.size)  # It needs no name.
            else:
                give(one, base if len(dim_atoms) == 1 else f"{base}.{one.role or position}")
    return names


def _layer_outputs(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]]
) -> dict[str, tuple[str, Dim]]:
    """Return the layers that a budget is expected to narrow.

    Returns:
        Name and output dimension of each layer, by the name of its weight.
    """
    outputs: dict[str, tuple[str, Dim]] = {}
    for path, layer in module.named_modules():
        name = f"{path}.weight" if path else "weight"
        # The groups of such a layer are in the input dimension of its weight.
        grouped = isinstance(layer, _ConvTransposeNd) and layer.groups > 1
        if isinstance(layer, (nn.Linear, _ConvNd)) and name in weights and not grouped:
            out_channels = weights[name][_output_dim(module, name)]
            if size(out_channels) > 1:
                outputs[name] = (path or type(layer).__name__, out_channels)
    return outputs


def _output_dim(module: nn.Module, weight: str) -> int:
    """Return the dimension of a weight that has its layer's outputs."""
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    turned = (
        isinstance(layer, (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd))
        and attribute == "weight"
    )
    return 1 if turned else 0


def _base_name(module: nn.Module, weight: str) -> str:
    """Return the name from which the names of a weight's axes are made: that of its layer."""
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    if isinstance(layer, ParametrizationList):
        path = path.rsplit(".", 2)[0]  # "conv.parametrizations.weight"
    ready_made = attribute in ("weight", "bias") or type(layer).__module__.startswith("torch.nn")
    name = re.sub(r"[\s()+]", "_", path if path and ready_made else weight)
    return f"layer.{name}" if name.isdecimal() else name  # A bare number would be read as a size.


def _expression(dim: Dim, names: Mapping[Atom, str]) -> Expr:
    """Return a dimension as an expression of named axes."""
    factors: list[Expr] = []
    for factor in resolve(dim):
        match factor:
            case Atom():
                term_expr: Expr = names.get(factor, factor.size)
            case Cat(terms):
                term_expr = Sum(tuple(_expression(term, names) for term in terms))
            case int():
                term_expr = factor
        if isinstance(term_expr, int) and factors and isinstance(factors[-1], int):
            factors[-1] *= term_expr
        else:
            factors.append(term_expr)
    return factors[0] if len(factors) == 1 else Product(tuple(factors)) if factors else 1


# --- what the user named ------------------------------------------------------------------------


def _fix(layout: Layout, fixed: Sequence[str], module: nn.Module) -> Layout:
    """Return the layout with the axes of named layers or weights fixed."""
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
                for axis in axes_in(layout.dims[weight][_output_dim(module, weight)])
            }
        for axis in pinned:
            axes[axis] = replace(axes[axis], fixed=True)
    return replace(layout, axes=axes)


def _under(layout: Layout, name: str) -> Iterator[str]:
    """Yield the weights of a layer by their first names, or the weight itself."""
    for weight, first in (*((w, w) for w in layout.dims), *layout.ties.items()):
        if weight == name or weight.startswith(f"{name}."):
            yield first


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return a sentence with the most similar names."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return (
        f" Nearest: {', '.join(map(repr, close))}."
        if close
        else f" There are {', '.join(map(repr, known[:8]))}."
    )


def _variants(
    module: nn.Module, runs: Sequence[Run], weights: Mapping[str, tuple[Dim, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the weights of every variant, or nothing for a module that has the whole model alone.

    Weights that no run computes with belong to the whole model, as they do without variants.
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


def _parts(
    module: nn.Module, layout: Layout, wanted: Mapping[str, Sequence[str]], runs: Sequence[Run]
) -> dict[str, tuple[str, ...]]:
    """Return the weights of every part: norms, the user's groups, and parts of stages."""
    norms = [path for path, layer in module.named_modules() if isinstance(layer, NORMS)]
    requests = {"norm": norms, **wanted}
    parts: dict[str, tuple[str, ...]] = {}
    for part, prefixes in requests.items():
        weights: dict[str, None] = {}
        for prefix in prefixes:
            members = dict.fromkeys(_under(layout, prefix) if prefix else layout.dims)
            if not members and part in wanted:
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


# --- the check ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mismatch:
    """A call in which a member does not follow its axes."""

    call: Call
    found: str
    branch: bool = False  # True: it computes something else. False: only sizes differ.
    # All calls of the layer, if it is not clear which one is the cause
    layer: tuple[Call, ...] = ()
    axes: tuple[str, ...] = ()  # Axes that are the cause, if they are known
    widths: Mapping[str, int] = field(default_factory=dict)  # Widths of the member

    def suspects(self, traced: Traced) -> list[str]:
        """Return the axes that the call has, or else all axes of its layer."""
        if self.axes:
            return list(self.axes)
        values = [*self.call.inputs, *self.call.outs]
        values += [value for call in self.layer for value in (*call.inputs, *call.outs)]
        atoms = (axis_atom for value in values for dim in value.dims for axis_atom in atoms_in(dim))
        return list(
            dict.fromkeys(
                traced.names[axis_atom] for axis_atom in atoms if axis_atom in traced.names
            )
        )


def _checked(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, fixed: Sequence[str]
) -> Layout:
    """Compare every shape and offset that members compute with what the axes predict.

    Returns:
        The layout. Axes of which one channel is too few have a larger least width.

    Raises:
        TraceError: A member does not follow the axes. The message says which axes to fix.
    """
    problem = current = _first_mismatch(module, inputs, traced, layout)
    if problem is None:
        return layout
    widened = _widened(module, inputs, traced, layout, problem)
    if widened is not None:
        return widened
    pinned: list[str] = []
    trial = layout
    # Axes are pinned until members work, so that the advice in the message has been tried.
    while current is not None:
        blamed = [name for name in current.suspects(traced) if not trial.axes[name].fixed]
        if not blamed and not current.layer and not current.axes:
            same_layer = tuple(
                call
                for run in traced.runs
                for call in run.calls
                if call.layer == current.call.layer
            )
            current = replace(current, layer=same_layer)
        elif blamed:
            pinned += blamed
            trial = _fix(trial, blamed, module)
            current = _first_mismatch(module, inputs, traced, trial)
        else:
            break
    names = ", ".join(map(repr, [*fixed, *pinned]))
    kind = type(module).__name__
    if problem.branch:
        cause = (
            f"{kind} takes another branch in a narrower member, since its code compares sizes "
            "that a cut changes"
        )
        rewrite = "take the decision in __init__ and keep it in an attribute"
    else:
        cause = f"{kind} has a size written into its code that a narrower member does not have"
        view = _kind(problem.call) == "view"
        rewrite = (
            "use x.flatten(1) or sizes read from x.shape"
            if view
            else "read it from a tensor's shape or from an attribute"
        )
    remedy = (
        f"{rewrite}, or pin what it depends on: fixed=[{names}]" if current is None else rewrite
    )
    raise TraceError(f"{cause}: {problem.call}: {problem.found}. To mend it, {remedy}.")


def _widened(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, problem: _Mismatch
) -> Layout | None:
    """Return the layout with a least width of two, if members fail with a single channel only.

    Standardized convolutions need two inputs, and `x.squeeze()` drops a dimension of one. None is
    returned if that is not the cause.
    """
    notes = list(layout.notes)
    current: _Mismatch | None = problem
    while current is not None:
        # Other layers that run the same line are likely to need the same.
        line = current.call.where
        same_line = tuple(call for run in traced.runs for call in run.calls if call.where == line)
        suspects = replace(current, layer=same_line).suspects(traced)
        narrow = [
            name for name in suspects if current.widths[name] < min(2, layout.axes[name].size)
        ]
        if not narrow:
            return None
        notes.append(
            f"members have at least 2 channels of {', '.join(narrow)}: with one, {current.call}: "
            f"{current.found}"
        )
        widened_axes = {name: replace(layout.axes[name], least=2) for name in narrow}
        layout = replace(layout, axes={**layout.axes, **widened_axes}, notes=tuple(notes))
        current = _first_mismatch(module, inputs, traced, layout)
    return layout


def _first_mismatch(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout
) -> _Mismatch | None:
    """Return the first mismatch of members with uneven, least and possibly branching widths."""
    free = [axis for axis in layout.axes.values() if not axis.fixed]
    numbers = _Numbers()
    for widths in (_uneven(free), *_narrowest(free)) if free else ():
        mismatch = _mismatch(module, inputs, traced, layout, widths, numbers)
        if mismatch is not None:
            return mismatch
    numbers.complete = True
    for widths in _meetings(traced, layout):
        mismatch = _mismatch(module, inputs, traced, layout, widths, numbers)
        if mismatch is not None:
            return replace(mismatch, branch=True, axes=tuple(widths))
    return None


@dataclass
class _Numbers:
    """The numbers among the arguments of the module's calls that depend on a member's widths.

    All other numbers are the same in every member. If such a number differs at a width where a
    comparison becomes equal, the member took another branch: `x * (2 if self.a != self.b else 3)`.
    """

    varying: set[tuple[Call, int]] = field(default_factory=set)  # (call, position)
    complete: bool = False  # True once members of all kinds of widths have run

    def difference(self, call: Call, other: Call) -> str | None:
        """Describe the number of a member's call that differs, or learn that it varies."""
        pairs = zip(self._of(call), self._of(other), strict=False)
        different = [
            (position, expected, actual)
            for position, (expected, actual) in enumerate(pairs)
            if expected != actual
        ]
        if not self.complete:
            self.varying.update((call, position) for position, _, _ in different)
            return None
        return next(
            (
                f"{actual}, not {expected}"
                for position, expected, actual in different
                if (call, position) not in self.varying
            ),
            None,
        )

    @staticmethod
    def _of(call: Call) -> list[int | float]:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, (int, float))]


def _mismatch(
    module: nn.Module,
    inputs: tuple[Any, ...],
    traced: Traced,
    layout: Layout,
    chosen: Mapping[str, int],
    numbers: _Numbers,
) -> _Mismatch | None:
    """Return the call in which the member with the chosen widths does not follow its axes."""
    constants = {
        name: buffer
        for name, buffer in _constants(module).items()
        if all(isinstance(dim, int) for dim in layout.dims[name])
    }
    widths = {**layout.sizes, **chosen}
    member = build(module, layout, widths)
    for run in traced.runs:
        try:
            done = record(
                member,
                {},
                inputs,
                _known,
                constants=constants,
                train=run.train,
                variant=run.variant,
            ).calls
        except RunError as failure:
            fails = f"the member fails here ({_first_line(failure.__cause__)})"
            # The cause may be an earlier call, because -1 in a view accepts any number of channels.
            mismatch = _compare(run.calls, failure.calls, traced, widths, numbers, fails)
            mismatch = mismatch or _Mismatch(_visible(run.calls)[-1], fails)
        else:
            mismatch = _compare(run.calls, done, traced, widths, numbers)
        if mismatch is not None:
            return replace(mismatch, widths=widths)
    return None


def _uneven(free: Sequence[Axis]) -> dict[str, int]:
    """Return about half of each axis, with a different share for each.

    Equal shares would hide a confusion of two axes.
    """
    shares = (0.38 + 0.24 * (number * 0.618 % 1) for number in range(len(free)))
    return {
        axis.name: max(axis.least, min(axis.size - 1, round(axis.size * share)))
        for axis, share in zip(free, shares, strict=True)
    }


def _narrowest(free: Sequence[Axis]) -> list[dict[str, int]]:
    """Return the least width of every axis. Where it is two, three is tried as well.

    A width of two may work by being even.
    """
    smallest = {axis.name: axis.least for axis in free}
    odd = {axis.name: min(3, axis.size) for axis in free if axis.least > 1}
    return [smallest, smallest | odd] if odd else [smallest]


def _meetings(traced: Traced, layout: Layout) -> list[dict[str, int]]:
    """Return widths at which sizes become equal that Python compared and found unequal.

    Members of these widths may take another branch.
    """
    meetings: dict[tuple[str, int], None] = {}
    for pair in dict.fromkeys(traced.unlike):
        dims = [dim for terms in pair for _, powers in terms for dim, _ in powers]
        for axis_atom in {
            axis_atom: None
            for dim in dims
            for axis_atom in atoms_in(dim)
            if axis_atom in traced.names
        }:
            axis = layout.axes[traced.names[axis_atom]]
            for width in range(axis.least, axis.least if axis.fixed else axis.size):
                first, second = (
                    traced.evaluate(terms, layout.sizes | {axis.name: width}) for terms in pair
                )
                if first == second:
                    meetings[axis.name, width] = None
    return [{name: width} for name, width in meetings]


def _compare(
    expected: Sequence[Call],
    found: Sequence[Call],
    traced: Traced,
    widths: Mapping[str, int],
    numbers: _Numbers,
    fails: str = "",
) -> _Mismatch | None:
    """Return the first call that differs. `fails` says why the member's run stopped, if it did."""
    sources = _Sources(expected, found)
    for call, member_call in _aligned(expected, found, sources):
        if member_call is None:
            assert call is not None
            return _Mismatch(call, fails or "the member is done before", branch=not fails)
        if call is None:
            return _Mismatch(_visible(expected)[-1], "the member goes on after it", branch=True)
        if _kind(call) != _kind(member_call):
            return _Mismatch(call, f"the member computes {_kind(member_call)} here", branch=True)
        if (different := sources.difference(call, member_call)) is not None:
            return _Mismatch(call, f"the member computes it from {different}", branch=True)
        if (different := numbers.difference(call, member_call)) is not None:
            return _Mismatch(call, f"the member computes it with {different}", branch=True)
        if rules.is_undefined(member_call) and not rules.is_undefined(call):
            return _Mismatch(call, "the member takes the variance of too few values")
        for value, member_value in zip(call.outs, member_call.outs, strict=False):
            predicted = tuple(traced.predict(dim, widths) for dim in value.dims)
            if value.known and predicted != member_value.shape:
                return _Mismatch(
                    call, f"the member gets shape {member_value.shape}, its axes say {predicted}"
                )
            for mark, dim in value.marks.items():
                actual, expected_number = rules.told(member_call, mark), traced.predict(dim, widths)
                if actual is not None and actual != expected_number:
                    return _Mismatch(
                        call, f"the member is told {actual}, its axes say {expected_number}"
                    )
    return None


def _aligned(
    expected: Sequence[Call], found: Sequence[Call], sources: _Sources
) -> Iterator[tuple[Call | None, Call | None]]:
    """Pair the calls of the module with those of a member, up to the first without a partner.

    Calls that make constants may be missing in one run, because forward caches a table.
    """
    calls, member_calls = deque(_visible(expected)), deque(_visible(found))
    while calls or member_calls:
        call = calls[0] if calls else None
        member_call = member_calls[0] if member_calls else None
        if (
            call
            and member_call
            and _kind(call) == _kind(member_call)
            and _line(call) == _line(member_call)
        ):
            yield calls.popleft(), member_calls.popleft()
        elif member_call and (member_call.constant or _is_needless(member_call)):
            sources.skip(member_calls.popleft())
        elif call and call.constant:
            calls.popleft()
        else:
            yield call, member_call
            return


def _line(call: Call) -> str:
    """Return the line of a call that makes a constant, and "" for other calls.

    A member may have more or fewer calls that make constants.
    """
    return call.where if call.constant else ""


class _Sources:
    """The tensors of a member and the tensors of the module that they correspond to.

    Shapes alone do not show that a member took another branch, because `self.a(x)` and `self.b(x)`
    may have equal shapes.
    """

    def __init__(self, expected: Sequence[Call], found: Sequence[Call]) -> None:
        self._originals: dict[Value, Value] = {}
        self._partners: dict[Value, Value] = {}
        for call in (*expected, *found):
            if call.op.overloadpacket in _COPIES:
                self.skip(call)

    def skip(self, call: Call) -> None:
        """Treat the result of a copy as the tensor that was copied."""
        if call.inputs:
            self._originals[call.outs[0]] = self._original(call.inputs[0])

    def _original(self, value: Value) -> Value:
        return self._originals.get(value, value)

    def difference(self, call: Call, other: Call) -> str | None:
        """Describe what the member's call is computed from, if it differs from the module's."""
        if len(call.inputs) != len(other.inputs):
            return f"{len(other.inputs)} tensors, not {len(call.inputs)}"
        for value, member_value in zip(call.inputs, other.inputs, strict=True):
            value, member_value = self._original(value), self._original(member_value)
            if value.constant or member_value.constant:
                continue
            if (
                value.weight != member_value.weight
                or self._partners.setdefault(value, member_value) is not member_value
            ):
                return repr(member_value.weight) if member_value.weight else "another tensor"
        self._partners.update(zip(call.outs, other.outs, strict=False))
        return None


def _is_needless(call: Call) -> bool:
    """Return True if a call views a single number in another shape.

    torch does that to write a number to many positions.
    """
    return _kind(call) == "view" and prod(call.outs[0].shape) == 1


def _visible(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without copies, which torch makes or not depending on strides."""
    return [call for call in calls if call.op.overloadpacket not in _COPIES]


def _kind(call: Call) -> str:
    """Return the name of a call's operation, which is "view" for all kinds of views."""
    packet = call.op.overloadpacket
    return "view" if packet in _VIEWS else str(packet.__name__)


_COPIES = {
    torch.ops.aten.clone,
    torch.ops.aten.alias,
    torch.ops.aten.detach,
    torch.ops.aten.contiguous,
}
_VIEWS = {
    torch.ops.aten.view,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.reshape,
    torch.ops.aten._reshape_alias,
}
