"""Volumes in NIfTI files, `.nii` and `.nii.gz`, read by nibabel (extra: `medical`)."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install
from fedquilt.names import said

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Image

SUFFIXES = (".nii", ".nii.gz")
NIFTI2_HEADER = 540  # Bytes of the header of a NIfTI-2 file, which is its first number.
MAX_BYTES = 2**31  # Decompressed size of a file: 512 × 512 × 2,048 values of four bytes.


@dataclass(frozen=True)
class Volume:
    """Values of a NIfTI file and the directions of its axes."""

    values: np.ndarray  # (channel, depth, height, width) in the order of the file's axes
    orientation: str  # Directions in which the three axes run, such as "RAS" or "LPS"


def read_volume(file: Path, canonical: bool = False) -> Volume:
    """Read a volume, with its intensities scaled as the header says.

    The file is decompressed up to `MAX_BYTES`. Its size is compared with its header before values
    are read, so that a broken header cannot allocate memory.

    Args:
        file: A file that ends in .nii or .nii.gz.
        canonical: Flip and swap axes so that they run to the right, to the front and up (RAS).
            False reads the array as it is stored.

    Raises:
        ConfigError: nibabel is not installed.
        DataError: The file is not a volume that can be read.
    """
    image = _parsed(file, _content(file))
    with _refused(file):
        from nibabel.funcs import as_closest_canonical
        from nibabel.orientations import aff2axcodes

        if canonical:
            image = as_closest_canonical(image)
        values = np.asarray(image.dataobj)
        axes = aff2axcodes(image.affine)

    if values.dtype.kind not in "uif":
        raise DataError(f"{file} has values of {values.dtype}; whole and real numbers can be read.")
    if not np.isfinite(values).all():
        count = int((~np.isfinite(values)).sum())
        raise DataError(
            f"{file} has {count:,} values that are not finite (NaN or infinite). Replace them in "
            "the file."
        )
    if values.ndim == 3:
        values = values[..., None]
    return Volume(np.moveaxis(values, -1, 0), "".join(axis or "?" for axis in axes))


def _content(file: Path) -> bytes:
    """Return the bytes of a file, decompressed if its name ends in .gz.

    Raises:
        DataError: It cannot be read, or has more than `MAX_BYTES` bytes.
    """
    opened = gzip.open if file.name.lower().endswith(".gz") else open
    try:
        with opened(file, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read as a NIfTI volume: {error}.") from error
    if len(content) > MAX_BYTES:
        raise DataError(
            f"{file} has more than {MAX_BYTES / 2**30:g} GiB; volumes of at most that size are "
            "read."
        )
    return bytes(content)


def _parsed(file: Path, content: bytes) -> Nifti1Image:
    """Return the NIfTI-1 or NIfTI-2 image in `content`. Values are not converted yet.

    Args:
        file: Name of the file for messages.
        content: Decompressed bytes of the file.

    Raises:
        ConfigError: nibabel is not installed.
        DataError: It does not have three or four dimensions, or the header announces more bytes
            than there are.
    """
    try:
        from nibabel.nifti1 import Nifti1Image
        from nibabel.nifti2 import Nifti2Image
    except ImportError as error:
        raise ConfigError(
            f"{file} was asked for; NIfTI volumes need nibabel, which is not installed: "
            f"{how_to_install('medical')}."
        ) from error
    header_size = content[:4]
    is_second = NIFTI2_HEADER in (
        int.from_bytes(header_size, "little"),
        int.from_bytes(header_size, "big"),
    )
    with _refused(file):
        image: Nifti1Image = (Nifti2Image if is_second else Nifti1Image).from_bytes(content)
        shape = tuple(map(int, image.shape))
        item_size = int(image.get_data_dtype().itemsize)

    if len(shape) not in (3, 4) or min(shape) < 1:
        raise DataError(
            f"{file} has an array of shape {shape}; (x, y, z) fits, or (x, y, z, channel), with at "
            "least one value a side."
        )
    if math.prod(shape) * item_size > len(content):
        raise DataError(
            f"{file} cannot be read as a NIfTI volume: its header says {shape} values of "
            f"{item_size} bytes, and the file has {len(content):,} bytes. It may be cut short."
        )
    return image


@contextmanager
def _refused(file: Path) -> Iterator[None]:
    """Raise nibabel's errors about a broken header as a `DataError` that names the file.

    These errors have no common base class. KeyError means an unknown code, and OverflowError an
    offset or a side without bounds.
    """
    from nibabel.filebasedimages import ImageFileError
    from nibabel.orientations import OrientationError
    from nibabel.spatialimages import HeaderDataError
    from nibabel.wrapstruct import WrapStructError

    broken = (ImageFileError, HeaderDataError, OrientationError, WrapStructError)
    try:
        with np.errstate(all="ignore"):  # Values that are not finite are refused below.
            yield
    except (*broken, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(f"{file} cannot be read as a NIfTI volume: {said(error)}") from error
