"""Conversion between dataclasses and plain values. Type hints of the dataclass are the schema.

`read` takes what TOML or JSON can hold: numbers, text, lists and tables. It collects every problem
with its path instead of stopping at the first. `write` is its inverse.

Three kinds of tables have a `name` that decides which other keys are allowed:

- a union of dataclasses (`optimizer: SGD | Adam`),
- a base class with a registry (`TABLES`),
- a `Choice`, a factory that is called later with the options that its signature names.

A string in place of a table is the name of a table without other keys.
"""

from __future__ import annotations

import difflib
import inspect
import io
import json
import re
import sys
import tokenize
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from fedquilt.checks import Check
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import find, name_of, nearest, said

T = TypeVar("T")
_LARGEST = 2**63  # Integers in files are signed 64-bit, as TOML and torch support them.


class Table(NamedTuple):
    """Subclasses of a base class by the names that files use for them."""

    what: str
    kinds: Mapping[str, Any]
    usual: str = ""  # Variant of a table without a name. Empty if a name is required.
    short: bool = False  # If True, a variant with default values is written as its name alone.


TABLES: dict[type, Table] = {}  # Filled by runs/experiment.py.


@dataclass(frozen=True)
class Choice(ABC):
    """A factory by its name, with the options that it will be called with.

    A subclass defines where names are looked up. Its further fields are settings beside the
    options. In a file, options and settings are keys of the same table.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    what: ClassVar[str] = "factory"
    # Options that the caller of `make` fills in if the settings leave them out.
    offers: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Callable[..., Any]:
        """Return the factory that has a name."""

    def make(self, kind: type[T], offers: Mapping[str, Any] | None = None) -> T:
        """Call the factory with its options, and return what it makes.

        Args:
            kind: Class that the result must be an instance of.
            offers: Values for options that the settings leave out. Those that the factory does not
                take are ignored. None: no such values.

        Raises:
            ConfigError: The factory failed, or returned something else.
        """
        factory = self.find(self.name)
        try:
            takes = parameters(factory)
            open_options = {key: value for key, value in (offers or {}).items() if key in takes}
            product = factory(**{**open_options, **self.options})
        except FedquiltError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name} was called and failed: {said(error)}") from error
        if not isinstance(product, kind):
            raise ConfigError(
                f"{self.name} was called for a {kind.__name__}; it returned "
                f"{_a(type(product).__name__)}."
            )
        return product


class Problem(NamedTuple):
    """A problem in the settings, and the path of the setting that has it."""

    path: str
    text: str


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()  # Returned by `read` for a value that has a problem.


# --- reading ------------------------------------------------------------------------------------


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
    if _is_table(kind):
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
        bits = (
            " of at most 64 bits"
            if kind in (int, float) and isinstance(plain, (int, float))
            else ""
        )
        text = f"{_shown(plain)} was found; {_fitting(kind)}{bits} would fit.{_meant(kind, plain)}"
        problems.append(Problem(path, text))
    return value


def _scalar(kind: Any, plain: Any) -> Any:
    if get_origin(kind) is Literal:
        return next(
            (
                choice
                for choice in get_args(kind)
                if choice == plain and type(choice) is type(plain)
            ),
            UNSET,
        )
    if kind is None or kind is types.NoneType:
        return None if plain is None or plain == "none" else UNSET
    is_integer = (
        isinstance(plain, int) and not isinstance(plain, bool) and -_LARGEST <= plain < _LARGEST
    )
    if kind is int:
        return plain if is_integer else UNSET
    if kind is float:
        is_finite_float = isinstance(plain, float) and abs(plain) < float("inf")  # NaN is not
        return float(plain) if is_integer or is_finite_float else UNSET
    return plain if kind in (bool, str) and type(plain) is kind else UNSET


def _read_sequence(kind: Any, plain: Sequence[Any], path: str, problems: list[Problem]) -> Any:
    args = get_args(kind)
    has_fixed_length = get_origin(kind) is tuple and Ellipsis not in args
    if has_fixed_length and len(plain) != len(args):
        problems.append(
            Problem(path, f"a list of {len(plain)} was found; {_fitting(kind)} would fit.")
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
    tables = [kind for kind in kinds if _is_table(kind)]
    other_kinds = [kind for kind in kinds if not _is_table(kind)]
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
            problems += trial  # Of all kinds this is the one that was meant.
            return UNSET
    fitting = " or ".join(_fitting(kind) for kind in kinds if kind is not types.NoneType)
    problems.append(Problem(path, f"{_shown(plain)} was found; {fitting} would fit."))
    return UNSET


def _read_table(
    kinds: Sequence[Any], plain: Any, path: str, problems: list[Problem], base: Any
) -> Any:
    """Read a table as one of several dataclasses. If there are several, `name` selects one."""
    if isinstance(plain, str):
        plain = {"name": plain}
    if not isinstance(plain, Mapping):
        fitting = " or ".join(_fitting(kind) for kind in kinds)
        problems.append(Problem(path, f"{_shown(plain)} was found; {fitting} would fit."))
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
    selected = _chosen(kinds, plain.get("name", UNSET), path, problems, base)
    if selected is UNSET:
        _read_as_meant(kinds, plain.get("name"), keys, path, problems)
        return UNSET
    if not isinstance(selected, type):
        instance = _made(selected, tuple(kinds), keys, plain["name"], path, problems)
        return (
            instance
            if instance is UNSET
            else _read_fields(type(instance), keys, path, problems, instance)
        )
    base = base if type(base) is selected else UNSET
    if "preset" in keys and "preset" not in _fields_of(selected):
        base = _preset(selected, keys.pop("preset"), _join(path, "preset"), problems)
    return _read_fields(selected, _forwarded(selected, keys), path, problems, base)


def _forwarded(kind: type, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Move keys to the field that a class forwards them to, over the field's own values.

    A method that trains with another method has no settings of local training. Its `method.local`
    belongs to the inner method.
    """
    moved = {key: value for key, value in keys.items() if key not in _forwards(kind)}
    for key, field_name in _forwards(kind).items():
        if key not in keys:
            continue
        inner = moved.get(field_name, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if isinstance(inner, Mapping):  # Any other value is refused when the field is read.
            moved[field_name] = _merged(inner, {key: keys[key]})
    return moved


def _forwards(kind: Any) -> Mapping[str, str]:
    """Return the keys that a class forwards (`Class.forwards`), with the field that takes each."""
    fields_by_key: Mapping[str, str] = getattr(kind, "forwards", {})
    return fields_by_key


def _merged(below: Any, above: Any) -> Any:
    """Merge two tables recursively. Values of `above` replace those of `below`."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {
        **below,
        **{
            key: _merged(below[key], value) if key in below else value
            for key, value in above.items()
        },
    }


def _chosen(kinds: Sequence[Any], name: Any, path: str, problems: list[Problem], base: Any) -> Any:
    """Return the class or factory that a name selects.

    Without a name, the class of `base` is kept, or the usual variant is taken.
    """
    named = choices(kinds)
    noun = TABLES[kinds[0]].what if len(kinds) == 1 else path.rpartition(".")[2]
    if name is UNSET and base is not UNSET and isinstance(base, tuple(kinds)):
        return type(base)
    if name is UNSET:
        name = _usual(kinds) or UNSET
    if not isinstance(name, str):
        finding = "no name was found" if name is UNSET else f"{_shown(name)} was found"
        problems.append(
            Problem(
                _join(path, "name"),
                f"{finding}; the name of {_a(noun)} is needed.{nearest('', named)}",
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
            f"{name} was asked for as {_a(noun)}; it is another kind of class. One derived from "
            f"{bases} fits."
        )
        problems.append(Problem(_join(path, "name"), text))
        return UNSET
    return selected


def _usual(kinds: Sequence[Any]) -> str:
    """Return the name that a table of these kinds has by default. Empty: it needs a name."""
    return next((TABLES[kind].usual for kind in kinds if kind in TABLES), "")


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
                if key in _fields_of(candidate)
            ),
            None,
        )
        if kind is not None:
            inner = default(_fields_of(kind)[key])
            values[key] = read(_hints(kind)[key], value, _join(path, key), problems, inner)
    for kind in closest_classes:
        problems += _further(
            kind, {key: value for key, value in values.items() if value is not UNSET}, path, UNSET
        )


def _made(
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
                f"{name} was called for a {class_names}; "
                f"it returned {_a(type(instance).__name__)}.",
            )
        )
        return UNSET
    return instance


def _preset(kind: type, name: Any, path: str, problems: list[Problem]) -> Any:
    presets = getattr(kind, "presets", {})
    if isinstance(name, str) and name in presets:
        return kind.preset(name)  # type: ignore[attr-defined]
    text = (
        f"{_shown(name)} was found; {label(kind)} has no preset of that "
        f"name.{nearest(str(name), presets)}"
    )
    problems.append(Problem(path, text))
    return UNSET


def _read_fields(
    kind: type, plain: Mapping[str, Any], path: str, problems: list[Problem], base: Any
) -> Any:
    """Return a dataclass from a table of its fields.

    Fields that the table leaves out are those of `base`. If `base` is UNSET, they have their
    defaults.
    """
    num_problems, fields_by_name = len(problems), _fields_of(kind)
    hints, values = _hints(kind), {}
    for key, value in plain.items():
        if key in fields_by_name:
            inner = default(fields_by_name[key]) if base is UNSET else getattr(base, key)
            values[key] = read(hints[key], value, _join(path, key), problems, inner)
        else:
            text = (
                f"{_owner(kind, path)} has no such "
                f"key.{nearest(key, fields_by_name)}{_inner(key, hints, path)}"
            )
            problems.append(Problem(_join(path, key), text))
    for key, field_info in fields_by_name.items():
        if base is UNSET and key not in plain and default(field_info) is UNSET:
            problems.append(
                Problem(_join(path, key), f"nothing was found; {_fitting(hints[key])} is needed.")
            )
    if len(problems) > num_problems:
        problems += _further(kind, values, path, base)
        return UNSET
    try:
        return kind(**values) if base is UNSET else replace(base, **values)
    except Exception as error:  # A user's class may raise anything.
        problems.extend(_blamed(error, path, fields_by_name))
        return UNSET


def _inner(key: str, hints: Mapping[str, Any], path: str) -> str:
    """Return the end of an error about an unknown key: the tables inside that have it.

    An example is `link.clock.deadline` for the unknown key `link.deadline`.
    """
    tables = [
        name
        for name, hint in hints.items()
        if any(key in _fields_of(member) for member in _members(hint))
    ]
    paths = " or ".join(f"{_join(path, name)}.{key}" for name in tables)
    return f" {paths} would work." if paths else ""


def _further(kind: type, values: Mapping[str, Any], path: str, base: Any) -> list[Problem]:
    """Return the problems that a class finds in the values that could be read.

    `__post_init__` is called on an incomplete instance, so that all problems are reported at once.
    """
    incomplete: Any = object.__new__(kind)
    fields_by_name = _fields_of(kind)
    for key, field_info in fields_by_name.items():
        value = values.get(key, default(field_info) if base is UNSET else getattr(base, key))
        if value is not UNSET:
            object.__setattr__(incomplete, key, value)
    try:
        getattr(incomplete, "__post_init__", lambda: None)()
    except ConfigError as error:
        return _blamed(error, path, fields_by_name) if error.fields else []
    except Exception:
        return []  # It needed a value that could not be read, which is reported already.
    return []


def _blamed(error: Exception, path: str, own: Mapping[str, Any]) -> list[Problem]:
    """Return one problem for each field that an error names, or one for the whole table."""
    if isinstance(error, ConfigError) and error.fields:
        return [
            Problem(_join(path, key) if key in own else path, text)
            for key, text in error.fields.items()
        ]
    return [Problem(path, str(error) if isinstance(error, FedquiltError) else said(error))]


def _read_choice(
    kind: type[Choice], plain: Mapping[str, Any], path: str, problems: list[Problem]
) -> Any:
    """Read the options of a factory by its signature. The factory is not called yet."""
    num_problems, name = len(problems), plain.get("name", UNSET)
    setting_fields = {
        key: field_info
        for key, field_info in _fields_of(kind).items()
        if key not in ("name", "options")
    }
    settings = {key: value for key, value in plain.items() if key in setting_fields}
    options = {
        key: value for key, value in plain.items() if key not in setting_fields and key != "name"
    }
    hints = _hints(kind)
    values = {
        key: read(hints[key], value, _join(path, key), problems, default(setting_fields[key]))
        for key, value in settings.items()
    }
    if not isinstance(name, str):
        finding = "nothing was found" if name is UNSET else f"{_shown(name)} was found"
        problems.append(
            Problem(_join(path, "name"), f"{finding}; the name of {_a(kind.what)} is needed.")
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
                    f"nothing was found; {name} needs {_fitting(parameter.hint)} here.",
                )
            )
    if len(problems) > num_problems:
        problems += _further(kind, {**values, "name": name, "options": options}, path, UNSET)
        return UNSET
    try:
        return kind(name, options, **values)
    except ConfigError as error:
        problems.extend(_blamed(error, path, setting_fields))
        return UNSET


# --- writing ------------------------------------------------------------------------------------


def write(value: Any, kind: Any = None) -> Any:
    """Return plain values that `read` converts back into an equal value.

    Args:
        value: A value that settings may have.
        kind: Type hint of the field that has the value. None: it has no hint.

    Raises:
        ConfigError: Files cannot hold the value.
    """
    if value is None:
        if str in _members(kind):  # "none" would be read as text.
            raise ConfigError("None cannot be written to a file where text may stand.")
        return "none"
    if isinstance(value, Choice):
        setting_fields = {
            key: field_info
            for key, field_info in _fields_of(type(value)).items()
            if key not in ("name", "options")
        }
        options = {key: write(option) for key, option in value.options.items()}
        return {"name": value.name, **_write_fields(value, setting_fields), **options}
    if is_dataclass(value):
        kinds = [member for member in _members(kind) if _is_table(member)]
        named = len(kinds) > 1 or any(member in TABLES for member in kinds)
        if any(member in TABLES and TABLES[member].short for member in kinds) and _has_defaults(
            value
        ):
            return label(type(value))
        return ({"name": label(type(value))} if named else {}) | _write_fields(
            value, _fields_of(type(value))
        )
    if isinstance(value, Mapping):
        args = (
            get_args(
                next(
                    (member for member in _members(kind) if get_origin(member) in (dict, Mapping)),
                    None,
                )
            )
            or (None,) * 2
        )
        return {key: write(item, args[1]) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        listed = next(
            (member for member in _members(kind) if get_origin(member) in (tuple, Sequence, list)),
            None,
        )
        return [write(item, next(iter(get_args(listed)), None)) for item in value]
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"{_a(type(value).__name__)} cannot be written to a file: {value!r}.")


def _has_defaults(value: Any) -> bool:
    """Return True if all fields of a dataclass have their defaults."""
    return all(
        getattr(value, key) == default(field_info)
        for key, field_info in _fields_of(type(value)).items()
    )


def _write_fields(value: Any, own: Mapping[str, Field[Any]]) -> dict[str, Any]:
    kind: Any = type(value)
    hints, written = _hints(kind), {}
    for key, field_info in own.items():
        current, default_value = getattr(value, key), default(field_info)
        if current is None and default_value is None:
            continue  # TOML has no null.
        try:
            written[key] = write(current, hints[key])
        except ConfigError as error:
            if current is not default_value:  # A default that files cannot hold is left out.
                raise ConfigError(f"{type(value).__name__}.{key}: {error}") from error
    return written


# --- what there is to set -----------------------------------------------------------------------


class Parameter(NamedTuple):
    """A parameter of a factory, or a field of a dataclass."""

    hint: Any
    default: Any


def parameters(factory: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a factory by name. Those without a type hint take any value."""
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # Built-in functions have no signature.
        return {}
    function: Any = inspect.unwrap(getattr(factory, "func", factory))  # `func` of a partial
    # A class has no globals, but its `__init__` has.
    names = getattr(function, "__globals__", None) or getattr(function.__init__, "__globals__", {})
    return {
        name: Parameter(
            Any if parameter.annotation is parameter.empty else _hint(parameter.annotation, names),
            UNSET if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def choices(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the classes that can be selected for any of these kinds, by name."""
    named: dict[str, Any] = {}
    for kind in kinds:
        named |= TABLES[kind].kinds if kind in TABLES else {label(kind): kind}
    return named


class Variants(NamedTuple):
    """The variants that a name at a path selects from.

    `common` has the keys that all of them take. `usual` is the name of the default variant.
    """

    common: frozenset[str]
    usual: str


def variants(kind: Any, path: Sequence[str], usual: Any = UNSET) -> Variants | None:
    """Return the variants that a name at a path selects from.

    Args:
        kind: Type hint at the beginning of the path.
        path: Keys below `kind`.
        usual: Default value at the path. UNSET: it has none.

    Returns:
        None if no name at the path decides which other keys are allowed.
    """
    kinds = [member for member in _members(kind) if _is_table(member)]
    has_names = len(kinds) > 1 or any(base in TABLES for base in kinds)
    classes_by_name = choices(kinds) if has_names else {}
    named = [
        candidate for candidate in classes_by_name.values() if isinstance(candidate, type)
    ] or kinds
    if path:
        for candidate in named:
            if path[0] in _fields_of(candidate):
                return variants(
                    _hints(candidate)[path[0]], path[1:], default(_fields_of(candidate)[path[0]])
                )
        return None
    # A class in a user's file may be selected too. Only the fields of its base class are known.
    open_bases = [base for base in kinds if base in TABLES]
    key_sets = [
        {*_fields_of(candidate), *_forwards(candidate)} - {"name", "options"}
        for candidate in (*named, *open_bases)
    ]
    if not has_names and any(hasattr(member, "presets") for member in kinds):
        return Variants(frozenset(), "")  # A name can only select another preset.
    if not has_names and not any(issubclass(member, Choice) for member in kinds):
        return None
    name = label(type(usual)) if is_dataclass(usual) else _usual(kinds)
    return Variants(frozenset(set.intersection(*key_sets)), name)


def label(kind: type) -> str:
    """Return the name of a class in files.

    It is the name in the registry, or `file.py:Class` if a registry exists and does not have the
    class. Classes without a registry have their own name in snake case: `ServerAdam` is
    `server_adam`. A capital at the end belongs to the word before it: `AdamW` is `adamw`.
    """
    for base, table in TABLES.items():
        if issubclass(kind, base):
            return next(
                (name for name, variant in table.kinds.items() if variant is kind), None
            ) or name_of(kind)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z].)", "_", kind.__name__).lower()


def described(kind: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return types (`options`), `defaults` and comments (`help`) of all settings of a class."""
    settings, helps = _takes(kind), comments(kind)
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
    for name, parameter in _takes(kind).items():
        value, leaf_path = (
            parameter.default if base is UNSET else getattr(base, name),
            f"{path}{name}",
        )
        kinds = [option for option in _members(parameter.hint) if _is_table(option)]
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
                inner_rows |= _of_others(inner_rows, alternatives)
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


def _of_others(
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


def _takes(kind: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the fields of a dataclass, or the parameters of a factory."""
    if not is_dataclass(kind):
        return parameters(kind)
    hints = _hints(kind)
    return {
        name: Parameter(hints[name], default(field_info))
        for name, field_info in _fields_of(kind).items()
    }


def shown_hint(hint: Any) -> str:
    """Return a type hint as it is written in code. A Literal is shown as its values."""
    if get_origin(hint) is typing.Annotated:
        return shown_hint(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace("NoneType", "None")


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


# --- words --------------------------------------------------------------------------------------


def _fitting(kind: Any) -> str:
    """Describe in words which values fit a type hint."""
    words = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
        types.NoneType: "'none'",
    }
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return _fitting(args[0])
    if kind is Any:
        return "a value"
    if kind in words:
        return words[kind]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_fitting(member) for member in args if member is not types.NoneType)
    if origin in (tuple, Sequence, list):
        has_fixed_length = origin is tuple and Ellipsis not in args
        return (
            f"a list of ({', '.join(map(_fitting, args))})"
            if has_fixed_length
            else f"a list, each {_fitting(args[0])}"
        )
    if origin in (dict, Mapping):
        return f"a table, each value {_fitting(args[1])}"
    if kind in TABLES:
        table = "a table" if TABLES[kind].usual else "a table with one"
        return f"{_a(TABLES[kind].what)} by its name, or {table}"
    if _is_table(kind):
        return f"a table with {', '.join(_fields_of(kind)) or 'nothing in it'}"
    return f"{shown_hint(kind)} (which no file can hold)"


def _meant(kind: Any, plain: Any) -> str:
    close = (
        difflib.get_close_matches(plain, map(str, get_args(kind)), n=1)
        if isinstance(plain, str)
        else []
    )
    return f" Did you mean {close[0]!r}?" if close and get_origin(kind) is Literal else ""


def _shown(plain: Any) -> str:
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


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


def _owner(kind: type, path: str) -> str:
    """Name the owner of a table's keys: the selected class, or the table itself."""
    is_selected_by_name = any(issubclass(kind, base) for base in TABLES)
    return label(kind) if is_selected_by_name else path.rpartition(".")[2] or "a configuration"


# --- hints --------------------------------------------------------------------------------------


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or kind in TABLES)


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _fields_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields that files can set, by name.

    `metadata={"setting": False}` excludes a field.
    """
    if not is_dataclass(kind):
        return {}
    return {
        field_info.name: field_info
        for field_info in fields(kind)
        if field_info.init and field_info.metadata.get("setting", True)
    }


def default(one: Field[Any]) -> Any:
    """Return the default of a field, created by its factory if it has one. UNSET: no default."""
    if one.default is not MISSING:
        return one.default
    return UNSET if one.default_factory is MISSING else one.default_factory()


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the evaluated hints of the fields that files can set, by name.

    They are cached, because evaluating them took more than half of the time of reading a file.
    """
    fields_by_name = _fields_of(kind)
    return {
        name: _hint(hint, vars(sys.modules[base.__module__]))
        for base in reversed(kind.__mro__)
        for name, hint in vars(base).get("__annotations__", {}).items()
        if name in fields_by_name
    }


def _hint(hint: Any, known: dict[str, Any]) -> Any:
    """Evaluate a type hint that may be text. Names imported for type checkers alone give Any."""
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__={"one": hint}), known, None, True
        )["one"]
    except NameError:
        return Any


def _join(path: str, key: str) -> str:
    key = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{path}.{key}" if path else key


def _frozen(plain: Any) -> Any:
    return tuple(map(_frozen, plain)) if isinstance(plain, list) else plain
