"""Bounds on settings, said once: `within(self, lr="(0, inf)", momentum="[0, 1)")` in a `__post_init__`.

`File` is a hint for text that names what has to be there when settings are read; in Python it is plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, get_args

from fedquilt.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """In `Annotated[kind, Check(why)]`: asked of a value that settings hold; "" if it will do, else what is wrong."""

    why: Callable[[Any], str]


def missing(path: str) -> str:
    """What to say of a file or folder that is not there; nothing was asked for with ""."""
    try:
        there = not path or Path(path).exists()
    except (OSError, ValueError):  # a name too long for a file, or with a NUL in it
        there = False
    return (
        "" if there else f"{path!r} was asked for; there is no such file or folder in {Path.cwd()}."
    )


File = Annotated[str, Check(missing)]


def within(owner: object, **intervals: str) -> None:
    """Raise one error that names every field of the owner outside of its interval. NaN and None lie in none."""
    refuse(owner, outside(owner, **intervals))


def outside(owner: object, **intervals: str) -> dict[str, str]:
    """What is wrong with each field outside of its interval."""
    return {
        name: _wrong(value, interval)
        for name, interval in intervals.items()
        for value in _values(getattr(owner, name))
        if not _lies_in(value, interval)
    }


def _wrong(value: object, interval: str) -> str:
    if isinstance(value, str):
        return f"{value!r} was asked for, which is text; it must be a number in {interval}."
    return f"{value} was asked for; it must lie in {interval}."


def one_of(owner: object, /, **words: object) -> None:
    """Raise one error that names every field of the owner that is none of a Literal's words."""
    wrong = {
        name: f"{getattr(owner, name)!r} was asked for; it may be {', '.join(map(repr, get_args(literal)))}."
        for name, literal in words.items()
        if getattr(owner, name) not in get_args(literal)
    }
    refuse(owner, wrong)


def refuse(owner: object, wrong: Mapping[str, str]) -> None:
    """Raise one error for all fields with which something is wrong."""
    if wrong:
        told = " ".join(f"{name} = {text}" for name, text in wrong.items())
        raise ConfigError(f"{type(owner).__name__}: {told}", wrong)


def whole(value: object, least: int = 0) -> bool:
    """Whether it is a whole number, of Python or NumPy, and not below the least; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _values(value: object) -> Iterable[object]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _lies_in(value: object, interval: str) -> bool:
    if not isinstance(value, (int, float)):
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)
