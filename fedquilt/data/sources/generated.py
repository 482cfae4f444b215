"""Images made from a seed, for trying settings without a download."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import whole
from fedquilt.data.origin import remembered
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Normalize, Scale
from fedquilt.errors import ConfigError

GRID = 4  # Blocks per side of a prototype. Large ones of one colour each survive pooling.
DARKEST, BRIGHTEST = 64, 192  # Range of the bytes of a prototype, the upper end excluded.
MAX_SHIFT = 48  # Bytes by which a domain may shift a colour, up or down.
_PROTOTYPE, _TRAIN, _TEST, _DOMAIN = range(4)


@remembered
def generated(  # noqa: PLR0913  # The parameters are settings of the source.
    classes: int = 10,  # Number of classes.
    shape: tuple[int, int, int] = (3, 32, 32),  # Channels, height and width of an image.
    train: int = 400,  # Number of training samples of all classes and domains together.
    test: int = 100,  # Number of test samples of all classes and domains together.
    domains: tuple[str, ...] = (),  # Names of domains, which shift colours. Empty: none.
    normalize: Normalize = "auto",  # Normalisation of the bytes, as for npz.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalize.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    seed: int = 0,  # Random seed of prototypes, noise and colours.
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
) -> Pool:
    """Generate images from a random seed, to try settings without a download.

    An image is the prototype of its class plus noise. Only integers are computed with, so that
    every machine makes the same images. Classes are balanced. They are balanced in every domain too
    if the number of samples is a multiple of classes × domains.

    Args:
        classes: Number of classes.
        shape: Channels, height and width of an image.
        train: Number of training samples of all classes and domains together.
        test: Number of test samples of all classes and domains together.
        domains: Names of domains. Each one shifts the colours in its own way. Empty: no domains.
        normalize: Scaling of the bytes. "auto" and "channel": by the mean and standard deviation of
            each channel. "none": to values from 0 to 1.
        mean: Mean of each channel, where white is 1. Empty: measured if `normalize` needs it.
        std: Standard deviation of each channel, together with `mean`. Empty: as for `mean`.
        seed: Random seed of prototypes, noise and colours.
        public: Share of the training samples, in [0, 1), that become public. All clients have them,
            without targets. 0: none.
    """
    _check(classes, shape, train, test, domains)
    prototypes = _prototypes(seed, classes, shape)
    shifts = torch.stack([_shift(seed, name, shape[0]) for name in domains or ("",)])
    inputs, targets, codes = _samples(
        noise.key(seed, noise.Stream.GENERATED_IMAGES, _TRAIN), prototypes, shifts, train
    )
    test_inputs, test_targets, test_codes = _samples(
        noise.key(seed, noise.Stream.GENERATED_IMAGES, _TEST), prototypes, shifts, test
    )
    return Pool.of(
        (inputs, targets),
        (test_inputs, test_targets),
        domains=codes if domains else None,
        test_domains=test_codes if domains else None,
        name="generated",
        num_classes=classes,
        domain_names=tuple(domains),
        scale=Scale.of(inputs, normalize, mean, std),
    ).with_public(public)


def _check(
    classes: int, shape: tuple[int, ...], train: int, test: int, domains: tuple[str, ...]
) -> None:
    counts = {"classes": classes, "train": train, "test": test}
    too_small = {name: count for name, count in counts.items() if count < 1}
    if too_small:
        raise ConfigError(
            f"generated data with {too_small} was asked for; each must be at least 1."
        )
    if len(shape) != 3 or not all(whole(length, 1) for length in shape):
        raise ConfigError(
            f"generated images of shape {tuple(shape)} were asked for; channels, height and width "
            "fit, as (3, 32, 32)."
        )
    if len(set(domains)) < len(domains):
        raise ConfigError(
            f"generated data of domains {tuple(domains)} was asked for; each name may be given "
            "once."
        )


def _prototypes(seed: int, classes: int, shape: tuple[int, int, int]) -> Tensor:
    """Return one image for each class, a grid of blocks in random colours.

    Args:
        seed: Random seed.
        classes: Number of classes.
        shape: Channels, height and width of an image.

    Returns:
        (class, channel, height, width) Integers in the range of bytes.
    """
    channels, height, width = shape
    key = torch.tensor(noise.key(seed, noise.Stream.GENERATED_IMAGES, _PROTOTYPE))
    colors = noise.bits(key, classes * channels * GRID * GRID) % (BRIGHTEST - DARKEST) + DARKEST
    blocks = colors.reshape(classes, channels, GRID, GRID)
    rows = torch.arange(height) * GRID // height
    columns = torch.arange(width) * GRID // width
    return blocks[:, :, rows][..., columns]  # (class, channel, height, width)


def _shift(seed: int, domain: str, channels: int) -> Tensor:
    """Return the number that a domain adds to each channel of its images, (channel,).

    It depends on the seed and the domain's name, not on other domains. It is 0 for an empty name.

    Args:
        seed: Random seed.
        domain: Name of the domain. Empty: there are no domains.
        channels: Number of channels.
    """
    if not domain:
        return torch.zeros(channels, dtype=torch.int64)
    key = torch.tensor(
        noise.key(seed, noise.Stream.GENERATED_IMAGES, _DOMAIN, zlib.crc32(domain.encode()))
    )
    return noise.bits(key, channels) % (2 * MAX_SHIFT + 1) - MAX_SHIFT


def _samples(
    key: int, prototypes: Tensor, shifts: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images as bytes (sample, channel, height, width), their classes and their domains.

    Classes take turns from sample to sample, and domains after every cycle of classes.

    Args:
        key: Key of the noise.
        prototypes: (class, channel, height, width) Image of each class without noise.
        shifts: (domain, channel) Number that a domain adds to each channel.
        count: Number of samples.
    """
    positions = torch.arange(count)
    targets = positions % len(prototypes)
    domains = positions // len(prototypes) % len(shifts)
    shape = (count, *prototypes.shape[1:])
    images = prototypes[targets] + shifts[domains][:, :, None, None] + _noise(key, shape)
    return images.clamp(0, 255).to(torch.uint8), targets, domains


def _noise(key: int, shape: tuple[int, ...]) -> Tensor:
    """Return approximately normal integers of a shape, with mean 0 and standard deviation 37.

    Each is a quarter of the sum of four random bytes, less its mean.
    """
    words = noise.bits(torch.tensor(key), torch.Size(shape).numel()).reshape(shape)
    total = torch.zeros(shape, dtype=torch.int64)
    for bits in (0, 8, 16, 24):
        total += (words >> bits) & 255
    return torch.div(total - 2 * 255, 4, rounding_mode="floor")
