"""Members as plain networks: copies of a module's structure with other sizes and without data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.axes import size_of
from fedquilt.errors import TraceError
from fedquilt.family.layout import Layout
from fedquilt.family.variants import Variants, choose
from fedquilt.hardware.torch_internals import ConvNd, ConvTransposeNd, NormBase
from fedquilt.terms import WHOLE

Rule = Callable[[Any], None]
_RULES: dict[type[nn.Module], Rule] = {}


def resize(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for layers of some classes and their subclasses.

    A rule sets a layer's size attributes, such as `in_features`, from the shapes of its weights.
    For a layer with several rules, the one of the nearest base class is used.
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


@resize(nn.Linear)
def _linear(layer: nn.Linear) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


@resize(nn.Bilinear)
def _bilinear(layer: nn.Bilinear) -> None:
    layer.out_features, layer.in1_features, layer.in2_features = layer.weight.shape


@resize(ConvNd)
def _conv(layer: ConvNd) -> None:
    outer, inner = layer.weight.shape[:2]
    inner *= layer.groups
    transposed = isinstance(layer, ConvTransposeNd)
    layer.in_channels, layer.out_channels = (outer, inner) if transposed else (inner, outer)


@resize(NormBase)
def _batch_norm(layer: NormBase) -> None:
    carrier = layer.weight if layer.weight is not None else layer.running_mean
    if carrier is not None:
        layer.num_features = carrier.shape[0]


@resize(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> None:
    if layer.affine:
        layer.num_channels = layer.weight.shape[0]


@resize(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> None:
    if layer.elementwise_affine:
        layer.normalized_shape = tuple(layer.weight.shape)


@resize(nn.Embedding, nn.EmbeddingBag)
def _embedding(layer: nn.Embedding | nn.EmbeddingBag) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


@resize(nn.MultiheadAttention)
def _attention(layer: nn.MultiheadAttention) -> None:
    # If heads are cut, the layout has `num_heads` among its attributes. The other sizes follow from
    # the weights.
    if layer.in_proj_weight is None:
        layer.embed_dim = layer.q_proj_weight.shape[0]
        layer.kdim, layer.vdim = layer.k_proj_weight.shape[1], layer.v_proj_weight.shape[1]
    else:
        layer.embed_dim = layer.kdim = layer.vdim = layer.in_proj_weight.shape[1]
    layer.head_dim = layer.embed_dim // layer.num_heads


@resize(nn.PReLU)
def _prelu(layer: nn.PReLU) -> None:
    layer.num_parameters = layer.weight.shape[0]


@resize(nn.RNNBase)
def _recurrent(layer: Any) -> None:
    # `layer` is Any, because the class does not declare its weights.
    layer.input_size = layer.weight_ih_l0.shape[1]
    layer.hidden_size = layer.weight_hh_l0.shape[0] // {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
    if layer.proj_size:
        layer.proj_size = layer.weight_hh_l0.shape[1]


@resize(nn.RNNCellBase)
def _cell(layer: nn.RNNCellBase) -> None:
    layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], layer.weight_hh.shape[1]


def build(
    module: nn.Module, layout: Layout, widths: Mapping[str, int], variant: str = WHOLE
) -> nn.Module:
    """Return a smaller network of the same classes, with empty weights on the meta device.

    Args:
        module: The traced module, which does not change.
        layout: Its axes.
        widths: Sizes of the axes that are cut. Axes that are missing are whole.
        variant: Variant that the network runs.
    """
    sizes = {**layout.sizes, **widths}
    if isinstance(module, Variants):
        module = module.holding(variant)

    def meta(name: str, tensor: Tensor) -> Tensor:
        first = layout.ties.get(name, name)
        shape = layout.shape(first, sizes) if first in layout.dims else tensor.shape
        empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )

    member = blueprint(module, meta)
    leads = tuple(f"{net}." for net in layout.net_names(variant)) if layout.nets else ("",)
    for path, expr in layout.attributes.items():
        if not path.startswith(leads):
            continue
        _assign(member, path.split("."), size_of(expr, layout.sizes), size_of(expr, sizes))
    for layer in member.modules():
        for kind in type(layer).__mro__:
            if kind in _RULES:
                _RULES[kind](layer)
                break
    choose(member, variant)
    return member


def blueprint(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module's structure with `make(name, weight)` in place of each weight.

    Buffers count as weights. Tied weights stay tied. Other tensors among the attributes are shared
    with the module.

    Raises:
        TraceError: An attribute of the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        memo[id(weight)] = make(name, weight)
    for layer in module.modules():
        # Tensors that are neither parameters nor buffers are constants, or recomputed by hooks.
        # They are shared and not copied.
        for attribute in vars(layer).values():
            if isinstance(attribute, Tensor) and id(attribute) not in memo:
                memo[id(attribute)] = attribute.detach()
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise TraceError(
            f"{type(module).__name__} cannot be copied, so no smaller member can be made from it: "
            f"{error}. "
            "Keep locks, generators, open files and the like out of the module's attributes."
        ) from error


def _assign(holder: Any, path: list[str], full: int, size: int) -> Any:
    """Change the number at a path from one size to another, as `_rescale` does.

    Modules and configurations are changed in place, and returned. Of a tuple or list a changed copy
    is returned.

    Args:
        holder: Object that the path starts from: a module, configuration, dictionary or tuple.
        path: Names of attributes or keys, and indices of tuples.
        full: Size of the whole model, which the number was made from.
        size: Size of the member.
    """
    key, *inner_path = path
    if isinstance(holder, (tuple, list)):
        items = list(holder)
        items[int(key)] = _replaced(items[int(key)], inner_path, full, size)
        return type(holder)(items)
    attributes = holder if isinstance(holder, dict) else vars(holder)
    if isinstance(holder, nn.Module) and key in holder._modules:
        attributes = holder._modules
    attributes[key] = _replaced(attributes[key], inner_path, full, size)
    return holder


def _replaced(value: Any, path: list[str], full: int, size: int) -> Any:
    """Return a number for another size, or a container in which the number at a path is changed.

    An integer becomes `size`. A real number is taken for a power of `full`, and becomes the same
    power of `size` (`_rescale`). Modules, configurations and dictionaries are changed in place, and
    returned. Of a tuple or list a changed copy is returned (`_assign`).

    Args:
        value: The number itself if `path` is empty, else the object that the path starts from.
        path: Names of attributes or keys, and indices of tuples.
        full: Size of the whole model, which the number was made from.
        size: Size of the member.
    """
    return _assign(value, path, full, size) if path else _rescale(value, full, size)


def number_at(holder: Any, path: str) -> int | float | None:
    """Return the number at a dotted path through modules, configurations and tuples.

    It is None if there is no positive number, such as for a path that does not exist. `holder` is
    the object that the path starts from.
    """
    for key in path.split("."):
        if isinstance(holder, (tuple, list)):
            holder = holder[int(key)] if key.isdecimal() and int(key) < len(holder) else None
        elif isinstance(holder, nn.Module) and key in holder._modules:
            holder = holder._modules[key]
        else:
            attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            holder = attributes.get(key)
    is_number = isinstance(holder, (int, float)) and not isinstance(holder, bool)
    return holder if is_number and holder > 0 else None


def _rescale(value: int | float, full: int, size: int) -> int | float:
    """Return a number that was made from a size, for another size.

    The number is the size itself, or a power of it such as an attention scale, d ** -0.5. An
    integer is taken for the size itself. The exponent of a real number is rounded to halves.

    Args:
        value: The number.
        full: Size that the number was made from.
        size: Size that the result is for.
    """
    if isinstance(value, int):
        return size
    return float(size ** (round(2 * math.log(value, full)) / 2))
