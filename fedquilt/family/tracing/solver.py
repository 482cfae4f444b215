"""Solve for the dimensions whose sizes Python computes or attributes hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import isclose

from torch import nn

from fedquilt.family.tracing.atoms import (
    Dim,
    Factor,
    Facts,
    Terms,
    count,
    couple,
    is_free,
    is_plain,
    pin,
    plain,
    resolve,
    size,
    split,
    unify,
)
from fedquilt.family.tracing.attributes import attributes
from fedquilt.family.tracing.sizes import Leaf, Poly, SizeScale, Trail
from fedquilt.hardware.torch_internals import ConvNd


def solve_sizes(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]], trail: Trail, facts: Facts
) -> dict[str, Dim]:
    """Unify dimensions whose sizes depend on each other in Python.

    Args:
        module: The module.
        weights: Dimensions of its weights, by name.
        trail: The sizes that Python used in the runs.
        facts: Facts about dimensions. Comparisons of unequal sizes are added.

    Returns:
        The dimensions whose sizes attributes hold, by the path of the attribute.
    """
    solver = _Solver(_attribute_values(module), dict(_layer_sizes(module, weights)))
    # An equation may need the result of a later one. Three rounds are enough for real modules.
    for _ in range(3):
        for equation in trail.equations:
            dim = equation.dim
            if dim is not None:
                solver.solve(equation.size, dim)
        for left, right in trail.equal:
            value = solver.evaluate(right)
            if value is not None:
                solver.solve(left, value)
            elif (value := solver.evaluate(left)) is not None:
                solver.solve(right, value)
    for poly in trail.numbers:
        for leaf, _ in (item for powers in poly for item in powers):
            couple(solver.dim_of(leaf) or ())
    facts.unlike += [(solver.terms(left), solver.terms(right)) for left, right in trail.unequal]
    for scale in trail.scales:
        for dim in _scaled_dims(scale, facts):
            solver.solved[scale.path] = dim
            couple(dim)
    return solver.solved


def _attribute_values(module: nn.Module) -> dict[str, int]:
    """Return the numbers that a module keeps, by path.

    Entries of a tuple or list have their own paths, such as "pool.size.0".
    """
    values: dict[str, int] = {}
    for path, _, _, attribute in attributes(module):
        if isinstance(attribute, (tuple, list)):
            values.update({f"{path}.{position}": n for position, n in enumerate(attribute)})
        else:
            values[path] = attribute
    return values


def _scaled_dims(scale: SizeScale, facts: Facts) -> Iterator[Dim]:
    """Yield the dimensions whose size has a scale as its root or inverse root.

    Only dimensions that batched products in the scale's own layer sum over are considered.
    Dimensions that are never cut are left out.

    Args:
        scale: Float attribute of a layer, such as the scale of attention.
        facts: Facts about dimensions, with those that products sum over.
    """
    layer = scale.path.rpartition(".")[0]
    for product_layer, dim in facts.contracted:
        if product_layer != layer or not is_free(dim):
            continue
        if any(isclose(scale, size(dim) ** power) for power in (-0.5, 0.5)):
            yield dim


def _layer_sizes(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]]
) -> Iterator[tuple[str, Dim]]:
    """Yield the attributes of torch's layers that hold sizes of their weights, with the dimensions.

    Linear layers and convolutions without groups are covered. They need no search, because the
    layers of a member are resized by rules (`build.py`).

    Args:
        module: The module.
        weights: Dimensions of its weights, by name.

    Yields:
        (path of the attribute, such as "fc.in_features", and its dimension).
    """
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            names = ["out_features", "in_features"]
        elif isinstance(layer, ConvNd) and layer.groups == 1:
            names = ["out_channels", "in_channels"]
            if layer.transposed:
                names.reverse()
        else:
            continue
        prefix = f"{path}." if path else ""
        for name, dim in zip(names, weights.get(f"{prefix}weight", ()), strict=False):
            yield prefix + name, dim


@dataclass
class _Solver:
    """A solver of equations between sizes, for one unknown at a time.

    Equations that it cannot solve are covered by the later check of members.
    """

    values: Mapping[str, int]  # Numbers that the module keeps, by attribute
    layer_sizes: Mapping[str, Dim]  # Dimensions that are known from the start, by attribute
    # Dimensions whose sizes other attributes hold, by attribute
    solved: dict[str, Dim] = field(default_factory=dict)

    def dim_of(self, leaf: Leaf) -> Dim | None:
        """Return the dimension that a leaf is, or None if it is unknown.

        A leaf is a dimension of a tensor, or the path of an attribute.
        """
        if isinstance(leaf, str):
            return self.layer_sizes.get(leaf) or self.solved.get(leaf)
        value, dim = leaf
        return resolve(value.dims[dim]) if value.described else None

    def evaluate(self, poly: Poly) -> Dim | None:
        """Return the dimension that a size equals, or None if it is no single known dimension.

        A constant is a plain dimension. Sums, products and quotients give None.
        """
        match [(powers, factor) for powers, factor in poly.items()]:
            case [(((leaf, 1),), factor)] if factor == 1:
                return self.dim_of(leaf)
            case [((), factor)]:
                return plain(int(factor))
        return None

    def terms(self, poly: Poly) -> Terms:
        """Return a size as a sum of products of dimensions.

        An attribute that follows no axis has the same value in every member, so that it counts as a
        constant. Without that, the width at which another attribute equals it would never be tried.
        """
        return tuple(
            (factor, tuple((self._dim_or_constant(leaf), power) for leaf, power in powers))
            for powers, factor in poly.items()
        )

    def _dim_or_constant(self, leaf: Leaf) -> Dim:
        dim = self.dim_of(leaf)
        if dim is not None:
            return dim
        return plain(self.values[leaf] if isinstance(leaf, str) else leaf[0].shape[leaf[1]])

    def solve(self, poly: Poly, dim: Dim) -> None:
        """Apply the equation that `poly` is the size of `dim`, by solving it for one leaf.

        For 2·a·b⁻¹ that is a = (b dim) / 2. If the leaf is an attribute without a dimension, the
        result is stored in `solved`. If it has a dimension, that is unified with the result. An
        equation that cannot be solved has no effect.
        """
        isolated = self._isolate(poly, dim)
        if isolated is None:
            return
        leaf, quotient = isolated
        leaf_dim = self.dim_of(leaf)
        if leaf_dim is None:
            if isinstance(leaf, str) and size(quotient) == self.values[leaf]:
                self.solved[leaf] = quotient
        elif count(leaf_dim) != count(quotient):  # Sizes demand equal lengths and no more.
            unify(*_cancel(leaf_dim, quotient))

    def _isolate(self, poly: Poly, dim: Dim) -> tuple[Leaf, Dim] | None:
        """Solve `poly` = `dim` for one leaf, and return the leaf and its dimension.

        Of several unsolved leaves, all that have a dimension are divided out until one leaf is
        left. The result is None if `poly` is a sum, if several unknown leaves remain, if a leaf has
        a power that cannot be solved for, or if a division leaves a remainder.
        """
        if len(poly) != 1:
            return None
        ((powers, factor),) = poly.items()
        product = resolve(dim)
        unsolved: list[tuple[Leaf, Dim | None]] = []
        for leaf, power in powers:
            leaf_dim = self.dim_of(leaf)
            if leaf_dim is None and power < 0 and isinstance(leaf, str):
                leaf_dim = plain(self.values[leaf])
            if leaf_dim is not None and is_plain(leaf_dim):
                factor *= Fraction(size(leaf_dim)) ** power
            elif leaf_dim is not None and power == -1:
                product = (*leaf_dim, *product)
            elif power == 1:
                unsolved.append((leaf, leaf_dim))
            else:
                return None
        quotient = _divide((*plain(factor.denominator), *product), plain(factor.numerator))
        for leaf, leaf_dim in unsolved[:]:
            if quotient is not None and leaf_dim is not None and len(unsolved) > 1:
                quotient = _divide(quotient, leaf_dim)
                unsolved.remove((leaf, leaf_dim))
        if quotient is None or len(unsolved) != 1:
            return None
        ((leaf, _),) = unsolved
        return leaf, quotient


def _cancel(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """Return two products without the factors that they share.

    For (c 2) and (2 d) these are c and d, which must be equally long.
    """
    remaining_a: list[Factor] = []
    remaining_b = list(resolve(b))
    for factor in resolve(a):
        if factor in remaining_b:
            remaining_b.remove(factor)
        else:
            remaining_a.append(factor)
    return tuple(remaining_a), tuple(remaining_b)


def _divide(dim: Dim, factor: Dim) -> Dim | None:
    """Return a product divided by a factor, or None if this is not possible.

    A factor with axes must occur in the product. A plain factor may be split off an atom. The
    split-off part is pinned, because the code fixes its size.

    Args:
        dim: The product.
        factor: The divisor.
    """
    dim, factor = resolve(dim), resolve(factor)
    if not is_plain(factor):
        for position in range(len(dim) - len(factor) + 1):
            if dim[position : position + len(factor)] == factor:
                return resolve((*dim[:position], *dim[position + len(factor) :]))
        return None
    n = size(factor)
    for position, part in enumerate(dim):
        if isinstance(part, int) and part % n == 0:
            return resolve((*dim[:position], part // n, *dim[position + 1 :]))
    if n == 1 or size(dim) % n:
        return dim if n == 1 else None
    outer, inner = split(dim, (n, size(dim) // n))
    pin(outer)  # The number of pieces is written in the code.
    return resolve(inner)
