"""docs/what-changed.md: old names are refused with the new ones, and the new ones are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError, renamed
from fedquilt.methods import api
from fedquilt.names import RENAMED, known
from fedquilt.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "what-changed.md").read_text()
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
    assert all(f"`fq.{name}`" in PAGE for name in renamed.NAMES if "." not in name)
    assert "`fedquilt.round.play`, `Played`" in PAGE
    assert "`fedquilt.engines.Vectorised`" in PAGE
    assert all(re.search(rf"\b{re.escape(name)}\b", PAGE) for name in RENAMED)


def test_modules_moved_as_the_page_says():
    moved = {before.strip("` "): now.strip("` ") for before, now in rows("Modules")}
    assert moved == {
        f"fedquilt.{before}": f"fedquilt.{now}" for before, now in renamed.MODULES.items()
    }
    for before, now in moved.items():
        importlib.import_module(now)
        if is_package(before):
            continue
        with pytest.raises(ModuleNotFoundError) as raised:
            importlib.import_module(before)
        assert str(raised.value) == f"there is no {before}. It is {now} now."


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from fedquilt import load", "there is no fedquilt.load. It is fedquilt.load_state now."),
        (
            "import fedquilt.engines.vectorised",
            "there is no fedquilt.engines.vectorised. "
            "It is fedquilt.engines.vectorized.engine now.",
        ),
        (
            "from fedquilt.round import play",
            "there is no fedquilt.round.play. It is fedquilt.round.run_round now.",
        ),
        (
            "from fedquilt.config import Experiment",
            "fedquilt.config has no 'Experiment'. The module that was fedquilt.config before is "
            "fedquilt.runs.experiment now.",
        ),
    ],
)
def test_imports_of_old_names_state_the_new_ones(line, message):
    with pytest.raises(ImportError) as raised:
        exec(line)
    assert str(raised.value) == message


def test_old_names_of_the_module_for_authors_state_the_new_ones():
    for old, new in renamed.API_NAMES.items():
        assert re.search(rf"\b{old}\b", PAGE), old
        with pytest.raises(ImportError, match=rf"It is fedquilt\.methods\.api\.{new} now"):
            exec(f"from fedquilt.methods.api import {old}")
        assert hasattr(api, new)


def test_imports_of_unknown_names_are_those_of_python():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'fedquilt\.nothing'$"):
        exec("import fedquilt.nothing")
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'fedquilt\.methods"):
        exec("from fedquilt.methods.api import nothing")


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
