"""Arrays in .npz files, whose sizes are read from headers before anything is decompressed.

An .npz file is a zip file of .npy files. `numpy.load` allocates the size in a header, so that 8 MB
can become 2 GB. It does not always read up to the end, where the checksum is compared. Here every
array is read to its end.
"""

from __future__ import annotations

import math
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.lib import format as npy

from fedquilt.errors import DataError
from fedquilt.storage.tensor_files import MAX_DIMS, too_large

MAX_ARRAYS = 1_000  # Limit on arrays of a file
MAX_HEADER = 10_000  # Limit on characters in the header of an array, which NumPy has too
KINDS = "biufcUS"  # Kinds of dtypes that are read: numbers, and text of fixed length
MAX_VALUES = 2**48  # Limit on values of an array. Memory is limited by `max_bytes`
SUFFIX = ".npy"
_END = b"PK\5\6"  # Signature of the record at the end of a zip file
_END_BYTES = 22
_MAX_COMMENT = 2**16


@dataclass(frozen=True)
class _Header:
    """An array as its header describes it."""

    shape: tuple[int, ...]
    is_fortran: bool  # True: values are stored column by column.
    dtype: np.dtype
    size: int  # Bytes of its values


def array_names(path: str | Path) -> list[str]:
    """Return the names of a file's arrays, without reading them.

    Raises:
        DataError: It is no .npz file.
    """
    with _opened(path) as archive:
        return [_name(member) for member in archive.infolist()]


def read_arrays(path: str | Path, max_bytes: int = 0) -> dict[str, np.ndarray]:
    """Return all arrays of a file by name. Nothing is unpickled.

    Args:
        path: An .npz file.
        max_bytes: Bytes that all arrays together may take. 0: half of the free memory.

    Raises:
        DataError: The file or one of its arrays cannot be read, or would take too much memory. The
            message names the array.
    """
    with _opened(path) as archive:
        members = {_name(member): member for member in archive.infolist()}
        headers = {}
        for name, member in members.items():
            with _reading(path, name), archive.open(member) as stream:
                headers[name] = _header(stream, member)
        total = sum(header.size for header in headers.values())
        if problem := too_large(total, max_bytes):
            raise DataError(f"{path} is not read: {problem}")
        arrays = {}
        for name, member in members.items():
            with _reading(path, name), archive.open(member) as stream:
                arrays[name] = _values(stream, _header(stream, member))
        return arrays


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(SUFFIX)


# --- zip files ----------------------------------------------------------------------------------


@contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Open an .npz file, which is a zip file, after checking its directory.

    Raises:
        DataError: It is no zip file, or its directory is not sound (see `_check_directory`).
    """
    if Path(path).exists() and not Path(path).is_file():  # Reading a FIFO would wait forever.
        raise DataError(f"{path} cannot be read as an .npz file: it is no plain file.")
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        # ValueError: names that are not UTF-8. NotImplementedError: a later version of the format.
        raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error
    with archive:
        _check_directory(path, archive.infolist())
        yield archive


def _check_directory(path: str | Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse a zip directory that hides arrays, repeats one, or lists an unusual compression.

    Args:
        path: The .npz file, for messages and for its end record.
        members: Members that `zipfile` found in it.
    """
    listed = _listed(Path(path))
    if len(members) != listed or listed > MAX_ARRAYS:
        raise DataError(
            f"{path} cannot be read as an .npz file: {len(members)} arrays were found and "
            f"{listed} are listed; at most {MAX_ARRAYS:,} fit."
        )
    names = [_name(member) for member in members]
    for member, name in zip(members, names, strict=True):
        problem = f"{path}: the array {name!r} cannot be read"
        if names.count(name) > 1:
            raise DataError(f"{problem}, because it is there twice.")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(
                f"{problem}, because of its compression {member.compress_type}; numpy.savez writes "
                "others."
            )


