"""Random numbers from a counter-based hash.

The same (seed, client, round, step, site) gives the same numbers on every engine. Nothing here has
state. So clients can be trained in any order, in any stack, on any machine, and repeatedly.
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
    """Hash integers to one key. Their order matters."""
    word = 0
    for part in parts:
        word = (word + _GOLDEN + part) % _WORD
        word = ((word ^ (word >> 30)) * _FIRST) % _WORD
        word = ((word ^ (word >> 27)) * _SECOND) % _WORD
        word ^= word >> 31
    return _signed(word)


def mix(word: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to each element of an int64 tensor."""
    word = (word ^ _shift(word, 30)) * _signed(_FIRST)
    word = (word ^ _shift(word, 27)) * _signed(_SECOND)
    return word ^ _shift(word, 31)


def _shift(word: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically. Masking the copies of the sign bit makes the shift logical.
    return (word >> places) & ((1 << (64 - places)) - 1)


def fold_in(words: Tensor, part: int | Tensor) -> Tensor:
    """Return new keys from keys and a number, such as a step or a site.

    Args:
        words: Keys, such as one per client.
        part: Number, or a tensor of numbers that broadcasts with `words`.
    """
    if isinstance(part, Tensor):  # int64 overflow wraps, as the hash needs.
        return mix(words + (part + _signed(_GOLDEN)))
    return mix(words + _signed((_GOLDEN + part) % _WORD))


def bits(words: Tensor, count: int) -> Tensor:
    """Return `count` hashed int64 words for one key (a 0-dimensional tensor)."""
    return mix(words + torch.arange(1, count + 1, device=words.device) * _signed(_GOLDEN))


def uniform(words: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return uniform random numbers in [0, 1) for one key.

    They have 24 bits of the hash, so that float32 and float64 give the same numbers.

    Args:
        words: () Key.
        shape: Shape of the result.
        dtype: Floating-point type of the result.
    """
    count = 1
    for length in shape:
        count *= length
    numbers = (_shift(bits(words, count), 40).to(_wide(dtype)) * 2.0**-24).reshape(shape)
    # Some numbers would be rounded to 1 in half precision. They become the largest number below 1.
    return (
        numbers.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)
        if _wide(dtype) != dtype
        else numbers
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to draw in. Half precision is drawn in float32, which holds 24 bits."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def normal(words: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return standard normal random numbers for one key (Box-Muller).

    Args:
        words: () Key.
        shape: Shape of the result.
        dtype: Floating-point type of the result.
    """
    radius = uniform(fold_in(words, 1), shape, _wide(dtype))
    angle = uniform(fold_in(words, 2), shape, _wide(dtype))
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * torch.pi * angle)).to(dtype)


def order(word: int, count: int) -> Tensor:
    """Return a random permutation of `count` numbers for one key."""
    return torch.argsort(bits(torch.tensor(word), count), stable=True)


def choose(word: int, count: int, among: int) -> list[int]:
    """Draw different numbers without replacement, in ascending order (Floyd's sampling).

    The cost depends on `count` and not on `among`.

    Args:
        word: Key.
        count: How many numbers are drawn.
        among: Numbers are drawn from 0 to `among` - 1.
    """
    selected: set[int] = set()
    for last in range(among - count, among):
        candidate = key(word, last) % (last + 1)
        selected.add(last if candidate in selected else candidate)
    return sorted(selected)


def dirichlet(words: Tensor, count: int, alpha: float) -> Tensor:
    """Draw shares from the symmetric Dirichlet distribution.

    Gamma variates are drawn by the method of Marsaglia and Tsang (2000), all at once. Rejected ones
    are drawn again with the next key. If alpha is below 1, it is increased by one, and the variate
    is multiplied by u^(1/alpha). Logarithms are used because a small alpha would underflow.

    Args:
        words: () Key.
        count: Number of shares.
        alpha: Concentration. Small values give unequal shares.

    Returns:
        (count,) Shares that sum to 1.
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
