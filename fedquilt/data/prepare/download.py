"""Published files: their addresses and checksums, and a folder of downloads."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    url2pathname,
)

from fedquilt.errors import DataError
from fedquilt.storage.files import why, write
from fedquilt.units import size as shown_size

SCHEMES = ("http", "https", "file")
TIMEOUT_S = 60.0  # Seconds without a byte after which a download is given up.
CHUNK_BYTES = 1 << 18
# Arguments: name of a step, how much of it is done, and how much there is (0: unknown).
Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Published:
    """File that others publish, with its addresses and its checksum."""

    name: str  # Name in the folder of downloads, and in the folder or URL of --from.
    urls: tuple[str, ...]  # Public addresses, in the order in which they are tried.
    max_bytes: int  # Size above which a file is refused: the exact size if it is known.
    max_unpacked: int  # Largest number of bytes that it may unpack to.
    md5: str = ""  # Published sum. Empty: none is known, so that the file cannot be checked.


@dataclass(frozen=True)
class Fetched:
    """Published file on this machine."""

    published: Published  # Entry of the catalogue.
    path: Path  # Path of the local copy.
    origin: str  # URL that it was downloaded from. Empty: it was there already.
    bytes: int  # Size of the file.
    sha256: str  # Checksum of the file.

    @property
    def is_checked(self) -> bool:
        """Return True if the published checksum is known and the file has it."""
        return bool(self.published.md5)


@dataclass
class Downloads:
    """Folder of downloaded files, each of which is downloaded at most once.

    Args:
        folder: Folder in which downloads are kept.
        origin: Folder or URL that has the files by their names. Files in a folder are read where
            they are. Empty: the places where files are published.
        watch: Called with the progress of a download.
    """

    folder: Path
    origin: str = ""
    watch: Watch = field(default=lambda step, done, total: None)

    def fetch(self, published: Published) -> Fetched:
        """Return a published file on this machine, after comparing its checksum.

        An existing file in the folder is used. If there is none, the addresses are tried in order.
        If `origin` is a folder, the file is taken from there and nothing is downloaded.

        Raises:
            DataError: The file cannot be obtained, is larger than announced, is truncated, or has
                another checksum. Existing files stay as they are.
        """
        if self.origin and "://" not in self.origin:
            return self._existing(published, Path(self.origin) / published.name)
        path = self.folder / published.name
        if path.exists():
            return self._existing(published, path)
        urls = published.urls
        if self.origin:
            urls = (f"{self.origin.rstrip('/')}/{quote(published.name)}",)
        failures = []
        for url in urls:
            try:
                return self._download(published, url, path)
            except _UnreachableError as error:
                failures.append(str(error))
        raise DataError(
            f"{published.name} could not be downloaded: {'; '.join(failures)}.{_by_hand(path)}"
        )

    def _existing(self, published: Published, path: Path) -> Fetched:
        """Return the file at `path`, and refuse it if its checksum or its size is wrong.

        Raises:
            DataError: It cannot be read, has another checksum than `published`, or is too large.
        """
        try:
            with path.open("rb") as file:
                md5, sha256, size = _sums(file)
        except OSError as error:
            address = f" It is published at {published.urls[0]}." if published.urls else ""
            raise DataError(
                f"{path} is needed; it cannot be read: {why(error)}.{address}"
            ) from error
        if published.md5 and md5 != published.md5:
            remedy = "Move it away to have it downloaded again."
            if self.origin:
                remedy = (
                    "Replace it by the published file, or leave --from out to have it downloaded."
                )
            raise DataError(
                f"{path} has the MD5 sum {md5}; the published file has {published.md5}. {remedy}"
            )
        if size > published.max_bytes:
            raise DataError(
                f"{path} has {size:,} bytes; the published file has at most "
                f"{published.max_bytes:,}."
            )
        return Fetched(published, path, "", size, sha256)

    def _download(self, published: Published, url: str, path: Path) -> Fetched:
        """Download the file at `url` to `path`, whose folder is made if it is missing.

        Bytes are written to a temporary file, which is renamed once its checksum is right.

        Raises:
            DataError: The URL has a scheme that is not read, or the file is not the published one.
        """
        if urlsplit(url).scheme not in SCHEMES:
            raise DataError(f"{url} was asked for; only {', '.join(SCHEMES)} are read.")
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write(path, self._checked(published, url))
        return Fetched(published, path, url, written.size, written.sha256)

    def _checked(self, published: Published, url: str) -> Iterator[bytes]:
        """Yield the bytes at `url` in chunks, and report progress to `watch`.

        Raises:
            DataError: The download is too large, ends early, or has another checksum than
                `published`. The last two are known only after the last chunk.
        """
        digest = hashlib.md5(usedforsecurity=False)
        size = 0
        with _opened(url) as (stream, announced):
            if announced > published.max_bytes:
                raise DataError(
                    f"{url} announces {announced:,} bytes; the published file has at most "
                    f"{published.max_bytes:,}."
                )
            size_text = f" ({shown_size(announced)})" if announced else ""
            step = f"{published.name}{size_text} from {urlsplit(url).netloc or 'a local folder'}"
            self.watch(step, 0, announced)
            for chunk in _chunks(stream, url):
                size += len(chunk)
                if size > published.max_bytes:
                    raise DataError(
                        f"{url} sends more than {published.max_bytes:,} bytes, which the file has "
                        "at most."
                    )
                digest.update(chunk)
                self.watch(step, size, announced)
                yield chunk
        if size < announced:
            raise DataError(f"{url} broke off after {size:,} of {announced:,} bytes. Try again.")
        if published.md5 and digest.hexdigest() != published.md5:
            raise DataError(
                f"{url} has the MD5 sum {digest.hexdigest()}; the published file has "
                f"{published.md5}. Nothing was kept."
            )


class _UnreachableError(Exception):
    """Failure to reach one address. The next address may have the file."""


@contextmanager
def _opened(url: str) -> Iterator[tuple[BinaryIO, int]]:
    """Yield a stream over a URL and the number of bytes that it announces (0: unknown)."""
    stream, announced = _stream(url)
    with stream:
        yield stream, announced


def _stream(url: str) -> tuple[BinaryIO, int]:
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(url2pathname(parts.path))
        try:
            return path.open("rb"), path.stat().st_size
        except OSError as error:
            raise _UnreachableError(f"{url}: {why(error)}") from error
    try:
        response = _opener().open(
            Request(url, headers={"User-Agent": "fedquilt"}), timeout=TIMEOUT_S
        )
    except HTTPError as error:
        error.close()
        raise _UnreachableError(f"{url}: HTTP status {error.code} ({error.reason})") from error
    except (URLError, OSError, http.client.HTTPException, ValueError) as error:
        raise _UnreachableError(f"{url}: {getattr(error, 'reason', error)}") from error
    if response is None:
        raise _UnreachableError(f"{url}: it leads to an address that is not read")
    length = response.headers.get("Content-Length", "")
    return response, int(length) if length.isdecimal() else 0


def _opener() -> OpenerDirector:
    """Return an opener for HTTP and HTTPS alone, so that no redirection leads to a local file."""
    opener = OpenerDirector()
    handlers = (
        ProxyHandler,
        HTTPHandler,
        HTTPSHandler,
        HTTPRedirectHandler,
        HTTPErrorProcessor,
        HTTPDefaultErrorHandler,
    )
    for handler in handlers:
        opener.add_handler(handler())
    return opener


def _chunks(stream: BinaryIO, url: str) -> Iterator[bytes]:
    while True:
        try:
            chunk = stream.read(CHUNK_BYTES)
        except http.client.IncompleteRead as error:
            chunk = error.partial  # The caller compares the sizes.
        except (OSError, http.client.HTTPException) as error:
            raise DataError(
                f"{url} broke off: {error or type(error).__name__}. Try again."
            ) from error
        if not chunk:
            return
        yield chunk


def _sums(file: BinaryIO) -> tuple[str, str, int]:
    """Return the MD5 checksum, the SHA-256 checksum and the size of a file."""
    md5 = hashlib.md5(usedforsecurity=False)
    sha256 = hashlib.sha256()
    size = 0
    while chunk := file.read(CHUNK_BYTES):
        md5.update(chunk)
        sha256.update(chunk)
        size += len(chunk)
    return md5.hexdigest(), sha256.hexdigest(), size


def _by_hand(path: Path) -> str:
    return (
        f" You can also put a copy of the file at {path}, or name a folder or URL that has it "
        "with --from."
    )
