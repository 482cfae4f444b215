"""The layers whose outputs HeteroFL's scaler divides: those whose outputs are cut.

The scaler divides by a client's share, so that the outputs of a narrow net are as large as those of
the whole net. A layer counts if it is a linear map: a convolution, a linear or bilinear layer, an
embedding, the projections of `nn.MultiheadAttention`, and any other layer with a two-dimensional
weight and a bias.

Recurrent layers are not scaled, because their outputs are bounded and fed back into them. Norms are
not scaled either, nor are parameters without a layer, such as learnt positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import nn

from fedquilt.axes import Expr, axes_in
from fedquilt.family.layout import Layout
from fedquilt.hardware.torch_internals import ConvNd, ConvTransposeNd

_ROWS = (nn.Linear, nn.Bilinear)  # Layers whose weights have the outputs first
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Scaled:
    """Names of layers to scale, and of weights where a layer's output cannot be intercepted.

    `nn.MultiheadAttention` applies its projections in one function. Dividing the weight and the
    bias of a linear map is the same as dividing its output.
    """

    layers: frozenset[str] = frozenset()  # Names of layers whose outputs are divided
    weights: tuple[str, ...] = ()  # Names of weights and biases that are divided

    @staticmethod
    def of(module: nn.Module, layout: Layout, cut: Set[str]) -> Scaled:
        """Find the layers and weights that are scaled in a member.

        Args:
            module: The whole module.
            layout: Its axes.
            cut: Names of the axes of which the member has fewer channels than the whole model.
        """
        dims = {**layout.dims, **{alias: layout.dims[name] for alias, name in layout.ties.items()}}
        layers: set[str] = set()
        weights: set[str] = set()
        applied: set[str] = set()
        for name, layer in module.named_modules():
            prefix = f"{name}." if name else ""
            if isinstance(layer, nn.MultiheadAttention):
                projections = [
                    prefix + weight
                    for weight in (*_PROJECTIONS, "out_proj.weight", "out_proj.bias")
                ]
                weights |= {
                    weight
                    for weight in projections
                    if weight in dims and cut & set(axes_in(dims[weight][0]))
                }
                applied.add(f"{prefix}out_proj")
            elif name not in applied and any(
                cut & set(axes_in(dim)) for dim in _outputs(layer, prefix, dims)
            ):
                layers.add(name)
        return Scaled(
            frozenset(layers), tuple(sorted(layout.ties.get(name, name) for name in weights))
        )


def _outputs(layer: nn.Module, prefix: str, dims: dict[str, tuple[Expr, ...]]) -> Iterator[Expr]:
    """Yield the dimensions of a layer's weight that are its outputs, as expressions of axes.

    Layers that the scaler leaves alone, such as norms, have none.

    Args:
        layer: The layer.
        prefix: Name of the layer with a dot, or "" for the module itself.
        dims: Dimensions of all weights by name, aliases included.
    """
    weight = next((dims[name] for name in _weights(prefix) if name in dims), None)
    if weight is None:
        return
    if isinstance(layer, ConvNd):
        transposed = isinstance(layer, ConvTransposeNd)
        yield weight[1] if transposed else weight[0]
        if transposed and layer.groups > 1:  # (groups · inputs, outputs of a group)
            yield weight[0]
    elif isinstance(layer, _ROWS):
        yield weight[0]
    elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        yield weight[1]
    elif len(weight) == 2 and len(bias := dims.get(f"{prefix}bias", ())) == 1:
        yield from (dim for dim in weight if dim == bias[0])


def _weights(prefix: str) -> tuple[str, ...]:
    """Return the names that a layer's weight may have, with and without weight norm.

    `prefix` is the layer's name with a dot, or "" for the module itself.
    """
    return f"{prefix}weight", f"{prefix}parametrizations.weight.original1", f"{prefix}weight_v"
