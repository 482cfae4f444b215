"""Columns of tables, which are described by text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedquilt.errors import ConfigError
from fedquilt.studies.result import Result
from fedquilt.studies.values import TableValue


@pytest.fixture
def run(record):
    svhn = {"accuracy/svhn": {"1.0": 0.3}}
    records = [
        record(1, {"1.0": 0.2, "0.5": 0.1}, **svhn),
        record(2),
        record(3, {"1.0": 0.6, "0.5": 0.4}, **svhn, kept={"8.0": 0.5, "9.0": 1.0}),
        record(4, {"1.0": 0.5, "0.5": 0.5}),
    ]
    summary = {
        "accuracy": {"1.0": 0.5, "0.5": 0.5},
        "metrics": {
            "accuracy": {"1.0": 0.5},
            "accuracy/svhn": {"0.5": 0.25},
            "kept": {"8.0": 0.25, "9.0": 0.5},
        },
        "rounds": 4,
        "seconds": 12.5,
        "bytes_down": 4_000_000_000,
        "bytes_up": 500_000_000,
        "percent": True,
        "macs": {"mean": 5.0, "deviation": 1.0},
    }
    return Result("a", 0, summary, records)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("accuracy 1.0 %", 0.5),
        ("metrics accuracy/svhn 0.5 %", 0.25),
        ("best accuracy 1.0 %", 0.6),
        ("best metrics accuracy/svhn 1.0 %", 0.3),
        ("best round count", 3),
        ("at 1 accuracy 0.5 %", 0.1),
        ("at 2 accuracy 0.5 %", None),
        ("at 9 accuracy 0.5 %", None),
        ("within 110 accuracy 1.0 %", 0.2),
        ("within 329 accuracy 1.0 %", 0.2),  # round 2 was not evaluated
        ("within 330 accuracy 1.0 %", 0.6),
        ("within 1e9 accuracy 1.0 %", 0.5),
        ("within 330 metrics accuracy/svhn 1.0 %", 0.3),
        ("within 109 accuracy 1.0 %", None),
        ("rounds_to 0.4 0.5 count", 3),
        ("rounds_to 0.4 1 count", 3),
        ("bytes_to 0.4 0.5 MB", 330),
        ("macs_to 0.4 0.5 T", 3000),
        ("seconds_to 0.4 0.5 s", 1.5),
        ("rounds_to 0.9 0.5 count", None),
        ("rounds_to 0.1 0.25 count", None),
        ("seconds s", 12.5),
        ("gigabytes count", 4.5),
        ("gigabytes_per_round number", 1.125),
        ("mean metrics kept %", 0.375),
        ("best mean metrics kept %", 0.75),
        ("mean metrics nothing %", None),
        ("mean seconds s", None),
        ("training_macs T", 4000),
        ("macs M", {"mean": 5.0, "deviation": 1.0}),
        ("accuracy 0.25 %", None),
        ("accuracy %", None),
        ("seconds 1.0 s", None),
        ("percent %", None),
    ],
)
def test_numbers_of_a_run(run, text, number):
    assert TableValue.parse(text).of(run) == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("round_seconds 1 4 number", 2.5),
        ("round_seconds 2 4 number", 2.0),
        ("round_seconds 4 4 number", 1.0),
        ("round_seconds 4 5 number", None),
    ],
)
def test_seconds_of_a_range_of_rounds_are_their_median(record, text, seconds):
    times = (9.0, 3.0, 2.0, 1.0)
    records = [replace(record(n), seconds=time) for n, time in enumerate(times, 1)]
    assert TableValue.parse(text).of(Result("a", 0, {}, records)) == seconds


def test_without_records_the_best_is_that_of_the_summary():
    early = Result("a", 0, {"best": {"accuracy": {"1.0": 0.7}}})
    assert TableValue.parse("best accuracy 1.0 %").of(early) == 0.7
    assert TableValue.parse("best accuracy 1.0 %").of(Result("a", 0, {})) is None


def test_where_lower_is_better_a_target_is_an_upper_bound(record):
    records = [record(n, {"1.0": value}, "rmse") for n, value in ((1, 0.9), (2, 0.4))]
    run = Result("a", 0, {"main": "rmse", "higher_is_better": False}, records)
    assert TableValue.parse("rounds_to 0.5 1.0 count").of(run) == 2


@pytest.mark.parametrize(
    ("text", "number", "shown"),
    [
        ("accuracy 1.0 %", 0.6124, "61.2"),
        ("bytes_down GB", 4.02e9, "4.0"),
        ("bytes_down MB", 4.02e9, "4,020.0"),
        ("bytes_down GiB", 898_224_960, "0.837"),
        ("params M", 11_689_512, "11.69"),
        ("seconds s", 12.4, "12"),
        ("rounds count", 1500, "1,500"),
        ("metrics rmse 1.0 number", 0.83456, "0.835"),
    ],
)
def test_numbers_are_shown_in_their_unit(text, number, shown):
    assert TableValue.parse(text).shown(number) == shown


def test_the_factor_is_that_of_the_unit():
    assert TableValue.parse("accuracy 1.0 %").factor == 100
    assert TableValue.parse("bytes_down GB").factor == 1e-9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy 1.0", "the value 'accuracy 1.0' was asked for; it ends with a unit"),
        ("seconds gb", "Known: %, GB, MB"),
        ("%", "the value '%' was asked for; it ends with a unit after the keys"),
        ("", "the value '' was asked for; it ends with a unit"),
        ("rounds_to 0.5 count", "write 'rounds_to TARGET SHARE UNIT'"),
        ("rounds_to high 0.5 count", "write 'rounds_to TARGET SHARE UNIT'"),
        ("bytes_to 0.5 wide GB", "write 'bytes_to TARGET SHARE UNIT'"),
        ("at accuracy 1.0 %", "write 'at ROUND KEYS UNIT'"),
        ("at 500 %", "write 'at ROUND KEYS UNIT'"),
        ("within 2GB accuracy 1.0 %", "write 'within BYTES KEYS UNIT'"),
        ("within 2e9 %", "write 'within BYTES KEYS UNIT'"),
        ("round_seconds 1 number", "write 'round_seconds FIRST LAST UNIT'"),
        ("round_seconds 0 4 number", "write 'round_seconds FIRST LAST UNIT'"),
        ("round_seconds 4 3 number", "write 'round_seconds FIRST LAST UNIT'"),
        ("round_seconds 1 last number", "write 'round_seconds FIRST LAST UNIT'"),
    ],
)
def test_a_text_that_is_no_value_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        TableValue.parse(text)
