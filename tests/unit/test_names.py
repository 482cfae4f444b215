"""Names of classes and functions: in a table, in a file, in a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedquilt.conformance.method import Finding
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS, HeteroFL
from fedquilt.names import find, is_in_module, is_reference, name_of


class Own(HeteroFL):
    """A class of a module that is not installed."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "quilted"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "mine.py").write_text(
        "class Mine:\n    class Inner: pass\ndef make(): pass\nnumber = 3\n"
    )
    (folder / "broken.py").write_text("raise ValueError('on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.modules", dict(sys.modules))


def test_a_name_is_an_entry_of_the_table_or_in_a_module(package: None) -> None:
    assert find(METHODS, "heterofl", "method") is HeteroFL
    assert find(METHODS, "fedquilt.methods.heterofl:HeteroFL", "method") is HeteroFL
    assert find(METHODS, "quilted.mine:Mine", "method").__name__ == "Mine"
    assert find(METHODS, "quilted.mine:Mine.Inner", "method").__name__ == "Inner"
    assert find(METHODS, "quilted.mine:make", "method").__name__ == "make"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quilted.mine:Mime", "quilted.mine has no such class or function. Did you mean 'Mine'?"),
        ("quilted.mine:number", "quilted.mine has no such class or function"),
        ("quilted.nothing:Mine", "there is no module 'quilted.nothing'. Is its package installed?"),
        ("quilted.broken:Mine", "importing quilted.broken failed: ValueError: on purpose"),
        ("heterfl", "there is no method named 'heterfl'. Did you mean 'heterofl'?"),
    ],
)
def test_missing_code_is_reported(package: None, name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(METHODS, name, "method")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "name", ["hub:mnist", "hub:owner/name", "file.py:Class", "a.b", "a.b:", "a..b:C", "C:x.npz"]
)
def test_other_names_with_a_colon_or_dots_are_in_no_module(name: str) -> None:
    assert not is_in_module(name)


def test_references_are_in_files_or_modules() -> None:
    assert is_reference("file.py:Class")
    assert is_reference("package.module:Class")
    assert not is_reference("heterofl")


def test_classes_of_installed_packages_are_named_by_their_module() -> None:
    assert name_of(Finding) == "fedquilt.conformance.method:Finding"
    assert name_of(HeteroFL) == "fedquilt.methods.heterofl:HeteroFL"
    assert name_of(pytest.Module) == "_pytest.python:Module"
    assert find({}, name_of(HeteroFL), "method") is HeteroFL


def test_other_classes_are_named_by_their_file() -> None:
    assert name_of(Own).endswith("test_names.py:Own")
