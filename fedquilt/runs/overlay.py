"""Changes to the settings of an experiment: other names, and settings over settings."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedquilt.config.toml import Settings, as_table, assign
from fedquilt.config.variants import variants
from fedquilt.runs.experiment import Experiment


def choose(settings: Settings, path: Sequence[str], name: Any) -> Settings:
    """Change the name in a table in-place, such as that of a method, an optimizer or the data.

    Keys that all variants have are kept, and options of the previous variant are removed. A preset
    is kept too, so that `read` refuses it if the new method has none of that name.

    Args:
        settings: Settings to change.
        path: Keys of the table.
        name: New name.
    """
    if not path:  # Settings as a whole have no name, so that reading them refuses it.
        return assign(settings, ["name"], name)
    current: Any = settings
    for key in path:
        current = current.get(key, {}) if isinstance(current, Mapping) else {}
    table = as_table(current)
    alternatives = variants(Experiment, path)
    if alternatives and table.get("name", alternatives.usual) != name:
        table = {
            key: value
            for key, value in table.items()
            if key in alternatives.common or key == "preset"
        }
    return assign(settings, path, {**table, "name": name})


def overlay(base: Settings, changes: Settings) -> Settings:
    """Return settings with others merged into them. Neither argument is changed.

    Tables are merged. If a name changes, `choose` decides which options of the base are kept. A
    string in place of a table is the name of a table without other keys.

    Args:
        base: Settings below.
        changes: Settings on top, which may have a part of the keys only.
    """
    settings = copy.deepcopy(base)
    _merge(settings, [], changes)
    return settings


def _merge(settings: Settings, path: list[str], changes: Mapping[str, Any]) -> None:
    """Merge changes into the table at a path of the settings, in-place.

    Args:
        settings: Settings as a whole.
        path: Keys of the table. Empty: the settings themselves.
        changes: Changes to that table, which may have nested tables.
    """
    # Names come first, because they decide which other keys are allowed.
    if path and "name" in changes:
        choose(settings, path, changes["name"])
    for key, value in changes.items():
        inner_path = [*path, key]
        if isinstance(value, Mapping):
            _merge(settings, inner_path, value)
        elif isinstance(value, str) and value != "none" and variants(Experiment, inner_path):
            choose(settings, inner_path, value)
        elif key != "name" or not path:
            assign(settings, inner_path, value)


def assign_all(settings: Settings, assignments: Iterable[tuple[Sequence[str], Any]]) -> Settings:
    """Set values at paths in-place. Names are set first, because they decide about other keys.

    Args:
        settings: Settings to change.
        assignments: Keys of each setting, and its value.
    """
    for keys, value in sorted(assignments, key=lambda assignment: assignment[0][-1] != "name"):
        if keys[-1] == "name":
            choose(settings, keys[:-1], value)
        else:
            assign(settings, keys, value)
    return settings
