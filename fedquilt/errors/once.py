"""Warnings that apply to many members or clients, logged once per run or family."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable

_NUMBER = re.compile(r"\d+")


class Once:
    """Logger that logs each warning once until `forget` is called.

    Two reasons that differ only in numbers count as equal, because a reason may name the sizes of a
    member.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[Hashable] = set()

    def warning(self, reason: str, message: str, *values: object, kind: Hashable = "") -> None:
        """Log a warning, unless one of the same message, kind and reason was logged.

        Args:
            reason: Cause of the warning, usually the text of an error.
            message: Format of the message, as `logging` takes it.
            values: Values of the format.
            kind: Further value that distinguishes warnings. "": none.
        """
        key = message, kind, _NUMBER.sub("#", reason)
        if key not in self._logged:
            self._logged.add(key)
            self._log.warning(message, *values)

    def forget(self) -> None:
        """Allow all warnings to be logged again."""
        self._logged.clear()
