"""Compressed files (gzip, bzip2 and tar), read in memory and never beyond a known size."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from fedquilt.data.prepare.download import Fetched
from fedquilt.errors import DataError

_DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)


def unpacked(file: Fetched) -> bytes:
    """Return the unpacked contents of a bzip2 file (.bz2) or else of a gzip file.

    Raises:
        DataError: It is damaged, or unpacks to more than `max_unpacked` bytes.
    """
    kind: type[bz2.BZ2File] | type[gzip.GzipFile] = (
        bz2.BZ2File if file.path.suffix == ".bz2" else gzip.GzipFile
    )
    limit = file.published.max_unpacked
    with _readable(file), kind(file.path, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise DataError(
            f"{file.path} unpacks to more than {limit:,} bytes, which the published file has at "
            "most."
        )
    return data


def members(file: Fetched, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of some members of a .tar.gz file, in their order in it.

    Nothing is written to disk, and other members are skipped. The file is refused if a path leads
    out of the archive, or if a wanted member is a link or occurs twice, because no published
    archive has such members.

    Args:
        file: The archive.
        is_wanted: Function of a member's path that returns True if its contents are needed.
    """
    names: set[str] = set()
    remaining = file.published.max_unpacked
    with (
        _readable(file),
        gzip.open(file.path, "rb") as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            remaining -= member.size
            if remaining < 0:
                limit = file.published.max_unpacked
                raise DataError(
                    f"{file.path} unpacks to more than {limit:,} bytes, which the published file "
                    "has at most."
                )
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise DataError(
                    f"{file.path} has a member {member.name!r}, whose path leads out of the "
                    "archive."
                )
            name = str(path)
            if not is_wanted(name):
                continue
            if not member.isreg() or name in names:
                reason = "there twice" if name in names else "no plain file"
                raise DataError(f"{file.path} has an unexpected member: {name} is {reason}.")
            names.add(name)
            contents = archive.extractfile(member)
            assert contents is not None
            data = contents.read()
            if len(data) < member.size:
                raise DataError(f"{file.path} breaks off in {name}.")
            yield name, data


def named_members(file: Fetched, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of members of a .tar.gz file, by their paths.

    Args:
        file: The archive.
        names: Paths of the members. Others are skipped.

    Raises:
        DataError: A member is missing.
    """
    contents = dict(members(file, lambda name: name in names))
    if missing := [name for name in names if name not in contents]:
        raise DataError(f"{file.path} has no member {missing[0]}, which the published archive has.")
    return contents


@contextmanager
def _readable(file: Fetched) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise DataError(f"{file.path} is damaged: {error or type(error).__name__}.") from error
