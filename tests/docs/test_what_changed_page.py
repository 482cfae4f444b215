"""docs/what-changed.md: old names are refused with the new ones, and the new ones are there."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.names import RENAMED, known
from fedquilt.runs.experiment import Experiment

PAGE = (Path(__file__).parents[2] / "docs" / "what-changed.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_old_names_of_fedquilt_state_the_new_ones():
    for before, now in rows("Names of `fedquilt`"):
        news = re.findall(r"`fq\.([\w.]+)`", now)
        for position, old in enumerate(re.findall(r"`fq\.(\w+)`", before)):
            new = news[position] if position < len(news) else f"methods.api.{old}"
            with pytest.raises(AttributeError, match=rf"It is fedquilt\.{re.escape(new)} now"):
                getattr(fq, old)
            value = fq
            for part in new.split("."):
                value = getattr(value, part)


def test_every_renamed_name_is_on_the_page():
    assert all(f"`fq.{name}`" in PAGE for name in fq._RENAMED)
    assert all(re.search(rf"\b{re.escape(name)}\b", PAGE) for name in RENAMED)


def test_modules_moved_as_the_page_says():
    moved = rows("Modules")
    assert len(moved) > 40
    for before, now in moved:
        old, new = before.strip("` "), now.strip("` ")
        importlib.import_module(new)
        spec = find_spec(old)
        is_package = spec is not None and spec.submodule_search_locations is not None
        assert spec is None or is_package, f"{old} is still a module"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": {"name": "fedavg", "local": {"optimiser": {"lr": 0.1}}}}, "'optimizer' now"),
        ({"method": {"name": "fedavg", "server": "server_adam"}}, "'server_optimizer' now"),
        (
            {"method": {"name": "fedavg", "local": {"optimizer": {"decay": 0.1}}}},
            "'weight_decay' now",
        ),
        ({"fleet": {"sample": 3}}, "'cohort' now"),
        ({"engine": "vectorised"}, "'vectorized' now"),
        ({"tracking": ["wandb"]}, "'trackers' now"),
    ],
)
def test_old_settings_state_the_new_ones(settings, words):
    plain = {"method": "fedavg", "data": "digits", **settings}
    with pytest.raises(ConfigError, match=f"It is called {words}"):
        Experiment.of(plain)


def test_an_old_name_counts_only_where_the_new_one_is_known():
    with pytest.raises(ConfigError, match=r"no method named 'sample'.*Known: a, b"):
        known({"a": 1, "b": 2}, "sample", "method")
