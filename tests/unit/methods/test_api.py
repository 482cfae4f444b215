"""`fedquilt.methods.api` has everything that the methods of the package import from below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedquilt
import fedquilt.methods
from fedquilt.methods import METHODS, api
from fedquilt.round.method import Method

FOLDER = Path(fedquilt.methods.__file__).parent
# Without the list of methods, the base class that the interface offers, and the interface itself.
FILES = sorted(
    set(FOLDER.glob("*.py")) - {FOLDER / f"{name}.py" for name in ("__init__", "method", "api")}
)
# Texts of error messages about models with norms in pairs, and what ProgFed measures theorem 1 of a
# run with. They are of no use to other methods.
INTERNAL = {"HOW_TO", "Gradients", "gradients_at", "Run"}


def imported(file: Path) -> set[str]:
    """Return the names that a file imports from the package below `fedquilt.methods`."""
    return {
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedquilt"
        if not (node.module or "").startswith("fedquilt.methods")
        for alias in node.names
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_has_what_a_method_of_the_package_imports(file):
    assert imported(file) - INTERNAL <= set(api.__all__)


def test_every_name_is_there_once():
    assert len(api.__all__) == len(set(api.__all__))
    assert [name for name in api.__all__ if not hasattr(api, name)] == []
    public = {name for name in vars(api) if not name.startswith("_")}
    assert public == set(api.__all__)


def test_names_that_fedquilt_has_too_are_the_same():
    shared = set(api.__all__) & set(fedquilt.__all__)
    assert {"Budget", "LocalTraining", "Family"} <= shared
    assert all(getattr(api, name) is getattr(fedquilt, name) for name in shared)


def test_what_the_steps_of_a_method_take_and_return_can_be_imported():
    """An author who writes type hints finds each of them here."""
    steps = (
        "init",
        "plan",
        "learner",
        "fold",
        "deploy",
        "client_submodels",
        "label",
        "candidates",
        "ranked",
        "figures",
        "fit",
    )
    hints = [hint for step in steps for hint in getattr(Method, step).__annotations__.values()]
    names = {node.id for node in ast.walk(ast.parse(";".join(hints))) if isinstance(node, ast.Name)}
    assert {"Server", "Submodel", "Learner", "Fold", "Submodels"} <= names
    assert names - {"list", "dict", "str", "float", "Sequence"} <= set(api.__all__)


def test_every_method_of_the_package_is_one_of_the_interface():
    assert all(issubclass(kind, api.Method) for kind in METHODS.values())
