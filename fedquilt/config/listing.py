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


def described(kind: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return types (`options`), `defaults` and comments (`help`) of all settings of a class."""
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


def leaves(
    kind: Callable[..., Any], base: Any = UNSET, path: str = ""
) -> dict[str, dict[str, Any]]:
    """Return every single value that can be set, by its path, with type, default and comment.

    If a name selects a table, the values of the other tables follow as `path (name)`. A value that
    is the same in every table is listed once, without a name.

    Args:
        kind: A dataclass or a factory.
        base: Instance whose values are shown as defaults. UNSET: the defaults of `kind` are.
        path: Prefix of the paths. Empty: `kind` is the top level.
    """
    rows: dict[str, dict[str, Any]] = {}
    helps = comments(kind)
    for name, parameter in _parameters_of(kind).items():
        value, leaf_path = (
            parameter.default if base is UNSET else getattr(base, name),
            f"{path}{name}",
        )
        kinds = [option for option in members(parameter.hint) if is_table(option)]
        if is_dataclass(value):
            inner_rows = leaves(type(value), value, f"{leaf_path}.")
            if len(kinds) > 1 or any(option in TABLES for option in kinds):
                named = choices(kinds)
                default_name, help = label(type(value)), helps.get(name, "")
                rows[leaf_path] = {
                    "type": " | ".join(named),
                    "default": default_name,
                    "what it is": help,
                }
                # A table that may contain itself, such as a method that wraps another, is left out,
                # because its rows would have no end.
                alternatives = {
                    name_in_file: leaves(option, path=f"{leaf_path}.")
                    for name_in_file, option in named.items()
                    if option is not type(value) and option is not kind
                }
                inner_rows |= _rows_of_variants(inner_rows, alternatives)
            rows |= inner_rows
        elif value is None and kinds:
            named = choices(kinds)
            rows[leaf_path] = {
                "type": shown_hint(parameter.hint),
                "default": "none",
                "what it is": helps.get(name, ""),
            }
            for name_in_file, option in named.items():
                suffix = f" ({name_in_file})" if len(named) > 1 else ""
                rows |= {
                    f"{leaf}{suffix}": row
                    for leaf, row in leaves(option, path=f"{leaf_path}.").items()
                }
        else:
            shown = (
                "needed"
                if value is UNSET
                else json.dumps(_shown_default(Parameter(parameter.hint, value)))
            )
            rows[leaf_path] = {
                "type": shown_hint(parameter.hint),
                "default": shown,
                "what it is": helps.get(name, ""),
            }
    return rows


def _rows_of_variants(
    chosen: Mapping[str, dict[str, Any]], others: Mapping[str, Mapping[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return the rows of the tables that are not selected, as `path (name)`.

    A row that the selected table has as well is left out if every table has the setting. If some
    table lacks it, as plain SGD lacks `beta1`, each of the others shows it.

    Args:
        chosen: Rows of the default table, by path.
        others: Rows of the other tables by path, by the name of the table.
    """
    settable = [{path.split()[0] for path in rows} for rows in (chosen, *others.values())]
    everywhere = set.intersection(*settable)
    return {
        f"{path} ({name})": row
        for name, rows in others.items()
        for path, row in rows.items()
        if chosen.get(path) != row or path.split()[0] not in everywhere
    }


def _parameters_of(kind: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the fields of a dataclass, or the parameters of a factory."""
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
    """Return the comments on fields or parameters by name, inherited fields included."""
    function = getattr(kind, "func", kind)  # `func` of a partial
    lineage = reversed(function.__mro__[:-1]) if isinstance(function, type) else [function]
    comments_by_name: dict[str, str] = {}
    for definition in lineage:
        comments_by_name |= _own_comments(definition)
    return comments_by_name


# Finding the source of a class parses its whole file, and tables name the same classes many times.
@cache
def _own_comments(kind: Callable[..., Any]) -> Mapping[str, str]:
    """Return the comments in the source of a class or function itself; none if it has no source."""
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
