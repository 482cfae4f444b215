"""Public samples of a round, and a teacher's rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.terms import Extras

# Ending of the extra with the positions of the public samples that rows are about.
POSITIONS = "/positions"
ROUND = "/round"  # Ending of the extra with the round whose draw the rows are about.


def num_drawn(draw: int, num_public: int) -> int:
    """Return how many public samples are drawn for a round.

    Args:
        draw: Number of samples to draw. 0, or a number that is too large: all samples.
        num_public: Number of public samples.
    """
    return draw if 0 < draw < num_public else num_public


def drawn_positions(seed: int, round: int, draw: int, num_public: int) -> Tensor:
    """Return the positions of the public samples that are drawn for a round, in ascending order.

    The draw is without replacement, and the same for all clients.

    Args:
        seed: Seed of the run.
        round: Round, counted from 0.
        draw: Number of samples. 0, or a number that is too large: all samples.
        num_public: Number of public samples.
    """
    if num_drawn(draw, num_public) == num_public:
        return torch.arange(num_public)
    order = noise.order(noise.key(noise.Stream.PUBLIC_DRAW, seed, round), num_public)
    return order[:draw].sort().values


@dataclass(frozen=True)
class PublicRows:
    """A teacher's rows, and the public samples that they are about.

    Args:
        positions: (row,) Positions of the public samples, on the CPU.
        table: (public sample, …) Rows by position. Those of other samples are zero.
    """

    positions: Tensor
    table: Tensor


def public_rows(name: str, extras: Extras, seed: int, like: Tensor) -> PublicRows:
    """Return the rows in an extra, by the position of the public sample.

    Another extra says which samples the rows belong to. `NAME/positions` has their positions, or
    `NAME/round` has the round that they were drawn for. Without either there is one row for every
    public sample.

    Args:
        name: Name of the extra.
        extras: Extras that were received or remembered. If they lack the rows, the result is empty.
        seed: Seed of the run.
        like: (public sample, …) Zeros in the shape of the table.
    """
    num_public = len(like)
    rows = extras.get(name)
    if rows is None:
        return PublicRows(torch.arange(0), like)
    if name + POSITIONS in extras:
        positions = extras[name + POSITIONS].cpu()
    elif name + ROUND in extras:
        positions = drawn_positions(seed, int(extras[name + ROUND]), len(rows), num_public)
    else:
        return PublicRows(torch.arange(num_public), rows)
    return PublicRows(positions, like.index_copy(0, positions.to(like.device), rows.to(like.dtype)))
