"""Bounds on settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from fedquilt.checks import outside, within
from fedquilt.errors import ConfigError


@dataclass(frozen=True)
class Thing:
    one: float = 0.5
    many: tuple[float, ...] = (0.1, 0.2)
    maybe: float | None = None


@pytest.mark.parametrize(
    ("interval", "inside", "beyond"),
    [
        ("(0, 1)", [0.5], [0, 1, -1, 2]),
        ("[0, 1]", [0, 1, 0.5], [-1e-9, 1.1]),
        ("(0, 1]", [1], [0]),
        ("[0, inf)", [0, 1e300], [-1, math.inf, math.nan, None]),
        ("(-inf, inf)", [-1e300, 0], [math.inf, -math.inf, math.nan]),
    ],
)
def test_intervals_are_open_or_closed_and_nan_is_in_none(
    interval: str, inside: list, beyond: list
) -> None:
    for value in inside:
        assert outside(Thing(one=value), one=interval) == {}
    for value in beyond:
        assert outside(Thing(one=value), one=interval) == {
            "one": f"{value} was asked for; it must lie in {interval}."
        }


def test_text_is_shown_with_its_quotes() -> None:
    told = "'0.5' was asked for, which is text; it must be a number in (0, 1)."
    assert outside(Thing(one="0.5"), one="(0, 1)") == {"one": told}  # type: ignore[arg-type]


def test_every_value_of_a_sequence_is_checked() -> None:
    assert outside(Thing(many=(0.1, 3.0)), many="[0, 1]") == {
        "many": "3.0 was asked for; it must lie in [0, 1]."
    }


def test_one_error_names_every_field() -> None:
    with pytest.raises(ConfigError) as caught:
        within(Thing(one=2.0), one="[0, 1]", many="[0, 1]", maybe="[0, 1]")
    assert str(caught.value) == (
        "Thing: one = 2.0 was asked for; it must lie in [0, 1]. maybe = None was asked for; it "
        "must lie in [0, 1]."
    )
    assert list(caught.value.fields) == ["one", "maybe"]
