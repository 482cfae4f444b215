"""The lock of a folder, so that one process at a time writes there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedquilt.errors import ConfigError
from fedquilt.runs.folder_files import check_folder
from fedquilt.storage.files import make_folder, why


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for writing while the block runs. The folder is created if necessary.

    Raises:
        ConfigError: Another process has the lock, or the folder cannot be written to.
    """
    with writable(f"the folder {path} was asked for"):
        make_folder(path)
        check_folder(path)
        handle = lock_folder(path)
    try:
        yield
    finally:
        os.close(handle)


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


def lock_folder(path: Path) -> int:
    """Lock a folder and write the process id into the lock file, for messages of other processes.

    The system releases the lock when the process ends, for whatever reason.
    """
    import fcntl

    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"the folder {path} was asked for; the run of process {owner or 'unknown'} is writing "
            "there. Wait for it to end, or name another."
        ) from error
    except OSError:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle
