"""Tables of classes that settings select by name, and problems of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class SettingsTable(NamedTuple):
    """Subclasses of a base class by the names that files use for them."""

    noun: str  # Word for a variant in messages, such as "method"
    kinds: Mapping[str, Any]  # Subclasses by name
    usual: str = ""  # Variant of a table without a name. Empty if a name is required.
    short: bool = False  # If True, a variant with default values is written as its name alone.


TABLES: dict[type, SettingsTable] = {}  # Filled by `fedquilt.runs.registries`


class Problem(NamedTuple):
    """A problem in the settings, and the path of the setting that has it."""

    path: str
    text: str


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()  # Returned by `read` for a value that has a problem.
