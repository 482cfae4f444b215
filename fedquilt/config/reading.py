"""Conversion of plain values into dataclasses. Type hints of the dataclasses are the schema.

`read` takes what TOML or JSON can hold: numbers, text, lists and tables. It collects every problem
with its path instead of stopping at the first. `writing.write` is its inverse.

Three kinds of tables have a `name` that decides which other keys are allowed:

- a union of dataclasses (`optimizer: SGD | Adam`),
- a base class with a registry (`TABLES`),
- a `Choice`, a factory that is called later with the options that its signature names.

A string in place of a table is the name of a table without other keys.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from fedquilt.checks import Check
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
    parameters,
    usual_name,
)
from fedquilt.config.tables import TABLES, UNSET, Problem
from fedquilt.config.wording import fitting_values, owner_of, shown_value, suggestion, with_article
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import find, nearest, said

INT64_END = 2**63  # Integers in files are signed 64-bit, as TOML and torch support them.


def read(kind: Any, plain: Any, path: str, problems: list[Problem], base: Any = UNSET) -> Any:
    """Return a value of a given kind, converted from plain values.

    Args:
        kind: Type hint of the value.
        plain: Numbers, text, lists and tables, as TOML or JSON hold them.
        path: Dotted path of the value in the settings, for messages.
        problems: List to which every problem is added.
        base: Instance whose fields replace those that `plain` leaves out. UNSET: the defaults do.

    Returns:
        The value, or UNSET if there was a problem.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _frozen(plain)
    if origin is typing.Annotated:
        value = read(args[0], plain, path, problems, base)
        if value is not UNSET:
            problems += [
                Problem(path, why)
                for check in args[1:]
                if isinstance(check, Check) and (why := check.why(value))
            ]
        return value
    if origin in (types.UnionType, typing.Union):
        return _read_union(args, plain, path, problems, base)
    if is_table(kind):
        return _read_table([kind], plain, path, problems, base)
    if origin in (tuple, Sequence, list) and isinstance(plain, (list, tuple)):
        return _read_sequence(kind, plain, path, problems)
    if origin in (dict, Mapping) and isinstance(plain, Mapping):
        table = {
            key: read(args[1], value, _join(path, key), problems) for key, value in plain.items()
        }
        return UNSET if UNSET in table.values() else table
    value = _scalar(kind, plain)
    if value is UNSET:
        is_too_large = kind in (int, float) and isinstance(plain, (int, float))
        bits = " of at most 64 bits" if is_too_large else ""
        text = (
            f"{shown_value(plain)} was found; {fitting_values(kind)}{bits} would fit."
            f"{suggestion(kind, plain)}"
        )
        problems.append(Problem(path, text))
    return value


def _scalar(kind: Any, plain: Any) -> Any:
    """Return a plain value if it fits the type hint of a number, text, boolean or None, else UNSET.

    Integers fit `float` and are converted. The text "none" fits None.

    Args:
        kind: Type hint, which may be a Literal.
        plain: The value.
    """
    if get_origin(kind) is Literal:
        is_choice = any(
            choice == plain and type(choice) is type(plain) for choice in get_args(kind)
        )
        return plain if is_choice else UNSET
    if kind is None or kind is types.NoneType:
        return None if plain is None or plain == "none" else UNSET
    is_integer = (
        isinstance(plain, int) and not isinstance(plain, bool) and -INT64_END <= plain < INT64_END
    )
    if kind is int:
        return plain if is_integer else UNSET
    if kind is float:
        is_finite_float = isinstance(plain, float) and abs(plain) < float("inf")  # NaN is not
        return float(plain) if is_integer or is_finite_float else UNSET
    return plain if kind in (bool, str) and type(plain) is kind else UNSET


def _read_sequence(kind: Any, plain: Sequence[Any], path: str, problems: list[Problem]) -> Any:
    """Read a list as a tuple, whose type hint may fix its length. Arguments are those of `read`.

    Returns:
        The tuple, or UNSET if its length or one of its items has a problem.
    """
    args = get_args(kind)
    has_fixed_length = get_origin(kind) is tuple and Ellipsis not in args
    if has_fixed_length and len(plain) != len(args):
        problems.append(
            Problem(path, f"a list of {len(plain)} was found; {fitting_values(kind)} would fit.")
        )
        return UNSET
    kinds = args if has_fixed_length else (args[0],) * len(plain)
    pairs = enumerate(zip(kinds, plain, strict=True))
    values = tuple(
        read(item_kind, value, f"{path}[{position}]", problems)
        for position, (item_kind, value) in pairs
    )
    return UNSET if any(value is UNSET for value in values) else values


