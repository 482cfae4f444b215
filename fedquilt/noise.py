"""Random numbers from a counter-based hash.

The same (seed, client, round, step, site) gives the same numbers on every engine. Nothing here has
state. So clients can be trained in any order, in any stack, on any machine, and repeatedly.

Every purpose of random numbers has a name in `Stream`, which is a part of its key. Two purposes
therefore never share random numbers, although they have the same random seed.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Self

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = 1 << 64

NO_SEED = 0  # Takes the place of the random seed in keys that are the same for every run.
# Numbers that separate the draws of one key within this module.
_RADIUS, _ANGLE, _ACCEPTED, _BOOST = 1, 2, 3, -1


class Stream(int, Enum):
    """Named purposes of random numbers, each a number in the keys of its draws.

    The value of a stream is its number and the parts of its keys, where `stream` marks the position
    of the number. `(22, "seed stream round")` means `noise.key(seed, Stream.COHORT, round)`. Keys
    that end in `...` may have further parts. A stream whose first part is `step` or `message` is
    folded into an existing key: `noise.fold_in(step_key, Stream.CROP)`.

    Numbers never change, because stored runs would then continue with other random numbers. A
    number may occur twice if its position or the number of parts differs, because the keys then
    differ. `tests/unit/test_noise.py` checks this, and that no call has a bare number.

    Numbers from 1,000 on are free for methods outside of fedquilt, which write
    `noise.key(1000, world.seed, client.id, server.round)`.
    """

    parts: tuple[str, ...]  # Names of the parts of a key.

    def __new__(cls, number: int, parts: str) -> Self:
        """Return a stream that is equal to its number.

        Args:
            number: Number of the stream in keys.
            parts: Names of the parts of its keys, separated by spaces.
        """
        stream = int.__new__(cls, number)
        stream._value_ = number, parts  # With the parts, equal numbers do not become aliases.
        stream.parts = tuple(parts.split())
        return stream

    # Checks and measurements before a run
    TRIAL_BATCH = 0, "stream"  # Batches that are only tried: checks, and timed steps
    TRIAL_CLASSES = 1, "stream"  # Random classes as targets of a timed step
    FAITHFULNESS = 61, "stream"  # Comparison of a traced net with its module
    EXPORTED_EXAMPLE = 51, "stream"  # Inputs on which an exported file is compared with its net
    CODEC_CHANGE = 46, "stream part"  # Change of weights that a codec is tried on
    CODEC_TRIAL = 46, "stream trial part"  # Keys of the messages of that trial

    # Data sets and their partition among clients
    SAMPLE_ORDER = 11, "seed stream"  # Order of all samples, which is then cut into parts
    CLIENT_CLASSES = 12, "seed stream client count queued"  # Classes that a client gets
    GROUP_ORDER = 13, "seed stream group"  # Order of the samples of a class or domain
    TEST_SPLIT = 14, "seed stream"  # Test samples of a set that has none
    PUBLIC_SPLIT = 15, "seed stream"  # Training samples that become public
    THINNING = 16, "seed stream"  # Samples that are left out of a client's part
    VALIDATION_SPLIT = 17, "seed stream"  # Samples that clients hold back for validation
    GENERATED_IMAGES = 17, "seed stream part ..."  # Images of the source `generated`
    DIRICHLET_CLIENTS = 41, "seed stream attempt class"  # Shares of the clients in a class
    QUANTITIES = 42, "seed stream"  # Sizes of the clients' parts
    USERS = 43, "seed stream"  # Users of a data set who become clients
    DIRICHLET_ORDER = 46, "seed stream"  # Order in which clients choose, if parts are equal
    DIRICHLET_CLASSES = 47, "seed stream client"  # Shares of the classes of a client
    GENERATED_VOLUMES = 49, "seed stream part"  # Volumes for ProgFed's segmentation presets
    DIGITS_FIVE = 62, "seed stream domain test"  # Images of Digits-Five that are used
    SYNTHETIC_DIGITS = 63, "seed stream test image"  # Looks of a drawn digit

    # Fleets
    DYNAMIC_BUDGET = 21, "seed stream client round"  # Budget of a client that changes
    COHORT = 22, "seed stream round"  # Clients of a round
    TESTED_CLIENTS = 23, "seed stream"  # Clients that are tested on their own samples
    ASSIGNED_SHARES = 24, "seed stream"  # Shares that clients draw once
    AWAKE_HOURS = 25, "seed stream"  # Rounds of a period in which a client is available

    # Local training
    BATCH_ORDER = 1, "stream seed client round"  # Order of a client's samples
    STEP_NOISE = 2, "stream seed client round"  # Everything that is drawn in training steps
    POOLED_ORDER = 3, "stream seed"  # Order of all clients' samples together
    PASS_ORDER = 4, "stream seed client round pass"  # Order of samples in a pass without steps
    POOLED_GRADIENT = 5, "stream seed batch"  # Layers that draw while gradients are measured
    PUBLIC_DRAW = 51, "stream seed round"  # Public samples of a round
    SERVER_SPLIT = 48, "stream seed"  # Public samples that the server holds back
    # Draws of a step. Layers of a net have the numbers from 1 on, in the order in which they draw
    CROP = -1, "step stream"
    FLIP = -2, "step stream"
    ATTACK_START = -3, "step stream"  # Starting point of an attack in training
    SAMPLE_WEIGHT = -4, "step stream"  # Weight of each sample in adversarial training
    INTENSITY = -5, "step stream"  # Factors and offsets of samples
    INTENSITY_NOISE = -6, "step stream"  # Noise that is added to samples

    # Links
    LINK = 41, "stream seed client round up scope purpose"  # Losses and codecs of a message
    WIRELESS_DISTANCE = 42, "stream seed client"  # Distance of a client from the server
    ROTATION_SIGNS = 47, "message stream"  # Signs of a codec's random rotation

    # Evaluation
    TEST_ATTACK = 47, "stream seed"  # Starting point of an attack on test samples

    # Methods
    FEDERATED_DROPOUT = 31, "stream seed client round"  # Channels that a client trains
    NESTED_WIDTHS = 41, "stream seed round"  # Widths of a step, such as FedResCuE's
    SPLITMIX_CYCLE = 43, "stream seed cycle"  # Order of base nets in a shared cycle
    SPLITMIX_BASES = 44, "stream seed client round"  # Further base nets of a client
    SPLITMIX_INITIAL = 45, "stream seed base"  # Initial weights of all base nets but the first
    PROGFED_STAGE = 48, "stream seed round"  # Stage that the strategy `random` trains
    PROTOTYPE_INITIAL = 49, "stream seed prototype"  # Initial weights of nets of several sizes
    FEDET_INITIAL = 50, "stream seed"  # Initial weights of the server's net
    UNION_INITIAL = 62, "stream seed net"  # Initial weights of all nets of a union but the first

    # Training of supernets
    SUPERNET_ORDER = 1, "seed stream phase epoch"  # Order of the images
    SUPERNET_CONFIG = 2, "seed stream phase epoch step"  # Members that a step trains
    SUPERNET_AUGMENTATION = 3, "seed stream phase epoch step"  # Augmentation of a batch


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def key(*parts: int) -> int:
    """Hash integers to one key, a signed integer of 64 bits. Their order matters.

    Args:
        *parts: Everything that the random numbers depend on, such as a stream, the random seed, a
            client and a round. No parts give the key 0.
    """
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

    Each key is hashed with the number. The keys `words` do not change.

    Args:
        words: Keys in an int64 tensor, such as one per client.
        part: Number, or a tensor of numbers that broadcasts with `words`.
    """
    if isinstance(part, Tensor):  # int64 overflow wraps, as the hash needs.
        return mix(words + (part + _signed(_GOLDEN)))
    return mix(words + _signed((_GOLDEN + part) % _WORD))


