"""Type hints of dataclasses and factories as a schema: fields, parameters, and names of classes."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin

from fedquilt.config.tables import TABLES, UNSET
from fedquilt.names import name_of


def forwards(kind: Any) -> Mapping[str, str]:
    """Return the keys that a class forwards (`Class.forwards`), with the field that takes each.

    The result is empty if the class forwards none.
    """
    fields_by_key: Mapping[str, str] = getattr(kind, "forwards", {})
    return fields_by_key


def usual_name(kinds: Sequence[Any]) -> str:
    """Return the name that a table of these kinds has by default. Empty: it needs a name."""
    return next((TABLES[kind].usual for kind in kinds if kind in TABLES), "")


class Parameter(NamedTuple):
    """A parameter of a factory, or a field of a dataclass."""

    hint: Any
    default: Any


def parameters(factory: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a factory by name, with type hint and default.

    Those without a type hint have the hint Any. Those without a default have UNSET. Positional-only
    and variadic parameters are left out. Built-in functions have none.

    Args:
        factory: A function, a class or a `functools.partial`.
    """
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # Built-in functions have no signature.
        return {}
    function: Any = inspect.unwrap(getattr(factory, "func", factory))  # `func` of a partial
    # A class has no globals, but its `__init__` has.
    names = getattr(function, "__globals__", None) or getattr(function.__init__, "__globals__", {})
    return {
        name: Parameter(
            Any
            if parameter.annotation is parameter.empty
            else evaluated_hint(parameter.annotation, names),
            UNSET if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def choices(kinds: Sequence[Any]) -> dict[str, Any]:
    """Return the classes that can be selected for any of these kinds, by name.

    Args:
        kinds: Dataclasses, which are themselves selectable, or base classes with a registry.
    """
    named: dict[str, Any] = {}
    for kind in kinds:
        named |= TABLES[kind].kinds if kind in TABLES else {label(kind): kind}
    return named


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


def is_table(kind: Any) -> bool:
    """Return True if a type hint is a dataclass, or a base class with a registry."""
    return isinstance(kind, type) and (is_dataclass(kind) or kind in TABLES)


def members(kind: Any) -> Sequence[Any]:
    """Return the members of a union, or the type hint itself if it is no union."""
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def fields_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass that files can set, by name.

    Fields without `init` are excluded, and so are those with `metadata={"setting": False}`. The
    result is empty if `kind` is no dataclass.
    """
    if not is_dataclass(kind):
        return {}
    return {
        field_info.name: field_info
        for field_info in fields(kind)
        if field_info.init and field_info.metadata.get("setting", True)
    }


def default(field_info: Field[Any]) -> Any:
    """Return the default of a field, created by its factory if it has one. UNSET: no default."""
    if field_info.default is not MISSING:
        return field_info.default
    if field_info.default_factory is not MISSING:
        return field_info.default_factory()
    return UNSET


@cache
def field_hints(kind: Any) -> Mapping[str, Any]:
    """Return the evaluated type hints of the fields that files can set, by name.

    Inherited fields are included. They are cached, because evaluating them took more than half of
    the time of reading a file.
    """
    fields_by_name = fields_of(kind)
    return {
        name: evaluated_hint(hint, vars(sys.modules[base.__module__]))
        for base in reversed(kind.__mro__)
        for name, hint in vars(base).get("__annotations__", {}).items()
        if name in fields_by_name
    }


def evaluated_hint(hint: Any, names: dict[str, Any]) -> Any:
    """Evaluate a type hint that may be text.

    If the hint needs a name that is imported for type checkers only, the result is Any.

    Args:
        hint: A type hint, or its source text.
        names: Global names of the module that has the hint.
    """
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__={"hint": hint}), names, None, True
        )["hint"]
    except NameError:
        return Any
