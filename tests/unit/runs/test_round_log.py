"""The log of a run: lines that are chained by checksums, and the intact lines of a damaged log."""

from __future__ import annotations

import hashlib
import json

import pytest

from fedquilt.round import Record
from fedquilt.runs import round_log as roundlog


def record(number: int) -> Record:
    return Record(number, 0.5, 2, bytes_down=100, bytes_up=10, macs=1000, loss=1.0 / number)


def written(rounds: int, unchecked: int = 0) -> list[bytes]:
    """Return the lines of a log, the first ones as earlier versions wrote them."""
    lines = [
        json.dumps(record(number).to_dict()).encode() + b"\n" for number in range(1, unchecked + 1)
    ]
    check = roundlog.parse(b"".join(lines)).check
    for number in range(unchecked + 1, rounds + 1):
        line, check = roundlog.encoded(record(number), check)
        lines.append(line)
    return lines


def rounds(lines: list[bytes]) -> list[int]:
    return [one.round for one in roundlog.parse(b"".join(lines)).records]


def test_a_line_has_the_keys_of_a_record_and_a_checksum_at_the_end() -> None:
    first, second = written(2)
    plain = json.loads(second)
    assert list(plain) == [*record(2).to_dict(), "check"]
    previous, check = plain.pop("check").split("-")
    assert previous == json.loads(first)["check"].split("-")[1]
    assert check == hashlib.sha256(previous.encode() + json.dumps(plain).encode()).hexdigest()[:16]


@pytest.mark.parametrize("unchecked", [0, 2, 4])
def test_a_log_that_an_earlier_version_began_is_read_back(unchecked: int) -> None:
    lines = written(4, unchecked)
    log = roundlog.parse(b"".join(lines))
    assert log.records == [record(number) for number in range(1, 5)]
    assert (log.damage, log.missing(4), log.content) == ((), [], b"".join(lines))


def test_a_flipped_bit_damages_its_line_only() -> None:
    lines = written(3)
    for place in range(len(lines[1]) - 1):
        for bit in range(8):
            harmed = bytearray(lines[1])
            harmed[place] ^= 1 << bit
            found = rounds([lines[0], bytes(harmed), lines[2]])
            assert found == [1, 3], (place, bit)


def test_lines_that_are_edited_lost_or_moved_are_noticed() -> None:
    lines = written(4)
    edited = lines[1].replace(b'"bytes_down": 100', b'"bytes_down": 999')
    assert rounds([lines[0], edited, *lines[2:]]) == [1, 3, 4]
    assert rounds([lines[0], *lines[2:]]) == [1, 3, 4]
    assert rounds([lines[0], lines[2], lines[1], lines[3]]) == [1, 2, 4]
    assert rounds([lines[0], lines[1], *lines[1:]]) == [1, 2, 3, 4]  # a line that is there twice
    assert rounds([lines[0], b"\x00\xff\n", *lines[1:]]) == [1, 2, 3, 4]
    assert rounds([*lines[:2], lines[2][:-9]]) == [1, 2]


def test_a_line_of_another_run_does_not_fit_into_the_chain() -> None:
    lines = written(3)
    other, _ = roundlog.encoded(Record(2, 9.0, 2, 5, 5, 5, 0.0), "0" * 16)
    log = roundlog.parse(b"".join([lines[0], other, lines[2]]))
    assert [one.round for one in log.records] == [1, 3]
    assert log.damage == ("line 2: it is not the line that was there when round 3 was written",)


def test_lines_of_an_earlier_version_are_covered_by_the_first_line_with_a_checksum() -> None:
    lines = written(4, unchecked=2)
    edited = lines[0].replace(b'"bytes_up": 10', b'"bytes_up": 11')
    assert rounds([edited, *lines[1:]]) == [3, 4]
    # Nothing is known about them before a run was resumed.
    assert rounds([edited, lines[1]]) == [
        1,
        2,
    ]
    assert rounds([lines[0].replace(b'"round": 1', b'"round": 7'), lines[1]]) == [2]
    # a line without a checksum after one
    assert rounds([*lines[:3], written(4, unchecked=4)[3]]) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "[]",
        "null",
        "{}",
        '{"round": 1}',
        10_000 * "[",
        "\udcff",
        '{"round": "x"}',
        json.dumps({"round": 1, "x": 2}),
    ],
)
def test_content_that_is_no_record_is_damage(text: str) -> None:
    log = roundlog.parse(text.encode(errors="surrogateescape") + b"\n")
    assert not log.lines
    assert log.damage[0].startswith("line 1: ")


def test_values_of_other_types_are_damage() -> None:
    plain = record(1).to_dict() | {
        "main": "rmse",
        "metrics": {"rmse": {"1.0": 0.5}},
        "accuracy": {},
    }
    assert not roundlog.parse(json.dumps(plain).encode() + b"\n").damage
    for name in (
        "round",
        "bytes_up",
        "seconds",
        "loss",
        "link_seconds",
        "missing",
        "server_macs",
        "metrics",
    ):
        assert roundlog.parse(json.dumps({**plain, name: "x"}).encode() + b"\n").damage, name
    wrong = [
        {"seconds": None},
        {"main": 3},
        *({"metrics": {"rmse": odd}} for odd in (None, [], {"1.0": None})),
    ]
    for change in wrong:
        assert roundlog.parse(json.dumps({**plain, **change}).encode() + b"\n").damage, change


def test_the_log_of_another_run_is_not_used() -> None:
    log = roundlog.parse(b"".join(written(3)))
    assert log.until(2).missing(3) == [(3, 3)]
    assert log.until(3, log.check).records == log.records
    assert log.until(3, "0" * 16).records == []


def test_rounds_in_words() -> None:
    assert roundlog.rounds_text([(4, 4)]) == "round 4"
    assert roundlog.rounds_text([(1, 1), (4, 6), (9, 9)]) == "rounds 1, 4 to 6, 9"


def test_gaps_are_found_also_if_there_are_too_many_to_list() -> None:
    assert roundlog.gaps([record(2), record(3), record(6)], 7) == [(1, 1), (4, 5), (7, 7)]
    assert roundlog.gaps([record(1), record(2)], 2) == []
    assert roundlog.gaps([record(5)], 3) == [(1, 3)]
    assert roundlog.gaps([], 2**60) == [(1, 2**60)]
