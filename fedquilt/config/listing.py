"""Descriptions of all settings for `fedquilt list`: types, defaults, and comments of the source."""

from __future__ import annotations

import inspect
import io
import json
import re
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from fedquilt.config.schema import (
    Parameter,
    choices,
    default,
    field_hints,
    fields_of,
    is_table,
    label,
    members,
    parameters,
)
from fedquilt.config.tables import TABLES, UNSET
from fedquilt.config.wording import shown_hint
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError

Rows = dict[str, dict[str, Any]]  # Type, default and comment of each setting, by its path


def described(kind: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return types (`options`), `defaults` and comments (`help`) of all settings of a class.

    Each of the three is a table by the name of the setting. Settings without a default or without a
    comment are missing there.

    Args:
        kind: A dataclass or a factory.
    """
    settings, helps = _parameters_of(kind), comments(kind)
    return {
        "options": {name: shown_hint(parameter.hint) for name, parameter in settings.items()},
        "defaults": {
            name: _shown_default(parameter)
            for name, parameter in settings.items()
            if parameter.default is not UNSET
        },
        "help": {name: helps[name] for name in settings if name in helps},
    }


def leaves(kind: Callable[..., Any], base: Any = UNSET, path: str = "") -> Rows:
    """Return every single value that can be set, by its path, with type, default and comment.

    If a name selects a table, the values of the other tables follow as `path (name)`. A value that
    is the same in every table is listed once, without a name.

    Args:
        kind: A dataclass or a factory.
        base: Instance whose values are shown as defaults. UNSET: the defaults of `kind` are.
        path: Prefix of the paths. Empty: `kind` is the top level.
    """
    rows: Rows = {}
    helps = comments(kind)
    for name, parameter in _parameters_of(kind).items():
        leaf_path = f"{path}{name}"
        help = helps.get(name, "")
        value = parameter.default
        if base is not UNSET:
            value = getattr(base, name)
        has_tables = any(is_table(option) for option in members(parameter.hint))
        if is_dataclass(value):
            rows |= _rows_of_table(kind, parameter.hint, value, leaf_path, help)
        elif value is None and has_tables:
            rows |= _rows_of_optional(parameter.hint, leaf_path, help)
        else:
            shown = "needed"
            if value is not UNSET:
                shown = json.dumps(_shown_default(Parameter(parameter.hint, value)))
            rows[leaf_path] = _row(shown_hint(parameter.hint), shown, help)
    return rows


def _row(kind: str, default: str, help: str) -> dict[str, Any]:
    return {"type": kind, "default": default, "what it is": help}


def _rows_of_table(owner: Callable[..., Any], hint: Any, value: Any, path: str, help: str) -> Rows:
    """Return the rows of a field whose default is a dataclass, and of the other variants.

    Args:
        owner: Class that has the field.
        hint: Type hint of the field.
        value: Default of the field.
        path: Path of the field.
        help: Comment on the field.
    """
    rows = leaves(type(value), value, f"{path}.")
    kinds = [option for option in members(hint) if is_table(option)]
    if len(kinds) == 1 and kinds[0] not in TABLES:
        return rows
    named = choices(kinds)
    # A table that may contain itself, such as a method that wraps another, is left out, because
    # its rows would have no end.
    alternatives = {
        name: leaves(option, path=f"{path}.")
        for name, option in named.items()
        if option is not type(value) and option is not owner
    }
    first = {path: _row(" | ".join(named), label(type(value)), help)}
    return {**first, **rows, **_rows_of_variants(rows, alternatives)}


def _rows_of_optional(hint: Any, path: str, help: str) -> Rows:
    """Return the rows of a field that is None by default, and of the tables that it may have.

    Paths of several tables end with the name of the table, as `path (name)`.

    Args:
        hint: Type hint of the field.
        path: Path of the field.
        help: Comment on the field.
    """
    rows = {path: _row(shown_hint(hint), "none", help)}
    named = choices([option for option in members(hint) if is_table(option)])
    for name, option in named.items():
        suffix = f" ({name})" if len(named) > 1 else ""
        for leaf, row in leaves(option, path=f"{path}.").items():
            rows[f"{leaf}{suffix}"] = row
    return rows


def _rows_of_variants(default_rows: Rows, variants: Mapping[str, Rows]) -> Rows:
    """Return the rows of the tables that are not the default, by `path (name)`.

    A row that equals the default table's is left out if every table has the setting. If some table
    lacks it, as plain SGD lacks `beta1`, each of the others shows it.

    Args:
        default_rows: Rows of the default table, by path.
        variants: Rows of the other tables by path, by the name of the table.
    """
    settable = [{path.split()[0] for path in rows} for rows in (default_rows, *variants.values())]
    in_every_table = set.intersection(*settable)
    rows = {}
    for name, rows_of_variant in variants.items():
        for path, row in rows_of_variant.items():
            if default_rows.get(path) != row or path.split()[0] not in in_every_table:
                rows[f"{path} ({name})"] = row
    return rows


def _parameters_of(kind: Callable[..., Any]) -> dict[str, Parameter]:
    """Return type hint and default of each setting of a dataclass or a factory, by name.

    Fields that files cannot set are left out.
    """
    if not is_dataclass(kind):
        return parameters(kind)
    hints = field_hints(kind)
    return {
        name: Parameter(hints[name], default(field_info))
        for name, field_info in fields_of(kind).items()
    }


def _shown_default(parameter: Parameter) -> Any:
    if parameter.default is None:
        return None
    try:
        return write(parameter.default, parameter.hint)
    except ConfigError:
        return shown_hint(parameter.default)


def comments(kind: Callable[..., Any]) -> dict[str, str]:
    """Return the comments on fields or parameters by name, inherited fields included.

    A class replaces comments of its base classes. Names without a comment are missing.

    Args:
        kind: A class, a function or a `functools.partial` of one.
    """
    function = getattr(kind, "func", kind)  # `func` of a partial
    lineage = reversed(function.__mro__[:-1]) if isinstance(function, type) else [function]
    comments_by_name: dict[str, str] = {}
    for definition in lineage:
        comments_by_name |= _own_comments(definition)
    return comments_by_name


# Finding the source of a class parses its whole file, and tables name the same classes many times.
@cache
def _own_comments(kind: Callable[..., Any]) -> Mapping[str, str]:
    """Return the comments on fields or parameters in the source of a class or function itself.

    Base classes are not searched. The result is empty if there is no source.
    """
    try:
        return _comments_in(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}


def _comments_in(source: str) -> dict[str, str]:
    """Return the comments in a source text, by the name of the field or parameter.

    A comment is behind `name: hint = default`, or on the lines above it.
    """
    comments_by_name: dict[str, str] = {}
    # Comments on lines of their own, by the number of the line below them.
    above: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ")
        row = token.start[0]
        if match := re.match(r"\s+(\w+): .*?#", token.line):
            comments_by_name[match[1]] = text
        elif token.line.lstrip().startswith("#"):
            above[row + 1] = f"{above.pop(row)} {text}" if row in above else text

    lines = ["", *source.splitlines(), ""]  # Lines are counted from 1
    for row, text in above.items():
        if match := re.match(r"\s+(\w+): \S", lines[row]):
            comments_by_name.setdefault(match[1], text)
    return comments_by_name
