"""Fewer bytes for a change of weights: quantised, sparsified, or both; really packed, and decoded from the bytes.

Linear quantisation and random sparsification of Konečný et al. (2016), ProgFed's LQ-X and SP-X. All weights are one
flat vector. A message is a tensor of bytes:

    8 bytes                the mask's seed, which is sent instead of the mask (keep < 1)
    4 + 4 bytes a weight   the least and the largest change in it, float32 (bits < 32)
    bits a value           the values that were kept, in order, and padded to a byte
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.devices import onto

Bits = Literal[2, 4, 8, 32]
_SEED = 8  # bytes


@dataclass(frozen=True)
class Codec:
    """How a change from what both sides know is coded. Unbiased, but with error feedback."""

    bits: Bits = 32  # a value, rounded at random to one of 2^bits levels; 32: as it is
    keep: float = 1.0  # part of the values that are sent, drawn at random; 1: all
    feedback: bool = False  # clients add what coding lost to their next change (Seide et al. 2014)
    down: bool = False  # downloads are coded too

    def __post_init__(self) -> None:
        within(self, keep="(0, 1]")
        one_of(self, bits=Bits)

    def __str__(self) -> str:
        values = "" if self.keep == 1 else f" for {self.keep:.3g} of the values"
        return f"{self.bits} bits a value{values}" + ", both ways" * self.down + ", errors fed back" * self.feedback

    @property
    def neutral(self) -> bool:
        """Whether everything is sent as it is."""
        return self.bits == 32 and self.keep == 1

    def kept(self, count: int) -> int:
        """How many of so many values are sent."""
        return min(count, max(1, round(self.keep * count)))

    def encode(
        self, change: Tensor, lengths: Sequence[int], seed: int, luck: int, arrives: Tensor | None = None
    ) -> Tensor:
        """The bytes of a change, of which weights have these lengths; those of the part that `arrives`, if not all.

        Scales and mask are of the whole change. `seed` draws the mask, `luck` the rounding.
        """
        pieces = []
        if self.keep < 1:
            pieces.append(onto(change.device, torch.tensor([seed])).view(torch.uint8))
        where = self._where(seed, len(change), arrives, change.device)
        if self.bits == 32:
            values = change if where is None else change[where]
            return torch.cat([*pieces, values.contiguous().view(torch.uint8)])
        ranges = _ranges(change, lengths)
        low, step = _spread(self._scale(ranges, change.dtype), lengths, len(change), where)
        dither = noise.uniform(_key(luck, change.device), change.shape, change.dtype)
        if where is not None:
            change, dither = change[where], dither[where]
        exact = torch.where(step > 0, (change - low) / step, 0.0)  # a weight may have changed alike everywhere
        codes = (exact + dither).floor().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return torch.cat([*pieces, ranges.reshape(-1).view(torch.uint8), pack(codes, self.bits)])

    def decode(
        self, message: Tensor, lengths: Sequence[int], dtype: torch.dtype, arrives: Tensor | None = None
    ) -> Tensor:
        """The change that a message tells of; zero where it has no value."""
        count, scale, seed = sum(lengths), 1.0, None
        if self.keep < 1:
            seed, message = message[:_SEED].clone().view(torch.int64)[0], message[_SEED:]
            # With feedback what is not sent now is sent later: scaled up, it would be fed back larger every time.
            scale = 1.0 if self.feedback else count / self.kept(count)
        where = self._where(seed, count, arrives, message.device)
        total = count if where is None else len(where)
        if self.bits == 32:
            values = message.clone().view(dtype)
        else:
            head = 2 * 4 * len(lengths)
            ranges = message[:head].clone().view(torch.float32).view(2, -1)
            low, step = _spread(self._scale(ranges, dtype), lengths, count, where)
            values = low + step * unpack(message[head:], self.bits, total).to(dtype)
        values = values * scale if scale != 1 else values
        return values if where is None else values.new_zeros(count).index_copy_(0, where, values)

    def _scale(self, ranges: Tensor, dtype: torch.dtype) -> Tensor:
        """(2, weight) each weight's least value and the width of a step, by what the header says."""
        low, high = ranges.to(dtype)
        # By a tensor: a GPU would divide by a number by multiplying with its inverse, which rounds otherwise.
        return torch.stack([low, (high - low) / torch.full_like(low, 2**self.bits - 1)])

    def _where(
        self, seed: int | Tensor | None, count: int, arrives: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """The places of the values that travel; None: all of them."""
        if self.keep == 1 or seed is None:
            return None if arrives is None else arrives.nonzero().flatten()
        # The hash of distinct counters is distinct: exactly as many as are kept lie below.
        drawn = noise.bits(_key(seed, device), count)
        mask = drawn <= drawn.topk(self.kept(count), largest=False, sorted=False).values.max()
        return (mask if arrives is None else mask & arrives).nonzero().flatten()


def _key(word: int | Tensor, device: torch.device) -> Tensor:
    return word if isinstance(word, Tensor) else onto(device, torch.tensor(word))


def _spread(each: Tensor, lengths: Sequence[int], count: int, where: Tensor | None) -> Tensor:
    """What is said of each weight (in the last dimension), for each of its values that travel."""
    sizes = onto(each.device, torch.tensor(lengths))
    if where is None:
        return each.repeat_interleave(sizes, dim=1, output_size=count)
    owner = torch.arange(len(lengths), device=each.device).repeat_interleave(sizes, output_size=count)
    return each[:, owner[where]]


def _ranges(change: Tensor, lengths: Sequence[int]) -> Tensor:
    """(2, weight) the least and the largest value of each weight; in float32 no value lies outside."""
    sizes = onto(change.device, torch.tensor(lengths))
    low, high = (torch.segment_reduce(change, how, lengths=sizes, unsafe=True) for how in ("min", "max"))
    least, most = low.float(), high.float()
    infinite = torch.full_like(least, torch.inf)
    least = torch.where(least.to(low.dtype) > low, torch.nextafter(least, -infinite), least)
    most = torch.where(most.to(high.dtype) < high, torch.nextafter(most, infinite), most)
    return torch.stack([least, most])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits (a divisor of 8), several a byte, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of what `pack` made."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:count]
