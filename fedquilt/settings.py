"""Dataclasses from plain values and back, by their type hints: the dataclass is the schema.

`read` takes what TOML or JSON can hold (numbers, text, lists, tables) and collects every problem with its path instead
of stopping at the first; `write` is its inverse. Three kinds of tables have a `name`, and which keys they take depends
on it: a union of dataclasses (`optimiser: SGD | Adam`), a base class with a registry (`TABLES`), and a `Choice`, a
factory that is called later with the options its signature names. A name alone stands for a table with nothing else.
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
_LARGEST = 2**63  # what TOML promises for whole numbers, and torch takes


class Table(NamedTuple):
    """The variants of a base class by their names."""

    what: str
    kinds: Mapping[str, Any]
    usual: str = ""  # Variant that a table without a name stands for. Empty if a name is needed.
    short: bool = False  # True: a variant with default values is written as its name alone


TABLES: dict[type, Table] = {}  # filled by config.py


@dataclass(frozen=True)
class Choice(ABC):
    """A factory by its name, and the options it is to be called with. Subclasses say where names are looked up.

    Further fields of a subclass are settings beside the options; in a file all of them are keys of one table.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    what: ClassVar[str] = "factory"
    offers: ClassVar[frozenset[str]] = (
        frozenset()
    )  # options that are filled in later where they were left open

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Callable[..., Any]:
        """The factory a name stands for."""

    def make(self, kind: type[T], offers: Mapping[str, Any] | None = None) -> T:
        """Call the factory with the options, and those offered that it takes and nobody set."""
        factory = self.find(self.name)
        try:
            takes = parameters(factory)
            open_options = {key: value for key, value in (offers or {}).items() if key in takes}
            made = factory(**{**open_options, **self.options})
        except FedquiltError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name} was called and failed: {said(error)}") from error
        if not isinstance(made, kind):
            raise ConfigError(
                f"{self.name} was called for a {kind.__name__}; it returned {_a(type(made).__name__)}."
            )
        return made


class Problem(NamedTuple):
    """One thing that is wrong with the settings, and where."""

    path: str
    text: str


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()  # what `read` returns where there was a problem


# --- reading ----------------------------------------------------------------------------------------------------


