"""Settings as plain tables: TOML text, dotted paths, and assignments such as `a.b=v`."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.errors import ConfigError

Settings = dict[str, Any]


def read_toml(file: str | Path) -> Settings:
    """Return the settings in a TOML file.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    try:
        return parse_toml(Path(file).read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} was asked for; it cannot be read: {error.strerror or error}."
        ) from error


def parse_toml(text: bytes, file: str) -> Settings:
    """Return the settings in the text of a TOML file.

    Args:
        text: Content of the file.
        file: Path of the file, for messages.

    Raises:
        ConfigError: The text is not TOML. The message has the line and the column.
    """
    try:
        return tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{file} nests too deeply to be read.") from error
    except ValueError as error:  # TOMLDecodeError, or an integer of more than 4,300 digits
        message, _, position = str(error).partition(" (at ")
        lines = text.decode().split("\n")
        end = [len(lines), len(lines[-1]) + 1]  # tomllib gives no numbers at the end.
        line, column = map(int, re.findall(r"\d+", position)) if "line" in position else end
        location = f"{file}:{line}:{column}" if position else file
        raise ConfigError(f"{location}: this is not TOML: {message.removesuffix('.')}.") from error


def assign(settings: Settings, path: Sequence[str], value: Any) -> Settings:
    """Set a value at a path in-place. A string on the way becomes a table with that name.

    Missing tables on the way are created. Other values on the way are replaced by a table.

    Args:
        settings: Settings to change.
        path: Keys of the setting.
        value: New value, which is copied.

    Returns:
        The same settings.

    Raises:
        ConfigError: A key on the way is a list of several tables.
    """
    *above, last = path
    table = settings
    for key in above:
        current = table.get(key, {})
        if isinstance(current, list) and len(current) > 1:
            raise ConfigError(
                f"{'.'.join(path)} was asked for; {key} is a list of {len(current)} there, of "
                f"which each has its own settings. In a file, write a table [[{key}]] for each, "
                "with its name and its settings."
            )
        table[key] = as_table(current)
        table = table[key]
    table[last] = copy.deepcopy(value)
    return settings


def as_table(value: Any) -> Settings:
    """Return a value as a table: a shallow copy of a table, or {"name": text} for a string.

    Any other value gives an empty table.
    """
    if isinstance(value, str):
        return {"name": value}
    return dict(value) if isinstance(value, Mapping) else {}


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `a.b=v`. The value is TOML, and bare words are text.

    Raises:
        ConfigError: There is no equals sign, or no dotted key before it.
    """
    key, equals, value = text.partition("=")
    path = parse_path(key) if equals else []
    if not path:
        raise ConfigError(f"--set {text} was asked for; write it as --set method.shift=2.")
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return path, value.strip()
    return path, table["value"] if list(table) == ["value"] else value.strip()


def parse_grid(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the path and the values of `a.b=v,v`. Each v is a TOML value, and bare words are text.

    If one value is not TOML, all are text. Values that are lists themselves are written as TOML
    lists: `a.b=[1.0],[1.0,0.5]`.

    Raises:
        ConfigError: There is no equals sign, no dotted key before it, or no value.
    """
    key, equals, values = text.partition("=")
    path = key.strip()
    if not equals or not parse_path(path) or not values.strip():
        raise ConfigError(
            f"--grid {text} was asked for; write it as --grid method.local.optimizer.lr=0.01,0.1."
        )
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"]
    except (ValueError, RecursionError):
        parsed = [value.strip() for value in values.split(",")]
    return path, tuple(parsed)


def parse_path(key: str) -> list[str]:
    """Return the keys of a dotted key, which may be quoted: fleet.budgets."0.5".

    The result is empty if the text is not a dotted key.
    """
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return []
    path = []
    while isinstance(table, dict):
        if len(table) != 1:
            return []
        ((name, table),) = table.items()
        path.append(name)
    return path
