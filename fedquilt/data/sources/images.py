"""Images in folders, read by Pillow (extra: `images`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedquilt.checks import File
from fedquilt.data.origin import remembered
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Normalize, Scale
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install
from fedquilt.storage.tensor_files import too_large

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXEL_BYTES = 4  # Bytes of a pixel in Pillow's largest modes
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


@remembered
def images(  # noqa: PLR0913  # The parameters are settings of the source.
    path: File,  # Path of the folder.
    size: int = 0,  # Pixels per side to resize images to. 0: all must have the same size.
    gray: bool = False,  # Read images with one channel.
    domains: bool = False,  # Folders of classes are in folders of domains: train/DOMAIN/CLASS/….
    normalize: Normalize = "auto",  # How stored values are scaled: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalize.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
    max_bytes: int = 0,  # Bytes that all images may take in memory. 0: half of the free memory.
) -> Pool:
    """Read a folder of images: train/CLASS/… and test/CLASS/…, or CLASS/… without a test part.

    Without a test part a fifth of the images is held out for testing.

    Args:
        path: Path of the folder.
        size: Pixels per side to which images are resized. 0: they must all have the same size.
        gray: True: read images with one channel. False: with three.
        domains: True: folders of classes are in folders of domains, as in train/DOMAIN/CLASS/….
            False: there are no domains.
        normalize: Scaling of the bytes. "auto" and "channel": by the mean and standard deviation of
            each channel. "none": to values from 0 to 1.
        mean: Mean of each channel, where white is 1. Empty: measured if `normalize` needs it.
        std: Standard deviation of each channel, together with `mean`. Empty: as for `mean`.
        public: Share of the training samples, in [0, 1), that become public. All clients have them,
            without targets. 0: none.
        max_bytes: Bytes that all images may take in memory. 0: half of the free memory.
    """
    root = Path(path)
    folders = [root / "train", root / "test"] if (root / "train").is_dir() else [root]
    sets = [_files(folder, domains) for folder in folders if folder.is_dir()]
    classes = sorted({file.parent.name for files in sets for file in files})
    domain_names = (
        sorted({file.parent.parent.name for files in sets for file in files}) if domains else []
    )
    width, height = image_size(sets[0][0])
    shape = (size, size) if size else (height, width)
    count = sum(map(len, sets))
    if problem := too_large(count * shape[0] * shape[1] * (1 if gray else 3), max_bytes):
        raise DataError(
            f"{root} has {count:,} images of {shape[0]}×{shape[1]} pixels and is not read: "
            f"{problem}"
        )
    opened = partial(open_image, max_bytes=max_bytes)
    inputs = [
        stacked(map(opened, files), list(map(str, files)), shape, gray, bool(size))
        for files in sets
    ]
    targets = [np.array([classes.index(file.parent.name) for file in files]) for files in sets]
    codes = (
        [
            np.array([domain_names.index(file.parent.parent.name) for file in files])
            for files in sets
        ]
        if domains
        else []
    )
    return Pool.of(
        (inputs[0], targets[0]),
        (inputs[1], targets[1]) if len(sets) > 1 else None,
        domains=codes[0] if codes else None,
        test_domains=codes[1] if len(codes) > 1 else None,
        name=root.name,
        num_classes=len(classes),
        class_names=tuple(classes),
        domain_names=tuple(domain_names),
        scale=Scale.of(torch.as_tensor(inputs[0]), normalize, mean, std),
    ).with_public(public)


def stacked(
    images: Iterable[Image], names: list[str], shape: tuple[int, int], gray: bool, resize: bool
) -> np.ndarray:
    """Return images of Pillow as one array of bytes (sample, channel, height, width).

    Images are converted to grey or RGB, and are closed.

    Args:
        images: Images of Pillow.
        names: Name of each image for messages.
        shape: Height and width of the result.
        gray: True: one channel. False: three channels.
        resize: True: images are resized to `shape`. False: other sizes are refused.

    Raises:
        DataError: An image has another size.
    """
    from PIL.Image import Resampling

    stack = np.empty((len(names), *shape, 1 if gray else 3), np.uint8)
    for index, image in enumerate(images):
        with image:
            picture = image.convert("L" if gray else "RGB")
        if resize:
            picture = picture.resize(shape[::-1], Resampling.BILINEAR)
        if (picture.height, picture.width) != shape:
            raise DataError(
                f"{names[index]} has {picture.height}×{picture.width} pixels and {names[0]} "
                f"{shape[0]}×{shape[1]}; size={min(shape)} makes all of them alike."
            )
        stack[index] = np.asarray(picture).reshape(*shape, -1)
    return np.ascontiguousarray(stack.transpose(0, 3, 1, 2))


def _files(folder: Path, domains: bool) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    levels = "DOMAIN/CLASS" if domains else "CLASS"
    if not files:
        raise DataError(
            f"{folder} has no images ({', '.join(SUFFIXES)}) in it; {folder}/{levels}/one.png "
            "would fit."
        )
    for file in files:
        if len(file.relative_to(folder).parts) < 2 + domains:
            raise DataError(
                f"{file} is in no folder that names its class; {folder}/{levels}/{file.name} "
                "would fit."
            )
    return files


def image_size(file: Path) -> tuple[int, int]:
    """Return width and height of an image by its header, without reading its pixels.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: The file is no image.
    """
    with image_errors(str(file)), _header_of(file) as image:
        return image.size


def open_image(file: Path, max_bytes: int = 0) -> Image:
    """Read an image with its pixels into memory, and close the file.

    Args:
        file: The file.
        max_bytes: Bytes that its pixels may take. 0: half of the free memory.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: The file cannot be read, or has too many pixels.
    """
    # The block closes the file. The pixels stay in memory.
    with (
        image_errors(str(file)),
        _header_of(file) as image,
    ):
        size = image.width * image.height * MAX_PIXEL_BYTES
        if problem := too_large(size, max_bytes):
            raise DataError(
                f"{file} has {image.height}×{image.width} pixels and is not read: {problem}"
            )
        image.load()  # A truncated file raises its error only here.
    return image


def _header_of(file: Path) -> Image:
    """Open an image without reading its pixels. The caller closes it.

    Pillow's warning about large images is silenced, because the size is compared with the memory
    later. A path that is no plain file raises a DataError.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        if not file.is_file():  # Reading a FIFO would wait forever.
            raise DataError(f"{file} cannot be read as an image: it is no plain file.")
        return Image.open(file)


@contextmanager
def image_errors(title: str) -> Iterator[None]:
    """Raise Pillow's errors in the block as a `DataError` that begins with `title`.

    They are about broken images and files that are no images. A ConfigError says how to install
    Pillow if it is missing.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ConfigError(
            f"images need Pillow, which is not installed: {how_to_install('images')}."
        ) from error
    try:
        yield
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
    ) as error:
        # SyntaxError: a broken chunk of a PNG. OSError and EOFError: a truncated file.
        # ValueError: a broken header.
        raise DataError(f"{title} cannot be read as an image: {error}.") from error
