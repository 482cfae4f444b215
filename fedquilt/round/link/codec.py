"""Codecs turn a change of weights into bytes: their contract, and the codec that is built in.

The built-in `Codec` quantises linearly and sparsifies at random (Konečný et al. 2016), ProgFed's
LQ-X and SP-X. Its message is a tensor of bytes:

    8 bytes                the seed of mask and rotation, sent instead of them (keep < 1 or rotate)
    4 + 4 bytes a weight   the smallest and the largest change in it, float32 (bits < 32)
    bits a value           the values that were kept, in order, and padded to a byte

With `rotate`, the values of each weight that were kept are padded with zeros to a power of two and
rotated (`rotation.py`). The message has all rotated values, and the smallest and largest of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import one_of, refuse, within
from fedquilt.hardware.device import to_device_async
from fedquilt.round.link.rotation import padded, rotate, unrotate

Bits = Literal[2, 4, 8, 32]  # Bits per value of a message. 32: values are not rounded.
Keys = tuple[int, int]  # Random keys of a message. No two messages share them.
_SEED = 8  # Bytes of a seed in a message.
# Rotated values are about normally distributed, and so are errors that are fed back and rotated.
# Two bits have three steps between the least and the largest value. For many normal values,
# rounding to these steps has an error with a larger variance than the values have. Without a
# rotation an error is at most one step, and does not grow.
_DIVERGES = (
    "what 2 bits lose of a large rotated tensor is more than the tensor, so that errors fed back "
    "grow without end. 4 or 8 bits would work, or one of the two options without the other."
)


@dataclass(frozen=True, eq=False)
class ChangeSpec:
    """Description of a change that sender and receiver both have, so that it costs no bytes.

    A change is a vector: the values of all its tensors, one tensor after the other.

    Args:
        shapes: Shape of every tensor by its name, in the order of the vector.
        dtype: Floating-point type of the change.
        device: Device that the change, its message and the decoded change are on.
        arrives: (value,) True at the values that arrive over a link with a loss. None if all do.
    """

    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    device: torch.device
    arrives: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the number of values of every tensor, in the order of the vector."""
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def count(self) -> int:
        """Return the number of values of the change, over all tensors."""
        return sum(self.lengths)


