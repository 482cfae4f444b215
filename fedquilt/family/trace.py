"""Find the axes of any module by running it once on tensors without data and following every dimension."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fedquilt.axes import Axis, Expr, Product, Sum, axes_in
from fedquilt.errors import TraceError
from fedquilt.family import rules
from fedquilt.family.atoms import (
    Atom,
    Cat,
    Dim,
    Facts,
    atom,
    atoms_in,
    fix,
    is_free,
    is_plain,
    pin,
    plain,
    resolve,
    size,
)
from fedquilt.family.build import build
from fedquilt.family.layout import Layout
from fedquilt.family.record import SMALL, Call, Run, RunError, Value, layer_name, record
from fedquilt.family.sizes import Trail, solve_sizes

Heads = Literal["inside", "whole"]
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
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
    traced = _trace(module, example_inputs, heads, class_dim)
    layout = _fix(traced.layout, fixed, module)
    layout = replace(layout, parts=_parts(module, layout, parts or {}))
    if check:
        _check(module, example_inputs, traced, layout, fixed)
    return layout


@dataclass(frozen=True)
class Traced:
    """A layout together with the run it was read from."""

    layout: Layout
    run: Run
    names: Mapping[Atom, str]

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


def _trace(module: nn.Module, inputs: tuple[Any, ...], heads: Heads, class_dim: int | None) -> Traced:
    if any(is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
        raise TraceError(f"{type(module).__name__} has lazy layers: run it once, so that they know their sizes.")
    ties = _ties(module)
    counters = _counters(module)
    weights = {
        name: tuple(atom(n) for n in weight.shape)
        for name, weight in (*module.named_parameters(), *module.named_buffers())
        if name not in counters
    }
    trail, facts = Trail(), Facts()
    run = _run(module, weights, inputs, trail)
    for call in run.calls:
        if call.live:
            rules.apply(call, facts)
    sizes = solve_sizes(module, trail, facts)
    class_dim = _settle_output(run.output, inputs, class_dim, facts)
    used = _first_uses(run)
    for dim in (dim for name, dims in weights.items() if name not in used for dim in dims):
        pin(dim)
    _settle(facts, heads)
    facts.notes += [f"Python reads a constant in {where}: every member takes that branch" for where in run.reads]
    unused = ", ".join(name for name, _ in module.named_parameters() if name not in used)
    facts.notes += [f"the output does not depend on {unused}: never cut"] if unused else []
    names = _name_axes(module, run, weights, used, class_dim)
    axes = {
        name: Axis(name, one.size, one.fixed, one.coupled, _inner(one, facts, names)) for one, name in names.items()
    }
    free = {name for name, axis in axes.items() if not axis.fixed}
    held = {path: _expression(dim, names) for path, dim in sizes.items()}
    layout = Layout(
        axes=axes,
        dims={name: tuple(_expression(dim, names) for dim in dims) for name, dims in weights.items()},
        ties=ties,
        attributes={path: expr for path, expr in held.items() if free & set(axes_in(expr))},
        class_dim=class_dim,
        notes=tuple(dict.fromkeys(facts.notes)),
    )
    return Traced(layout, run, names)


def _ties(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
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


def _run(module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], inputs: tuple[Any, ...], trail: Trail) -> Run:
    kind = type(module).__name__
    try:
        run = record(module, weights, inputs, _known, trail, _constants(module))
    except RunError as failure:
        cause = failure.__cause__
        place = f"{layer_name(failure.layer)}, {failure.where}"
        if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise TraceError(
                f"{kind} reads a tensor's values in Python ({place}), so what it computes depends on the data and its "
                "axes cannot be traced. Compute with tensors instead (torch.where, masks, .amax()), or take the "
                "decision in __init__ or outside of forward."
            ) from cause
        raise TraceError(
            f"{kind} does not run on tensors that have the example inputs' shapes but no data ({place}): {cause}"
        ) from cause
    if not isinstance(run.output, Value):
        raise TraceError(
            f"{kind} returns a {type(run.output).__name__}, not one tensor. Wrap it in a module whose forward returns "
            "the logits alone, and trace that."
        )
    return run


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no statistics: masks, tables of positions."""
    small = {name: buffer for name, buffer in module.named_buffers() if buffer.numel() <= SMALL and not buffer.is_meta}
    norms = {path for path, layer in module.named_modules() if isinstance(layer, _NormBase)}
    return {name: buffer for name, buffer in small.items() if name.rpartition(".")[0] not in norms}


