"""All randomness, as a counter-based hash: the same (seed, client, round, step, site) draws the same on every engine.

Nothing here keeps state, so clients can be trained in any order, in any stack, on any machine, or again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 1 << 64


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def key(*parts: int) -> int:
    """Fold whole numbers into one key; the order matters."""
    word = 0
    for part in parts:
        word = (word + _GOLDEN + part) % _WORD
        word = ((word ^ (word >> 30)) * _FIRST) % _WORD
        word = ((word ^ (word >> 27)) * _SECOND) % _WORD
        word ^= word >> 31
    return _signed(word)


def mix(word: Tensor) -> Tensor:
    """The finaliser of splitmix64, element by element on int64."""
    word = (word ^ _shift(word, 30)) * _signed(_FIRST)
    word = (word ^ _shift(word, 27)) * _signed(_SECOND)
    return word ^ _shift(word, 31)


def _shift(word: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically; masking the sign's copies off makes it a logical shift.
    return (word >> places) & ((1 << (64 - places)) - 1)


def fold_in(words: Tensor, part: int | Tensor) -> Tensor:
    """New keys from keys (a tensor of them, one a client) and a number, such as a step or a site."""
    if isinstance(part, Tensor):  # int64 wraps as the hash wants it
        return mix(words + (part + _signed(_GOLDEN)))
    return mix(words + _signed((_GOLDEN + part) % _WORD))


def bits(words: Tensor, count: int) -> Tensor:
    """`count` hashed int64 words for one key (a 0-dimensional tensor)."""
    return mix(words + torch.arange(1, count + 1, device=words.device) * _signed(_GOLDEN))


def uniform(words: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) for one key. 24 bits of the hash, so that float32 and float64 draw the same."""
    count = 1
    for length in shape:
        count *= length
    drawn = (_shift(bits(words, count), 40).to(_wide(dtype)) * 2.0**-24).reshape(shape)
    # Rounded to half precision some would be 1: those become the largest number below it.
    return (
        drawn.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)
        if _wide(dtype) != dtype
        else drawn
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Half precision cannot hold 24 bits, so it is drawn in float32 and rounded."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def normal(words: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers for one key (Box-Muller)."""
    radius = uniform(fold_in(words, 1), shape, _wide(dtype))
    angle = uniform(fold_in(words, 2), shape, _wide(dtype))
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * torch.pi * angle)).to(dtype)


def order(word: int, count: int) -> Tensor:
    """A permutation of `count` for one key."""
    return torch.argsort(bits(torch.tensor(word), count), stable=True)


def choose(word: int, count: int, among: int) -> list[int]:
    """`count` different numbers below `among` for one key, ascending, at a cost of `count` (Floyd's sampling)."""
    chosen: set[int] = set()
    for last in range(among - count, among):
        drawn = key(word, last) % (last + 1)
        chosen.add(last if drawn in chosen else drawn)
    return sorted(chosen)


def dirichlet(words: Tensor, count: int, alpha: float) -> Tensor:
    """One draw of shares from the symmetric Dirichlet distribution, in logarithms, since a small alpha underflows.

    Gamma variates by Marsaglia and Tsang (2000), all at once, those refused drawn again under the next key; below 1
    alpha is raised by one and the variate scaled back by u^(1/alpha).
    """
    shift = alpha + 1 if alpha < 1 else alpha
    d = shift - 1 / 3
    logs = torch.full((count,), torch.nan, dtype=torch.float64)
    attempt = 0
    while bool((open_ := logs.isnan()).any()):
        site = fold_in(words, attempt)
        x, u = (
            normal(site, (count,), torch.float64),
            uniform(fold_in(site, 3), (count,), torch.float64) + 2.0**-25,
        )
        v = (1 + x / math.sqrt(9 * d)) ** 3
        good = (
            open_
            & (v > 0)
            & (torch.log(u) < 0.5 * x**2 + d - d * v + d * torch.log(v.clamp(min=1e-300)))
        )
        logs = torch.where(good, torch.log(d * v.clamp(min=1e-300)), logs)
        attempt += 1
    if alpha < 1:
        logs = (
            logs
            + torch.log(uniform(fold_in(words, -1), (count,), torch.float64) + 2.0**-25) / alpha
        )
    return torch.softmax(logs, 0)
