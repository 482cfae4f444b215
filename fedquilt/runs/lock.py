"""The lock of a folder, so that one process at a time writes there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.errors import ConfigError
from fedquilt.runs.folder_files import check_folder
from fedquilt.storage.files import make_folder, why

if TYPE_CHECKING:
    from filelock import BaseFileLock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for writing while the block runs. The folder is created if necessary.

    Raises:
        ConfigError: Another process has the lock, or the folder cannot be written to.
    """
    with writable(f"the folder {path} was asked for"):
        make_folder(path)
        check_folder(path)
        lock = lock_folder(path)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writable(request: str) -> Iterator[None]:
    """Raise an OSError inside as a ConfigError about a folder that cannot be written to.

    Args:
        request: Beginning of the message, such as "the folder runs/one was asked for".
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{request}; it cannot be written to: {why(error)}.") from error


def lock_folder(path: Path) -> BaseFileLock:
    """Lock a folder and write the process id into the lock file, for messages of other processes.

    The system releases the lock when the process ends, for whatever reason. Windows lets no process
    read or write a locked file, so that messages there do not name the process.
    """
    from filelock import FileLock, Timeout

    file = path / "lock"
    lock = FileLock(file, timeout=0, mode=0o644)
    try:
        lock.acquire()
    except Timeout as error:
        process = ""
        with suppress(OSError):
            process = file.read_text(errors="replace").strip()
        raise ConfigError(
            f"the folder {path} was asked for; the run of process {process or 'unknown'} is "
            "writing there. Wait for it to end, or name another."
        ) from error
    with suppress(PermissionError):
        file.write_text(str(os.getpid()))
    return lock