def read(kind: Any, plain: Any, path: str, problems: list[Problem], base: Any = UNSET) -> Any:
    """A value of a kind from plain values; what is missing is taken from `base`, an instance, or the defaults."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _frozen(plain)
    if origin is typing.Annotated:
        value = read(args[0], plain, path, problems, base)
        if value is not UNSET:
            problems += [
                Problem(path, why)
                for one in args[1:]
                if isinstance(one, Check) and (why := one.why(value))
            ]
        return value
    if origin in (types.UnionType, typing.Union):
        return _read_union(args, plain, path, problems, base)
    if _is_table(kind):
        return _read_table([kind], plain, path, problems, base)
    if origin in (tuple, Sequence, list) and isinstance(plain, (list, tuple)):
        return _read_sequence(kind, plain, path, problems)
    if origin in (dict, Mapping) and isinstance(plain, Mapping):
        found = {
            key: read(args[1], value, _join(path, key), problems) for key, value in plain.items()
        }
        return UNSET if UNSET in found.values() else found
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
    whole = isinstance(plain, int) and not isinstance(plain, bool) and -_LARGEST <= plain < _LARGEST
    if kind is int:
        return plain if whole else UNSET
    if kind is float:
        finite = isinstance(plain, float) and abs(plain) < float("inf")  # NaN is not
        return float(plain) if whole or finite else UNSET
    return plain if kind in (bool, str) and type(plain) is kind else UNSET


def _read_sequence(kind: Any, plain: Sequence[Any], path: str, problems: list[Problem]) -> Any:
    args = get_args(kind)
    fixed = get_origin(kind) is tuple and Ellipsis not in args
    if fixed and len(plain) != len(args):
        problems.append(
            Problem(path, f"a list of {len(plain)} was found; {_fitting(kind)} would fit.")
        )
        return UNSET
    kinds = args if fixed else (args[0],) * len(plain)
    places = enumerate(zip(kinds, plain, strict=True))
    found = tuple(read(one, value, f"{path}[{place}]", problems) for place, (one, value) in places)
    return UNSET if any(value is UNSET for value in found) else found


def _read_union(
    kinds: Sequence[Any], plain: Any, path: str, problems: list[Problem], base: Any
) -> Any:
    tables = [kind for kind in kinds if _is_table(kind)]
    others = [kind for kind in kinds if not _is_table(kind)]
    takes_mappings = any(get_origin(kind) in (dict, Mapping) for kind in others)
    if tables and (
        (isinstance(plain, Mapping) and ("name" in plain or not takes_mappings))
        or (
            isinstance(plain, str)
            and str not in others
            and (plain != "none" or types.NoneType not in others)
        )
    ):
        return _read_table(tables, plain, path, problems, base)
    # The kind the value already has comes first, so that 3 stays whole where any number will do.
    for kind in sorted(others, key=lambda one: one is not type(plain)):
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
            problems += trial  # of several kinds this is the one that was meant
            return UNSET
    fitting = " or ".join(_fitting(kind) for kind in kinds if kind is not types.NoneType)
    problems.append(Problem(path, f"{_shown(plain)} was found; {fitting} would fit."))
    return UNSET


def _read_table(
    kinds: Sequence[Any], plain: Any, path: str, problems: list[Problem], base: Any
) -> Any:
    """One of several dataclasses, chosen by `name` where there is more than one to choose from."""
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
        if "name" in plain and hasattr(
            kind, "presets"
        ):  # where there is one kind, a name is that of a preset
            base = _preset(kind, plain["name"], _join(path, "name"), problems)
            plain = {key: value for key, value in plain.items() if key != "name"}
        return _read_fields(kind, plain, path, problems, base if isinstance(base, kind) else UNSET)
    keys = {key: value for key, value in plain.items() if key != "name"}
    chosen = _chosen(kinds, plain.get("name", UNSET), path, problems, base)
    if chosen is UNSET:
        _read_as_meant(kinds, plain.get("name"), keys, path, problems)
        return UNSET
    if not isinstance(chosen, type):
        made = _made(chosen, tuple(kinds), keys, plain["name"], path, problems)
        return made if made is UNSET else _read_fields(type(made), keys, path, problems, made)
    base = base if type(base) is chosen else UNSET
    if "preset" in keys and "preset" not in _fields_of(chosen):
        base = _preset(chosen, keys.pop("preset"), _join(path, "preset"), problems)
    return _read_fields(chosen, _forwarded(chosen, keys), path, problems, base)


def _forwarded(kind: type, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Move keys to the field that a class forwards them to, over what is there.

    A method that trains with another one has no settings of local training; `method.local` is the inner one's.
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
    """Return the keys that a class forwards, each with the field that takes it (`Class.forwards`)."""
    found: Mapping[str, str] = getattr(kind, "forwards", {})
    return found


def _merged(below: Any, above: Any) -> Any:
    """Return plain values in which those of `above` replace those of `below`, table by table."""
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
    """The class a name stands for, or a factory in a file; without a name, the class of what is there already."""
    named = choices(kinds)
    what = TABLES[kinds[0]].what if len(kinds) == 1 else path.rpartition(".")[2]
    if name is UNSET and base is not UNSET and isinstance(base, tuple(kinds)):
        return type(base)
    if name is UNSET:
        name = _usual(kinds) or UNSET
    if not isinstance(name, str):
        found = "no name was found" if name is UNSET else f"{_shown(name)} was found"
        problems.append(
            Problem(
                _join(path, "name"),
                f"{found}; the name of {_a(what)} is needed.{nearest('', named)}",
            )
        )
        return UNSET
    try:
        chosen = find(named, name, what)
    except FedquiltError as error:
        problems.append(Problem(_join(path, "name"), str(error)))
        return UNSET
    if isinstance(chosen, type) and not issubclass(chosen, tuple(kinds)):
        bases = " or ".join(kind.__name__ for kind in kinds)
        told = f"{name} was asked for as {_a(what)}; it is another kind of class. One derived from {bases} fits."
        problems.append(Problem(_join(path, "name"), told))
        return UNSET
    return chosen


def _usual(kinds: Sequence[Any]) -> str:
    """Return the name that a table without one of these kinds has, or an empty string."""
    return next((TABLES[kind].usual for kind in kinds if kind in TABLES), "")


def _read_as_meant(
    kinds: Sequence[Any], name: Any, keys: Mapping[str, Any], path: str, problems: list[Problem]
) -> None:
    """What is wrong below a name that nobody has: read as the nearest one, or as whichever class has the key."""
    named = {known: kind for known, kind in choices(kinds).items() if isinstance(kind, type)}
    close = difflib.get_close_matches(str(name), named, n=1)
    likely = [named[close[0]]] if close else []
    values = {}
    for key, value in keys.items():
        kind = next((one for one in (*likely, *named.values()) if key in _fields_of(one)), None)
        if kind is not None:
            inner = default(_fields_of(kind)[key])
            values[key] = read(_hints(kind)[key], value, _join(path, key), problems, inner)
    for kind in likely:
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
    """What a function in a file makes of the keys that are its parameters; they are taken out."""
    before = len(problems)
    takes = parameters(factory)
    options = {
        key: read(takes[key].hint, keys.pop(key), _join(path, key), problems)
        for key in list(keys)
        if key in takes
    }
    if len(problems) > before:
        return UNSET
    try:
        made = factory(**options)
    except FedquiltError as error:
        problems.append(Problem(path, str(error)))
        return UNSET
    except Exception as error:
        problems.append(Problem(path, f"{name} was called and failed: {said(error)}"))
        return UNSET
    if not isinstance(made, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        problems.append(
            Problem(
                path, f"{name} was called for a {wanted}; it returned {_a(type(made).__name__)}."
            )
        )
        return UNSET
    return made


def _preset(kind: type, name: Any, path: str, problems: list[Problem]) -> Any:
    presets = getattr(kind, "presets", {})
    if isinstance(name, str) and name in presets:
        return kind.preset(name)  # type: ignore[attr-defined]
    text = f"{_shown(name)} was found; {label(kind)} has no preset of that name.{nearest(str(name), presets)}"
    problems.append(Problem(path, text))
    return UNSET


def _read_fields(
    kind: type, plain: Mapping[str, Any], path: str, problems: list[Problem], base: Any
) -> Any:
    """A dataclass by its fields: those given are read, the others are the base's or the default."""
    before, own = len(problems), _fields_of(kind)
    hints, values = _hints(kind), {}
    for key, value in plain.items():
        if key in own:
            inner = default(own[key]) if base is UNSET else getattr(base, key)
            values[key] = read(hints[key], value, _join(path, key), problems, inner)
        else:
            problems.append(
                Problem(
                    _join(path, key), f"{_owner(kind, path)} has no such key.{nearest(key, own)}"
                )
            )
    for key, one in own.items():
        if base is UNSET and key not in plain and default(one) is UNSET:
            problems.append(
                Problem(_join(path, key), f"nothing was found; {_fitting(hints[key])} is needed.")
            )
    if len(problems) > before:
        problems += _further(kind, values, path, base)
        return UNSET
    try:
        return kind(**values) if base is UNSET else replace(base, **values)
    except Exception as error:  # a class of the user's own may raise anything
        problems.extend(_blamed(error, path, own))
        return UNSET


