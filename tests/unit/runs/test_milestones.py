"""Rounds, bytes and seconds until an accuracy was reached, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg
from fedquilt.round import Grades, Record
from fedquilt.runs.milestones import Milestone, check_target, milestones, reached


def record(round, accuracy=None, **metrics):
    grades = Grades()
    if accuracy:
        grades = Grades(
            "accuracy", {"accuracy": {"1.0": accuracy[0], "0.5": accuracy[1]}, **metrics}
        )
    return Record(round, 0.5, 2, bytes_down=100, bytes_up=10, macs=1, loss=1.0, grades=grades)


RECORDS = [
    record(1),
    record(2, (0.5, 0.4), **{"accuracy/svhn": {"1.0": 0.7, "0.5": 0.1}}),
    record(3),
    record(4, (0.6, 0.3), **{"accuracy/svhn": {"1.0": 0.2, "0.5": float("nan")}}),
    record(5, (0.55, 0.45), **{"accuracy/svhn": {"1.0": 0.9, "0.5": 0.3}}),
]


def test_a_target_is_reached_in_the_first_evaluated_round_that_has_it():
    """All bytes until then count, also those of rounds that were not evaluated.

    Later ones do not.
    """
    assert reached(RECORDS, 0.6) == Milestone(round=4, bytes=440, macs=4, seconds=2.0)
    assert reached(RECORDS, 0.55, share=1) == Milestone(4, 440, 4, 2.0)
    assert reached(RECORDS, 0.4, share=0.5) == Milestone(2, 220, 2, 1.0)
    assert reached(RECORDS, 0.61) is None
    assert milestones(RECORDS, 0.45) == {
        "1.0": Milestone(2, 220, 2, 1.0),
        "0.5": Milestone(5, 550, 5, 2.5),
    }


def test_a_link_with_a_clock_has_its_own_seconds():
    """The slowest client of each round counts, and not the speed of the simulation."""
    timed = [replace(one, link_seconds=10.0 * one.round) for one in RECORDS]
    assert reached(timed, 0.6) == Milestone(4, 440, macs=4, seconds=2.0, link_seconds=100.0)
    assert reached(RECORDS, 0.6).link_seconds is None


def test_a_target_of_another_metric():
    assert reached(RECORDS, 0.6, metric="accuracy/svhn") == Milestone(2, 220, 2, 1.0)
    assert reached(RECORDS, 0.3, share=0.5, metric="accuracy/svhn") == Milestone(5, 550, 5, 2.5)


def test_nothing_is_reached_before_anything_was_evaluated():
    assert reached(RECORDS[:1], 0.1) is None
    assert milestones([], 0.1, "accuracy/svhn") == {}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"target": 0.5, "share": 0.25},
            "the share 0.25 was asked for; the records have accuracy at 1.0, 0.5.",
        ),
        (
            {"target": 0.5, "metric": "accuracy/svnh"},
            "the metric 'accuracy/svnh' was asked for; the records have accuracy, accuracy/svhn.",
        ),
    ],
)
def test_impossible_milestones_are_refused(asked, said):
    with pytest.raises(ConfigError, match=said):
        reached(RECORDS, **asked)


@pytest.mark.parametrize("target", [0, -0.1, 60, float("nan")])
def test_the_target_of_a_rate_is_between_0_and_1(target):
    said = rf"a target of {target:g} was asked for; accuracy is in \(0, 1\]: for 60 %, ask for 0.6."
    with pytest.raises(ConfigError, match=said):
        check_target(target, "accuracy", is_rate=True)


def test_other_figures_have_any_finite_target():
    check_target(-3.5, "r2")
    with pytest.raises(ConfigError, match="a target of inf was asked for; a finite number fits"):
        check_target(float("inf"), "rmse")


def test_if_lower_is_better_a_target_is_an_upper_bound():
    falling = [
        replace(
            record(number),
            grades=Grades("rmse", {"rmse": {"1.0": value}, "r2": {"1.0": 1 - value}}),
        )
        for number, value in ((1, 0.9), (2, 0.7), (3, 0.8))
    ]
    assert reached(falling, 0.8, higher_is_better=False).round == 2
    assert reached(falling, 0.6, higher_is_better=False) is None
    assert reached(falling, 0.3, metric="r2").round == 2


def test_a_run_returns_its_milestones(perceptron, play, make_data):
    run = play(FedAvg(), perceptron, make_data(perceptron, (5, 6)), evaluation=fq.Evaluation())
    best = max(record.grades.accuracy["1.0"] for record in run.records)
    found = run.reached(best)
    assert found.bytes == sum(r.bytes_down + r.bytes_up for r in run.records[: found.round])
    assert run.reached(min(1.0, best + 0.01)) is None
