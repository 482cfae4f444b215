"""Members as plain modules that have weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedquilt.family.variants import Variants
from fedquilt.terms import Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family.family import Family


def tensors_of(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return detached copies of the parameters and buffers of a module that `names` lists.

    They are by name, in the order of `names`. Every name must exist.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensors[name].detach().clone() for name in names}


def assemble(
    family: Family, submodel: Submodel, weights: Weights, shared: bool, extract: bool
) -> nn.Module:
    """Return a member as a plain module with weights that are already cut.

    Args:
        family: The family.
        submodel: The member and its positions.
        weights: Its weights by name. Missing ones are cut from the traced module.
        shared: True: the module shares memory with `weights`. False: it has copies of them.
        extract: True: of a module with variants, only the member's variant is returned. False: the
            result still has the methods of `Variants`. Other modules are not affected.
    """
    member = family.member(submodel)
    module = family.built(member)
    # Constants, and statistics that were not measured yet, are those of the traced module.
    missing_names = [name for name in member.names if name not in weights]
    missing = family.cutter.gather(
        family.traced_state(missing_names), replace(submodel, scope=""), missing_names
    )
    reference = next((value for value in weights.values() if value.is_floating_point()), None)
    aliases: dict[str, list[str]] = {}
    for alias, name in family.layout.ties.items():
        aliases.setdefault(name, []).append(alias)
    layers = dict(module.named_modules(remove_duplicate=False))
    for name in member.names:
        value = weights[name] if name in weights else _move_to(missing[name], reference)
        value = value.detach() if shared else value.detach().clone()
        _assign(layers, (name, *aliases.get(name, ())), value)
    for layer in module.modules():
        counter = getattr(layer, "num_batches_tracked", None)
        if isinstance(counter, Tensor):
            layer.num_batches_tracked = torch.zeros((), dtype=counter.dtype)
    return module.extract() if extract and isinstance(module, Variants) else module


def _move_to(value: Tensor, reference: Tensor | None) -> Tensor:
    """Return a tensor on the device of `reference`, with real numbers in its dtype.

    Integers keep their dtype. A tensor on the meta device is returned as it is. So is every tensor
    if `reference` is None.
    """
    if reference is None or value.is_meta:
        return value
    return value.to(reference.device, reference.dtype if value.is_floating_point() else value.dtype)


def _assign(layers: Mapping[str, nn.Module], names: Sequence[str], value: Tensor) -> None:
    """Put a tensor in place of an empty weight of a module, in place.

    Args:
        layers: Layers of the module, by path.
        names: All names of the weight, which stays tied: its first name, then its aliases.
        value: The tensor. In place of a parameter it becomes a parameter, which needs a gradient if
            the empty one does.
    """
    path, _, attribute = names[0].rpartition(".")
    empty = getattr(layers[path], attribute)
    weight = value
    if isinstance(empty, nn.Parameter):
        weight = nn.Parameter(value, requires_grad=empty.requires_grad)
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(layers[path], attribute, weight)