def _further(kind: type, values: Mapping[str, Any], path: str, base: Any) -> list[Problem]:
    """What a class finds wrong with the values that could be read, so that all problems are told at once."""
    bare: Any = object.__new__(kind)
    own = _fields_of(kind)
    for key, one in own.items():
        value = values.get(key, default(one) if base is UNSET else getattr(base, key))
        if value is not UNSET:
            object.__setattr__(bare, key, value)
    try:
        getattr(bare, "__post_init__", lambda: None)()
    except ConfigError as error:
        return _blamed(error, path, own) if error.fields else []
    except Exception:
        return []  # it missed what could not be read, which has been told
    return []


def _blamed(error: Exception, path: str, own: Mapping[str, Any]) -> list[Problem]:
    """The problems an error tells of: one for each field it names, else one for all of them."""
    if isinstance(error, ConfigError) and error.fields:
        return [
            Problem(_join(path, key) if key in own else path, text)
            for key, text in error.fields.items()
        ]
    return [Problem(path, str(error) if isinstance(error, FedquiltError) else said(error))]


def _read_choice(
    kind: type[Choice], plain: Mapping[str, Any], path: str, problems: list[Problem]
) -> Any:
    """A factory's options by its signature; nothing is called yet."""
    before, name = len(problems), plain.get("name", UNSET)
    own = {key: one for key, one in _fields_of(kind).items() if key not in ("name", "options")}
    settings = {key: value for key, value in plain.items() if key in own}
    options = {key: value for key, value in plain.items() if key not in own and key != "name"}
    hints = _hints(kind)
    values = {
        key: read(hints[key], value, _join(path, key), problems, default(own[key]))
        for key, value in settings.items()
    }
    if not isinstance(name, str):
        found = "nothing was found" if name is UNSET else f"{_shown(name)} was found"
        problems.append(
            Problem(_join(path, "name"), f"{found}; the name of {_a(kind.what)} is needed.")
        )
        return UNSET
    try:
        takes = parameters(kind.find(name))
    except (FedquiltError, OSError) as error:  # the name may be that of a file
        problems.append(Problem(_join(path, "name"), str(error)))
        return UNSET
    for key, value in options.items():
        if key in takes:
            options[key] = read(takes[key].hint, value, _join(path, key), problems)
        else:
            problems.append(
                Problem(
                    _join(path, key), f"{name} has no such option.{nearest(key, [*takes, *own])}"
                )
            )
    for key, parameter in takes.items():
        if parameter.default is UNSET and key not in options and key not in kind.offers:
            problems.append(
                Problem(
                    _join(path, key),
                    f"nothing was found; {name} needs {_fitting(parameter.hint)} here.",
                )
            )
    if len(problems) > before:
        problems += _further(kind, {**values, "name": name, "options": options}, path, UNSET)
        return UNSET
    try:
        return kind(name, options, **values)
    except ConfigError as error:
        problems.extend(_blamed(error, path, own))
        return UNSET


