"""One error for all problems of the settings, each with the flag that set it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fedquilt.config.reading import read
from fedquilt.config.tables import Problem
from fedquilt.config.toml import Settings
from fedquilt.errors import ConfigError

T = TypeVar("T")


def resolved(kind: type[T], settings: Settings, flags: Mapping[str, str], file: str = "") -> T:
    """Return an instance of a dataclass from settings, or raise one error with all problems.

    Args:
        kind: The dataclass.
        settings: Nested plain tables.
        flags: Command-line flag by the path that it set, for messages. Empty: there are none.
        file: File of the settings, for messages. Empty: there is none.

    Raises:
        ConfigError: Some settings are wrong. The message lists all problems.
    """
    problems: list[Problem] = []
    instance: T = read(kind, settings, "", problems)
    if problems:
        lines = [f"{path or 'settings'}{_flag_of(path, flags)}: {text}" for path, text in problems]
        location = f" in {file}" if file else ""
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError("\n  ".join([f"{count}{location}:", *lines]))
    return instance


def _flag_of(path: str, flags: Mapping[str, str]) -> str:
    """Return the flag that set a path, a table above it, or a value below it.

    Args:
        path: Dotted path of a setting.
        flags: Command-line flag by the path that it set.

    Returns:
        The flag in parentheses after a space, for a message. Empty: no flag set it.
    """
    for set_path, flag in flags.items():
        if f"{path}.".startswith(f"{set_path}.") or f"{set_path}.".startswith(f"{path}."):
            return f" ({flag})"
    return ""