def _known(op: Any) -> bool:
    return rules.find_rule(op) is not None


# --- what may be cut -----------------------------------------------------------------------------------------------


def _settle_output(output: Value, inputs: tuple[Any, ...], class_dim: int | None, facts: Facts) -> int:
    ndim = len(output.shape)
    if class_dim is None:
        tokens = bool(inputs) and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point()
        class_dim = -1 if tokens and ndim != 2 else min(1, ndim - 1)
    if not -ndim <= class_dim < ndim:
        raise TraceError(f"class_dim={class_dim} was asked for, but the output has shape {output.shape}.")
    class_dim %= ndim
    for at, dim in enumerate(output.dims):
        if at != class_dim or len(resolve(dim)) != 1 or isinstance(resolve(dim)[0], Cat):
            pin(dim)
        fix(dim)
    if is_plain(output.dims[class_dim]):
        facts.notes.append(f"dimension {class_dim} of the output is no axis of its own: there is no axis 'class'")
    return class_dim


def _settle(facts: Facts, heads: Heads) -> None:
    """Decide what only the whole graph can tell."""
    # Ranges of a table of which some are never cut (positions up to the example's length): none is.
    changed = True
    while changed:
        changed = False
        for pieces in facts.slices:
            if any(is_plain(piece) and size(piece) for piece in pieces) and any(map(is_free, pieces)):
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
            found.update({names[inside]: None for inside in atoms_in(inner) if inside in names and not inside.fixed})
    return tuple(found)


# --- names ---------------------------------------------------------------------------------------------------------


def _first_uses(run: Run) -> list[str]:
    """The weights in the order the output's computation first reads them."""
    uses = (value.weight for call in run.calls if call.live for value in call.inputs)
    return list(dict.fromkeys([name for name in uses if name is not None] + [run.output.weight or ""]))


def _name_axes(
    module: nn.Module, run: Run, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str], class_dim: int
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
    classes = set(atoms_in(run.output.dims[class_dim]))
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


def _output_dim(module: nn.Module, weight: str) -> int:
    """Which dimension of a weight are its layer's outputs."""
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    turned = isinstance(layer, (nn.Embedding, nn.EmbeddingBag, _ConvTransposeNd)) and attribute == "weight"
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
                raise TraceError(f"fixed={name!r} names no axis, layer or weight.{_nearest(name, known)}")
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
    return f" Nearest: {', '.join(map(repr, close))}." if close else f" There are {', '.join(map(repr, known[:8]))}."


