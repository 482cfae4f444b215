"""Digits-Five: MNIST, SVHN, USPS, SYN-like digits and MNIST-M, 28 × 28, balanced by class."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedquilt import noise
from fedquilt.data.prepare.download import Fetched, Watch
from fedquilt.data.prepare.mnist import mnist
from fedquilt.data.prepare.packed import members, unpacked
from fedquilt.data.prepare.syn import SIDE, need_pillow, synthesised
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install

DOMAINS = ("mnist", "svhn", "usps", "syn", "mnistm")
NUM_CLASSES = 10
USPS_SHAPE = (16, 16)
Samples = tuple[np.ndarray, np.ndarray]  # Images (n, 28, 28, 3) as bytes, and their digits.


def digits5(
    files: Mapping[str, Fetched], per_domain: int, seed: int, fonts: Path | None, watch: Watch
) -> dict[str, np.ndarray]:
    """Return arrays of Digits-Five by name, with equally many images of each class and domain.

    SYN is drawn anew. The images of the other domains are a random choice of published ones.

    Args:
        files: Published files by their names.
        per_domain: Training images per domain. There are half as many test images.
        seed: Random seed of the choice of images and of SYN.
        fonts: Folder of fonts for SYN. None: those of matplotlib and Pillow.
        watch: Called with the progress.
    """
    need_pillow("digits5")
    arrays: dict[str, np.ndarray] = {"domains": np.array(DOMAINS)}
    counts = split_counts(per_domain)
    for split, count in counts.items():
        parts = []
        for index, domain in enumerate(DOMAINS):
            if domain == "syn":
                parts.append(synthesised(count, split, seed, fonts, watch))
                continue
            watch(f"{domain} {split}", 0, 0)
            key = noise.key(seed, noise.Stream.DIGITS_FIVE, index, split == "test")
            parts.append(_READERS[domain](files, split, count, key))
        arrays[f"x_{split}"] = np.concatenate([images for images, _ in parts])
        arrays[f"y_{split}"] = np.concatenate([digits for _, digits in parts])
        arrays[f"domain_{split}"] = np.repeat(np.arange(len(DOMAINS), dtype=np.uint8), count)
    return arrays


def split_counts(per_domain: int) -> dict[str, int]:
    """Return the numbers of images per domain for "train" (`per_domain`) and "test" (half of it).

    Raises:
        ConfigError: `per_domain` is not a positive multiple of 20, so that classes cannot balance.
    """
    if per_domain < 2 * NUM_CLASSES or per_domain % (2 * NUM_CLASSES):
        raise ConfigError(
            f"{per_domain} images per domain were asked for; a multiple of {2 * NUM_CLASSES} can "
            "be balanced by class, with half as many for testing."
        )
    return {"train": per_domain, "test": per_domain // 2}


def balanced(digits: np.ndarray, count: int, key: int, name: str) -> np.ndarray:
    """Draw samples at random without replacement, equally many of each of the ten digits.

    Args:
        digits: (sample,) Digit of each sample.
        count: Number of samples to draw, a multiple of ten.
        key: Key of the random numbers.
        name: Name of the data, for the message.

    Returns:
        Positions of the samples, ascending.

    Raises:
        DataError: A digit has too few samples.
    """
    each = count // NUM_CLASSES
    positions = []
    for digit in range(NUM_CLASSES):
        rows = np.flatnonzero(digits == digit)
        if len(rows) < each:
            raise DataError(
                f"{each} images of the digit {digit} were asked for; {name} has {len(rows)}."
            )
        order = noise.order(noise.key(key, digit), len(rows))[:each]
        positions.append(rows[order.numpy()])
    return np.sort(np.concatenate(positions))


# --- the published sets -------------------------------------------------------------------------


def _mnist(files: Mapping[str, Fetched], split: str, count: int, key: int) -> Samples:
    images, digits = mnist(files, split)
    rows = balanced(digits, count, key, f"MNIST's {split} part")
    return _colored(images[rows]), digits[rows]


def _svhn(files: Mapping[str, Fetched], split: str, count: int, key: int) -> Samples:
    file = files[f"{split}_32x32.mat"]
    images, digits = _mat(file)
    rows = balanced(digits, count, key, f"SVHN's {split} part")
    return _resized(images[rows]), digits[rows]


def _mat(file: Fetched) -> Samples:
    """Return the images (n, 32, 32, 3) and digits (n,) of a MATLAB file, both as bytes.

    The digit 0 has the label 10 in the file.
    """
    try:
        from scipy.io import loadmat, whosmat
        from scipy.io.matlab import MatReadError
    except ImportError as error:
        raise ConfigError(
            f"SVHN needs SciPy, which is not installed: {how_to_install('cli')}."
        ) from error
    try:
        announced = sum(math.prod(shape) for _, shape, _ in whosmat(file.path))
        if announced > file.published.max_unpacked:
            limit = file.published.max_unpacked
            raise DataError(
                f"{file.path} announces {announced:,} numbers; the published file has at most "
                f"{limit:,}."
            )
        variables = loadmat(file.path, variable_names=("X", "y"))
        images = np.moveaxis(variables["X"], -1, 0)
        digits = variables["y"].reshape(-1) % NUM_CLASSES
    except (MatReadError, OSError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise DataError(f"{file.path} is no MATLAB file with X and y: {error}.") from error
    if images.dtype != np.uint8 or images.shape != (len(digits), 32, 32, 3):
        raise DataError(
            f"{file.path} has X of {variables['X'].shape} and {len(digits)} labels; (32, 32, 3, n) "
            "fits."
        )
    return images, digits.astype(np.uint8)


def _usps(files: Mapping[str, Fetched], split: str, count: int, key: int) -> Samples:
    file = files["usps.bz2" if split == "train" else "usps.t.bz2"]
    images, digits = _libsvm(file)
    rows = balanced(digits, count, key, f"USPS's {split} part")
    return _resized(_colored(images[rows], check_size=False)), digits[rows]


def _libsvm(file: Fetched) -> Samples:
    """Return the images (n, 16, 16) from 0 to 255 and the digits of a LIBSVM text.

    A line has the digit plus 1, followed by `pixel:value` with pixels from 1 on and values from −1
    to 1. Pixels that it does not list are 0 there, which is 128 in the image.
    """
    lines = unpacked(file).splitlines()
    pixels = np.zeros((len(lines), math.prod(USPS_SHAPE)))
    digits = np.zeros(len(lines), np.uint8)
    for row, line in enumerate(lines):
        try:
            label, *entries = line.split()
            digits[row] = int(label) - 1
            for entry in entries:
                position, value = entry.split(b":")
                pixels[row, int(position) - 1] = float(value)
        except (ValueError, IndexError, OverflowError) as error:
            raise DataError(
                f"{file.path}, line {row + 1}: {error}; `label pixel:value …` fits."
            ) from error
    if (
        not np.isfinite(pixels).all()
        or np.abs(pixels).max(initial=0) > 1
        or digits.max(initial=0) >= NUM_CLASSES
    ):
        raise DataError(f"{file.path} has labels outside 1 to 10 or pixels outside −1 to 1.")
    return np.round((pixels + 1) * 127.5).astype(np.uint8).reshape(-1, *USPS_SHAPE), digits


def _mnistm(files: Mapping[str, Fetched], split: str, count: int, key: int) -> Samples:
    """Return `count` images (n, side, side, 3) and digits of MNIST-M, equally many of each digit.

    The archive has PNG files, and a list of their names and digits. It is read twice, because the
    list may come after the files it names.

    Args:
        files: Downloaded files by name.
        split: Part of the data: "train" or "test".
        count: Number of images, which are drawn at random.
        key: Key of the random numbers.
    """
    file = files["mnist_m.tar.gz"]
    folder = f"mnist_m/mnist_m_{split}"
    listing = dict(members(file, lambda name: name == f"{folder}_labels.txt"))
    if not listing:
        raise DataError(
            f"{file.path} has no member {folder}_labels.txt, which the published archive has."
        )
    names = []
    digits = []
    for line in next(iter(listing.values())).decode().splitlines():
        try:
            name, digit = line.split()
            names.append(f"{folder}/{name}")
            digits.append(int(digit))
        except ValueError as error:
            raise DataError(
                f"{file.path}: {folder}_labels.txt has the line {line!r}; `image.png 7` fits."
            ) from error
    rows = balanced(np.array(digits), count, key, f"MNIST-M's {split} part")
    positions = {names[row]: position for position, row in enumerate(rows)}
    images = np.zeros((count, SIDE, SIDE, 3), np.uint8)
    for name, data in members(file, lambda name: name in positions):
        images[positions.pop(name)] = _png(data, f"{file.path}: {name}")
    if positions:
        raise DataError(
            f"{file.path} has no member {next(iter(positions))}, which {folder}_labels.txt lists."
        )
    return images, np.array(digits, np.uint8)[rows]


def _png(data: bytes, name: str) -> np.ndarray:
    """Decode a PNG image to bytes (28, 28, 3). Sizes up to 56 × 56 pixels are resized to that.

    Args:
        data: Contents of the PNG file.
        name: Name of the image for messages.

    Raises:
        DataError: It is no PNG image, or a side is longer than 56 pixels.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if max(image.size) > 2 * SIDE:
                raise DataError(
                    f"{name} has {image.width} × {image.height} pixels; {SIDE} × {SIDE} fit."
                )
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} is no PNG image: {error}.") from error
    return pixels if pixels.shape[:2] == (SIDE, SIDE) else _resized(pixels[None])[0]


_READERS: dict[str, Callable[[Mapping[str, Fetched], str, int, int], Samples]] = {
    "mnist": _mnist,
    "svhn": _svhn,
    "usps": _usps,
    "mnistm": _mnistm,
}


# --- images -------------------------------------------------------------------------------------


def _colored(gray: np.ndarray, check_size: bool = True) -> np.ndarray:
    """Return grey images (n, height, width) with three equal channels, (n, height, width, 3).

    With `check_size`, images that are not 28 × 28 pixels raise a DataError.
    """
    if check_size and gray.shape[1:] != (SIDE, SIDE):
        raise DataError(f"images of {gray.shape[1:]} pixels were found; {SIDE} × {SIDE} fit.")
    return np.repeat(gray[..., None], 3, axis=3)


def _resized(images: np.ndarray) -> np.ndarray:
    """Return colour images (n, height, width, 3) resized to 28 × 28 by a bilinear filter."""
    from PIL import Image

    resized = [
        Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in images
    ]
    return np.stack([np.asarray(image) for image in resized])