def _read_union(
    kinds: Sequence[Any], plain: Any, path: str, problems: list[Problem], base: Any
) -> Any:
    """Read a value as the first kind of a union that fits. Tables are selected by their name.

    Arguments and result are those of `read`, except that `kinds` has the members of the union.
    """
    tables = [kind for kind in kinds if is_table(kind)]
    other_kinds = [kind for kind in kinds if not is_table(kind)]
    takes_mappings = any(get_origin(kind) in (dict, Mapping) for kind in other_kinds)
    if tables and (
        (isinstance(plain, Mapping) and ("name" in plain or not takes_mappings))
        or (
            isinstance(plain, str)
            and str not in other_kinds
            and (plain != "none" or types.NoneType not in other_kinds)
        )
    ):
        return _read_table(tables, plain, path, problems, base)
    # The type of the plain value comes first, so that 3 stays an integer for `int | float`.
    for kind in sorted(other_kinds, key=lambda candidate: candidate is not type(plain)):
        trial: list[Problem] = []
        value = read(kind, plain, path, trial, base)
        if not trial:
            return value
        if isinstance(plain, (Mapping, list)) and get_origin(kind) in (
            dict,
            Mapping,
            tuple,
            Sequence,
            list,
        ):
            problems += trial  # A list or a table can only be meant as this kind.
            return UNSET
    fitting = " or ".join(fitting_values(kind) for kind in kinds if kind is not types.NoneType)
    problems.append(Problem(path, f"{shown_value(plain)} was found; {fitting} would fit."))
    return UNSET


def _read_table(
    kinds: Sequence[Any], plain: Any, path: str, problems: list[Problem], base: Any
) -> Any:
    """Read a table as one of several dataclasses. If there are several, `name` selects one.

    Arguments and result are those of `read`, except that `kinds` has dataclasses or base classes.
    """
    if isinstance(plain, str):
        plain = {"name": plain}
    if not isinstance(plain, Mapping):
        fitting = " or ".join(fitting_values(kind) for kind in kinds)
        problems.append(Problem(path, f"{shown_value(plain)} was found; {fitting} would fit."))
        return UNSET
    if len(kinds) == 1 and kinds[0] not in TABLES:
        kind = kinds[0]
        if issubclass(kind, Choice):
            return _read_choice(kind, plain, path, problems)
        # If only one class is possible, a name is that of a preset.
        if "name" in plain and hasattr(kind, "presets"):
            base = _preset(kind, plain["name"], _join(path, "name"), problems)
            plain = {key: value for key, value in plain.items() if key != "name"}
        return _read_fields(kind, plain, path, problems, base if isinstance(base, kind) else UNSET)
    keys = {key: value for key, value in plain.items() if key != "name"}
    selected = _select(kinds, plain.get("name", UNSET), path, problems, base)
    if selected is UNSET:
        _read_as_meant(kinds, plain.get("name"), keys, path, problems)
        return UNSET
    if not isinstance(selected, type):
        instance = _call_factory(selected, tuple(kinds), keys, plain["name"], path, problems)
        if instance is UNSET:
            return UNSET
        return _read_fields(type(instance), keys, path, problems, instance)
    base = base if type(base) is selected else UNSET
    if "preset" in keys and "preset" not in fields_of(selected):
        base = _preset(selected, keys.pop("preset"), _join(path, "preset"), problems)
    return _read_fields(selected, _forwarded(selected, keys), path, problems, base)