def _listed(path: Path) -> int:
    """Return the number of files that a zip file's end record announces.

    `zipfile` does not compare it with the files that it finds.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _END_BYTES - _MAX_COMMENT))
        tail = stream.read()
    start = tail.rfind(_END)
    return int.from_bytes(tail[start + 10 : start + 12], "little")


@contextmanager
def _reading(path: str | Path, name: str) -> Iterator[None]:
    """Raise errors in the block as a `DataError` that names the file and the array.

    These are errors of `zipfile` and `zlib` about a broken file, and `_BadArrayError`.
    """
    try:
        yield
    except _BROKEN as error:
        raise DataError(
            f"{path}: the array {name!r} cannot be read: {error or 'the file ends within it'}."
        ) from error
    except _BadArrayError as error:
        raise DataError(f"{path}: the array {name!r} cannot be read: {error}.") from error


# --- arrays -------------------------------------------------------------------------------------


class _BadArrayError(Exception):
    """Problem of an array. `_reading` adds the names of the file and the array."""


# Errors of `zipfile` and `zlib` for an array that is broken, encrypted (RuntimeError), of a later
# version of the format (NotImplementedError), or has a name that is not UTF-8 (UnicodeDecodeError).
_BROKEN = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error),
    *(NotImplementedError, RuntimeError, UnicodeDecodeError),
)


def _header(stream: IO[bytes], member: zipfile.ZipInfo) -> _Header:
    """Read the .npy header of an array, and leave the stream at its first value.

    Args:
        stream: Opened member of the .npz file.
        member: Entry of the member in the zip directory.

    Raises:
        _BadArrayError: The header is damaged, would unpickle objects, or announces another number
            of bytes than the member has.
    """
    if not member.filename.endswith(SUFFIX):
        raise _BadArrayError(f"its name in the file does not end with {SUFFIX}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of headers that Python 2 wrote.
            version = npy.read_magic(stream)
            if version == (1, 0):
                shape, is_fortran, dtype = npy.read_array_header_1_0(stream, MAX_HEADER)
            elif version == (2, 0):
                shape, is_fortran, dtype = npy.read_array_header_2_0(stream, MAX_HEADER)
            else:
                raise _BadArrayError(
                    f"it has version {version} of the format; (1, 0) and (2, 0) are read"
                )
    except (
        ValueError,
        TypeError,
        SyntaxError,
        RecursionError,
        MemoryError,
        tokenize.TokenError,
    ) as error:
        # `ast.literal_eval` documents all of them but the last, which is of NumPy's reader of old
        # headers.
        raise _BadArrayError(f"its header is damaged ({str(error)[:200]})") from error
    if dtype.hasobject or dtype.kind not in KINDS:
        raise _BadArrayError(
            f"it has values of {dtype}; numbers and text are read, and nothing is unpickled"
        )
    if (
        len(shape) > MAX_DIMS
        or min(shape, default=0) < 0
        or math.prod(filter(None, shape)) > MAX_VALUES
    ):
        raise _BadArrayError(f"its shape {str(shape)[:100]} is no shape")
    size = math.prod(shape) * dtype.itemsize
    available = member.file_size - stream.tell()
    if size != available:
        raise _BadArrayError(
            f"its header says {shape} values of {dtype}, {size:,} bytes, and it has {available:,}"
        )
    return _Header(shape, is_fortran, dtype, size)


def _values(stream: IO[bytes], header: _Header) -> np.ndarray:
    """Read the values of an array from a stream that is behind the header.

    It reads up to the end, where `zipfile` compares the checksum. The array has native byte order.

    Raises:
        _BadArrayError: Bytes follow the values.
    """
    data = bytearray(header.size)
    order: Literal["F", "C"] = "F" if header.is_fortran else "C"
    view = memoryview(data)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        view = view[count:]
    if stream.read(1):
        raise _BadArrayError("it has bytes behind its values")
    if not header.size:  # `frombuffer` refuses text of length 0.
        return np.empty(header.shape, header.dtype)
    array = np.frombuffer(data, header.dtype).reshape(header.shape, order=order)
    return array if header.dtype.isnative else array.astype(header.dtype.newbyteorder("="))
