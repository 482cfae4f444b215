"""Words for problems of settings: which values fit, and which were found."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from fedquilt.config.schema import fields_of, is_table, label
from fedquilt.config.tables import TABLES


def shown_hint(hint: Any) -> str:
    """Return a type hint as it is written in code, without module names.

    A Literal is shown as its values, as in `'inside' | 'whole'`.
    """
    if get_origin(hint) is typing.Annotated:
        return shown_hint(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace("NoneType", "None")


def fitting_values(kind: Any) -> str:
    """Describe in words which values fit a type hint, such as "a whole number" for int."""
    words = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
        types.NoneType: "'none'",
    }
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return fitting_values(args[0])
    if kind is Any:
        return "a value"
    if kind in words:
        return words[kind]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(
            fitting_values(member) for member in args if member is not types.NoneType
        )
    if origin in (tuple, Sequence, list):
        has_fixed_length = origin is tuple and Ellipsis not in args
        if has_fixed_length:
            return f"a list of ({', '.join(map(fitting_values, args))})"
        return f"a list, each {fitting_values(args[0])}"
    if origin in (dict, Mapping):
        return f"a table, each value {fitting_values(args[1])}"
    if kind in TABLES:
        table = "a table" if TABLES[kind].usual else "a table with one"
        return f"{with_article(TABLES[kind].noun)} by its name, or {table}"
    if is_table(kind):
        return f"a table with {', '.join(fields_of(kind)) or 'nothing in it'}"
    return f"{shown_hint(kind)} (which no file can hold)"


def suggestion(kind: Any, plain: Any) -> str:
    """Return the question for the value of a Literal that is closest to a text, for a message.

    Args:
        kind: Type hint that the value should fit.
        plain: Value that was found.

    Returns:
        Text such as " Did you mean 'cosine'?". Empty: none is close, or `kind` is no Literal.
    """
    close = (
        difflib.get_close_matches(plain, map(str, get_args(kind)), n=1)
        if isinstance(plain, str)
        else []
    )
    return f" Did you mean {close[0]!r}?" if close and get_origin(kind) is Literal else ""


def shown_value(plain: Any) -> str:
    """Return a plain value as text of at most 60 characters. Tables are not shown in full."""
    if isinstance(plain, bool):
        return str(plain).lower()
    if isinstance(plain, Mapping):
        return "a table"
    text = repr(plain) if isinstance(plain, (str, list, tuple)) else _digits(plain)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _digits(plain: Any) -> str:
    try:
        return str(plain)
    except ValueError:  # Python converts no integer of more than 4,300 digits to text.
        return "a number of thousands of digits"


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


def owner_of(kind: type, path: str) -> str:
    """Return a word for the owner of a table's keys: the selected class, or the table itself.

    Args:
        kind: Dataclass that the table is read as.
        path: Dotted path of the table. Empty: the settings as a whole.
    """
    is_selected_by_name = any(issubclass(kind, base) for base in TABLES)
    return label(kind) if is_selected_by_name else path.rpartition(".")[2] or "a configuration"
