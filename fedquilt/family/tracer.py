"""Find the axes of any module by running it on tensors without data, in evaluation and in training, and following
every dimension."""

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
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from fedquilt.axes import Axis, Expr, Product, Sum, axes_in
from fedquilt.errors import FedquiltError, TraceError
from fedquilt.family import rules
from fedquilt.family.atoms import (
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
from fedquilt.family.build import build
from fedquilt.family.dual import NORMS
from fedquilt.family.layout import Layout
from fedquilt.family.record import SMALL, Call, Run, RunError, Value, layer_name, record, rehearse
from fedquilt.family.sizes import Trail, solve_sizes
from fedquilt.family.variants import Variants, names_of
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
    """The axes of a module, and where each of its weights carries them.

    `fixed` names axes, layers or weights that are never cut; `parts` names groups of weights. Attention is cut inside
    each head, or by whole heads. `check` builds two members and compares all they compute with what the axes predict.
    """
    traced = trace_runs(module, example_inputs, heads, class_dim)
    layout = _fix(traced.layout, fixed, module)
    layout = replace(layout, parts=_parts(module, layout, parts or {}, traced.runs))
    return _checked(module, example_inputs, traced, layout, fixed) if check else layout


@dataclass(frozen=True)
class Traced:
    """A layout together with the runs it was read from."""

    layout: Layout
    runs: tuple[Run, ...]
    names: Mapping[Atom, str]
    unlike: Sequence[tuple[Terms, Terms]]  # sizes that Python compared and found different

    def predict(self, dim: Dim, widths: Mapping[str, int]) -> int:
        """How long a dimension of the run is in a member."""
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
        """Return a size that Python computes in a member. Python rounds quotients down."""
        total = Fraction(0)
        for factor, powers in terms:
            for dim, power in powers:
                factor *= Fraction(self.predict(dim, widths)) ** power
            total += factor
        return floor(total)


def trace_runs(
    module: nn.Module, inputs: tuple[Any, ...], heads: Heads, class_dim: int | None
) -> Traced:
    """Run every variant of a module symbolically, and read its axes off the runs. No member is built to check them.

    Args:
        module: The module, which does not change.
        inputs: Example inputs.
        heads: Attention is cut inside each head, or by whole heads.
        class_dim: Dimension of the output that the classes are in; None: it is guessed from the inputs.
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
        f"Python reads a constant in {where}: every member takes that branch"
        for where in runs[0].reads
    ]
    unused = ", ".join(name for name, _ in module.named_parameters() if name not in used)
    facts.notes += [f"nothing is computed from {unused}: never cut"] if unused else []
    names = _name_axes(module, runs[0].output.dims[class_dim], weights, used)
    axes = {
        name: Axis(name, one.size, one.fixed, one.coupled, _inner(one, facts, names))
        for one, name in names.items()
    }
    free = {name for name, axis in axes.items() if not axis.fixed}
    whole = ", ".join(
        f"{layer} (because of {causes[name]})" if name in causes else layer
        for name, (layer, made) in outputs.items()
        if name in used and is_plain(made)
    )
    facts.notes += (
        [f"no axis reaches the outputs of {whole}: every member has all of them"] if whole else []
    )
    held = {path: _expression(dim, names) for path, dim in sizes.items()}
    layout = Layout(
        axes=axes,
        dims={
            name: tuple(_expression(dim, names) for dim in dims) for name, dims in weights.items()
        },
        ties=ties,
        attributes={path: expr for path, expr in held.items() if free & set(axes_in(expr))},
        variants=_variants(module, runs, weights),
        class_dim=class_dim,
        notes=tuple(dict.fromkeys(facts.notes)),
    )
    return Traced(layout, runs, names, facts.unlike)


def _refuse(module: nn.Module) -> None:
    """Modules that are no plain networks (yet)."""
    kind = type(module).__name__
    if any(is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
        raise TraceError(f"{kind} has lazy layers: run it once, so that they know their sizes.")
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is compiled by torch.jit, which hides its code and fixes its sizes. "
                "Trace the module it was compiled from."
            )
        if isinstance(layer, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TraceError(
                f"{kind} ({layer_name(path)}) is a {type(layer).__name__}: trace the network inside it, its `.module`."
            )


def _ties(module: nn.Module) -> dict[str, str]:
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
    """Batch norms count their batches; that is bookkeeping, not a weight."""
    found = set()
    for path, layer in module.named_modules():
        if isinstance(layer, _NormBase):
            found.add(f"{path}.num_batches_tracked" if path else "num_batches_tracked")
    return found


def _runs(
    module: nn.Module,
    weights: Mapping[str, tuple[Dim, ...]],
    inputs: tuple[Any, ...],
    trail: Trail,
    facts: Facts,
) -> tuple[Run, ...]:
    """Return the run in evaluation and the one in training, for each variant; the whole model's are first.

    Training may bring in heads and noise that evaluation never sees. Runs share their atoms, so that axes are common
    to all variants.
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
        weights: Dimensions of the weights. Those of others are plain numbers.
        trail: Follows the sizes that Python reads. None: nothing follows them.
        facts: Takes a note where the run in training cannot be recorded. None: nothing is noted.

    Raises:
        TraceError: It does not run in evaluation, or does not return one tensor.
    """
    evaluation = record_evaluation(module, inputs, variant, weights, trail)
    try:
        training = record(
            module, weights, inputs, _known, trail, _constants(module), train=True, variant=variant
        )
    except RunError as failure:
        place = f"{layer_name(failure.layer)}, {failure.where}"
        cause = failure.__cause__
        why = "Python reads a tensor's values" if _reads_data(cause) else _first_line(cause)
        if facts is not None:
            facts.notes.append(f"followed in evaluation only, since in training ({place}): {why}")
        return (evaluation,)
    _require_one_tensor(training, type(module).__name__)
    return evaluation, training


def _reads_data(cause: BaseException | None) -> bool:
    asked = isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException))
    return asked or ".numpy()" in str(cause)


def record_evaluation(
    module: nn.Module,
    inputs: tuple[Any, ...],
    variant: str,
    weights: Mapping[str, tuple[Dim, ...]] = MappingProxyType({}),
    trail: Trail | None = None,
) -> Run:
    """Return the run of a variant in evaluation. The arguments are those of `variant_runs`.

    Raises:
        TraceError: It does not run, or does not return one tensor.
    """
    kind = type(module).__name__
    try:
        run = record(module, weights, inputs, _known, trail, _constants(module), variant=variant)
    except RunError as failure:
        cause = failure.__cause__
        if isinstance(
            cause, FedquiltError
        ):  # A model of fedquilt says what is wrong with its inputs.
            raise cause from None
        place = f"{layer_name(failure.layer)}, {failure.where}"
        if _reads_data(cause):
            raise TraceError(
                f"{kind} reads a tensor's values in Python ({place}), so what it computes depends on the data and its "
                "axes cannot be traced. Compute with tensors instead (torch.where, masks, .amax()), or take the "
                "decision in __init__ or outside of forward."
            ) from cause
        raise TraceError(
            f"{kind} does not run on tensors that have the example inputs' shapes but no data ({place}): "
            f"{str(cause).rstrip('.')}. "
            "Either the example inputs are not what its forward takes, or it needs gradients or data while it runs."
        ) from cause
    _require_one_tensor(run, kind)
    return run


def _require_one_tensor(run: Run, kind: str) -> None:
    if not isinstance(run.output, Value):
        raise TraceError(
            f"{kind} returns a {type(run.output).__name__}{' in training' if run.train else ''}, not one tensor. Wrap "
            "it in a module whose forward returns the logits alone, and trace that."
        )


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no statistics: masks, tables of positions."""
    small = {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.numel() <= SMALL and not buffer.is_meta
    }
    norms = {path for path, layer in module.named_modules() if isinstance(layer, _NormBase)}
    return {name: buffer for name, buffer in small.items() if name.rpartition(".")[0] not in norms}


def _known(op: Any) -> bool:
    return rules.find_rule(op) is not None


# --- what may be cut -----------------------------------------------------------------------------------------------


def _apply_rules(
    runs: Sequence[Run], outputs: Mapping[str, tuple[str, Dim]], facts: Facts
) -> dict[str, Call]:
    """Learn from every call, and return the one that pinned a layer's outputs, by its weight."""
    causes: dict[str, Call] = {}
    free = {name: made for name, (_, made) in outputs.items()}
    for call in (call for run in runs for call in run.calls):
        rules.apply(call, facts)
        for name in [name for name, made in free.items() if is_plain(made)]:
            causes[name] = call
            del free[name]
    return causes


def _pin_unproduced(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str], facts: Facts
) -> None:
    """Keep inputs whole that no layer produces, such as the coordinates in a layer's input table.

    Channels that training never made are part of the problem, as the colours of an image are.
    """
    parameters = {name for name, _ in module.named_parameters()}
    produced: set[Atom] = set()
    for name in parameters & weights.keys():
        dims = weights[name]
        layer = module.get_submodule(name.rpartition(".")[0])
        if dims and isinstance(layer, (nn.Linear, _ConvNd)):
            dims = (dims[_output_dim(module, name)],)
        produced.update(one for dim in dims for one in atoms_in(dim))
    for name in used:
        for dim in weights.get(name, ()):
            if any(one not in produced and not one.fixed for one in atoms_in(dim)):
                pin(dim)
                facts.notes.append(
                    f"no layer produces the {size(dim)} channels that {name} carries: never cut"
                )


