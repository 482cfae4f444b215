"""The paper's numbers beside the measured ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedquilt.studies.papers import Column, Preset, PresetScale, Row
from fedquilt.studies.published import HEAD, comparison_table, spread_of, spread_text
from fedquilt.studies.result import Result
from fedquilt.studies.values import TableValue


@pytest.fixture
def preset():
    return Preset(
        title="Table 1: accuracy",
        columns=(Column("last", "metrics accuracy 1.0 %"), Column("cost", "bytes_down MB")),
        rows=(
            Row("FedRolex", ("69.44 ± 1.50", "")),
            Row("HeteroFL", ("", "")),
            Row("FedAvg", ("38.0", "")),
        ),
        scales={
            "smoke": PresetScale(note="Numbers mean nothing.", seeds=(0,)),
            "full": PresetScale(),
        },
        seeds=(0, 1),
        notes=("It differs.",),
        name="mine/table1",
    )


def test_lines_have_means_over_seeds_and_differences(preset, result):
    runs = [
        result("FedRolex", 0, [0.1, 0.62], bytes_down=1_200_000),
        result("FedRolex", 1, [0.1, 0.66], bytes_down=1_200_000),
    ]
    runs += [result("FedAvg", seed, [0.38], bytes_down=0) for seed in (0, 1)]
    table = comparison_table(preset, runs)
    assert table.title == "mine/table1: Table 1: accuracy"
    assert tuple(table.head) == HEAD
    assert table.rows == [
        ["FedRolex", "last", "69.44 ± 1.50", "64.0 ± 2.8", "-5.4"],
        ["FedRolex", "cost", "–", "1.2 ± 0.0", "–"],
        ["FedAvg", "last", "38.0", "38.0 ± 0.0", "0.0"],
        ["FedAvg", "cost", "–", "0.0 ± 0.0", "–"],
    ]
    assert table.notes == ["It differs.", "HeteroFL: it was not run."]


def test_the_papers_numbers_alone_are_shown_too(preset):
    table = comparison_table(preset, [])
    assert table.rows == [
        ["FedRolex", "last", "69.44 ± 1.50", "–", "–"],
        ["FedAvg", "last", "38.0", "–", "–"],
    ]


def test_a_column_that_no_run_has_is_named(preset, result):
    columns = (Column("error", "metrics rmse 1.0 number"), Column("later", "at 9 accuracy 1.0 %"))
    rows = (Row("FedAvg", ("0.7", "")),)
    mistaken = replace(preset, columns=columns, rows=rows, seeds=(0,), notes=())
    notes = comparison_table(mistaken, [result("FedAvg", 0, [0.5])]).notes
    assert notes == ["error: no run has 'metrics rmse 1.0 number', which the column shows."]
    assert comparison_table(mistaken, []).notes == ["FedAvg: it was not run."]


def test_notes_name_the_scale_missing_seeds_and_runs_that_diverged(preset, result):
    runs = [
        result(name, 0, [0.1], diverged=1 if name == "FedAvg" else None)
        for name in ("FedRolex", "HeteroFL", "FedAvg")
    ]
    assert comparison_table(preset, runs, "smoke").notes == [
        "Scale smoke: Numbers mean nothing.",
        "It differs.",
        "FedAvg: the run of seed 0 diverged in round 1; its last figures count.",
    ]
    assert comparison_table(preset, runs).notes[1:] == [
        "FedRolex: no run of seed 1; the means are over the others.",
        "HeteroFL: no run of seed 1; the means are over the others.",
        "FedAvg: no run of seed 1; the means are over the others.",
        "FedAvg: the run of seed 0 diverged in round 1; its last figures count.",
    ]


def test_one_run_has_no_deviation_and_a_mean_over_clients_has_theirs():
    value = TableValue.parse("macs M")
    one = Result("a", 0, {"macs": 3e6})
    assert spread_text(spread_of([one], value), value) == "3.00"
    clients = [
        Result("a", seed, {"macs": {"mean": seed * 1e6, "deviation": 2e6}}) for seed in (1, 2)
    ]
    assert spread_text(spread_of(clients, value), value) == "1.50 ± 2.00"
    assert spread_of([Result("a", 0, {})], value) is None
