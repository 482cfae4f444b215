"""The problem that a device has now, in a file that `fedquilt join` watches.

The worker of a device is a process of its own, whose output goes to a log. So it writes what fails
to a file in the state folder, and deletes the file once a request succeeds.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedquilt.errors import RecordError
from fedquilt.storage.files import write_text

PROBLEM = "problem.json"  # Name of the file in the state folder of a device


@dataclass(frozen=True)
class DeviceProblem:
    """Reason why a device cannot answer a request of its server."""

    text: str  # One sentence or more
    is_final: bool = False  # True: the device cannot take part at all. False: a round failed

    @staticmethod
    def load(state: Path) -> DeviceProblem | None:
        """Return the problem in a state folder. None: there is none."""
        try:
            plain = json.loads((state / PROBLEM).read_bytes())
            return DeviceProblem(str(plain["text"]), bool(plain["is_final"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def report(state: Path, problem: DeviceProblem | None) -> None:
        """Write the problem to a state folder. None deletes the one that is there.

        Nothing is raised if the folder cannot be written, because the server gets the reason too.
        """
        with suppress(OSError, RecordError):
            if problem is None:
                (state / PROBLEM).unlink(missing_ok=True)
            elif problem != DeviceProblem.load(state):
                write_text(state / PROBLEM, json.dumps(asdict(problem)) + "\n")


class ProblemLog:
    """Turns changes of a device's problem into lines for people: once it begins, once it ends."""

    def __init__(self, name: str, state: Path) -> None:
        """Watch a state folder. A problem of an earlier `join` in it is deleted.

        Args:
            name: Name of the device.
            state: Its state folder.
        """
        self._name, self._state = name, state
        self._shown: DeviceProblem | None = None
        DeviceProblem.report(state, None)

    def changed(self) -> tuple[str, DeviceProblem | None]:
        """Return a line about the change since the last call, and the present problem.

        The line is empty if nothing has changed.
        """
        problem = DeviceProblem.load(self._state)
        line = ""
        if problem is not None and problem != self._shown:
            line = f"{self._name} could not do what the server asked for: {problem.text}"
        elif problem is None and self._shown is not None:
            line = f"{self._name} works again."
        self._shown = problem
        return line, problem
