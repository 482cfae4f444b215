"""Rows of charts, and the bounds on what is drawn, with numbers worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from fedquilt.display.thinning import bins, evenly, number, plain, thinned
from fedquilt.report import tables
from fedquilt.report.collect import RunFolder
from fedquilt.round.engine import Attendance
from fedquilt.studies.result import Result
from tests.unit.report.conftest import record


def folder(tmp_path, records, entry="fedavg", seed=0, **summary):
    return RunFolder(tmp_path, Result(entry, seed, summary, tuple(records)))


def test_curves_have_costs_summed_up_to_each_evaluated_round(tmp_path):
    records = [record(1), record(2, {"1.0": 0.5}), record(3, {"1.0": 0.7, "0.5": math.nan})]
    rows = tables.curve_rows(folder(tmp_path, records), "accuracy", {})
    assert [(row["share"], row["round"], row["value"]) for row in rows] == [
        ("1", 2, 0.5),
        ("1", 3, 0.7),
        ("0.5", 3, None),
    ]
    assert [row["bytes"] for row in rows] == [300, 450, 450]
    assert [row["seconds"] for row in rows] == [1.0, 1.5, 1.5]
    assert "link_seconds" not in tables.usable_axes(rows)


def test_a_link_with_a_clock_adds_an_axis(tmp_path):
    rows = tables.curve_rows(
        folder(tmp_path, [record(1, {"1.0": 0.5}, link_seconds=2.0)]), "accuracy", {}
    )
    assert rows[0]["link_seconds"] == 2.0
    assert "link_seconds" in tables.usable_axes(rows)


def test_spreads_are_means_and_sample_deviations_over_seeds(tmp_path):
    rows = [
        row
        for seed, value in ((0, 0.4), (1, 0.6))
        for row in tables.curve_rows(
            folder(tmp_path, [record(1, {"1.0": value})], seed=seed), "accuracy", {}
        )
    ]
    (spread,) = tables.spread_rows(rows)
    deviation = math.sqrt(2 * 0.1**2)
    assert spread["value"] == pytest.approx(0.5)
    assert (spread["low"], spread["high"]) == pytest.approx((0.5 - deviation, 0.5 + deviation))
    assert spread["seeds"] == 2


def test_a_front_has_the_points_that_no_other_beats():
    rows = [
        {"value": value, "bytes": cost}
        for value, cost in [(0.9, 9.0), (0.5, 9.0), (0.6, 3.0), (0.4, 4.0), (0.7, None)]
    ]
    front = tables.pareto_rows(rows, "bytes", True)
    assert [row["front"] for row in front] == [True, False, True, False]
    lowest = tables.pareto_rows(rows, "bytes", False)
    assert [row["front"] for row in lowest] == [False, False, True, True]


def test_participation_counts_what_became_of_clients():
    simulated = record(1, clients=5, late=(3,), missing=1)
    asked = Attendance((1, 2, 3), {1: "no reply"}, {}, {2: "NaN"}, wire_down=1, wire_up=1)
    deployed = record(2, clients=3, attendance=asked)
    rows = tables.participation_rows([simulated, deployed])
    assert [row["clients"] for row in rows if row["fate"] == "trained"] == [3, 1]
    assert [row["clients"] for row in rows if row["fate"] == "refused"] == [0, 1]
    assert {row["fate"] for row in rows} == {"trained", "late", "missing", "refused"}
    absences = tables.absence_rows([simulated, deployed])
    assert [(row["client"], row["fate"]) for row in absences] == [
        (3, "late"),
        (1, "missing"),
        (2, "refused"),
    ]


def test_costs_are_means_of_each_bin():
    rows = tables.cost_rows([record(round, macs=round) for round in range(1, 401)])
    macs = [row for row in rows if row["cost"] == tables.COSTS["macs"]]
    assert len(macs) == tables.MAX_BINS
    assert (macs[0]["first"], macs[0]["last"], macs[0]["amount"]) == (1, 2, 1.5)
    assert not [row for row in rows if row["cost"] == tables.COSTS["server_macs"]]


def test_final_figures_robustness_and_use_of_devices_are_means_over_seeds():
    results = [
        Result(
            "a",
            seed,
            {
                "main": "standard",
                "metrics": {"standard": {"1.0": value}, "robust": {"1.0": value / 2}},
                "members": {"1.0": {"params": 10, "macs": 20}},
                "bytes_down": 100,
                "bytes_up": 50,
                "utilisation": value,
            },
        )
        for seed, value in ((0, 0.4), (1, 0.8))
    ]
    (row,) = tables.final_rows(results)
    assert (row["value"], row["bytes"], row["params"]) == (pytest.approx(0.6), 150, 10)
    (row,) = tables.robust_rows(results)
    assert (row["standard"], row["robust"]) == pytest.approx((0.6, 0.3))
    (row,) = tables.utilization_rows(results)
    assert row["value"] == pytest.approx(0.6)


def test_thinning_keeps_both_ends_of_every_line():
    assert evenly(list(range(1001)), 11) == list(range(0, 1001, 100))
    assert evenly([1, 2], 2) == [1, 2]
    rows = [{"line": line, "x": x} for x in range(100) for line in "ab"]
    drawn = thinned(rows, ["line"], 5)
    assert len(drawn) == 10
    assert {row["x"] for row in drawn if row["line"] == "b"} >= {0, 99}


@pytest.mark.parametrize(("count", "bound"), [(0, 4), (3, 4), (4, 4), (9, 4), (5000, 100)])
def test_bins_cover_everything_once(count, bound):
    ranges = bins(count, bound)
    assert [position for start, stop in ranges for position in range(start, stop)] == list(
        range(count)
    )
    assert len(ranges) == min(count, bound)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, 1e301, "1", True, None])
def test_what_cannot_be_drawn_is_no_number(value):
    assert number(value) is None


def test_plain_values_are_json():
    value = {"a": [math.nan, 10**400, 2**60, 1, "x", None, True]}
    text = json.dumps(plain(value), allow_nan=False)
    assert json.loads(text) == {"a": [None, None, float(2**60), 1, "x", None, True]}
