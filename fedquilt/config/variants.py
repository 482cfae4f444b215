"""The variants that a name in the settings selects from, and the keys that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from fedquilt.config.choice import Choice
from fedquilt.config.schema import (
    choices,
    default,
    field_hints,
    fields_of,
    forwards,
    is_table,
    label,
    members,
    usual_name,
)
from fedquilt.config.tables import TABLES, UNSET


class SettingVariants(NamedTuple):
    """The variants that a name at a path selects from."""

    common: frozenset[str]  # Keys that all variants have
    usual: str  # Name of the default variant. Empty: a name is required


def variants(kind: Any, path: Sequence[str], usual: Any = UNSET) -> SettingVariants | None:
    """Return the common keys and the default of the variants that a name at a path selects from.

    Args:
        kind: Type hint at the beginning of the path.
        path: Keys below `kind`.
        usual: Default value at the path. UNSET: it has none.

    Returns:
        None if no name at the path decides which other keys are allowed, or there is no such path.
    """
    kinds = [member for member in members(kind) if is_table(member)]
    has_names = len(kinds) > 1 or any(base in TABLES for base in kinds)
    classes_by_name = choices(kinds) if has_names else {}
    named = [
        candidate for candidate in classes_by_name.values() if isinstance(candidate, type)
    ] or kinds
    if path:
        for candidate in named:
            if path[0] in fields_of(candidate):
                return variants(
                    field_hints(candidate)[path[0]],
                    path[1:],
                    default(fields_of(candidate)[path[0]]),
                )
        return None
    # A class in a user's file may be selected too. Only the fields of its base class are known.
    open_bases = [base for base in kinds if base in TABLES]
    key_sets = [
        {*fields_of(candidate), *forwards(candidate)} - {"name", "options"}
        for candidate in (*named, *open_bases)
    ]
    if not has_names and any(hasattr(member, "presets") for member in kinds):
        return SettingVariants(frozenset(), "")  # A name can only select another preset.
    if not has_names and not any(issubclass(member, Choice) for member in kinds):
        return None
    name = label(type(usual)) if is_dataclass(usual) else usual_name(kinds)
    return SettingVariants(frozenset(set.intersection(*key_sets)), name)
