"""Checks of settings: `within(self, lr="(0, inf)", momentum="[0, 1)")` in a `__post_init__`.

`File` is a type hint for the path of a file or folder, which must exist when settings are read. In
Python it is a plain `str`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np

from fedquilt.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """A check of a setting, for `Annotated[kind, Check(why)]`.

    It only holds the function. Reading a configuration calls it, and reports what it returns.
    """

    why: Callable[[Any], str]  # Returns what is wrong with a value, or "" if it is valid.


def missing(path: str) -> str:
    """Return an error message if a file or folder does not exist, else an empty string.

    An empty path is valid. A relative path starts from the current folder.
    """
    try:
        exists = not path or Path(path).exists()
    except (OSError, ValueError):  # The name is too long, or has a NUL in it.
        exists = False
    if not exists:
        return f"{path!r} was asked for; there is no such file or folder in {Path.cwd()}."
    return ""


File = Annotated[str, Check(missing)]


def within(owner: object, **intervals: str) -> None:
    """Raise one error that names all fields of the owner outside of their intervals.

    NaN and None are outside of every interval. Of a list or a tuple, every value is checked.

    Args:
        owner: Object that has the fields, usually a dataclass in its `__post_init__`.
        **intervals: Interval of each field, such as `lr="(0, inf)"`. A bracket includes the bound,
            and a parenthesis excludes it.

    Raises:
        ConfigError: Some fields are outside of their intervals.
    """
    refuse(owner, outside(owner, **intervals))


def outside(owner: object, **intervals: str) -> dict[str, str]:
    """Return an error message for each field of the owner outside of its interval, by field name.

    It is the check of `within` without the error. Fields that are valid are left out.
    """
    return {
        name: _problem(value, interval)
        for name, interval in intervals.items()
        for value in _values(getattr(owner, name))
        if not _is_in(value, interval)
    }


def _problem(value: object, interval: str) -> str:
    if isinstance(value, str):
        return f"{value!r} was asked for, which is text; it must be a number in {interval}."
    return f"{value} was asked for; it must lie in {interval}."


def one_of(owner: object, /, **words: object) -> None:
    """Raise one error that names all fields whose value is not among those of a Literal.

    Args:
        owner: Object that has the fields, usually a dataclass in its `__post_init__`.
        **words: Literal of each field, such as `long=Cut`.

    Raises:
        ConfigError: Some fields have other values.
    """
    problems = {
        name: f"{getattr(owner, name)!r} was asked for; it may be "
        f"{', '.join(map(repr, get_args(literal)))}."
        for name, literal in words.items()
        if getattr(owner, name) not in get_args(literal)
    }
    refuse(owner, problems)


def refuse(owner: object, problems: Mapping[str, str]) -> None:
    """Raise one error for all fields that have a problem.

    Args:
        owner: Object that has the fields.
        problems: Problem of each field, as the end of a sentence that begins with "name = ". Empty:
            nothing is raised.

    Raises:
        ConfigError: Some field has a problem.
    """
    if problems:
        messages = " ".join(f"{name} = {text}" for name, text in problems.items())
        raise ConfigError(f"{type(owner).__name__}: {messages}", problems)


_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "float": (Real, "a number"),
    "int": (Integral, "a whole number"),
    "bool": ((bool, np.bool_), "True or False"),
    "str": (str, "text"),
}


def check_kinds(owner: Any) -> None:
    """Raise one error that names all fields of a dataclass whose value has the wrong type.

    Dataclasses do not check types themselves. Only the hints float, int, bool and str are checked.
    A float may be an integer. Booleans are not accepted as numbers.

    Raises:
        ConfigError: Some fields have values of other types.
    """
    problems = {}
    for field in fields(owner):
        hint = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        value = getattr(owner, field.name)
        if hint not in _KINDS:
            continue
        kind, words = _KINDS[hint]
        is_flag = isinstance(value, bool) and hint in ("float", "int")
        if is_flag or not isinstance(value, kind):
            problems[field.name] = f"{value!r} was asked for; it must be {words}."
    refuse(owner, problems)


def whole(value: object, minimum: int = 0) -> bool:
    """Return True if a value is an integer of Python or NumPy, and at least `minimum`.

    Booleans are not accepted as integers.
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def _values(value: object) -> Iterable[object]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _is_in(value: object, interval: str) -> bool:
    if not isinstance(value, (int, float)):
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)
