"""Runs made by hand, with numbers that can be worked out on paper."""

from __future__ import annotations

import pytest

from fedquilt.round import Grades, Record
from fedquilt.studies.result import Result


def make_record(number, figures=None, main="accuracy", macs=1000, **metrics):
    """Return a round with 100 bytes down and 10 up, evaluated if it has figures by share."""
    grades = Grades()
    if figures is not None:
        grades = Grades(main, {main: figures, **metrics})
    return Record(number, 0.5, 2, bytes_down=100, bytes_up=10, macs=macs, loss=1.0, grades=grades)


def make_result(entry, seed, curve, main="accuracy", **summary):
    """Return a run whose share 1.0 has the figures of `curve`, one evaluated round for each."""
    records = [make_record(n, {"1.0": figure}, main) for n, figure in enumerate(curve, 1)]
    plain = {
        "method": entry,
        "data": "digits",
        "task": "classification",
        "rounds": len(records),
        "seconds": 0.5 * len(records),
        "bytes_down": 100 * len(records),
        "bytes_up": 10 * len(records),
        "accuracy": {},
        "metrics": {main: {"1.0": curve[-1]}},
        "main": main,
        "higher_is_better": True,
        "percent": True,
        "members": {"1.0": {"params": 1234, "macs": 56}},
        "note": "",
    }
    return Result(entry, seed, {**plain, **summary}, records)


@pytest.fixture
def record():
    return make_record


@pytest.fixture
def result():
    return make_result