@dataclass(frozen=True)
class BaseCodec(ABC):
    """Contract of a codec: how a change becomes bytes, and bytes become a change.

    A codec is a frozen dataclass, and its fields are its settings. It has no state. Its random
    numbers are functions of `keys`, so that every engine and a resumed run send the same bytes. A
    codec that can be asked for error feedback or for coded downloads has a field
    `feedback: bool = False` or `down: bool = False`. A lossy codec is allowed.
    """

    @property
    def neutral(self) -> bool:
        """Return True if the codec changes nothing with these settings, so that a link omits it."""
        return False

    @property
    def feedback(self) -> bool:
        """Return True if clients add what coding lost to their next change (Seide et al. 2014)."""
        return False

    @property
    def down(self) -> bool:
        """Return True if downloads are coded too."""
        return False

    @property
    def has_fixed_length(self) -> bool:
        """Return True if the values of a change do not decide how long its message is.

        Then the time of an upload is known before training, and clients that would miss the
        deadline of a round (`Clock.deadline`) need not train. It may depend on the spec and on the
        keys.
        """
        return False

    @abstractmethod
    def encode(self, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
        """Return a change as bytes.

        Args:
            change: (value,) The change. It must not be modified, because error feedback needs it.
            spec: Description of the change. Only values that arrive are to be encoded.
            keys: Keys for the functions of `fedquilt.noise`, the only source of random numbers.

        Returns:
            (byte,) A uint8 tensor on the device of the change. The link charges its length.
        """

    @abstractmethod
    def decode(self, message: Tensor, spec: ChangeSpec) -> Tensor:
        """Return the change that a message describes.

        Args:
            message: (byte,) Result of `encode`. It must not be modified.
            spec: The description that `encode` was given.

        Returns:
            (value,) Finite values of the spec's dtype and on its device, zero where none arrives.
        """


@dataclass(frozen=True)
class Codec(BaseCodec):
    """Linear quantisation, random sparsification, or both. Unbiased, but with error feedback.

    The rotation is that of Konečný et al. (2016): random signs, then an orthonormal Hadamard
    transform of the whole tensor. ProgFed's released code rotates differently. It transforms along
    the first dimension only, and it draws the signs after the transform, so that they do not change
    how the values mix. Where the first dimension is no power of two, it truncates the matrix
    instead of padding. The truncated matrix is not orthogonal, and its inverse amplifies the
    quantisation error.

    The released code sparsifies weights, not rotated values, by an independent draw per value
    (Bernoulli), after decoding. Here exactly `keep` of the values are drawn, and only they are
    rotated and sent. Over a link with a loss, the values that arrive are rotated.
    """

    bits: Bits = 32  # Bits per value, rounded at random to one of 2^bits levels. 32: not rounded
    keep: float = 1.0  # Fraction of values that are sent, drawn at random. 1: all values
    feedback: bool = False  # Add the error of coding to the next change (Seide et al. 2014)
    down: bool = False  # Code downloads too
    # Rotate every tensor by a random Hadamard transform before quantization. No effect at 32 bits
    rotate: bool = False

    def __post_init__(self) -> None:
        within(self, keep="(0, 1]")
        one_of(self, bits=Bits)
        if self.rotate and self.feedback and self.bits == 2:
            refuse(self, {"rotate": f"True was asked for with feedback and 2 bits; {_DIVERGES}"})

    def __str__(self) -> str:
        values = "" if self.keep == 1 else f" for {self.keep:.3g} of the values"
        rotated = ", rotated at random" * self._rotates
        return (
            f"{self.bits} bits a value{values}{rotated}"
            + ", both ways" * self.down
            + ", errors fed back" * self.feedback
        )

    @property
    @override
    def neutral(self) -> bool:
        """Return True if all values are sent without coding."""
        return self.bits == 32 and self.keep == 1

    @property
    @override
    def has_fixed_length(self) -> bool:
        return True

    def kept(self, count: int) -> int:
        """Return how many of `count` values are sent: the fraction `keep`, but at least one."""
        return min(count, max(1, round(self.keep * count)))

    @property
    def _rotates(self) -> bool:
        """Return True if values are rotated. At 32 bits a rotation would have no effect."""
        return self.rotate and self.bits < 32

    @property
    def _seeded(self) -> bool:
        """Return True if messages begin with a seed, which gives mask and rotation."""
        return self.keep < 1 or self._rotates

    @override
    def encode(self, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
        """Return a change as bytes.

        Scales and mask are computed from the whole change, even if only a part arrives. With
        `rotate`, only the part that arrives is rotated, and the scales are those of its values.

        Args:
            change: (value,) The change. It is not modified.
            spec: Description of the change.
            keys: Seed of mask and rotation, and key of random rounding.
        """
        seed, rounding_key = keys
        lengths = spec.lengths
        pieces = []
        if self._seeded:
            pieces.append(to_device_async(change.device, torch.tensor([seed])).view(torch.uint8))
        positions = self._where(seed, len(change), spec.arrives, change.device)
        if self.bits == 32:
            values = change if positions is None else change[positions]
            return torch.cat([*pieces, values.contiguous().view(torch.uint8)])
        if self._rotates:
            lengths = _travelling(lengths, positions)
            change = change if positions is None else change[positions]
            change = rotate(change, lengths, _key(seed, change.device))
            lengths = [padded(length) for length in lengths]
            positions = None
        ranges = _ranges(change, lengths)
        low, step = _spread(self._scale(ranges, change.dtype), lengths, len(change), positions)
        dither = noise.uniform(_key(rounding_key, change.device), change.shape, change.dtype)
        if positions is not None:
            change = change[positions]
            dither = dither[positions]
        # The step is 0 if all values of a weight have changed by the same amount.
        exact = torch.where(step > 0, (change - low) / step, 0.0)
        codes = (exact + dither).floor().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return torch.cat([*pieces, ranges.reshape(-1).view(torch.uint8), pack(codes, self.bits)])

    @override
    def decode(self, message: Tensor, spec: ChangeSpec) -> Tensor:
        """Return the change (value,) that a message describes.

        It is zero where the message has no value. If only a part of the values is sent, they are
        scaled up so that the mean is unbiased, but not with error feedback.

        Args:
            message: (byte,) Result of `encode`. It is not modified.
            spec: The description that `encode` was given.
        """
        count = spec.count
        seed = None
        if self._seeded:
            seed = message[:_SEED].clone().view(torch.int64)[0]
            message = message[_SEED:]
        positions = self._where(seed, count, spec.arrives, message.device)
        if self.bits == 32:
            values = message.clone().view(spec.dtype)
        elif self._rotates and seed is not None:
            lengths = _travelling(spec.lengths, positions)
            rotated = self._dequantized(
                message, [padded(length) for length in lengths], None, spec.dtype
            )
            values = unrotate(rotated, lengths, seed)
        else:
            values = self._dequantized(message, spec.lengths, positions, spec.dtype)
        # Scaling up keeps the mean unbiased. With feedback, values that are not sent now are sent
        # later, and a scale above 1 would make the error grow with every message.
        if self.keep < 1 and not self.feedback:
            values = values * (count / self.kept(count))
        if positions is None:
            return values
        return values.new_zeros(count).index_copy_(0, positions, values)

    def _dequantized(
        self, message: Tensor, lengths: Sequence[int], positions: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the values (value,) that the codes of a message describe.

        Args:
            message: (byte,) Scales and codes, without the seed.
            lengths: Number of values of every tensor, whether sent or not.
            positions: (value,) Positions of the values that are in the message. None: all.
            dtype: Type of the result.

        Returns:
            One value for each code, in order. Values that were not sent are not included.
        """
        count = sum(lengths)
        head = 2 * 4 * len(lengths)
        ranges = message[:head].clone().view(torch.float32).view(2, -1)
        low, step = _spread(self._scale(ranges, dtype), lengths, count, positions)
        total = count if positions is None else len(positions)
        values: Tensor = low + step * unpack(message[head:], self.bits, total).to(dtype)
        return values

    def _scale(self, ranges: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (2, weight) the lowest level and the step between levels of each weight.

        Args:
            ranges: (2, weight) Smallest and largest value of each weight.
            dtype: Type of the result.
        """
        low, high = ranges.to(dtype)
        # The divisor is a tensor. A GPU divides by a Python number by multiplying with its inverse,
        # which rounds differently.
        return torch.stack([low, (high - low) / torch.full_like(low, 2**self.bits - 1)])

    def _where(
        self, seed: int | Tensor | None, count: int, arrives: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the ascending positions of the values that are sent and arrive. None: all values.

        Args:
            seed: Seed of the random mask. None: there is no mask.
            count: Number of values of the change.
            arrives: (value,) True at values that the link delivers. None: all.
            device: Device of the result.
        """
        if self.keep == 1 or seed is None:
            return None if arrives is None else arrives.nonzero().flatten()
        # Hashes of distinct counters are distinct, so that exactly `kept` of them are selected.
        hashes = noise.bits(_key(seed, device), count)
        mask = hashes <= hashes.topk(self.kept(count), largest=False, sorted=False).values.max()
        return (mask if arrives is None else mask & arrives).nonzero().flatten()


def _key(word: int | Tensor, device: torch.device) -> Tensor:
    return word if isinstance(word, Tensor) else to_device_async(device, torch.tensor(word))


def _travelling(lengths: Sequence[int], positions: Tensor | None) -> list[int]:
    """Return how many values of each weight are at `positions`.

    Args:
        lengths: Number of values of each weight, in the order of the vector.
        positions: Ascending positions in the vector of all values. None: all of them.
    """
    if positions is None:
        return list(lengths)
    ends = to_device_async(positions.device, torch.tensor(lengths).cumsum(0))
    counts = torch.searchsorted(positions, ends)
    return counts.diff(prepend=counts.new_zeros(1)).tolist()


def _spread(each: Tensor, lengths: Sequence[int], count: int, positions: Tensor | None) -> Tensor:
    """Repeat a figure of each weight for every one of its values that is sent.

    Args:
        each: (figure, weight) Figures of each weight, such as its lowest level.
        lengths: Number of values of each weight.
        count: Number of values of all weights.
        positions: (sent value,) Positions of the values that are sent. None: all.

    Returns:
        (figure, sent value).
    """
    sizes = to_device_async(each.device, torch.tensor(lengths))
    if positions is None:
        return each.repeat_interleave(sizes, dim=1, output_size=count)
    owner = torch.arange(len(lengths), device=each.device).repeat_interleave(
        sizes, output_size=count
    )
    return each[:, owner[positions]]


def _ranges(change: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return (2, weight) the smallest and the largest value of each weight, as float32.

    They are rounded outwards, so that no value is outside the range.

    Args:
        change: (value,) Values of all weights, one weight after the other.
        lengths: Number of values of each weight.
    """
    sizes = to_device_async(change.device, torch.tensor(lengths))
    low, high = (
        torch.segment_reduce(change, how, lengths=sizes, unsafe=True) for how in ("min", "max")
    )
    lowest = low.float()
    highest = high.float()
    infinite = torch.full_like(lowest, torch.inf)
    lowest = torch.where(lowest.to(low.dtype) > low, torch.nextafter(lowest, -infinite), lowest)
    highest = torch.where(
        highest.to(high.dtype) < high, torch.nextafter(highest, infinite), highest
    )
    return torch.stack([lowest, highest])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (code,) of `bits` bits, which is 2, 4 or 8, into bytes.

    The first code of a byte is in its lowest bits. The last byte is padded with zeros.
    """
    if bits == 8:
        return codes
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes that `pack` has packed.

    Args:
        packed: (byte,) Result of `pack`.
        bits: Bits per code.
        count: Number of codes, without padding.
    """
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:count]