def _pin_projected(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], ties: Mapping[str, str]
) -> None:
    """torch tells an LSTM's projection by its being smaller than the hidden state, which must therefore stay."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            name = f"{path}.weight_ih_l0"
            pin(weights[ties.get(name, name)][0])


def _settle_output(
    runs: Sequence[Run], inputs: tuple[Any, ...], class_dim: int | None, facts: Facts
) -> int:
    output: Value = runs[0].output
    for run in runs[1:]:
        for at, dim in enumerate(run.output.dims):
            unify(dim, output.dims[at] if run.output.shape == output.shape else plain(size(dim)))
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
    for at, dim in enumerate(output.dims):
        if at != class_dim or len(resolve(dim)) != 1 or isinstance(resolve(dim)[0], Cat):
            pin(dim)
        fix(dim)
    if is_plain(output.dims[class_dim]):
        facts.notes.append(
            f"dimension {class_dim} of the output is no axis of its own: there is no axis 'class'"
        )
    return class_dim


def _settle(facts: Facts, heads: Heads) -> None:
    """Decide what only the whole graph can tell."""
    # Ranges of a table of which some are never cut (positions up to the example's length): none is.
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
    # Of a dimension taken apart, one factor is cut: what is inside each head, or whole heads.
    for pieces in facts.views:
        factors = [(factor,) for piece in pieces for factor in resolve(piece) if is_free((factor,))]
        for factor in factors[:-1] if heads == "inside" else factors[1:]:
            fix(factor)
    # Groups within groups (norms of 16 and of 32 on one stream): the outermost and the innermost are cut.
    for outer, _ in facts.groups:
        for factor in [(factor,) for factor in resolve(outer) if is_free((factor,))][1:]:
            fix(factor)


def _inner(one: Atom, facts: Facts, names: Mapping[Atom, str]) -> tuple[str, ...]:
    if one.fixed:
        return ()
    found: dict[str, None] = {}
    for outer, inner in facts.groups:
        if one in list(atoms_in(outer)):
            found.update(
                {
                    names[inside]: None
                    for inside in atoms_in(inner)
                    if inside in names and not inside.fixed
                }
            )
    return tuple(found)


# --- names ---------------------------------------------------------------------------------------------------------


def _first_uses(runs: Sequence[Run]) -> list[str]:
    """The weights in the order they are first computed with."""
    uses = (value.weight for run in runs for call in run.calls for value in call.inputs)
    return list(
        dict.fromkeys([name for name in uses if name is not None] + [runs[0].output.weight or ""])
    )


def _name_axes(
    module: nn.Module, class_dim: Dim, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str]
) -> dict[Atom, str]:
    """Each axis is called after the first layer whose weight carries it, by preference in its outputs."""
    names: dict[Atom, str] = {}
    taken: set[str] = {CLASS}

    def give(one: Atom, wanted: str) -> None:
        name, count = wanted, 1
        while name in taken:
            count += 1
            name = f"{wanted}.{count}"
        taken.add(name)
        names[one] = name

    outputs = [
        (_base_name(module, name), weights[name], _output_dim(module, name))
        for name in used
        if weights.get(name)  # a scalar has no dimensions
    ]
    classes = set(atoms_in(class_dim))
    first = [(base, dims[at]) for base, dims, at in outputs]
    for base, dim in (*first, *((base, dim) for base, dims, _ in outputs for dim in dims)):
        found = list(atoms_in(dim))
        for position, one in enumerate(found):
            if one in names:
                continue
            if one in classes:
                names[one] = CLASS
            elif one.fixed and not one.role:
                one.bound = plain(one.size)  # nobody needs its name
            else:
                give(one, base if len(found) == 1 else f"{base}.{one.role or position}")
    return names


def _layer_outputs(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]]
) -> dict[str, tuple[str, Dim]]:
    """Return name and outputs, by weight, of the layers that a budget is expected to narrow."""
    outputs: dict[str, tuple[str, Dim]] = {}
    for path, layer in module.named_modules():
        name = f"{path}.weight" if path else "weight"
        grouped = (
            isinstance(layer, _ConvTransposeNd) and layer.groups > 1
        )  # its groups are among its weight's inputs
        if isinstance(layer, (nn.Linear, _ConvNd)) and name in weights and not grouped:
            made = weights[name][_output_dim(module, name)]
            if size(made) > 1:
                outputs[name] = (path or type(layer).__name__, made)
    return outputs


def _output_dim(module: nn.Module, weight: str) -> int:
    """Which dimension of a weight are its layer's outputs."""
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    turned = (
        isinstance(layer, (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd))
        and attribute == "weight"
    )
    return 1 if turned else 0


def _base_name(module: nn.Module, weight: str) -> str:
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    if isinstance(layer, ParametrizationList):
        path = path.rsplit(".", 2)[0]  # "conv.parametrizations.weight"
    ready_made = attribute in ("weight", "bias") or type(layer).__module__.startswith("torch.nn")
    name = re.sub(r"[\s()+]", "_", path if path and ready_made else weight)
    return f"layer.{name}" if name.isdecimal() else name  # a bare number would read as a size


def _expression(dim: Dim, names: Mapping[Atom, str]) -> Expr:
    factors: list[Expr] = []
    for factor in resolve(dim):
        match factor:
            case Atom():
                found: Expr = names.get(factor, factor.size)
            case Cat(terms):
                found = Sum(tuple(_expression(term, names) for term in terms))
            case int():
                found = factor
        if isinstance(found, int) and factors and isinstance(factors[-1], int):
            factors[-1] *= found
        else:
            factors.append(found)
    return factors[0] if len(factors) == 1 else Product(tuple(factors)) if factors else 1


# --- what the user named -------------------------------------------------------------------------------------------


def _fix(layout: Layout, fixed: Sequence[str], module: nn.Module) -> Layout:
    axes = dict(layout.axes)
    for name in fixed:
        if name in axes:
            pinned = {name}
        else:
            under = list(_under(layout, name))
            if not under:
                known = [*axes, *(path for path, _ in module.named_modules() if path), *layout.dims]
                raise TraceError(
                    f"fixed={name!r} names no axis, layer or weight.{_nearest(name, known)}"
                )
            pinned = {
                axis
                for weight in under
                if layout.dims[weight]
                for axis in axes_in(layout.dims[weight][_output_dim(module, weight)])
            }
        for axis in pinned:
            axes[axis] = replace(axes[axis], fixed=True)
    return replace(layout, axes=axes)


