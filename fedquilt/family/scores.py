"""Scores of channels: the size of the weights at every position of every axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedquilt.axes import Expr, Product, Sum, axes_in, size_of
from fedquilt.errors import ConfigError
from fedquilt.family.member import Member
from fedquilt.terms import Weights

Norm = Literal[1, 2]


def channel_scores(
    member: Member, weights: Weights, norm: Norm = 2, scope: str = ""
) -> dict[str, Tensor]:
    """Score every position of every axis by the size of the weights that belong to it.

    The score of a position is a sum over all trainable weights that have the axis. Each weight
    contributes the norm of the entries that a member without the position would lack. An entry
    counts once, even if the weight has the axis in several dimensions. A tied weight counts once.

        scores = channel_scores(world.family.member(world.family.whole), server.weights)
        submodel = highest(self.fit(client.budget, world), scores)

    Args:
        member: Network that the weights belong to. The server's weights are the whole model's.
        weights: Tensors of the member, by scope and name. Weights that are missing do not count.
        norm: 1 for the sum of absolute values, 2 for the square root of the sum of squares.
        scope: Prefix of the names, if one state has several nets. "" has no effect.

    Returns:
        A vector (position,) in float64 for every axis, including inputs and classes. It is on the
        device of the weights. An axis that no weight has is scored 0.

    Raises:
        ConfigError: `norm` is another number.
    """
    if norm not in (1, 2):
        raise ConfigError(f"channel_scores was asked for norm={norm!r}; 1 and 2 are known.")
    layout = member.family.layout
    names = [name for name in member.trainable if scope + name in weights]
    device = weights[scope + names[0]].device if names else torch.device("cpu")
    scores = {
        axis: torch.zeros(member.sizes[axis], dtype=torch.float64, device=device)
        for axis in layout.axes
    }

    for name in names:
        dims = layout.dims[name]
        weight = weights[scope + name].detach().double()
        powers = weight.abs() if norm == 1 else weight.square()
        for axis in dict.fromkeys(axis for dim in dims for axis in axes_in(dim)):
            sums = _sums_by_position(powers, dims, axis, member.sizes)
            scores[axis] += sums if norm == 1 else sums.sqrt()
    return scores


def _sums_by_position(
    values: Tensor, dims: Sequence[Expr], axis: str, sizes: Mapping[str, int]
) -> Tensor:
    """Add up the entries of a weight that belong to each position of an axis, each entry once.

    Args:
        values: Entries of the weight, or powers of them.
        dims: Dimensions of the weight as expressions of axes.
        axis: Name of the axis, which at least one dimension has.
        sizes: Size of every axis in the weight.

    Returns:
        (position,) Sums on the device of `values`.
    """
    carrying = [number for number, dim in enumerate(dims) if axis in axes_in(dim)]
    remaining = [number for number in range(len(dims)) if number not in carrying]
    values = values.sum(remaining) if remaining else values
    owners = [_owners(dims[number], axis, sizes).to(values.device) for number in carrying]
    size = sizes[axis]

    if len(owners) == 1 and owners[0].shape[1] == 1:
        owner = owners[0][:, 0]
        sums = values.new_zeros(size)
        return sums.index_add_(0, owner.clamp(min=0), values * (owner >= 0))

    # An entry may belong to a position in several dimensions. It is counted for the first of them.
    positions = torch.arange(size, device=values.device)
    belongs = [(owner[None] == positions[:, None, None]).any(2).double() for owner in owners]
    sums = values.new_zeros(size)
    for first, rows in enumerate(belongs):
        masks = [1 - earlier for earlier in belongs[:first]] + [rows]
        sums += _masked_sums(values, masks)
    return sums


def _masked_sums(values: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Return for each position the sum of the values whose rows its masks select.

    Args:
        values: (row of dimension 1, row of dimension 2, …)
        masks: (position, row) of 0 and 1 for each of the first dimensions. A value counts if all
            masks are 1 at its rows. Later dimensions are summed completely.

    Returns:
        (position,) Sums.
    """
    values = (
        values.sum(tuple(range(len(masks), values.dim()))) if values.dim() > len(masks) else values
    )
    sums: Tensor = torch.tensordot(masks[0], values, 1)  # (position, row of dimension 2, …)
    for mask in masks[1:]:
        sums = (mask.reshape(*mask.shape, *[1] * (sums.dim() - 2)) * sums).sum(1)
    return sums


def _owners(expr: Expr, axis: str, sizes: Mapping[str, int]) -> Tensor:
    """Return the positions of an axis that each row of a dimension belongs to.

    Args:
        expr: Expression of the dimension.
        axis: Name of the axis. It may occur several times in the expression.
        sizes: Size of every axis.

    Returns:
        (row, occurrence of the axis), with -1 where a row belongs to none.
    """
    match expr:
        case Sum(terms):
            parts = [_owners(term, axis, sizes) for term in terms]
            max_columns = max(part.shape[1] for part in parts)
            padded = [
                torch.nn.functional.pad(part, (0, max_columns - part.shape[1]), value=-1)
                for part in parts
            ]
            return torch.cat(padded)
        case Product(factors):
            owners = torch.zeros(1, 0, dtype=torch.int64)
            for factor in factors:
                inner = _owners(factor, axis, sizes)
                outer_rows, inner_rows = len(owners), len(inner)
                owners = torch.cat(
                    [owners.repeat_interleave(inner_rows, 0), inner.repeat(outer_rows, 1)], 1
                )
            return owners
        case str() if expr == axis:
            return torch.arange(sizes[axis])[:, None]
        case _:
            return torch.zeros(size_of(expr, sizes), 0, dtype=torch.int64)