# --- writing ----------------------------------------------------------------------------------------------------


def write(value: Any, kind: Any = None) -> Any:
    """Plain values that `read` turns into an equal value. `kind` is the hint of the field that holds it."""
    if value is None:
        if str in _members(kind):  # the word would be read as text
            raise ConfigError("None cannot be written to a file where text may stand.")
        return "none"
    if isinstance(value, Choice):
        own = {
            key: one
            for key, one in _fields_of(type(value)).items()
            if key not in ("name", "options")
        }
        options = {key: write(option) for key, option in value.options.items()}
        return {"name": value.name, **_write_fields(value, own), **options}
    if is_dataclass(value):
        kinds = [one for one in _members(kind) if _is_table(one)]
        named = len(kinds) > 1 or any(one in TABLES for one in kinds)
        if any(one in TABLES and TABLES[one].short for one in kinds) and _has_defaults(value):
            return label(type(value))
        return ({"name": label(type(value))} if named else {}) | _write_fields(
            value, _fields_of(type(value))
        )
    if isinstance(value, Mapping):
        args = (
            get_args(
                next((one for one in _members(kind) if get_origin(one) in (dict, Mapping)), None)
            )
            or (None,) * 2
        )
        return {key: write(one, args[1]) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        listed = next(
            (one for one in _members(kind) if get_origin(one) in (tuple, Sequence, list)), None
        )
        return [write(one, next(iter(get_args(listed)), None)) for one in value]
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"{_a(type(value).__name__)} cannot be written to a file: {value!r}.")


def _has_defaults(value: Any) -> bool:
    """Return True if all fields of a dataclass have their defaults."""
    return all(getattr(value, key) == default(one) for key, one in _fields_of(type(value)).items())


def _write_fields(value: Any, own: Mapping[str, Field[Any]]) -> dict[str, Any]:
    hints, written = _hints(type(value)), {}
    for key, one in own.items():
        held, usual = getattr(value, key), default(one)
        if held is None and usual is None:
            continue  # TOML has no null
        try:
            written[key] = write(held, hints[key])
        except ConfigError as error:
            if (
                held is not usual
            ):  # what no file can hold is left to the code, where it is the code's own
                raise ConfigError(f"{type(value).__name__}.{key}: {error}") from error
    return written