def _under(layout: Layout, name: str) -> Iterator[str]:
    """The weights of a layer (by their first names), or the weight itself."""
    for weight, first in (*((w, w) for w in layout.dims), *layout.ties.items()):
        if weight == name or weight.startswith(f"{name}."):
            yield first


def _nearest(name: str, known: Sequence[str]) -> str:
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
    norms = [path for path, layer in module.named_modules() if isinstance(layer, NORMS)]
    found = {"norm": norms, **wanted}
    parts: dict[str, tuple[str, ...]] = {}
    for part, prefixes in found.items():
        weights: dict[str, None] = {}
        for prefix in prefixes:
            under = dict.fromkeys(_under(layout, prefix) if prefix else layout.dims)
            if not under and part in wanted:
                known = [*(path for path, _ in module.named_modules() if path), *layout.dims]
                raise TraceError(
                    f"parts[{part!r}] names {prefix!r}, no layer or weight.{_nearest(prefix, known)}"
                )
            weights.update(under)
        parts[part] = tuple(weights)
    if isinstance(module, Variants):
        declared = module.variant_parts({run.variant: run for run in runs if not run.train})
        # Counters of batches are among a module's buffers, and are no weights.
        grown = {
            part: tuple(name for name in names if name in layout.dims)
            for part, names in declared.items()
        }
        if taken := sorted(grown.keys() & parts.keys()):
            raise TraceError(
                f"parts[{taken[0]!r}] was asked for; that is the name of a part of the stages. Another name would work."
            )
        parts |= grown
    return parts


