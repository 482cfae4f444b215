"""Differences between the settings of two studies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedquilt.studies.entries import (
    Entry,
    num_rounds,
)


def entry_differences(new: Entry, old: Entry) -> list[str]:
    """Return one line of text for each setting or grid that differs between two entries.

    More rounds in the new entry are no difference, but fewer are. Seeds are not compared.

    Args:
        new: Entry that is asked for.
        old: Entry of the study that exists.
    """
    old_settings = {**old.settings, "rounds": num_rounds(old.settings)}
    settings = new.settings
    if num_rounds(settings) >= old_settings["rounds"]:
        settings = {**settings, "rounds": old_settings["rounds"]}
    return value_differences(settings, old_settings) + value_differences(
        _plain_grid(new), _plain_grid(old)
    )


def _plain_grid(entry: Entry) -> dict[str, list[Any]]:
    return {path: list(values) for path, values in entry.grid.items()}


def value_differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Return one line of text for each value that differs, with its dotted path and both values.

    Nested tables are compared value by value. A missing value is shown as `nothing`. The top-level
    key `seed` is ignored.

    Args:
        new: Tables that are asked for.
        old: Tables that exist.
    """
    new_values = dict(_leaves("", new))
    old_values = dict(_leaves("", old))
    nothing = "nothing"
    return [
        f"{path} is {old_values.get(path, nothing)} there, {new_values.get(path, nothing)} was "
        "asked for"
        for path in {**old_values, **new_values}
        if path != "seed" and new_values.get(path) != old_values.get(path)
    ]


def _leaves(path: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of everything in nested tables. Tuples become lists.

    Args:
        path: Path of the table. Empty for the outermost one.
        table: Tables and values by key. Empty tables yield nothing.
    """
    for key, value in table.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _leaves(inner, value)
        else:
            yield inner, list(value) if isinstance(value, tuple) else value