def _parts(module: nn.Module, layout: Layout, wanted: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    norms = [path for path, layer in module.named_modules() if isinstance(layer, NORMS)]
    found = {"norm": norms, **wanted}
    parts: dict[str, tuple[str, ...]] = {}
    for part, prefixes in found.items():
        weights: dict[str, None] = {}
        for prefix in prefixes:
            under = dict.fromkeys(_under(layout, prefix) if prefix else layout.dims)
            if not under and part in wanted:
                known = [*(path for path, _ in module.named_modules() if path), *layout.dims]
                raise TraceError(f"parts[{part!r}] names {prefix!r}, no layer or weight.{_nearest(prefix, known)}")
            weights.update(under)
        parts[part] = tuple(weights)
    return parts


# --- the check -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mismatch:
    """Where a member does not follow its axes."""

    call: Call
    found: str
    layer: tuple[Call, ...] = ()  # all of the layer's calls, where it is not clear which one is to blame

    def suspects(self, traced: Traced) -> list[str]:
        """The axes of what the call touches, else of all its layer does."""
        values = [*self.call.inputs, *self.call.outs]
        values += [value for call in self.layer for value in (*call.inputs, *call.outs)]
        atoms = (one for value in values for dim in value.dims for one in atoms_in(dim))
        return list(dict.fromkeys(traced.names[one] for one in atoms if one in traced.names))


def _check(module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout, fixed: Sequence[str]) -> None:
    """Running is no check: compare every shape and offset a member computes with what the axes predict."""
    problem = current = _first_mismatch(module, inputs, traced, layout)
    if problem is None:
        return
    pinned: list[str] = []
    trial = layout
    # What to pin is found by pinning: the advice has been tried before it is given.
    while current is not None:
        blamed = [name for name in current.suspects(traced) if not trial.axes[name].fixed]
        if not blamed and not current.layer:
            alike = tuple(call for call in traced.run.calls if call.layer == current.call.layer)
            current = replace(current, layer=alike)
        elif blamed:
            pinned += blamed
            trial = _fix(trial, blamed, module)
            current = _first_mismatch(module, inputs, traced, trial)
        else:
            break
    names = ", ".join(map(repr, [*fixed, *pinned]))
    rewrite = "use x.flatten(1) or sizes read from x.shape" if _kind(problem.call) == "view" else "read it from x.shape"
    remedy = f"{rewrite}, or pin what it depends on: fixed=[{names}]" if current is None else rewrite
    raise TraceError(
        f"{type(module).__name__} has a size written into its code that a narrower member does not have: "
        f"{problem.call}: {problem.found}. To mend it, {remedy}."
    )


def _first_mismatch(module: nn.Module, inputs: tuple[Any, ...], traced: Traced, layout: Layout) -> _Mismatch | None:
    free = [axis for axis in layout.axes.values() if not axis.fixed]
    expected = _visible(traced.run.calls)
    same = {
        name: buffer
        for name, buffer in _constants(module).items()
        if all(isinstance(dim, int) for dim in layout.dims[name])
    }
    for narrow in (_uneven(free), {axis.name: 1 for axis in free}) if free else ():
        widths = layout.sizes | narrow
        try:
            rerun = record(build(module, layout, widths), {}, inputs, _known, constants=same)
        except RunError as failure:
            done = _visible(failure.calls)
            call = expected[min(len(done), len(expected) - 1)]
            fails = _Mismatch(call, f"the member fails here ({str(failure.__cause__).splitlines()[0]})")
            # What went wrong may have gone unnoticed for a while: -1 in a view takes any number of channels.
            return _compare(expected[: len(done)], done, traced, widths) or fails
        calls = [call for call in _visible(rerun.calls) if call.live]
        mismatch = _compare([call for call in expected if call.live], calls, traced, widths)
        if mismatch is not None:
            return mismatch
    return None


def _uneven(free: Sequence[Axis]) -> dict[str, int]:
    """About half of each axis, but of each another share: equal shares would hide a mix-up of two axes."""
    shares = (0.38 + 0.24 * (at * 0.618 % 1) for at in range(len(free)))
    return {
        axis.name: min(axis.size - 1, max(1, round(axis.size * share)))
        for axis, share in zip(free, shares, strict=True)
    }


def _compare(
    expected: Sequence[Call], found: Sequence[Call], traced: Traced, widths: Mapping[str, int]
) -> _Mismatch | None:
    for call, other in zip(expected, found, strict=False):
        if _kind(call) != _kind(other):
            return _Mismatch(call, f"the member computes {_kind(other)} here")
        for value, got in zip(call.outs if call.live else (), other.outs, strict=False):
            predicted = tuple(traced.predict(dim, widths) for dim in value.dims)
            if value.known and predicted != got.shape:
                return _Mismatch(call, f"the member gets shape {got.shape}, its axes say {predicted}")
            for mark, dim in value.marks.items():
                asked, right = rules.told(other, mark), traced.predict(dim, widths)
                if asked is not None and asked != right:
                    return _Mismatch(call, f"the member is told {asked}, its axes say {right}")
    if len(expected) != len(found):
        return _Mismatch(expected[min(len(found), len(expected) - 1)], "the member takes another path")
    return None


def _visible(calls: Sequence[Call]) -> list[Call]:
    """Without copies, which torch makes or not as the strides happen to be."""
    return [call for call in calls if call.op.overloadpacket not in _COPIES]


def _kind(call: Call) -> str:
    packet = call.op.overloadpacket
    return "view" if packet in _VIEWS else str(packet.__name__)


_COPIES = {torch.ops.aten.clone, torch.ops.aten.alias, torch.ops.aten.detach, torch.ops.aten.contiguous}
_VIEWS = {torch.ops.aten.view, torch.ops.aten._unsafe_view, torch.ops.aten.reshape, torch.ops.aten._reshape_alias}
