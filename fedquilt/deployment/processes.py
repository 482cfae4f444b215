"""Processes of Flower: how they are started, watched and stopped."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.storage.files import make_folder

STOP_SECONDS = 15.0  # Time that a process has to end after SIGTERM
START_SECONDS = 120.0  # Time until a server listens
CONTROL_SECONDS = 120.0  # Time for one command of flwr
MAX_LOG_BYTES = 64 << 20  # A log that is larger is begun anew when its process is restarted
LOG_TAIL_BYTES = 4000


def _libc() -> ctypes.CDLL | None:
    """Return the C library on Linux. None: another system."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)


_LIBC = _libc()
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _end_with_parent() -> None:
    """Let this process be ended with its parent, even if the parent is killed.

    Without this, a killed `fedquilt serve` would leave a SuperLink that holds the database, and a
    ServerApp that holds the lock of the run's folder.
    """
    assert _LIBC is not None
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: offline, and with a home of their own.

    Args:
        home: Folder for Flower's settings and apps.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **os.environ,
        "PATH": path,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }


def program(name: str) -> str:
    """Return the path of a program that flwr installs.

    Raises:
        ConfigError: It is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} is needed; it is not installed: {how_to_install('flower')}.")
    return path


@dataclass
class Process:
    """A process that this one has started, and may start again.

    Args:
        name: Name for people and for the log.
        command: Program and arguments.
        env: Environment.
        log: File for its output.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    starts: int = 0  # How often it was started

    def start(self) -> None:
        """Start the process, in a session of its own so that ctrl-C does not reach it."""
        make_folder(self.log.parent)
        is_large = self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES
        with self.log.open("wb" if is_large else "ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It makes one system call and takes no lock, so that threads do not matter.
                preexec_fn=_end_with_parent if _LIBC else None,  # noqa: PLW1509
            )
        self.starts += 1

    @property
    def is_running(self) -> bool:
        """Return True if it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Return its exit status. None: it has not ended."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """Stop the process and those that it has started, and wait until it has ended.

        It is asked to end first, and killed if it still runs after `STOP_SECONDS`. Nothing
        happens if it was never started.
        """
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # Its own session: what it started and left.
        process.wait()

    @property
    def tail(self) -> str:
        """Return the end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def new_secret(path: Path) -> Path:
    """Write a random secret that its owner alone can read, unless there is one.

    Args:
        path: File of the secret.
    """
    make_folder(path.parent)
    if not path.exists():
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
    return path


def wait_until_listening(process: Process, port: int) -> None:
    """Wait until a server accepts connections on 127.0.0.1.

    Args:
        process: The server.
        port: Its port.

    Raises:
        ConfigError: It ended, or does not listen after a minute. The message has its last words.
    """
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if not process.is_running:
            break
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise ConfigError(
        f"{process.name} was started; it does not listen on port {port}. Its log is {process.log}, "
        f"and ends with:\n{process.tail[-1000:]}"
    )