# --- the check -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mismatch:
    """Where a member does not follow its axes."""

    call: Call
    found: str
    branch: bool = False  # whether it computes something else, and not only in other sizes
    layer: tuple[
        Call, ...
    ] = ()  # all of the layer's calls, where it is not clear which one is to blame
    axes: tuple[str, ...] = ()  # the axes to blame, where they are known
    widths: Mapping[str, int] = field(default_factory=dict)  # of the member

    def suspects(self, traced: Traced) -> list[str]:
        """The axes of what the call touches, else of all its layer does."""
        if self.axes:
            return list(self.axes)
        values = [*self.call.inputs, *self.call.outs]
        values += [value for call in self.layer for value in (*call.inputs, *call.outs)]
        atoms = (one for value in values for dim in value.dims for one in atoms_in(dim))
        return list(dict.fromkeys(traced.names[one] for one in atoms if one in traced.names))


def _checked(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, fixed: Sequence[str]
) -> Layout:
    """Compare every shape and offset that members compute with what the axes predict.

    Returns:
        The layout, with a least width for axes of which one channel is too few.
    """
    problem = current = _first_mismatch(module, inputs, traced, layout)
    if problem is None:
        return layout
    widened = _widened(module, inputs, traced, layout, problem)
    if widened is not None:
        return widened
    pinned: list[str] = []
    trial = layout
    # What to pin is found by pinning: the advice has been tried before it is given.
    while current is not None:
        blamed = [name for name in current.suspects(traced) if not trial.axes[name].fixed]
        if not blamed and not current.layer and not current.axes:
            alike = tuple(
                call
                for run in traced.runs
                for call in run.calls
                if call.layer == current.call.layer
            )
            current = replace(current, layer=alike)
        elif blamed:
            pinned += blamed
            trial = _fix(trial, blamed, module)
            current = _first_mismatch(module, inputs, traced, trial)
        else:
            break
    names = ", ".join(map(repr, [*fixed, *pinned]))
    kind = type(module).__name__
    if problem.branch:
        found = f"{kind} takes another branch in a narrower member, since its code compares sizes that a cut changes"
        rewrite = "take the decision in __init__ and keep it in an attribute"
    else:
        found = f"{kind} has a size written into its code that a narrower member does not have"
        view = _kind(problem.call) == "view"
        rewrite = (
            "use x.flatten(1) or sizes read from x.shape"
            if view
            else "read it from a tensor's shape or from an attribute"
        )
    remedy = (
        f"{rewrite}, or pin what it depends on: fixed=[{names}]" if current is None else rewrite
    )
    raise TraceError(f"{found}: {problem.call}: {problem.found}. To mend it, {remedy}.")


