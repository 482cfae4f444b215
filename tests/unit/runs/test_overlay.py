"""Settings over settings: assignments, other names, and tables that are merged."""

from __future__ import annotations

from typing import Any

import pytest

from fedquilt.config.toml import assign, parse_assignment
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import choose, overlay


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("method.shift=2", ["method", "shift"], 2),
        ("method.shift = -1", ["method", "shift"], -1),
        ("lr=1e-3", ["lr"], 1e-3),
        ("a.b=true", ["a", "b"], True),
        ("method=fedavg", ["method"], "fedavg"),
        ("data=x.npz", ["data"], "x.npz"),
        ('a="quoted"', ["a"], "quoted"),
        ("a=[1, 2]", ["a"], [1, 2]),
        ("a={ name = 'income' }", ["a"], {"name": "income"}),
        ('fleet.budgets."0.5"=0.3', ["fleet", "budgets", "0.5"], 0.3),
        ("a=", ["a"], ""),
        ("a=b=c", ["a"], "b=c"),
        ("a=1\nb=2", ["a"], "1\nb=2"),
    ],
)
def test_assignments_take_toml_values_and_bare_words(
    text: str, path: list[str], value: object
) -> None:
    assert parse_assignment(text) == (path, value)


@pytest.mark.parametrize("text", ["", "method.shift", "=3", "a..b=1", "a b=1"])
def test_malformed_assignments_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as --set method"):
        parse_assignment(text)


def test_a_name_becomes_a_table_when_a_key_of_it_is_set() -> None:
    assert assign({"method": "fedrolex"}, ["method", "shift"], 2) == {
        "method": {"name": "fedrolex", "shift": 2}
    }
    assert assign({}, ["a", "b", "c"], 1) == {"a": {"b": {"c": 1}}}
    assert assign({"a": {"x": 1, "y": 2}}, ["a"], {"z": 3}) == {"a": {"z": 3}}
    assert assign({"rounds": 3}, ["rounds", "x"], 1) == {"rounds": {"x": 1}}


def test_another_name_keeps_the_keys_that_all_variants_have() -> None:
    own = {"name": "fedrolex", "shift": 2, "preset": "paper", "local": {"epochs": 3}}
    assert choose({"method": own, "rounds": 2}, ["method"], "fedavg") == {
        "method": {"preset": "paper", "local": {"epochs": 3}, "name": "fedavg"},
        "rounds": 2,
    }
    assert choose({"method": own}, ["method"], "fedrolex") == {"method": own}
    assert choose({"method": "fedrolex"}, ["method"], "fedavg") == {"method": {"name": "fedavg"}}
    assert choose({}, ["method"], "fedavg") == {"method": {"name": "fedavg"}}
    assert choose({"model": {"name": "vit", "depth": 2}}, ["model"], "vgg11") == {
        "model": {"name": "vgg11"}
    }
    data = {"name": "digits", "public": 0.1, "partition": "labels"}
    assert choose({"data": data}, ["data"], "x.npz") == {
        "data": {"name": "x.npz", "partition": "labels"}
    }


def test_a_preset_that_another_method_lacks_is_refused() -> None:
    """Earlier versions dropped the preset, and compared the other method without tuning."""
    parts = {"model": "tiny_resnet", "data": "digits"}
    asked = {"method": {"name": "splitmix", "preset": "cifar10-robust"}, **parts}
    with pytest.raises(
        ConfigError,
        match=r"method\.preset: 'cifar10-robust' was found; fedavg has no preset of that",
    ) as caught:
        Experiment.of(choose(asked, ["method"], "fedavg"))
    assert f"Known: {', '.join(METHODS['fedavg'].presets)}." in str(caught.value)
    for method in ("splitmix", "sheterofl", "heterofl", "fedavg"):
        digits = {"method": {"name": "splitmix", "preset": "digits"}, **parts}
        found = Experiment.of(choose(digits, ["method"], method)).method
        assert found == METHODS[method].preset("digits")