# --- what there is to set ---------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """One option of a factory."""

    hint: Any
    default: Any


def parameters(factory: Callable[..., Any]) -> dict[str, Parameter]:
    """The options of a factory by its signature. What has no hint takes any value."""
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # built-in functions have none
        return {}
    function: Any = inspect.unwrap(getattr(factory, "func", factory))  # of a partial
    known = getattr(function, "__globals__", None) or getattr(
        function.__init__, "__globals__", {}
    )  # of a class
    return {
        name: Parameter(
            Any if one.annotation is one.empty else _hint(one.annotation, known),
            UNSET if one.default is one.empty else one.default,
        )
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


def choices(kinds: Sequence[Any]) -> dict[str, Any]:
    """The classes one can ask for by name where any of these kinds may stand."""
    named: dict[str, Any] = {}
    for kind in kinds:
        named |= TABLES[kind].kinds if kind in TABLES else {label(kind): kind}
    return named


class Variants(NamedTuple):
    """What one can name at a path: the keys that all of them take, and the name that stands there if none is given."""

    common: frozenset[str]
    usual: str


def variants(kind: Any, path: Sequence[str], usual: Any = UNSET) -> Variants | None:
    """What can be named at a path below a kind; None where a name decides nothing about other keys."""
    kinds = [one for one in _members(kind) if _is_table(one)]
    several = len(kinds) > 1 or any(one in TABLES for one in kinds)
    known = choices(kinds) if several else {}
    named = [one for one in known.values() if isinstance(one, type)] or kinds
    if path:
        for one in named:
            if path[0] in _fields_of(one):
                return variants(_hints(one)[path[0]], path[1:], default(_fields_of(one)[path[0]]))
        return None
    # A class in a file may stand here too: of it only the fields of the base class are known.
    open_bases = [one for one in kinds if one in TABLES]
    taken = [
        {*_fields_of(one), *_forwards(one)} - {"name", "options"} for one in (*named, *open_bases)
    ]
    if not several and any(hasattr(one, "presets") for one in kinds):
        return Variants(frozenset(), "")  # another preset is all there is
    if not several and not any(issubclass(one, Choice) for one in kinds):
        return None
    name = label(type(usual)) if is_dataclass(usual) else _usual(kinds)
    return Variants(frozenset(set.intersection(*taken)), name)


def label(kind: type) -> str:
    """Return the name of a class in files: that of its registry, else its own in lower case, else `file.py:Class`.

    `ServerAdam` is `server_adam`. A capital at the end belongs to the word before it: `AdamW` is `adamw`.
    """
    for base, table in TABLES.items():
        if issubclass(kind, base):
            return next(
                (name for name, one in table.kinds.items() if one is kind), None
            ) or name_of(kind)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z].)", "_", kind.__name__).lower()


