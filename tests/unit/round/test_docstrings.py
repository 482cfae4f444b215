"""Examples in the docstrings of the main classes of a round run, and print what they say."""

from __future__ import annotations

import doctest
import inspect

import pytest

import fedquilt as fq
from fedquilt.methods.api import Method


@pytest.mark.parametrize(
    ("kind", "num_lines"),
    [(Method, 10), (fq.Link, 4), (fq.LocalTraining, 3), (fq.Evaluation, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_example_of_a_docstring_runs(kind, num_lines):
    module = inspect.getmodule(kind)
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__, module=module)
    assert len(example.examples) == num_lines
    assert doctest.DocTestRunner().run(example).failed == 0