def bits(words: Tensor, count: int) -> Tensor:
    """Return random int64 words (count,) for one key, which is a 0-dimensional tensor.

    The first words do not depend on `count`.
    """
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
    radius = uniform(fold_in(words, _RADIUS), shape, _wide(dtype))
    angle = uniform(fold_in(words, _ANGLE), shape, _wide(dtype))
    return (torch.sqrt(-2 * torch.log1p(-radius)) * torch.cos(2 * torch.pi * angle)).to(dtype)


def order(word: int, count: int) -> Tensor:
    """Return a random permutation (count,) of the numbers 0 to `count` - 1, for the key `word`."""
    return torch.argsort(bits(torch.tensor(word), count), stable=True)


def choose(word: int, count: int, among: int) -> list[int]:
    """Draw different numbers without replacement, in ascending order (Floyd's sampling).

    The cost depends on `count` and not on `among`.

    Args:
        word: Key.
        count: How many numbers are drawn, at most `among`.
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
        x = normal(site, (count,), torch.float64)
        u = uniform(fold_in(site, _ACCEPTED), (count,), torch.float64) + 2.0**-25
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
            + torch.log(uniform(fold_in(words, _BOOST), (count,), torch.float64) + 2.0**-25) / alpha
        )
    return torch.softmax(logs, 0)
