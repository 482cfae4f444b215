"""Names and numbers a user gives: looked up, with the nearest known name when there is none, and kept in bounds."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from math import inf
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


def bounded(who: str, value: object, **bounds: tuple[float, float | None]) -> None:
    """Refuse fields outside their bounds (inclusive; None is unbounded), all of them at once."""
    wrong = []
    for name, (least, most) in bounds.items():
        found = getattr(value, name)
        if not (least <= found < inf if most is None else least <= found <= most):  # NaN is outside of everything
            fits = f"at least {least}" if most is None else f"between {least} and {most}"
            wrong.append(f"{who} was given {name}={found}; it must be {fits}.")
    if wrong:
        raise ConfigError("\n  ".join(wrong))


def one_of(who: str, name: str, value: object, known: Sequence[str]) -> None:
    """Refuse a word that is none of the known ones."""
    if value not in known:
        raise ConfigError(f"{who} was given {name}={value!r}; it may be {', '.join(map(repr, known))}.")
