"""A device that has joined: Flower's SuperNode, and the worker that takes its tasks."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedquilt.deployment.host import DeviceSettings
from fedquilt.deployment.processes import (
    Process,
    environment,
    free_port,
    new_secret,
    program,
    wait_until_listening,
)

_log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0  # Time between two looks at the processes
RESTART_SECONDS = 5.0  # Time before a process is started again
MAX_RESTART_SECONDS = 60.0
REFUSED_WAIT_SECONDS = 10.0  # Time before a key is tried again that was not accepted
# Time without any step after an error, after which a SuperNode is started again. A TLS handshake
# that fails, such as that of a server which was just killed, ends its loop, and its process lives
# on.
STUCK_SECONDS = 30.0
# Time after which a SuperNode is started again that has sent a reply to an earlier message in place
# of the last one. It would send every further reply one message late.
BEHIND_SECONDS = 10.0
STABLE_SECONDS = 120.0  # A process that ran for so long is restarted without a longer wait.
# What a SuperNode prints. A log that is longer than what is read ends with messages.
_STARTS = "Starting Flower SuperNode"
_ACTIVE = "SuperNode ID:"
_RECEIVES = "Receiving:"
_REFUSED = "Failed to activate SuperNode"
_LEVEL = re.compile(r"^(?:\x1b\[\d+m)?(DEBUG|INFO|WARNING|ERROR)\b", re.MULTILINE)
_RECEIVED = "Received successfully"
_SENDS = "Sending:"

Isolation = Literal["process", "subprocess"]


@dataclass
class SuperNode:
    """A SuperNode, and its worker if the isolation is `process`.

    Args:
        settings: What the owner decided.
        address: Address of the server's gate, host:port.
        ca: CA certificate of the server. None: plain HTTP, for loopback only.
        key: Private key of the device. None: the SuperNode makes one.
        isolation: "process": one long-lived worker. "subprocess": a process for each message.
    """

    settings: DeviceSettings
    address: str
    ca: Path | None = None
    key: Path | None = None
    isolation: Isolation = "process"
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        home = self.settings.state / "flower"
        env = environment(home)
        file = self.settings.save()
        secret = str(new_secret(home / "secret"))
        command = [program("flower-supernode"), "--superlink", self.address]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--isolation", self.isolation]
        command += ["--node-config", f'settings="{file.resolve()}"']
        if self.isolation == "process":
            command += ["--superexec-auth-secret-file", secret]
        if self.ca is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.ca)]
        if self.key is not None:
            command += ["--auth-supernode-private-key", str(self.key)]
        self.node = Process("the SuperNode", command, env, home / "supernode.log")
        worker = [sys.executable, "-m", "fedquilt.deployment.worker"]
        worker += [f"127.0.0.1:{self.port}", str(file), secret]
        self.worker = Process("the worker", worker, env, home / "worker.log")
        self.processes = [self.node]
        if self.isolation == "process":
            self.processes.append(self.worker)
        self._stack = ExitStack()
        self._due: dict[str, float] = {}  # When a process is started again, by its name
        self._begun: dict[str, float] = {}  # When a process was started last
        self._waits: dict[str, float] = {}  # How long the last wait was
        self._steps: int | None = None  # Times that the SuperNode's main thread has slept
        self._moved = time.monotonic()  # When that number was another one
        self._messages = MessageLog(self.node.log)
        self._behind_since: float | None = None  # When a reply was left. None: none is left

    def __enter__(self) -> SuperNode:
        try:
            for process in self.processes:
                self._stack.callback(process.stop)
                process.start()
                self._begun[process.name] = time.monotonic()
            wait_until_listening(self.node, self.port)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def last_words(self) -> str:
        """Return what the SuperNode has printed since it was started, or the end of that."""
        return self.node.tail.rpartition(_STARTS)[2]

    @property
    def is_active(self) -> bool:
        """Return True if the server has accepted the key, and the SuperNode runs."""
        words = self.last_words
        return self.node.is_running and (_ACTIVE in words or _RECEIVES in words)

    @property
    def is_refused(self) -> bool:
        """Return True if the SuperNode has ended because the server does not accept the key."""
        return not self.node.is_running and _REFUSED in self.last_words

    def watch(self) -> None:
        """Start processes again that have ended. A wait between two starts grows up to a minute."""
        now = time.monotonic()
        if self._is_stuck(now):
            _log.warning(
                "the SuperNode has done nothing for %.0f s after an error and is started again.",
                STUCK_SECONDS,
            )
            self.node.stop()
        if self._is_behind(now):
            _log.warning(
                "the SuperNode has kept a reply for %.0f s and is started again.", BEHIND_SECONDS
            )
            self.node.stop()
        for process in self.processes:
            name = process.name
            if process.is_running:
                continue
            if name not in self._due:
                if process is self.worker and self._messages.lacks_a_reply:
                    # The SuperNode may wait for ever for the reply of the worker that has ended.
                    # Once both are back, the server sends its request again.
                    self.node.stop()
                if now - self._begun[name] > STABLE_SECONDS:
                    self._waits.pop(name, None)
                wait = min(2 * self._waits.get(name, RESTART_SECONDS / 2), MAX_RESTART_SECONDS)
                is_refused = process is self.node and self.is_refused
                if is_refused:  # Whoever watches reports it once.
                    wait = REFUSED_WAIT_SECONDS
                self._waits[name], self._due[name] = wait, now + wait
                if not is_refused:
                    _log.warning(
                        "%s ended with status %s and is started again in %.0f s.",
                        name,
                        process.status,
                        wait,
                    )
            elif now >= self._due[name]:
                del self._due[name]
                process.start()
                self._begun[name] = now

    def _is_stuck(self, now: float) -> bool:
        """Return True if the SuperNode's loop has ended because of an error, and its process runs.

        Its last line then is an error, and its main thread does not sleep any more. A thread that
        polls sleeps every 3 s. One that waits for a slow upload has not printed an error.

        Args:
            now: Time of the monotonic clock.
        """
        process = self.node.process
        steps = num_sleeps(process.pid) if process is not None and self.node.is_running else None
        if steps is None or steps != self._steps:
            self._steps, self._moved = steps, now
        if now - self._moved <= STUCK_SECONDS:
            return False
        levels: list[str] = _LEVEL.findall(self.node.tail)
        return levels[-1:] == ["ERROR"]

    def _is_behind(self, now: float) -> bool:
        """Return True if the SuperNode has kept a reply for a long time that it should have sent.

        After each message it sends what replies there are, and then waits for the next message. If
        that was the reply to an earlier message, the reply to the last one stays until then.

        Args:
            now: Time of the monotonic clock.
        """
        self._messages.read()
        if not (self.node.is_running and self._messages.has_kept_a_reply):
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        return self._behind_since is not None and now - self._behind_since > BEHIND_SECONDS


class MessageLog:
    """Counts the messages in a SuperNode's log since its last start, as the log grows.

    Args:
        path: The log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0  # Bytes that were read
        self._received = self._sent = 0
        self._has_just_sent = False  # True: a reply was sent after the last message

    def read(self) -> None:
        """Read what is new."""
        try:
            if self._path.stat().st_size < self._position:  # It was begun anew.
                self._position = 0
            with self._path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except OSError:
            return
        lines, newline, _ = text.rpartition(b"\n")
        self._position += len(lines) + len(newline)
        for line in lines.decode(errors="replace").splitlines():
            if _STARTS in line:
                self._received = self._sent = 0
            self._received += _RECEIVED in line
            self._sent += _SENDS in line
            if _SENDS in line or _RECEIVED in line or _STARTS in line:
                self._has_just_sent = _SENDS in line

    @property
    def has_kept_a_reply(self) -> bool:
        """Return True if a reply was sent after the last message, and not as many in all."""
        return self._has_just_sent and self.lacks_a_reply

    @property
    def lacks_a_reply(self) -> bool:
        """Return True if more messages were received than replies were sent."""
        return self._received > self._sent


def num_sleeps(process: int) -> int | None:
    """Return how often the main thread of a process has slept. None: the system does not say it.

    Args:
        process: Id of the process.
    """
    try:
        lines = Path(f"/proc/{process}/task/{process}/status").read_text().splitlines()
    except OSError:
        return None
    counts = [line for line in lines if line.startswith("voluntary_ctxt_switches")]
    return int(counts[0].split()[1]) if counts else None