def test_settings_are_merged_table_by_table() -> None:
    base = {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": {"optimizer": {"lr": 0.1}, "epochs": 2}},
    }
    over = {"method": {"local": {"optimizer": {"momentum": 0.9}, "batch_size": 5}}, "seed": 3}
    local = {"optimizer": {"lr": 0.1, "momentum": 0.9}, "epochs": 2, "batch_size": 5}
    assert overlay(base, over) == {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": local},
        "seed": 3,
    }
    assert base == {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": {"optimizer": {"lr": 0.1}, "epochs": 2}},
    }
    assert overlay(base, {}) == base
    assert overlay(base, {})["method"] is not base["method"]
    assert overlay({}, base) == base


def test_another_name_drops_the_options_of_the_previous_one() -> None:
    base = {
        "method": {"name": "fedrolex", "preset": "paper", "shift": 2, "local": {"epochs": 2}},
        "data": {"name": "x.npz", "channels": "last", "partition": {"name": "labels", "labels": 2}},
        "fleet": {"clients": 8, "budgets": {"name": "two_level", "rho": 0.1}},
    }
    over = {
        "method": {"local": {"epochs": 3}, "weighting": "data", "name": "fedavg"},
        "data": {"name": "generated", "train": 8, "partition": {"labels": 3}},
        "fleet": {"budgets": "uniform"},
    }
    assert overlay(base, over) == {
        "method": {
            "name": "fedavg",
            "preset": "paper",
            "local": {"epochs": 3},
            "weighting": "data",
        },
        "data": {"name": "generated", "train": 8, "partition": {"name": "labels", "labels": 3}},
        "fleet": {"clients": 8, "budgets": {"name": "uniform"}},
    }
    assert overlay(base, {"fleet": {"budgets": "two_level"}}) == base
    assert overlay(base, {"fleet": {"budgets": {"name": "two_level"}}}) == base


def test_names_lists_and_none_replace_tables() -> None:
    base = {
        "method": "fedavg",
        "model": "mlp",
        "data": {"name": "digits", "partition": "iid"},
        "trackers": ["wandb"],
    }
    assert overlay(base, {"method": {"share": 0.5}})["method"] == {"name": "fedavg", "share": 0.5}
    assert overlay(base, {"data": {"partition": "none"}})["data"] == {
        "name": "digits",
        "partition": "none",
    }
    assert overlay(base, {"trackers": []})["trackers"] == []
    norms = overlay(
        {"method": {"name": "fedavg", "local": {"norm": "post"}}},
        {"method": {"local": {"norm": "batch"}}},
    )
    assert Experiment.of({**norms, "data": "digits"}).method.local.norm.name == "batch"


def test_another_name_in_a_nested_table_keeps_common_keys() -> None:
    def chosen(held: Any, name: str, *path: str) -> Any:
        settings = choose(assign({}, path, held), path, name)
        for key in path:
            settings = settings[key]
        return settings

    optimizer = "method", "local", "optimizer"
    assert chosen({"lr": 0.1, "momentum": 0.5}, "adam", *optimizer) == {"lr": 0.1, "name": "adam"}
    assert chosen({"lr": 0.1, "momentum": 0.5}, "sgd", *optimizer) == {
        "lr": 0.1,
        "momentum": 0.5,
        "name": "sgd",
    }
    assert chosen({"name": "labels", "labels": 2, "fraction": 0.5}, "iid", "data", "partition") == {
        "name": "iid",
        "fraction": 0.5,
    }
    assert chosen({"name": "uniform", "shares": [1.0]}, "income", "fleet", "budgets") == {
        "name": "income"
    }
    assert chosen({"name": "ray", "workers": 2}, "vectorized", "engine") == {
        "name": "vectorized",
        "workers": 2,
    }
    assert chosen(3, "x", "rounds") == {"name": "x"}