def _widened(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, problem: _Mismatch
) -> Layout | None:
    """Return the layout with a least width of two, if members fail with a single channel only.

    Standardized convolutions need two inputs, and `x.squeeze()` drops a dimension of one.
    """
    notes = list(layout.notes)
    current: _Mismatch | None = problem
    while current is not None:
        # Other layers that run the same line are likely to need the same.
        where = current.call.where
        alike = tuple(call for run in traced.runs for call in run.calls if call.where == where)
        suspects = replace(current, layer=alike).suspects(traced)
        narrow = [
            name for name in suspects if current.widths[name] < min(2, layout.axes[name].size)
        ]
        if not narrow:
            return None
        notes.append(
            f"members have at least 2 channels of {', '.join(narrow)}: with one, {current.call}: {current.found}"
        )
        least = {name: replace(layout.axes[name], least=2) for name in narrow}
        layout = replace(layout, axes={**layout.axes, **least}, notes=tuple(notes))
        current = _first_mismatch(module, inputs, traced, layout)
    return layout


def _first_mismatch(
    module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout
) -> _Mismatch | None:
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

    The others are the same in every member. One that differs at the width where a comparison comes
    out equal shows that the member took another branch: `x * (2 if self.a != self.b else 3)`.
    """

    varying: set[tuple[Call, int]] = field(default_factory=set)  # (call, place among its numbers)
    complete: bool = False  # True once members of all kinds of widths have been seen

    def difference(self, call: Call, other: Call) -> str | None:
        """Return in words which number of a member's call differs, or learn that it varies."""
        pairs = zip(self._of(call), self._of(other), strict=False)
        different = [(at, mine, own) for at, (mine, own) in enumerate(pairs) if mine != own]
        if not self.complete:
            self.varying.update((call, at) for at, _, _ in different)
            return None
        return next(
            (f"{own}, not {mine}" for at, mine, own in different if (call, at) not in self.varying),
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
    """Return where the member with the chosen widths does not follow its axes."""
    same = {
        name: buffer
        for name, buffer in _constants(module).items()
        if all(isinstance(dim, int) for dim in layout.dims[name])
    }
    widths = {**layout.sizes, **chosen}
    member = build(module, layout, widths)
    for run in traced.runs:
        try:
            done = record(
                member, {}, inputs, _known, constants=same, train=run.train, variant=run.variant
            ).calls
        except RunError as failure:
            fails = f"the member fails here ({_first_line(failure.__cause__)})"
            # What went wrong may have gone unnoticed for a while: -1 in a view takes any number of channels.
            mismatch = _compare(run.calls, failure.calls, traced, widths, numbers, fails)
            mismatch = mismatch or _Mismatch(_visible(run.calls)[-1], fails)
        else:
            mismatch = _compare(run.calls, done, traced, widths, numbers)
        if mismatch is not None:
            return replace(mismatch, widths=widths)
    return None


def _uneven(free: Sequence[Axis]) -> dict[str, int]:
    """About half of each axis, but of each another share: equal shares would hide a mix-up of two axes."""
    shares = (0.38 + 0.24 * (at * 0.618 % 1) for at in range(len(free)))
    return {
        axis.name: max(axis.least, min(axis.size - 1, round(axis.size * share)))
        for axis, share in zip(free, shares, strict=True)
    }


def _narrowest(free: Sequence[Axis]) -> list[dict[str, int]]:
    """Return the least width of every axis, and for two also three: two may suit by being even."""
    least = {axis.name: axis.least for axis in free}
    odd = {axis.name: min(3, axis.size) for axis in free if axis.least > 1}
    return [least, least | odd] if odd else [least]


def _meetings(traced: Traced, layout: Layout) -> list[dict[str, int]]:
    """Widths at which what Python found different comes out equal: members that may take another branch."""
    found: dict[tuple[str, int], None] = {}
    for pair in dict.fromkeys(traced.unlike):
        dims = [dim for terms in pair for _, powers in terms for dim, _ in powers]
        for one in {one: None for dim in dims for one in atoms_in(dim) if one in traced.names}:
            axis = layout.axes[traced.names[one]]
            for width in range(axis.least, axis.least if axis.fixed else axis.size):
                first, second = (
                    traced.evaluate(terms, layout.sizes | {axis.name: width}) for terms in pair
                )
                if first == second:
                    found[axis.name, width] = None
    return [{name: width} for name, width in found]


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
    for call, other in _aligned(expected, found, sources):
        if other is None:
            assert call is not None
            return _Mismatch(call, fails or "the member is done before", branch=not fails)
        if call is None:
            return _Mismatch(_visible(expected)[-1], "the member goes on after it", branch=True)
        if _kind(call) != _kind(other):
            return _Mismatch(call, f"the member computes {_kind(other)} here", branch=True)
        if (different := sources.difference(call, other)) is not None:
            return _Mismatch(call, f"the member computes it from {different}", branch=True)
        if (different := numbers.difference(call, other)) is not None:
            return _Mismatch(call, f"the member computes it with {different}", branch=True)
        if rules.is_undefined(other) and not rules.is_undefined(call):
            return _Mismatch(call, "the member takes the variance of too few values")
        for value, got in zip(call.outs, other.outs, strict=False):
            predicted = tuple(traced.predict(dim, widths) for dim in value.dims)
            if value.known and predicted != got.shape:
                return _Mismatch(
                    call, f"the member gets shape {got.shape}, its axes say {predicted}"
                )
            for mark, dim in value.marks.items():
                asked, right = rules.told(other, mark), traced.predict(dim, widths)
                if asked is not None and asked != right:
                    return _Mismatch(call, f"the member is told {asked}, its axes say {right}")
    return None


def _aligned(
    expected: Sequence[Call], found: Sequence[Call], sources: _Sources
) -> Iterator[tuple[Call | None, Call | None]]:
    """Pair the calls of the module with those of a member, up to the first that has no partner.

    A constant table that forward caches is computed in one run and found ready in another.
    """
    calls, others = deque(_visible(expected)), deque(_visible(found))
    while calls or others:
        call = calls[0] if calls else None
        other = others[0] if others else None
        if call and other and _kind(call) == _kind(other) and _line(call) == _line(other):
            yield calls.popleft(), others.popleft()
        elif other and (other.constant or _is_needless(other)):
            sources.skip(others.popleft())
        elif call and call.constant:
            calls.popleft()
        else:
            yield call, other
            return


def _line(call: Call) -> str:
    """Return the line of a call that makes a constant. A member may have more or fewer of them."""
    return call.where if call.constant else ""


class _Sources:
    """The tensors of a member and those of the module that they correspond to.

    Shapes alone do not show that a member took another branch: `self.a(x)` and `self.b(x)` may have
    equal ones.
    """

    def __init__(self, expected: Sequence[Call], found: Sequence[Call]) -> None:
        self._originals: dict[Value, Value] = {}
        self._partners: dict[Value, Value] = {}
        for call in (*expected, *found):
            if call.op.overloadpacket in _COPIES:
                self.skip(call)

    def skip(self, call: Call) -> None:
        """Let what a copy returns count as what it was given."""
        if call.inputs:
            self._originals[call.outs[0]] = self._original(call.inputs[0])

    def _original(self, value: Value) -> Value:
        return self._originals.get(value, value)

    def difference(self, call: Call, other: Call) -> str | None:
        """Return in words what the member's call is computed from, if the module's is not."""
        if len(call.inputs) != len(other.inputs):
            return f"{len(other.inputs)} tensors, not {len(call.inputs)}"
        for value, got in zip(call.inputs, other.inputs, strict=True):
            value, got = self._original(value), self._original(got)
            if value.constant or got.constant:
                continue
            if value.weight != got.weight or self._partners.setdefault(value, got) is not got:
                return repr(got.weight) if got.weight else "another tensor"
        self._partners.update(zip(call.outs, other.outs, strict=False))
        return None


def _is_needless(call: Call) -> bool:
    """Whether torch views a single number in another shape, as it does to write it to many places."""
    return _kind(call) == "view" and prod(call.outs[0].shape) == 1


def _visible(calls: Sequence[Call]) -> list[Call]:
    """Without copies, which torch makes or not as the strides happen to be."""
    return [call for call in calls if call.op.overloadpacket not in _COPIES]


def _kind(call: Call) -> str:
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
