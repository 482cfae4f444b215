"""Introductions of devices while a run goes on: new ones, and those that return.

Between two rounds the registrar looks at which devices are online. It asks those that are new, or
that were away, to introduce themselves. A device with a new key joins the run, and one that has
returned with another budget or other samples takes part with these from the next round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.roster import Roster

_log = logging.getLogger(__name__)
SETTLE_SECONDS = 10.0  # Longest wait of a round for devices that introduce themselves


class RosterChangedError(Exception):
    """Devices have joined or returned with other facts, so that the run needs another fleet.

    It is raised between two rounds, and is no failure.
    """


class Introducing(Protocol):
    """Courier that can ask devices to introduce themselves."""

    def sessions(self) -> dict[str, str]:
        """Return the session of every public key that is online, which changes if it was away."""

    def enrol(self, keys: Sequence[str]) -> dict[str, Enrolment]:
        """Ask devices to introduce themselves, and return those that did by public key."""


@dataclass
class Registrar:
    """Knows what devices say about themselves, and whom to ask again.

    Args:
        courier: It carries the questions.
        allowed: Returns the keys of devices that may take part. Empty: all that are online.
    """

    courier: Introducing
    allowed: Callable[[], Collection[str]] = tuple
    introduced: dict[str, Enrolment] = field(default_factory=dict)  # Last words, by public key
    refused: dict[str, str] = field(default_factory=dict)  # Reasons, by public key
    _sessions: dict[str, str] = field(default_factory=dict)  # Sessions of these words
    _asking: set[str] = field(default_factory=set)  # Keys whose device has not replied yet
    _awaited: dict[str, str] = field(default_factory=dict)  # Sessions that were waited for
    _doubted: dict[str, str] = field(default_factory=dict)  # Sessions that were asked about again
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, seconds: float = SETTLE_SECONDS) -> None:
        """Ask devices that are new or were away, and wait for what they say.

        Those that do not reply in time may do so until the next look. They take part as before, and
        are not waited for again.

        Args:
            seconds: Longest wait.
        """
        sessions = self.courier.sessions()
        allowed = self.allowed()
        threads = []
        with self._lock:
            for key, session in sessions.items():
                is_known = key in self._asking or self._sessions.get(key) == session
                if is_known or (allowed and key not in allowed):
                    continue
                self._asking.add(key)
                thread = threading.Thread(target=self._ask, args=(key, session), daemon=True)
                thread.start()
                if self._awaited.get(key) != session:
                    threads.append(thread)
                self._awaited[key] = session
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _ask(self, key: str, session: str) -> None:
        try:
            enrolments = self.courier.enrol([key])
        except Exception as error:  # It is asked again at the next look.
            _log.warning("%s could not be asked to introduce itself: %s", key[-16:], error)
            enrolments = {}
        with self._lock:
            if key in enrolments:
                self._sessions[key] = session
                self._note(key, enrolments[key])
            self._asking.discard(key)

    def _note(self, key: str, enrolment: Enrolment) -> None:
        if enrolment.failed:
            self.refused[key] = f"{enrolment.name} cannot take part: {enrolment.failed}"
            self.introduced.pop(key, None)
            _log.warning("%s", self.refused[key])
        else:
            self.refused.pop(key, None)
            self.introduced[key] = enrolment

    def ask_again(self, key: str) -> None:
        """Ask a device at the next look, because it may have other facts than it said.

        The look waits for the reply once in a session, so that a device which fails in every round
        does not delay all of them.

        Args:
            key: Its public key.
        """
        with self._lock:
            session = self._sessions.pop(key, "")
            if session and self._doubted.get(key) != session:
                self._doubted[key] = session
                self._awaited.pop(key, None)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse what a device has said. It is heard again if it returns.

        Args:
            key: Its public key.
            reason: Why it cannot take part, for the log.
        """
        with self._lock:
            self.refused[key] = reason
            self.introduced.pop(key, None)
        _log.warning("%s", reason)

    def changes(self, roster: Roster) -> dict[str, Enrolment]:
        """Return what devices said that the roster does not have, by public key.

        Devices that were struck off are refused.

        Args:
            roster: The roster.
        """
        with self._lock:
            said = dict(self.introduced)
        changes = {}
        for key, enrolment in said.items():
            entry = roster.by_key(key)
            if entry is not None and entry.is_struck_off:
                self.refuse(key, f"{enrolment.name} was struck off")
            elif entry is None or (entry.budget, entry.size) != (enrolment.budget, enrolment.size):
                changes[key] = enrolment
        return changes
