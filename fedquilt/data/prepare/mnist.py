"""MNIST in gzipped IDX files, and QMNIST's extended labels, which say who wrote each digit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedquilt.data.prepare.download import Fetched
from fedquilt.data.prepare.packed import unpacked
from fedquilt.errors import DataError

WRITER_COLUMN = 2  # QMNIST's extended labels: class, series, writer, …
MAX_WRONG_LABELS = 0.01  # Share that may differ. In another order nine in ten would.
_DTYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}


def idx(file: Fetched, num_dims: int) -> np.ndarray:
    """Return the array of a gzipped IDX file, with the shape and type that its header gives.

    Args:
        file: The file.
        num_dims: Number of dimensions that the array must have.

    Raises:
        DataError: The header or the length of the file is wrong.
    """
    data = unpacked(file)
    start = 4 * (1 + num_dims)
    if len(data) < start or data[:2] != b"\0\0" or data[2] not in _DTYPES or data[3] != num_dims:
        raise DataError(
            f"{file.path} is no IDX file of {num_dims} dimensions: it begins with {data[:4].hex()}."
        )
    dtype = _DTYPES[data[2]]
    shape = tuple(np.frombuffer(data, ">i4", num_dims, offset=4).tolist())
    expected = start + dtype.itemsize * math.prod(shape)
    if min(shape) < 0 or len(data) != expected:
        raise DataError(
            f"{file.path} announces an array of {shape} and has {len(data):,} bytes, not "
            f"{expected:,}."
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def mnist(files: Mapping[str, Fetched], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, 28, 28) and digits (n,) of MNIST's `train` or `test` part, as bytes.

    Args:
        files: Published files by their names.
        split: "train" or "test".
    """
    prefix = "train" if split == "train" else "t10k"
    images = idx(files[f"{prefix}-images-idx3-ubyte.gz"], 3)
    digits = idx(files[f"{prefix}-labels-idx1-ubyte.gz"], 1)
    if len(images) != len(digits):
        raise DataError(f"MNIST's {split} part has {len(images)} images and {len(digits)} labels.")
    return images, digits


def mnist_writers(files: Mapping[str, Fetched]) -> dict[str, np.ndarray]:
    """Return arrays of MNIST by name, with the writer of every image as its client.

    Writers are from QMNIST's labels, which follow the order of MNIST. Its test part begins with
    MNIST's and is longer.

    Args:
        files: Published files of MNIST and QMNIST by their names.

    Raises:
        DataError: The labels of MNIST and QMNIST do not fit each other.
    """
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        images, digits = mnist(files, split)
        extended = idx(files[f"qmnist-{split}-labels-idx2-int.gz"], 2)[: len(images)]
        if len(extended) != len(images) or extended.shape[1] <= WRITER_COLUMN:
            raise DataError(
                f"QMNIST's {split} labels are {extended.shape}; MNIST has {len(images)} images."
            )
        num_different = int((extended[:, 0] != digits).sum())
        if num_different > MAX_WRONG_LABELS * len(digits):
            raise DataError(
                f"{num_different} of QMNIST's {split} labels differ from MNIST's; they should be "
                "the same images."
            )
        arrays[f"x_{split}"] = images
        arrays[f"y_{split}"] = digits
        arrays[f"client_{split}"] = extended[:, WRITER_COLUMN].astype(np.uint16)
    return arrays
