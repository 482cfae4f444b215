"""Unions: several architectures in one federation, each traced separately.

A union is a family like any other. Its variants are its nets and pairs of nets. Names of weights
and axes have the name of their net in front. The class axis has no prefix, because all nets share
it. Nothing is traced again: the layout of a union is made from the layouts of its nets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedquilt import noise
from fedquilt.axes import Axis, Dims, Index, renamed
from fedquilt.errors import TraceError
from fedquilt.family.family import Family
from fedquilt.family.layout import CLASS, Layout
from fedquilt.family.nets import Nets
from fedquilt.family.origin import JoinedTracings, make_module
from fedquilt.family.variants import JOIN
from fedquilt.terms import WHOLE, Arch, Submodel, Weights

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def union(families: Mapping[str, Family] | Iterable[tuple[str, Family]]) -> Family:
    """Join several traced models into one family, whose variants are its nets and pairs of nets.

    The first net is the whole model. Methods that do not use variants train it, and `deploy`
    returns it. The other nets are chosen by name: `family.at("big")` is the family whose members
    are those of the net `big`, and `joined("whole", "big")` is a pair. Nets share no weights. A
    share refers to a net's own channels, because different architectures have no channels in
    common.

    The first net starts from the weights of the run's seed, as it does without a union. Every other
    net has its own random numbers. A net that was traced as a module keeps its weights for every
    seed.

    Args:
        families: Traced models by name, or pairs of a name and a model. Names consist of letters,
            digits, "_" and "-".

    Raises:
        TraceError: The nets do not fit each other, or a name cannot be used.

    Example:
        >>> import torch, fedquilt as fq
        >>> from torch import nn
        >>> small = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> large = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        >>> rows = torch.randn(5, 4)
        >>> family = fq.union({"small": fq.trace(small, rows), "large": fq.trace(large, rows)})
        >>> family.variants
        ('whole', 'large')
        >>> family.cost(family.fit(fq.Budget(share=1.0), variant="large")).params
        226
    """
    named = list(families.items() if isinstance(families, Mapping) else families)
    _check_names([name for name, _ in named])
    nets = dict(named)
    _check_kinds(nets)
    _check_shapes(nets)
    _check_weights(nets)
    factories = {name: family._factory for name, family in nets.items()}
    module = Nets({name: family._module for name, family in nets.items()})
    first = next(iter(nets.values()))
    layout = _merged({name: family.layout for name, family in nets.items()})
    traced = JoinedTracings({name: family.tracing for name, family in nets.items()})
    return Family(module, layout, first.example_inputs, _Factory(factories), _traced=traced)


@dataclass(frozen=True, eq=False)
class _Factory:
    """A function that makes the nets of a union. Each net's random numbers are independent."""

    factories: Mapping[str, Callable[[], nn.Module]]

    def __call__(self) -> nn.Module:
        seed = torch.initial_seed()
        seeds = [
            noise.key(noise.Stream.UNION_INITIAL, seed, number) if number else seed
            for number in range(len(self.factories))
        ]
        nets = {
            name: make_module(factory, seeds.pop(0)) for name, factory in self.factories.items()
        }
        return Nets(nets)


# --- one net of a union -------------------------------------------------------------------------


def alone(
    family: Family, nets: Sequence[Submodel], states: Sequence[Weights] = ()
) -> tuple[Family, tuple[Submodel, ...], tuple[Weights, ...]]:
    """Return nets of one architecture as sub-models of a family that has no other.

    Weights have the names that the user gave them. If the family is no union, or if the nets have
    several architectures, all arguments are returned as they are.

    Args:
        family: Any family.
        nets: Sub-models of the family.
        states: Weights of each net, by name and without the scope.

    Returns:
        The family of the one architecture, its sub-models, and the states under the new names.
    """
    variants = {net.arch.variant for net in nets}
    if not family.layout.nets or len(variants) != 1 or JOIN in next(iter(variants)):
        return family, tuple(nets), tuple(states)
    prefix = f"{family.layout.net_names(next(iter(variants)))[0]}."
    stripped = tuple(_stripped(net, prefix) for net in nets)
    renamed_states = tuple(
        {name.removeprefix(prefix): value for name, value in state.items()} for state in states
    )
    return family.alone(next(iter(variants))), stripped, renamed_states


