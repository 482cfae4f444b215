"""Name the axes after layers, and write dimensions as expressions of axes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fedquilt.axes import Expr, Product, Sum
from fedquilt.family.tracing.atoms import Atom, Cat, Dim, atoms_in, plain, resolve, size
from fedquilt.family.tracing.run import RecordedRun
from fedquilt.hardware.torch_internals import ConvNd, ConvTransposeNd

CLASS = "class"  # Name of the axis of the classes


def first_uses(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the weights that runs compute with, in the order of first use.

    Each name occurs once. The name of the first run's output is added, which is "" unless a module
    returns one of its weights.
    """
    uses = (value.weight for run in runs for call in run.calls for value in call.inputs)
    return list(
        dict.fromkeys([name for name in uses if name is not None] + [runs[0].output.weight or ""])
    )


def name_axes(
    module: nn.Module, class_dim: Dim, weights: Mapping[str, tuple[Dim, ...]], used: Sequence[str]
) -> dict[Atom, str]:
    """Name each axis after the first layer whose weight has it.

    Layers that have the axis in their outputs are preferred. A name that is taken gets a number, as
    in `fc.2`. If a dimension has several atoms, the role or the position of the atom follows the
    layer: `attn.heads`.

    Args:
        module: The module.
        class_dim: Dimension of the output that has the classes. Its axis is called `CLASS`.
        weights: Dimensions of the weights, by name. Fixed atoms without a role are bound to plain
            sizes, in-place.
        used: Names of the weights, in the order in which they are first used.

    Returns:
        Name of each atom that is an axis. Atoms of unused weights have none.
    """
    names: dict[Atom, str] = {}
    used_names: set[str] = {CLASS}

    def give_name(axis_atom: Atom, base_name: str) -> None:
        name, count = base_name, 1
        while name in used_names:
            count += 1
            name = f"{base_name}.{count}"
        used_names.add(name)
        names[axis_atom] = name

    outputs = [
        (_base_name(module, name), weights[name], output_dim(module, name))
        for name in used
        if weights.get(name)  # A scalar has no dimensions.
    ]
    classes = set(atoms_in(class_dim))
    output_dims = [(base, dims[out_dim]) for base, dims, out_dim in outputs]
    all_dims = [(base, dim) for base, dims, _ in outputs for dim in dims]
    for base, dim in (*output_dims, *all_dims):
        dim_atoms = list(atoms_in(dim))
        for position, axis_atom in enumerate(dim_atoms):
            if axis_atom in names:
                continue
            if axis_atom in classes:
                names[axis_atom] = CLASS
            elif axis_atom.fixed and not axis_atom.role:
                axis_atom.bound = plain(axis_atom.size)  # It needs no name.
            elif len(dim_atoms) == 1:
                give_name(axis_atom, base)
            else:
                give_name(axis_atom, f"{base}.{axis_atom.role or position}")
    return names


def layer_outputs(
    module: nn.Module, weights: Mapping[str, tuple[Dim, ...]]
) -> dict[str, tuple[str, Dim]]:
    """Return the layers that a budget is expected to narrow.

    These are linear layers and convolutions with more than one output. Transposed convolutions with
    groups are left out.

    Args:
        module: The module.
        weights: Dimensions of its weights, by name.

    Returns:
        Name and output dimension of each layer, by the name of its weight.
    """
    outputs: dict[str, tuple[str, Dim]] = {}
    for path, layer in module.named_modules():
        name = f"{path}.weight" if path else "weight"
        # The groups of such a layer are in the input dimension of its weight.
        grouped = isinstance(layer, ConvTransposeNd) and layer.groups > 1
        if isinstance(layer, (nn.Linear, ConvNd)) and name in weights and not grouped:
            out_channels = weights[name][output_dim(module, name)]
            if size(out_channels) > 1:
                outputs[name] = (path or type(layer).__name__, out_channels)
    return outputs


def output_dim(module: nn.Module, weight: str) -> int:
    """Return the number of the dimension of a weight that has its layer's outputs.

    It is 1 for the weights of embeddings and transposed convolutions, and 0 for everything else.

    Args:
        module: Module that has the weight.
        weight: Full name of the weight, such as "block.conv.weight".
    """
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    turned = (
        isinstance(layer, (nn.Embedding, nn.EmbeddingBag, ConvTransposeNd))
        and attribute == "weight"
    )
    return 1 if turned else 0


def _base_name(module: nn.Module, weight: str) -> str:
    """Return the name from which the names of a weight's axes are made.

    It is the path of the layer for weights and biases, and for layers of torch. For other
    parameters it is their own full name. Spaces, brackets and plus signs become underscores, and a
    bare number N becomes `layer.N`.

    Args:
        module: Module that has the weight.
        weight: Full name of the weight.
    """
    path, _, attribute = weight.rpartition(".")
    layer = module.get_submodule(path)
    if isinstance(layer, ParametrizationList):
        path = path.rsplit(".", 2)[0]  # "conv.parametrizations.weight"
    ready_made = attribute in ("weight", "bias") or type(layer).__module__.startswith("torch.nn")
    name = re.sub(r"[\s()+]", "_", path if path and ready_made else weight)
    return f"layer.{name}" if name.isdecimal() else name  # A bare number would be read as a size.


def expression(dim: Dim, names: Mapping[Atom, str]) -> Expr:
    """Return a dimension as an expression of named axes.

    Neighbouring plain sizes are multiplied. The expression of a dimension of size 1 is the number
    1.

    Args:
        dim: Dimension, as a product of atoms, sums and plain sizes.
        names: Names of the axes. An atom without a name counts as its size.
    """
    factors: list[Expr] = []
    for factor in resolve(dim):
        match factor:
            case Atom():
                term_expr: Expr = names.get(factor, factor.size)
            case Cat(terms):
                term_expr = Sum(tuple(expression(term, names) for term in terms))
            case int():
                term_expr = factor
        if isinstance(term_expr, int) and factors and isinstance(factors[-1], int):
            factors[-1] *= term_expr
        else:
            factors.append(term_expr)
    if not factors:
        return 1
    return factors[0] if len(factors) == 1 else Product(tuple(factors))
