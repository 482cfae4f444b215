"""Charts of runs and studies: one mark for each number that was recorded."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

import fedquilt as fq
from fedquilt.display.thinning import MAX_POINTS
from fedquilt.errors import ConfigError
from fedquilt.round import Grades, Record
from fedquilt.runs.plot import metric_rows, titled
from fedquilt.studies.plot import study_chart
from fedquilt.studies.result import Result


def record(number: int, **metrics: dict[str, float]) -> Record:
    grades = Grades("accuracy", metrics) if metrics else Grades()
    return Record(number, 0.1, 2, 10, 10, 5, 1.0, grades=grades)


def values(chart) -> list[dict]:
    """Return the rows that a chart draws."""
    return chart.to_dict()["data"]["values"]


@pytest.fixture
def run(perceptron, make_data, play):
    data = make_data(perceptron, (5, 6, 4, 7))
    fleet = fq.Fleet.of((1.0, 0.5), 4, 2)
    every_round = fq.Evaluation(every=1)
    return play(
        fq.methods.HeteroFL(), perceptron, data, fleet=fleet, rounds=3, evaluation=every_round
    )


def test_a_run_has_a_point_for_each_share_of_each_evaluated_round(run):
    pytest.importorskip("altair")
    expected = [
        {"round": record.round, "share": f"{float(share):g}", "value": value}
        for record in run.records
        for share, value in record.grades.accuracy.items()
    ]
    assert len(expected) == 6

    def point(row):
        return row["share"], row["round"]

    assert sorted(values(run.plot()), key=point) == sorted(expected, key=point)
    assert values(run.plot("loss")) != expected


def test_a_metric_that_nobody_recorded_is_refused(run):
    with pytest.raises(ConfigError, match=r"metric 'accurcy'\. Did you mean 'accuracy'"):
        run.plot("accurcy")
    run.records = [replace(r, grades=Grades()) for r in run.records]
    with pytest.raises(ConfigError, match="no round was evaluated"):
        run.plot()


def test_without_altair_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ConfigError, match=r"needs Altair.*fedquilt\[report\]|\.\[report\]"):
        run.plot()


def test_values_that_are_not_finite_are_not_drawn():
    rows = metric_rows([record(1, accuracy={"1.0": math.nan, "0.5": 0.5}), record(2)], "", "it")
    assert [row["value"] for row in rows] == [None, 0.5]


def test_long_runs_are_thinned_to_whole_rounds_and_the_chart_says_so():
    pytest.importorskip("altair")
    rows = [
        {"round": number, "share": share, "value": 0.5}
        for number in range(1, 5001)
        for share in ("1", "0.5")
    ]
    chart = titled(rows, "accuracy", "share", True, "t").to_dict()
    rounds_by_share = {
        share: [row["round"] for row in chart["data"]["values"] if row["share"] == share]
        for share in ("1", "0.5")
    }
    assert rounds_by_share["1"] == rounds_by_share["0.5"]
    assert len(rounds_by_share["1"]) == MAX_POINTS
    assert {1, 5000} <= set(rounds_by_share["1"])
    assert chart["title"]["subtitle"] == [f"{MAX_POINTS} of 5,000 evaluated rounds are drawn."]
    assert titled(rows[:10], "accuracy", "share", True, "t").to_dict()["title"]["subtitle"] == []


def test_hostile_names_are_text_of_a_title():
    pytest.importorskip("altair")
    name = "<script>alert(1)</script>"
    rows = [{"round": 1, "share": name, "value": 0.5}]
    chart = titled(rows, name, "share", False, name)
    assert values(chart) == rows
    assert chart.to_dict()["layer"][0]["encoding"]["y"]["title"] == name


def result(entry: str, seed: int, *figures: float) -> Result:
    records = [record(n, accuracy={"1.0": f, "0.5": f / 2}) for n, f in enumerate(figures, 1)]
    metrics = records[-1].grades.metrics
    summary = {"main": "accuracy", "metrics": metrics, "data": "d", "task": "t"}
    return Result(entry, seed, summary, records)


def test_a_study_draws_means_and_deviations_over_seeds():
    pytest.importorskip("altair")
    results = [result("a", 0, 0.2, 0.4), result("a", 1, 0.4, 0.4), result("b", 0, 0.1, math.nan)]
    assert values(study_chart(results)) == [
        {
            "entry": "a",
            "round": 1,
            "value": pytest.approx(0.3),
            "seeds": 2,
            "low": pytest.approx(0.3 - 0.02**0.5),
            "high": pytest.approx(0.3 + 0.02**0.5),
        },
        {
            "entry": "a",
            "round": 2,
            "value": pytest.approx(0.4),
            "seeds": 2,
            "low": pytest.approx(0.4),
            "high": pytest.approx(0.4),
        },
        {"entry": "b", "round": 1, "value": 0.1, "seeds": 1},
        {"entry": "b", "round": 2, "value": None, "seeds": 1},
    ]
    assert values(study_chart(results, share=0.5))[2]["value"] == 0.05


def test_a_study_refuses_a_share_that_nobody_has_and_a_study_without_runs():
    results = [result("a", 0, 0.2)]
    with pytest.raises(ConfigError, match=r"at share 0\.3.*Known: 1\.0, 0\.5"):
        study_chart(results, share=0.3)
    with pytest.raises(ConfigError, match="no run of the study is finished"):
        study_chart([])
    with pytest.raises(ConfigError, match="'los' was asked for"):
        study_chart(results, "los")
