"""Conversion of dataclasses into plain values that `reading.read` converts back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, is_dataclass
from typing import Any, get_args, get_origin

from fedquilt.config.choice import Choice
from fedquilt.config.schema import default, field_hints, fields_of, is_table, label, members
from fedquilt.config.tables import TABLES
from fedquilt.config.wording import with_article
from fedquilt.errors import ConfigError


def write(value: Any, kind: Any = None) -> Any:
    """Return plain values that `read` converts back into an equal value.

    Args:
        value: A value that settings may have.
        kind: Type hint of the field that has the value. None: it has no hint.

    Raises:
        ConfigError: Files cannot hold the value.
    """
    if value is None:
        if str in members(kind):  # "none" would be read as text.
            raise ConfigError("None cannot be written to a file where text is allowed.")
        return "none"
    if isinstance(value, Choice):
        setting_fields = {
            key: field_info
            for key, field_info in fields_of(type(value)).items()
            if key not in ("name", "options")
        }
        options = {key: write(option) for key, option in value.options.items()}
        return {"name": value.name, **_write_fields(value, setting_fields), **options}
    if is_dataclass(value):
        kinds = [member for member in members(kind) if is_table(member)]
        named = len(kinds) > 1 or any(member in TABLES for member in kinds)
        if any(member in TABLES and TABLES[member].short for member in kinds) and _has_defaults(
            value
        ):
            return label(type(value))
        return ({"name": label(type(value))} if named else {}) | _write_fields(
            value, fields_of(type(value))
        )
    if isinstance(value, Mapping):
        args = (
            get_args(
                next(
                    (member for member in members(kind) if get_origin(member) in (dict, Mapping)),
                    None,
                )
            )
            or (None,) * 2
        )
        return {key: write(item, args[1]) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        listed = next(
            (member for member in members(kind) if get_origin(member) in (tuple, Sequence, list)),
            None,
        )
        return [write(item, next(iter(get_args(listed)), None)) for item in value]
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"{with_article(type(value).__name__)} cannot be written to a file: {value!r}."
    )


def _has_defaults(value: Any) -> bool:
    """Return True if all fields of a dataclass that files can set have their defaults.

    Other fields, such as those without `init`, are ignored. A field without a default gives False.
    """
    return all(
        getattr(value, key) == default(field_info)
        for key, field_info in fields_of(type(value)).items()
    )


def _write_fields(value: Any, fields_by_name: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """Return the plain values of fields of a dataclass, by name.

    Fields that are None by default and in `value` are left out, because TOML has no null. A default
    that files cannot hold is left out too.

    Args:
        value: Instance of a dataclass.
        fields_by_name: Fields to write.

    Raises:
        ConfigError: Files cannot hold a value that is not the default.
    """
    kind: Any = type(value)
    hints, written = field_hints(kind), {}
    for key, field_info in fields_by_name.items():
        current, default_value = getattr(value, key), default(field_info)
        if current is None and default_value is None:
            continue  # TOML has no null.
        try:
            written[key] = write(current, hints[key])
        except ConfigError as error:
            if current is not default_value:  # A default that files cannot hold is left out.
                raise ConfigError(f"{type(value).__name__}.{key}: {error}") from error
    return written
