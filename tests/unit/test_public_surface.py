"""The public surface: few names, all of them importable, and every name of the pages among them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedquilt as fq

ROOT = Path(__file__).parents[2]
MAX_NAMES = 36
NAMESPACES = ("attacks", "links", "optimizers", "schedules")
# what-changed.md has the old names, and a test of its own.
PAGES = sorted(
    page
    for page in (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "fedquilt" / "papers" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.ipynb"),
    )
    if page.name != "what-changed.md"
)
# Scripts that no test runs as a whole.
SCRIPTS = sorted(
    file for folder in ("bench", "examples", "tools") for file in (ROOT / folder).rglob("*.py")
)
NOT_NAMES = {"csv", "html", "json", "md", "py", "toml", "whl", "MODULE"}  # Ends of files, a blank
CHAIN = re.compile(r"(?<![\w./-])(?:fq|fedquilt)((?:\.[A-Za-z_]\w*)+)")
IMPORT = re.compile(r"^\s*from (fedquilt[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)


def text_of(page: Path) -> str:
    """Return the text of a page. Of a notebook it is the text of its cells."""
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each name that a line `from fedquilt… import …` imports."""
    for module, names in IMPORT.findall(text):
        for name in re.sub(r"#[^\n]*|[()`]", "", names).split(","):
            if name.strip():
                yield module, name.split()[0]


def find(path: str) -> Any:
    """Return the object at a path from `fedquilt`: a module, or an attribute of one or of a class.

    Raises:
        AttributeError: Nothing has this name.
    """
    value: Any = fq
    for name in path.split("."):
        if inspect.isclass(value) and not hasattr(value, name) and name in fields_of(value):
            return None  # A field without a default, of which nothing more is known.
        if inspect.ismodule(value) and not hasattr(value, name):
            value = submodule(value, name)
        else:
            value = getattr(value, name)
    return value


def submodule(module: Any, name: str) -> Any:
    """Return a module of a package that nothing has imported yet."""
    path = f"{module.__name__}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise AttributeError(f"there is no {path}") from error


def fields_of(owner: type) -> set[str]:
    return {name for base in owner.__mro__ for name in inspect.get_annotations(base)}


def missing(text: str) -> list[str]:
    """Return the names in a text that cannot be imported."""
    paths = {chain.lstrip(".") for chain in CHAIN.findall(text)}
    paths = {path for path in paths if path.split(".")[-1] not in NOT_NAMES}
    paths |= {f"{module}.{name}".removeprefix("fedquilt.") for module, name in imported(text)}
    absent = []
    for path in sorted(paths):
        try:
            find(path)
        except AttributeError:
            absent.append(path)
    return absent


def test_there_are_few_names_and_all_can_be_imported():
    assert len(fq.__all__) <= MAX_NAMES
    assert sorted(fq.__all__) == sorted(dir(fq))
    for name in fq.__all__:
        assert getattr(fq, name) is not None


def test_namespaces_have_what_their_names_say():
    assert {"SGD", "Adam", "AdamW"} <= set(dir(fq.optimizers))
    assert {"Constant", "Cosine", "Steps", "WithinRound"} <= set(dir(fq.schedules))
    assert {"ColumnLoss", "Wireless", "Codec", "Clock"} <= set(dir(fq.links))
    assert {"PGD", "AdversarialTraining"} <= set(dir(fq.attacks))
    assert set(NAMESPACES) <= set(fq.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_a_page_uses_can_be_imported(page: Path):
    assert missing(text_of(page)) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_every_name_that_a_script_imports_exists(script: Path):
    for module, name in imported(script.read_text()):
        owner = importlib.import_module(module)
        assert hasattr(owner, name) or submodule(owner, name)


def test_names_that_cannot_be_imported_are_found():
    text = """
    `fq.trace(net)`, `fedquilt.runs.nothing`, `fq.Budget.share`, `fq.Budget.shape`, fq.links.Code
    and fq.optimizers.SGD.lr, in config/fedquilt.toml

        from fedquilt.terms import (  # nouns
            Budget,
            Sever as Server,
        )
        from fedquilt.methods.api import World, Word  # both
    """
    assert missing(text) == [
        "Budget.shape",
        "links.Code",
        "methods.api.Word",
        "runs.nothing",
        "terms.Sever",
    ]
    assert any("fedquilt" in text_of(page) and page.suffix == ".ipynb" for page in PAGES)
