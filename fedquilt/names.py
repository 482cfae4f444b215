"""Looking things up by name, with the nearest known name when there is none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from fedquilt.errors import ConfigError

T = TypeVar("T")


def known(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table, or an error that says what would fit."""
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"there is no {what} named {name!r}.{hint} Known: {', '.join(table)}.")
