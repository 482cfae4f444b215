"""One run as statistics see it."""

from __future__ import annotations

import math

import pytest

from fedquilt.studies.result import Result


def test_the_best_round_is_the_widest_models(record):
    """The narrow model is best in round 1, the widest in round 3; round 2 was not evaluated."""
    records = [
        record(1, {"1.0": 0.5, "0.5": 0.9}),
        record(2),
        record(3, {"1.0": 0.7, "0.5": 0.1}),
        record(4, {"1.0": 0.7, "0.5": 0.2}),
        record(5, {"1.0": 0.6, "0.5": 0.3}),
    ]
    result = Result("a", 0, {}, records)
    number, grades = result.best
    assert number == 3
    assert grades.figures == {"1.0": 0.7, "0.5": 0.1}
    assert result.best_figure == 0.7


def test_the_best_round_where_lower_is_better(record):
    records = [record(n, {"1.0": value}, "rmse") for n, value in ((1, 0.9), (2, 0.4), (3, 0.5))]
    result = Result("a", 0, {"main": "rmse", "higher_is_better": False}, records)
    assert result.best[0] == 2
    assert result.best_figure == 0.4


@pytest.mark.parametrize("higher", [True, False])
def test_figures_that_are_no_numbers_are_never_the_best(record, higher):
    """Comparisons with NaN are False, so that `max` would return whichever record comes first."""
    values = (math.nan, 0.4, math.nan)
    records = [record(n, {"1.0": value}) for n, value in enumerate(values, 1)]
    assert Result("a", 0, {"higher_is_better": higher}, records).best[0] == 2
    assert Result("a", 0, {"higher_is_better": higher}, records[:1]).best is None
    assert Result("a", 0, {"higher_is_better": higher}, records[:1]).best_figure is None


def test_nothing_evaluated_has_no_best_round(record):
    assert Result("a", 0, {}, [record(1)]).best is None
    assert Result("a", 0, {}).best is None


def test_metrics_by_share_and_summaries_of_early_versions():
    early = Result("a", 0, {"accuracy": {"1.0": 0.5}, "metrics": {"accuracy/svhn": {"1.0": 0.4}}})
    assert early.main == "accuracy"
    assert early.higher_is_better
    assert early.metric() == early.metric("accuracy") == {"1.0": 0.5}
    assert early.metric("accuracy/svhn") == {"1.0": 0.4}
    assert early.metric("rmse") == {}
    new = Result("a", 0, {"main": "rmse", "accuracy": {}, "metrics": {"rmse": {"1.0": 2.0}}})
    assert new.metric() == {"1.0": 2.0}
    assert new.metric("accuracy") == {}


def test_multiply_adds_are_those_of_all_rounds(record):
    assert Result("a", 0, {}, [record(1, macs=3), record(2, macs=4)]).macs == 7
    assert Result("a", 0, {}).macs is None


def test_a_diverged_run_has_the_round_of_divergence():
    assert Result("a", 0, {"diverged": 7}).diverged == 7
    assert Result("a", 0, {}).diverged is None


@pytest.mark.parametrize(
    ("metric", "higher", "percent"),
    [
        ("", False, False),
        ("rmse", False, False),
        ("rmse/svhn", False, False),
        ("local_rmse", False, False),
        ("robust/0.5", False, False),
        ("r2", True, False),
        ("loss", False, False),
        ("accuracy", True, True),
        ("top5", True, True),
        ("top3/mnist", True, True),
    ],
)
def test_other_metrics_have_their_own_direction_and_unit(metric, higher, percent):
    result = Result("a", 0, {"main": "rmse", "higher_is_better": False, "percent": False})
    assert result.prefers_higher(metric) is higher
    assert result.is_in_percent(metric) is percent
