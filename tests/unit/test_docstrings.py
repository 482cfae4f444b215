"""Docstrings of the public surface: complete, plain, and with examples that run."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from torch import nn

from tests.docstrings import (
    ENTRY_POINTS,
    PACKAGE,
    Finding,
    commented_fields,
    docstrings,
    entries_of,
    entry_point,
    example_findings,
    examples_by_module,
    names_in_prose,
    opening_findings,
    parameter_findings,
    public_objects,
)

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def listed(findings: list[Finding]) -> str:
    return "\n".join(str(finding) for finding in findings)


def test_every_parameter_of_the_public_surface_is_explained():
    findings = list(parameter_findings(public_objects()))
    assert not findings, listed(findings)


def test_docstrings_open_with_a_verb_or_a_noun_phrase():
    findings = list(opening_findings(PACKAGE))
    assert not findings, listed(findings)


def test_entry_points_have_an_example():
    findings = list(example_findings())
    assert not findings, listed(findings)


@pytest.mark.parametrize(("module", "number"), examples_by_module(PACKAGE).items())
def test_examples_in_docstrings_run(module, number, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # Examples may write files.
    results = doctest.testmod(importlib.import_module(module), optionflags=FLAGS)
    assert results.attempted == number
    assert results.failed == 0, "the captured output shows which example failed"


def test_the_surface_has_what_the_checks_are_about():
    objects = public_objects()
    names = {value.__qualname__ for value in objects}
    assert {"Family", "Fleet", "Run", "trace", "FedRolex", "SGD", "Codec", "Task", "UNet"} <= names
    assert {entry_point(path).__name__ for path in ENTRY_POINTS} >= {"fit", "deploy", "Pool"}
    assert sum(1 for _ in docstrings(PACKAGE)) > 1000


# The rest shows that the checks find what they look for.


def explained(first: int, second: int, third: int) -> None:
    """Add numbers.

    Args:
        first: First summand,
            third: which is not an entry.
        second, third (int): Other summands.
    """


def half_explained(first: int, second: int, third: int) -> None:
    """Add first, second and third.

    Args:
        first: First summand.
        second:
    """


def in_prose(path: str, max_bytes: int) -> None:
    """Read a file at `path` of at most max bytes."""


def not_in_prose(path: str, memory: int) -> None:
    """Read a file of at most max bytes."""


@dataclass
class Commented:
    """Fields with comments.

    Attributes:
        listed: Entry of the list.
    """

    listed: int
    behind: int  # Comment behind the field.
    # Comment above the field.
    above: int
    bare: int
    excused: int = 3  # noqa: RUF100
    _private: int = 0


class Contract(Protocol):
    def act(self, amount: float) -> None:
        """Act by an amount."""

    def stop(self, reason: str) -> None:
        """Stop."""


class Inheriting(Contract):
    def act(self, amount: float, extra: int = 0) -> None:
        """Act."""


class Scaler:
    """Scaler of numbers.

    Args:
        factor: Factor of each number.
        offset: Summand of each number.
    """

    def __init__(self, factor: float, offset: float, unit: str) -> None:
        """Store the numbers."""


class Net(nn.Module):
    """A net."""

    def forward(self, x: Any) -> Any:
        return x


def problems(value: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr("tests.docstrings._is_own", lambda value: value.__module__ == __name__)
    findings = parameter_findings([value])
    return [(finding.owner, finding.problem) for finding in findings]


def test_entries_of_a_list_are_those_at_its_indentation():
    assert entries_of("Sum.\n\nArgs:\n    a: One.\n        b: two\n    c (int): Three.\n") == {
        "a",
        "c",
    }
    assert entries_of("Sum.\n\nReturns:\n    a: One.") == set()
    assert entries_of("Sum.\n\nArgs:\n    a, *rest: Both.\n\nRaises:\n    b: Never.") == {
        "a",
        "rest",
    }
    assert names_in_prose("num_clients", "The num clients of it.")
    assert not names_in_prose("share", "All shared weights.")


def test_unexplained_parameters_are_found(monkeypatch: pytest.MonkeyPatch):
    assert problems(explained, monkeypatch) == []
    assert problems(half_explained, monkeypatch) == [
        ("half_explained", "does not explain second, third")
    ]
    assert problems(in_prose, monkeypatch) == []
    assert problems(not_in_prose, monkeypatch) == [
        ("not_in_prose", "does not explain path, memory")
    ]


def test_fields_without_comment_or_entry_are_found(monkeypatch: pytest.MonkeyPatch):
    assert commented_fields(Commented) == {"behind", "above"}
    assert problems(Commented, monkeypatch) == [
        ("Commented", "does not explain the field bare, excused")
    ]


def test_the_docstring_of_a_class_explains_the_parameters_of_its_init(
    monkeypatch: pytest.MonkeyPatch,
):
    assert problems(Scaler, monkeypatch) == [("Scaler.__init__", "does not explain unit")]


def test_overrides_explain_only_what_they_add(monkeypatch: pytest.MonkeyPatch):
    assert problems(Contract, monkeypatch) == [("Contract.stop", "does not explain reason")]
    assert problems(Inheriting, monkeypatch) == [("Inheriting.act", "does not explain extra")]
    assert problems(Net, monkeypatch) == []


def test_question_words_are_found(tmp_path: Any):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "m.py").write_text(
        '"""Whatever it is."""\ndef f():\n    """Whether, or not."""\n'
        'class C:\n    """Where things are."""\n    def g(self):\n        """Return it."""\n'
    )
    findings = list(opening_findings(tmp_path / "p"))
    assert [(finding.module, finding.owner) for finding in findings] == [("p.m", "f"), ("p.m", "C")]