def described(kind: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """What a dataclass or a factory takes: `options` (types), `defaults` and `help` (comments), each by name."""
    found, helps = _takes(kind), comments(kind)
    return {
        "options": {name: shown_hint(one.hint) for name, one in found.items()},
        "defaults": {
            name: _shown_default(one) for name, one in found.items() if one.default is not UNSET
        },
        "help": {name: helps[name] for name in found if name in helps},
    }


def leaves(
    kind: Callable[..., Any], base: Any = UNSET, path: str = ""
) -> dict[str, dict[str, Any]]:
    """Every single value one can set, by its path: type, default, and the comment in the code.

    Where a table is chosen by name, the values of those not chosen follow, as `path (name)`, unless they are the same.
    """
    found: dict[str, dict[str, Any]] = {}
    helps = comments(kind)
    for name, one in _takes(kind).items():
        value, place = one.default if base is UNSET else getattr(base, name), f"{path}{name}"
        kinds = [option for option in _members(one.hint) if _is_table(option)]
        if is_dataclass(value):
            own = leaves(type(value), value, f"{place}.")
            if len(kinds) > 1 or any(option in TABLES for option in kinds):
                named = choices(kinds)
                default_name, help = label(type(value)), helps.get(name, "")
                found[place] = {
                    "type": " | ".join(named),
                    "default": default_name,
                    "what it is": help,
                }
                for other, option in named.items():
                    # A table that may have itself as a part, such as a method over another, would have no end.
                    if option is not type(value) and option is not kind:
                        rows = leaves(option, path=f"{place}.").items()
                        own |= {
                            f"{leaf} ({other})": row for leaf, row in rows if own.get(leaf) != row
                        }
            found |= own
        elif value is None and kinds:
            named = choices(kinds)
            found[place] = {
                "type": shown_hint(one.hint),
                "default": "none",
                "what it is": helps.get(name, ""),
            }
            for other, option in named.items():
                which = f" ({other})" if len(named) > 1 else ""
                found |= {
                    f"{leaf}{which}": row for leaf, row in leaves(option, path=f"{place}.").items()
                }
        else:
            shown = (
                "needed"
                if value is UNSET
                else json.dumps(_shown_default(Parameter(one.hint, value)))
            )
            found[place] = {
                "type": shown_hint(one.hint),
                "default": shown,
                "what it is": helps.get(name, ""),
            }
    return found


def _takes(kind: Callable[..., Any]) -> dict[str, Parameter]:
    """The fields of a dataclass, or the parameters of a factory."""
    if not is_dataclass(kind):
        return parameters(kind)
    hints = _hints(kind)
    return {name: Parameter(hints[name], default(one)) for name, one in _fields_of(kind).items()}


def shown_hint(hint: Any) -> str:
    """A type hint as one would write it; of a Literal, the words."""
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
    """Return the comment behind or above each field of a class or parameter of a function, and those it inherits."""
    function = getattr(kind, "func", kind)  # of a partial
    lineage = reversed(function.__mro__[:-1]) if isinstance(function, type) else [function]
    found: dict[str, str] = {}
    for one in lineage:
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):
            continue
        found |= _comments_in(source)
    return found


@cache
def _comments_in(source: str) -> dict[str, str]:
    """Return comments by name, of `name: hint = default  # comment` or with the comment on the lines above."""
    found: dict[str, str] = {}
    above: dict[
        int, str
    ] = {}  # Comments on lines of their own, by the number of the line below them
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("# ")
        row = token.start[0]
        if match := re.match(r"\s+(\w+): .*?#", token.line):
            found[match[1]] = text
        elif token.line.lstrip().startswith("#"):
            above[row + 1] = f"{above.pop(row)} {text}" if row in above else text

    lines = ["", *source.splitlines(), ""]  # Lines are counted from 1
    for row, text in above.items():
        if match := re.match(r"\s+(\w+): \S", lines[row]):
            found.setdefault(match[1], text)
    return found


# --- words ------------------------------------------------------------------------------------------------------


def _fitting(kind: Any) -> str:
    """What would fit, in words."""
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
    if kind in words:
        return words[kind]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_fitting(one) for one in args if one is not types.NoneType)
    if origin in (tuple, Sequence, list):
        fixed = origin is tuple and Ellipsis not in args
        return (
            f"a list of ({', '.join(map(_fitting, args))})"
            if fixed
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
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


def _owner(kind: type, path: str) -> str:
    """Whose keys these are: what was chosen by name, else the table itself."""
    chosen = any(issubclass(kind, base) for base in TABLES)
    return label(kind) if chosen else path.rpartition(".")[2] or "a configuration"


# --- hints ------------------------------------------------------------------------------------------------------


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or kind in TABLES)


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _fields_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields that files can set, by name. `metadata={"setting": False}` keeps a field out."""
    if not is_dataclass(kind):
        return {}
    return {one.name: one for one in fields(kind) if one.init and one.metadata.get("setting", True)}


def default(one: Field[Any]) -> Any:
    """A field's default, made if need be; UNSET if it has none."""
    if one.default is not MISSING:
        return one.default
    return UNSET if one.default_factory is MISSING else one.default_factory()


def _hints(kind: Any) -> dict[str, Any]:
    own = _fields_of(kind)
    return {
        name: _hint(hint, vars(sys.modules[base.__module__]))
        for base in reversed(kind.__mro__)
        for name, hint in vars(base).get("__annotations__", {}).items()
        if name in own
    }


def _hint(hint: Any, known: dict[str, Any]) -> Any:
    """A hint that may be text, evaluated; what is imported for type checkers alone takes any value."""
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