def _stripped(net: Submodel, prefix: str) -> Submodel:
    """Return the sub-model of one net of a union as a sub-model of that net's own family.

    Axes lose the prefix, the variant becomes `WHOLE`, and the net is no longer among the parts that
    are trained.

    Args:
        net: The sub-model, of one net.
        prefix: Name of the net with a dot.
    """
    widths = tuple((axis.removeprefix(prefix), width) for axis, width in net.arch.widths)
    index = Index({axis.removeprefix(prefix): positions for axis, positions in net.index.items()})
    trains = tuple(part for part in net.arch.trains if f"{part}." != prefix)
    return replace(net, arch=Arch(widths, WHOLE, trains), index=index)


# --- layouts ------------------------------------------------------------------------------------


def _merged(layouts: Mapping[str, Layout]) -> Layout:
    """Return the layout of a union from the layouts of its nets, by name.

    Names of weights, axes, ties and attributes begin with the net's name and a dot. The class axis
    is shared. Each net is a variant, the first of them `WHOLE`, and a part of its own name. Other
    parts of equal names are joined.
    """
    axes: dict[str, Axis] = {}
    dims: dict[str, Dims] = {}
    ties: dict[str, str] = {}
    attributes: dict[str, Any] = {}
    parts: dict[str, tuple[str, ...]] = {}
    variants: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    for net, layout in layouts.items():
        names = {axis: axis if axis == CLASS else f"{net}.{axis}" for axis in layout.axes}
        for axis in layout.axes.values():
            inner = tuple(names[inner_axis] for inner_axis in axis.inner)
            axes.setdefault(names[axis.name], replace(axis, name=names[axis.name], inner=inner))
        dims |= {
            f"{net}.{name}": renamed(expressions, names)
            for name, expressions in layout.dims.items()
        }
        ties |= {f"{net}.{alias}": f"{net}.{name}" for alias, name in layout.ties.items()}
        attributes |= {
            f"{net}.{path}": renamed((size,), names)[0] for path, size in layout.attributes.items()
        }
        for part, weights in layout.parts.items():
            parts[part] = (*parts.get(part, ()), *(f"{net}.{name}" for name in weights))
        variants[net if variants else WHOLE] = tuple(f"{net}.{name}" for name in layout.dims)
        notes += [f"{net}: {note}" for note in layout.notes]
    for net, weights in zip(layouts, variants.values(), strict=True):
        parts[net] = weights
    # The class axis is last, as in most models, so that one net's layout is what was traced.
    if CLASS in axes:
        axes[CLASS] = axes.pop(CLASS)
    class_dim = next(iter(layouts.values())).class_dim
    return Layout(
        axes, dims, ties, attributes, parts, variants, class_dim, tuple(notes), tuple(layouts)
    )


# --- what does not fit --------------------------------------------------------------------------


def _check_names(names: Sequence[str]) -> None:
    """Raise a TraceError if names of nets are missing, malformed, repeated or reserved."""
    if not names:
        raise TraceError(
            "a union of no nets was asked for; one or more traced models by name would work: "
            'fq.union({"small": fq.trace(module, example), "big": …}).'
        )
    for name in names:
        request = f"a union with a net named {name!r} was asked for"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TraceError(
                f"{request}; names consist of letters, digits, '_' and '-', because '.', '/' and "
                "'+' separate names in a federation's state."
            )
        if names.count(name) > 1:
            raise TraceError(
                f"{request} {names.count(name)} times; every net needs a name of its own, such as "
                f"{name}_1 and {name}_2."
            )
        if name == WHOLE:
            raise TraceError(
                f"{request}; {WHOLE!r} is the name of the first net as a variant. Another name "
                "would work, such as 'first'."
            )
        if hasattr(Nets, name):
            raise TraceError(
                f"{request}; nn.Module has an attribute of that name. {name}_net would work."
            )