def _forwarded(kind: type, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table in which forwarded keys are inside the field that takes them.

    There they replace the field's own values. A method that trains with another method has no
    settings of local training. Its `method.local` belongs to the inner method.
    """
    moved = {key: value for key, value in keys.items() if key not in forwards(kind)}
    for key, field_name in forwards(kind).items():
        if key not in keys:
            continue
        inner = moved.get(field_name, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if isinstance(inner, Mapping):  # Any other value is refused when the field is read.
            moved[field_name] = _merged(inner, {key: keys[key]})
    return moved


def _merged(below: Any, above: Any) -> Any:
    """Return two tables merged recursively. Values of `above` replace those of `below`.

    Neither is changed. If one of them is no table, `above` is returned.
    """
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {
        **below,
        **{
            key: _merged(below[key], value) if key in below else value
            for key, value in above.items()
        },
    }


def _select(kinds: Sequence[Any], name: Any, path: str, problems: list[Problem], base: Any) -> Any:
    """Return the class or factory that a name selects, or UNSET after adding a problem.

    Without a name (UNSET), the class of `base` is kept, or the usual variant is taken.
    """
    named = choices(kinds)
    noun = TABLES[kinds[0]].noun if len(kinds) == 1 else path.rpartition(".")[2]
    if name is UNSET and base is not UNSET and isinstance(base, tuple(kinds)):
        return type(base)
    if name is UNSET:
        name = usual_name(kinds) or UNSET
    if not isinstance(name, str):
        finding = "no name was found" if name is UNSET else f"{shown_value(name)} was found"
        problems.append(
            Problem(
                _join(path, "name"),
                f"{finding}; the name of {with_article(noun)} is needed.{nearest('', named)}",
            )
        )
        return UNSET
    try:
        selected = find(named, name, noun)
    except FedquiltError as error:
        problems.append(Problem(_join(path, "name"), str(error)))
        return UNSET
    if isinstance(selected, type) and not issubclass(selected, tuple(kinds)):
        bases = " or ".join(kind.__name__ for kind in kinds)
        text = (
            f"{name} was asked for as {with_article(noun)}; it is another kind of class. One "
            f"derived from {bases} fits."
        )
        problems.append(Problem(_join(path, "name"), text))
        return UNSET
    return selected


def _read_as_meant(
    kinds: Sequence[Any], name: Any, keys: Mapping[str, Any], path: str, problems: list[Problem]
) -> None:
    """Report the problems of a table whose name is unknown.

    Its keys are validated against the closest known class. Keys that this class does not have are
    validated against the first class that has them.
    """
    named = {
        class_name: kind for class_name, kind in choices(kinds).items() if isinstance(kind, type)
    }
    close = difflib.get_close_matches(str(name), named, n=1)
    closest_classes = [named[close[0]]] if close else []
    values = {}
    for key, value in keys.items():
        kind = next(
            (
                candidate
                for candidate in (*closest_classes, *named.values())
                if key in fields_of(candidate)
            ),
            None,
        )
        if kind is not None:
            inner = default(fields_of(kind)[key])
            values[key] = read(field_hints(kind)[key], value, _join(path, key), problems, inner)
    for kind in closest_classes:
        problems += _problems_of_incomplete(
            kind, {key: value for key, value in values.items() if value is not UNSET}, path, UNSET
        )


def _call_factory(
    factory: Callable[..., Any],
    kinds: tuple[type, ...],
    keys: dict[str, Any],
    name: str,
    path: str,
    problems: list[Problem],
) -> Any:
    """Call a function in a user's file with those keys that are its parameters.

    These keys are removed from `keys`. The remaining ones are fields of the object that the
    function returns.
    """
    num_problems = len(problems)
    takes = parameters(factory)
    options = {
        key: read(takes[key].hint, keys.pop(key), _join(path, key), problems)
        for key in list(keys)
        if key in takes
    }
    if len(problems) > num_problems:
        return UNSET
    try:
        instance = factory(**options)
    except FedquiltError as error:
        problems.append(Problem(path, str(error)))
        return UNSET
    except Exception as error:
        problems.append(Problem(path, f"{name} was called and failed: {said(error)}"))
        return UNSET
    if not isinstance(instance, kinds):
        class_names = " or ".join(kind.__name__ for kind in kinds)
        problems.append(
            Problem(
                path,
                f"{name} was called for a {class_names}; it returned "
                f"{with_article(type(instance).__name__)}.",
            )
        )
        return UNSET
    return instance


def _preset(kind: type, name: Any, path: str, problems: list[Problem]) -> Any:
    """Return the instance that a preset of a class gives.

    If the class has none of that name, a problem at `path` is added, and UNSET is returned.
    """
    presets = getattr(kind, "presets", {})
    if isinstance(name, str) and name in presets:
        return kind.preset(name)  # type: ignore[attr-defined]
    text = (
        f"{shown_value(name)} was found; {label(kind)} has no preset of that "
        f"name.{nearest(str(name), presets)}"
    )
    problems.append(Problem(path, text))
    return UNSET


def _read_fields(
    kind: type, plain: Mapping[str, Any], path: str, problems: list[Problem], base: Any
) -> Any:
    """Return an instance of a dataclass from a table of its fields, or UNSET after adding problems.

    Fields that the table leaves out are those of `base`. If `base` is UNSET, they have their
    defaults.
    """
    num_problems, fields_by_name = len(problems), fields_of(kind)
    hints, values = field_hints(kind), {}
    for key, value in plain.items():
        if key in fields_by_name:
            inner = default(fields_by_name[key]) if base is UNSET else getattr(base, key)
            values[key] = read(hints[key], value, _join(path, key), problems, inner)
        else:
            text = (
                f"{owner_of(kind, path)} has no such "
                f"key.{nearest(key, fields_by_name)}{_inner(key, hints, path)}"
            )
            problems.append(Problem(_join(path, key), text))
    for key, field_info in fields_by_name.items():
        if base is UNSET and key not in plain and default(field_info) is UNSET:
            problems.append(
                Problem(
                    _join(path, key), f"nothing was found; {fitting_values(hints[key])} is needed."
                )
            )
    if len(problems) > num_problems:
        problems += _problems_of_incomplete(kind, values, path, base)
        return UNSET
    try:
        return kind(**values) if base is UNSET else replace(base, **values)
    except Exception as error:  # A user's class may raise anything.
        problems.extend(_problems_of_error(error, path, fields_by_name))
        return UNSET


def _inner(key: str, hints: Mapping[str, Any], path: str) -> str:
    """Return the end of an error about an unknown key: the tables inside that have it.

    An example is `link.clock.deadline` for the unknown key `link.deadline`.
    """
    tables = [
        name
        for name, hint in hints.items()
        if any(key in fields_of(member) for member in members(hint))
    ]
    paths = " or ".join(f"{_join(path, name)}.{key}" for name in tables)
    return f" {paths} would work." if paths else ""


def _problems_of_incomplete(
    kind: type, values: Mapping[str, Any], path: str, base: Any
) -> list[Problem]:
    """Return the problems that a class finds in the values that could be read.

    `__post_init__` is called on an incomplete instance, so that all problems are reported at once.
    Fields without a value in `values` are those of `base`, or have their defaults.
    """
    incomplete: Any = object.__new__(kind)
    fields_by_name = fields_of(kind)
    for key, field_info in fields_by_name.items():
        value = values.get(key, default(field_info) if base is UNSET else getattr(base, key))
        if value is not UNSET:
            object.__setattr__(incomplete, key, value)
    try:
        getattr(incomplete, "__post_init__", lambda: None)()
    except ConfigError as error:
        return _problems_of_error(error, path, fields_by_name) if error.fields else []
    except Exception:
        return []  # It needed a value that could not be read, which is reported already.
    return []


def _problems_of_error(
    error: Exception, path: str, fields_by_name: Mapping[str, Any]
) -> list[Problem]:
    """Return one problem for each field that an error names, or one for the whole table.

    `path` is that of the table, and `fields_by_name` has its fields.
    """
    if isinstance(error, ConfigError) and error.fields:
        return [
            Problem(_join(path, key) if key in fields_by_name else path, text)
            for key, text in error.fields.items()
        ]
    return [Problem(path, str(error) if isinstance(error, FedquiltError) else said(error))]


def _read_choice(
    kind: type[Choice], plain: Mapping[str, Any], path: str, problems: list[Problem]
) -> Any:
    """Read the options of a factory by its signature, and settings beside them. It is not called.

    Arguments and result are those of `read`. `kind` is the subclass of `Choice`.
    """
    num_problems, name = len(problems), plain.get("name", UNSET)
    setting_fields = {
        key: field_info
        for key, field_info in fields_of(kind).items()
        if key not in ("name", "options")
    }
    settings = {key: value for key, value in plain.items() if key in setting_fields}
    options = {
        key: value for key, value in plain.items() if key not in setting_fields and key != "name"
    }
    hints = field_hints(kind)
    values = {
        key: read(hints[key], value, _join(path, key), problems, default(setting_fields[key]))
        for key, value in settings.items()
    }
    if not isinstance(name, str):
        finding = "nothing was found" if name is UNSET else f"{shown_value(name)} was found"
        problems.append(
            Problem(
                _join(path, "name"), f"{finding}; the name of {with_article(kind.noun)} is needed."
            )
        )
        return UNSET
    try:
        accepted = parameters(kind.find(name))
    except (FedquiltError, OSError) as error:  # The name may refer to a file.
        problems.append(Problem(_join(path, "name"), str(error)))
        return UNSET
    for key, value in options.items():
        if key in accepted:
            options[key] = read(accepted[key].hint, value, _join(path, key), problems)
        else:
            problems.append(
                Problem(
                    _join(path, key),
                    f"{name} has no such option.{nearest(key, [*accepted, *setting_fields])}",
                )
            )
    for key, parameter in accepted.items():
        if parameter.default is UNSET and key not in options and key not in kind.offers:
            problems.append(
                Problem(
                    _join(path, key),
                    f"nothing was found; {name} needs {fitting_values(parameter.hint)} here.",
                )
            )
    if len(problems) > num_problems:
        problems += _problems_of_incomplete(
            kind, {**values, "name": name, "options": options}, path, UNSET
        )
        return UNSET
    try:
        return kind(name, options, **values)
    except ConfigError as error:
        problems.extend(_problems_of_error(error, path, setting_fields))
        return UNSET


def _join(path: str, key: str) -> str:
    """Return the dotted path of a key in a table. A key with other characters is quoted."""
    key = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{path}.{key}" if path else key


def _frozen(plain: Any) -> Any:
    """Convert lists to tuples, also nested ones, because fields of settings are hashable."""
    return tuple(map(_frozen, plain)) if isinstance(plain, list) else plain
