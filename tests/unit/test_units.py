"""Numbers with units, and budgets that are written with them."""

from __future__ import annotations

import doctest

import pytest

import fedquilt as fq
from fedquilt import terms
from fedquilt.errors import BudgetError
from fedquilt.units import quantity


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("2MB", "memory", 2e6),
        ("512 MiB", "memory", 512 * 2**20),
        ("1.5k", "macs", 1500.0),
        ("28M", "params", 28e6),
        ("2e6", "macs", 2e6),
        ("2MB", "macs", None),
        ("1k", "share", None),
        ("1.2.3", "memory", None),
        ("lots", "memory", None),
    ],
)
def test_a_quantity_has_a_unit_that_fits_it(text, name, value):
    assert quantity(text, name) == value


def test_budgets_with_units_are_equal_to_those_with_numbers():
    written = fq.Budget(macs="28M", params="1.5k", memory="2MB")
    counted = fq.Budget(macs=28e6, params=1500, memory=2_000_000)
    assert written == counted
    assert hash(written) == hash(counted)
    assert written.both(fq.Budget(memory="1MB")).memory == 1e6


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"memory": "2XB"}, "memory='2XB' was asked for; write it like 2GB, 512MiB or 2e9"),
        ({"macs": "2MB"}, "macs='2MB' was asked for; write it like 76M, 1.5G or 2e6"),
        ({"share": "0.5"}, "share='0.5' was asked for; it must be a number above 0"),
        ({"memory": True}, "memory=True was asked for; it must be a number above 0"),
        ({"params": "0"}, r"params=0\.0 was asked for; it must be a number above 0"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(bound, message):
    with pytest.raises(BudgetError, match=message):
        fq.Budget(**bound)


def test_the_example_of_a_budget_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(fq.Budget, "Budget", module=terms)
    assert doctest.DocTestRunner().run(example).failed == 0