def _check_kinds(nets: Mapping[str, Family]) -> None:
    """Refuse nets that are no traced models, or have variants themselves.

    A net whose name is also the name of a part of some net is refused too.

    Raises:
        TraceError: There is such a net.
    """
    for name, family in nets.items():
        if not isinstance(family, Family):
            raise TraceError(
                f"a union was asked for, whose net {name!r} is a {type(family).__name__}; a traced "
                "model would work: fq.trace(module, example)."
            )
        if family.layout.variants:
            kind = f"a model with the variants {', '.join(family.variants)}"
            if family.layout.nets:
                kind = "a union itself"
            raise TraceError(
                f"a union was asked for, whose net {name!r} is {kind}; traced models without "
                "variants would work. Give all nets to one union, and trace modules without stages."
            )
    for name in nets:
        if any(name in family.parts for family in nets.values()):
            raise TraceError(
                f"a union with a net named {name!r} was asked for; a part of a model has that name "
                "already. Another "
                "name of the net would work, or of the part (fq.trace(…, parts=…))."
            )


def _check_shapes(nets: Mapping[str, Family]) -> None:
    """Refuse nets that cannot be trained on the same samples, by a TraceError.

    Inputs, outputs, the class dimension, and the kind of adjustable norms must be equal.
    """
    _check_equal(nets, "inputs of shape", "Trace all of them on the same example", _inputs)
    _check_equal(nets, "outputs of shape", "Nets with equal numbers of classes fit", _outputs)
    remedy = "fq.trace(…, class_dim=…) names another dimension"
    _check_equal(nets, "the classes in dimension", remedy, lambda family: family.layout.class_dim)
    remedy = "Trace all of them with norms in pairs (fq.dual), or none"
    _check_equal(
        nets, "dual or conditioned norms:", remedy, lambda family: (family.dual, family.conditioned)
    )


def _check_equal(
    nets: Mapping[str, Family], noun: str, remedy: str, value: Callable[[Family], object]
) -> None:
    """Raise a TraceError if a property of a net differs from the first net's.

    Args:
        nets: Traced models by name.
        noun: Name of the property, for messages.
        remedy: Advice for messages.
        value: Returns the property of a net.
    """
    (first, family), *later_nets = nets.items()
    expected = value(family)
    for name, net in later_nets:
        if (actual := value(net)) != expected:
            raise TraceError(
                f"a union of {', '.join(map(repr, nets))} was asked for; {first!r} has {noun} "
                f"{_quoted(expected)}, and {name!r} has {_quoted(actual)}. {remedy}."
            )


def _quoted(value: object) -> str:
    """Return a value as text for messages. The items of a list are separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _inputs(family: Family) -> list[str]:
    """Return the shape and type of each tensor of the example as text, without the batch."""
    return [
        f"{tuple(value.shape[1:])} {value.dtype}"
        for value in family.example_inputs
        if hasattr(value, "shape")
    ]


def _outputs(family: Family) -> tuple[int, ...]:
    return family.output_shape[1:]


def _check_weights(nets: Mapping[str, Family]) -> None:
    """Refuse nets that share a weight or buffer, by a TraceError.

    Each net is trained, sent and cut separately.
    """
    owners: dict[int, str] = {}
    for name, family in nets.items():
        for weight in (*family._module.parameters(), *family._module.buffers()):
            owner = owners.setdefault(id(weight), name)
            if owner != name:
                raise TraceError(
                    f"a union was asked for, whose nets {owner!r} and {name!r} have weights in "
                    "common; nets with "
                    "weights of their own would work. Trace a module of its own for each name."
                )
