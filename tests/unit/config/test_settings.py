"""Dataclasses from plain values and back, and the errors about settings that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from fedquilt.checks import within
from fedquilt.config.choice import Choice
from fedquilt.config.listing import comments, described, leaves
from fedquilt.config.reading import read
from fedquilt.config.schema import parameters
from fedquilt.config.tables import TABLES, UNSET, Problem, SettingsTable
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError


@dataclass(frozen=True)
class Round:
    """A shape."""

    radius: float = 1.0  # from the centre

    def __post_init__(self) -> None:
        within(self, radius="(0, inf)")


@dataclass(frozen=True)
class BoxShape:
    """A shape with corners."""

    sides: tuple[float, float] = (1.0, 2.0)


@dataclass(frozen=True)
class Animal:
    """A base class with a registry."""

    legs: int = 4
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def preset(cls, name: str) -> Animal:
        return cls(**cls.presets[name])


@dataclass(frozen=True)
class Bird(Animal):
    legs: int = 2
    nest: Round | BoxShape = Round(0.5)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"stork": {"nest": Round(2.0)}}


@dataclass(frozen=True)
class Fish(Animal):
    legs: int = 0
    depth: float | None = None


def cake(
    layers: int,
    sugar: float = 0.5,
    fruit: Sequence[str] = (),
    oven: Callable[[], int] = int,
    guests=None,
):
    """A factory."""


@dataclass(frozen=True)
class Recipe(Choice):
    tries: int = 1
    noun: ClassVar[str] = "recipe"

    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        if name == "cake":
            return cake
        raise ConfigError(f"there is no recipe named {name!r}.")


@dataclass(frozen=True)
class Farm:
    animal: Animal
    name: str = "farm"
    open: bool = True
    acres: int | float = 3
    crop: Literal["oats", "rye"] = "oats"
    fields: dict[str, float] = field(default_factory=dict)
    shape: Round | BoxShape | dict[str, float] = BoxShape()
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()
    owner: str | None = "nobody"


@pytest.fixture(autouse=True)
def animals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, Animal, SettingsTable("animal", {"bird": Bird, "fish": Fish}))


def farm(**plain: Any) -> Farm:
    problems: list[Problem] = []
    found = read(Farm, {"animal": "fish", **plain}, "", problems)
    assert problems == []
    return found


def wrong(kind: Any = Farm, **plain: Any) -> dict[str, str]:
    problems: list[Problem] = []
    assert read(kind, plain, "", problems) is UNSET
    return dict(problems)


# --- reading ------------------------------------------------------------------------------------


def test_missing_values_have_their_defaults() -> None:
    assert farm() == Farm(Fish())


def test_values_are_read_by_their_hints() -> None:
    read_one = farm(
        animal={"name": "bird", "legs": 3},
        open=False,
        acres=2.5,
        crop="rye",
        fields={"north": 1},
        notes=["a", "b"],
        recipe={"name": "cake", "layers": 2, "fruit": ["fig"], "tries": 4},
    )
    assert read_one.animal == Bird(legs=3)
    assert read_one.acres == 2.5
    assert read_one.fields == {"north": 1.0}
    assert type(read_one.fields["north"]) is float
    assert read_one.notes == ("a", "b")
    assert read_one.recipe == Recipe("cake", {"layers": 2, "fruit": ("fig",)}, tries=4)


def test_a_name_alone_means_a_table_with_that_name() -> None:
    assert farm(animal="bird").animal == farm(animal={"name": "bird"}).animal == Bird()
    assert farm(shape="round").shape == Round()


def test_integers_stay_integers_if_floats_fit_too() -> None:
    assert type(farm(acres=3).acres) is int
    assert type(farm(acres=3.0).acres) is float


def test_a_table_without_a_name_changes_fields_of_the_default() -> None:
    bird = farm(animal={"name": "bird", "nest": {"radius": 3}}).animal
    assert bird == Bird(nest=Round(3.0))


def test_another_name_starts_from_the_defaults_of_its_class() -> None:
    assert farm(animal={"name": "bird", "nest": "box_shape"}).animal == Bird(nest=BoxShape())


def test_a_union_with_a_table_of_numbers_takes_both() -> None:
    assert farm(shape={"a": 1.0}).shape == {"a": 1.0}
    assert farm(shape={"name": "round", "radius": 2}).shape == Round(2.0)


def test_a_preset_comes_first_and_other_keys_on_top() -> None:
    assert farm(animal={"name": "bird", "preset": "stork"}).animal == Bird(nest=Round(2.0))
    assert farm(animal={"name": "bird", "preset": "stork", "legs": 1}).animal == Bird(1, Round(2.0))
    assert (
        "Did you mean 'stork'?"
        in wrong(animal={"name": "bird", "preset": "storck"})["animal.preset"]
    )
    assert "Known: none." in wrong(animal={"name": "fish", "preset": "stork"})["animal.preset"]


def test_none_is_written_as_text() -> None:
    assert farm(animal={"name": "fish", "depth": "none"}).animal == Fish(depth=None)
    assert farm(recipe="none").recipe is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("open", 1, "1 was found; true or false would fit."),
        ("acres", True, "true was found; a whole number or a finite number would fit."),
        ("acres", math.nan, "nan was found; a whole number or a finite number would fit."),
        ("acres", 10**30, "a whole number or a finite number would fit."),
        ("crop", "oat", "'oat' was found; one of 'oats', 'rye' would fit. Did you mean 'oats'?"),
        ("crop", 3, "3 was found; one of 'oats', 'rye' would fit."),
        ("name", ["a"], "['a'] was found; text would fit."),
        ("notes", "a", "'a' was found; a list, each text would fit."),
        ("notes", "x" * 99, "x…"),
        ("fields", 3, "3 was found; a table, each value a finite number would fit."),
        ("animal", 3, "3 was found; an animal by its name, or a table with one would fit."),
        (
            "shape",
            3,
            "3 was found; a table with radius or a table with sides or a table, each value",
        ),
    ],
)
def test_values_of_another_kind_are_refused(key: str, value: object, said: str) -> None:
    problems: list[Problem] = []
    assert read(Farm, {"animal": "fish", key: value}, "", problems) is UNSET
    ((path, text),) = problems
    assert path == key
    assert said in text


def test_all_problems_are_reported_at_once_with_their_paths() -> None:
    found = wrong(
        nmae="x",
        open="yes",
        animal={"name": "bird", "nest": {"name": "round", "radius": -1.0}, "legs": 1.5},
        notes=["a", 2],
        shape={"name": "box_shape", "sides": [1.0]},
        fields={"a b": "c"},
        recipe={"name": "cake", "sugr": 1},
    )
    assert list(found) == [
        "nmae",
        "open",
        "animal.nest.radius",
        "animal.legs",
        "notes[1]",
        "shape.sides",
        'fields."a b"',
        "recipe.sugr",
        "recipe.layers",
    ]
    assert found["nmae"].startswith(
        "a configuration has no such key. Did you mean 'name'? Known: animal, name, "
    )
    assert found["animal.nest.radius"] == "-1.0 was asked for; it must lie in (0, inf)."
    assert (
        found["shape.sides"]
        == "a list of 1 was found; a list of (a finite number, a finite number) would fit."
    )
    assert found["recipe.sugr"] == (
        "cake has no such option. Did you mean 'sugar'? Known: layers, sugar, fruit, oven, guests, "
        "tries."
    )
    assert found["recipe.layers"] == "nothing was found; cake needs a whole number here."


def test_values_out_of_bounds_are_reported_beside_values_that_cannot_be_read() -> None:
    @dataclass(frozen=True)
    class Pair:
        one: int
        other: int = 0

        def __post_init__(self) -> None:
            within(self, other="[0, 9]")

    assert list(wrong(Pair, one="x", other=10)) == ["one", "other"]
    assert list(wrong(Pair, other=10)) == ["one", "other"]


def test_unknown_names_get_the_nearest_known_one() -> None:
    assert wrong(animal="brid") == {
        "animal.name": "there is no animal named 'brid'. Did you mean 'bird'? Known: bird, fish."
    }
    assert wrong(animal={})["animal.name"].startswith(
        "no name was found; the name of an animal is needed"
    )
    assert "Known: round, box_shape." in wrong(animal="fish", shape="oval")["shape.name"]
    assert wrong(animal="fish", recipe={"layers": 1}).keys() == {"recipe.name"}
    assert wrong() == {
        "animal": "nothing was found; an animal by its name, or a table with one is needed."
    }


def test_values_that_files_cannot_hold_are_reported() -> None:
    found = wrong(animal="fish", recipe={"name": "cake", "layers": 1, "oven": 3})
    assert "which no file can hold" in found["recipe.oven"]


def test_an_option_without_a_hint_needs_a_value() -> None:
    problems: list[Problem] = []
    read(Untyped, {"name": "pie"}, "recipe", problems)
    assert dict(problems) == {"recipe.filling": "nothing was found; pie needs a value here."}
    assert read(Untyped, {"name": "pie", "filling": 3}, "recipe", []).options == {"filling": 3}


class Untyped(Recipe):
    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        return lambda filling: filling


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Farm(Fish()),
        Farm(Bird(nest=BoxShape((3.0, 4.0))), fields={"a": 1.0}, shape=Round(), notes=("x",)),
        Farm(
            Fish(depth=2.0),
            shape={"a": 1.0},
            recipe=Recipe("cake", {"layers": 3, "fruit": ("fig",)}, tries=2),
        ),
        Farm(Fish(), acres=1.0, recipe=None),
    ],
)
def test_written_values_are_read_back_unchanged(value: Farm) -> None:
    problems: list[Problem] = []
    assert read(Farm, write(value), "", problems) == value
    assert problems == []


def test_only_tables_selected_by_name_are_written_with_one() -> None:
    assert write(Farm(Bird()))["animal"] == {
        "name": "bird",
        "legs": 2,
        "nest": {"name": "round", "radius": 0.5},
    }
    assert write(Farm(Fish(), shape=Round())) == {
        "animal": {"name": "fish", "legs": 0},
        "name": "farm",
        "open": True,
        "acres": 3,
        "crop": "oats",
        "fields": {},
        "shape": {"name": "round", "radius": 1.0},
        "notes": [],
        "owner": "nobody",
    }


def test_values_that_cannot_be_written_are_named() -> None:
    @dataclass(frozen=True)
    class Odd:
        made: Any = print
        other: Any = 1

    assert write(Odd()) == {"other": 1}
    with pytest.raises(ConfigError, match=r"Odd\.other: .* cannot be written to a file"):
        write(Odd(other=object()))
    with pytest.raises(ConfigError, match=r"Farm\.owner: None cannot be written"):
        write(Farm(Fish(), owner=None))


# --- what there is ------------------------------------------------------------------------------


def test_options_defaults_and_comments_are_described() -> None:
    assert described(Round) == {
        "options": {"radius": "float"},
        "defaults": {"radius": 1.0},
        "help": {"radius": "from the centre"},
    }
    found = described(cake)
    assert found["options"]["fruit"] == "Sequence[str]"
    assert found["options"]["guests"] == "Any"
    assert "layers" not in found["defaults"]
    assert found["defaults"]["oven"] == "int"
    assert parameters(cake)["guests"].hint is Any


def test_comments_are_inherited() -> None:
    from fedquilt.methods import FedProx

    assert comments(FedProx)["mu"] == "Weight of the proximal term. 0 gives FedAvg."
    assert comments(FedProx)["share"].startswith("Share of every axis")


@dataclass(frozen=True)
class Commented:
    """Fields whose help is behind them, above them, or nowhere."""

    behind: int = 0  # Behind
    # Above, on
    # two lines
    above: int = 0
    # This one loses
    both: int = 0  # This one wins

    # This is no help, because of the empty line.

    none: int = 0


def test_comments_are_behind_a_field_or_above_it() -> None:
    assert comments(Commented) == {
        "behind": "Behind",
        "above": "Above, on two lines",
        "both": "This one wins",
    }


def test_every_setting_of_progfed_and_its_codec_has_help() -> None:
    from fedquilt.methods import ProgFed
    from fedquilt.round.link import Codec

    for kind in (ProgFed, Codec):
        told = described(kind)
        assert set(told["help"]) == set(told["options"])


@dataclass(frozen=True)
class Pan:
    price: float = 9.0  # Price in francs


@dataclass(frozen=True)
class Pot:
    price: float = 9.0  # Price in francs
    lid: bool = True  # Comes with a lid


@dataclass(frozen=True)
class Cauldron(Pot):
    legs: int = 3  # Number of legs


@dataclass(frozen=True)
class Hearth:
    vessel: Pan | Pot | Cauldron = Pot()  # Vessel on the fire


def test_inherited_settings_of_a_choice_are_listed_with_its_name_and_their_help() -> None:
    rows = leaves(Hearth)
    assert list(rows) == [
        "vessel",
        "vessel.price",  # All have it, so that it is listed once
        "vessel.lid",
        "vessel.lid (cauldron)",  # A pan has none
        "vessel.legs (cauldron)",
    ]
    assert rows["vessel.lid (cauldron)"] == rows["vessel.lid"]
    assert rows["vessel.lid (cauldron)"]["what it is"] == "Comes with a lid"
