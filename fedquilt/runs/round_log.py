"""The log of a run, `rounds.jsonl`: one JSON object per round, chained by checksums.

A line ends with the key `check`, which holds the checksums of the previous line and of this line:

    {"round": 7, …, "check": "1f0c5d9be2a34876-a8e01b44c2d95f37"}

The second part is the SHA-256, cut to 16 digits, of the first part followed by the line as it would
be without the key. Each line can be checked by itself, so that one damaged line does not make the
others useless. The first part shows if the previous line has changed since this line was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedquilt.errors import FormatError
from fedquilt.round import Grades, Record

Gap = tuple[int, int]  # First and last of consecutive missing rounds

NUM_DIGITS = 16  # Hexadecimal digits of a checksum
MAX_REASON = 200  # Largest number of characters in the description of damage

_CHECK = re.compile(rb', "check": "([0-9a-f]{16}|)-([0-9a-f]{16})"\}$')

# What the parsers of a line raise if its values are wrong
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    FormatError,
)


@dataclass(frozen=True)
class Line:
    """A line of the log that holds the record of a round."""

    text: bytes  # Content without the line break
    record: Record  # Record of the round
    # Checksum of the previous line, as this line has it. None: an earlier version wrote the line
    previous: str | None
    check: str  # Checksum of this line


@dataclass(frozen=True)
class RoundLog:
    """The intact lines of a log, and descriptions of the damaged ones."""

    lines: tuple[Line, ...] = ()  # Intact lines in the order of the file
    damage: tuple[str, ...] = ()  # Descriptions such as "line 3: its checksum differs"

    @property
    def records(self) -> list[Record]:
        """Return the records of the intact lines."""
        return [line.record for line in self.lines]

    @property
    def check(self) -> str:
        """Return the checksum of the last line. Empty: there is none."""
        return self.lines[-1].check if self.lines else ""

    @property
    def content(self) -> bytes:
        """Return the content of a file that has the intact lines only."""
        return b"".join(line.text + b"\n" for line in self.lines)

    def missing(self, rounds: int) -> list[Gap]:
        """Return the rounds up to `rounds` without an intact line, as pairs of first and last."""
        return gaps(self.records, rounds)

    def until(self, rounds: int, check: str | None = None) -> RoundLog:
        """Return a log with the intact lines up to a round, and without descriptions of damage.

        Args:
            rounds: The last round.
            check: Checksum of its line, from a checkpoint. If it differs, the log is of another
                run, and no lines are returned. None: it is not known.
        """
        lines = tuple(line for line in self.lines if line.record.round <= rounds)
        is_another = (
            bool(lines)
            and lines[-1].record.round == rounds
            and check not in (None, lines[-1].check)
        )
        return RoundLog(() if is_another else lines)


def encoded(record: Record, previous: str) -> tuple[bytes, str]:
    """Return the line of a record with its line break, and its checksum.

    Args:
        record: Record of a round.
        previous: Checksum of the previous line. Empty: there is none.
    """
    text = json.dumps(record.to_dict()).encode()
    check = _checksum(previous, text)
    return text[:-1] + f', "check": "{previous}-{check}"}}\n'.encode(), check


def parse(content: bytes) -> RoundLog:
    """Read a log line by line, and separate intact lines from damaged ones. It raises no error.

    Lines of earlier versions have no checksum. They are accepted at the beginning of a file, and
    the first line with a checksum covers all of them. An incomplete last line counts as damaged.

    Args:
        content: Content of rounds.jsonl.
    """
    texts = content.split(b"\n")
    unfinished = texts.pop()
    damage = {len(texts) + 1: "it was not written to its end"} if unfinished else {}
    num_unchecked = next(
        (position for position, text in enumerate(texts) if _CHECK.search(text)), len(texts)
    )
    previous = ""
    lines: dict[int, Line] = {}  # By line number, from 1
    for number, text in enumerate(texts, 1):
        try:
            lines[number] = _line(text, number, previous if number <= num_unchecked else None)
        except _UNREADABLE as error:
            damage[number] = str(error)[:MAX_REASON] or type(error).__name__
        if number <= num_unchecked:
            previous = _checksum(previous, text)

    first = lines.get(num_unchecked + 1)
    if num_unchecked and first is not None and first.previous != previous:
        for number in range(1, num_unchecked + 1):
            damage[number] = (
                f"the lines up to {num_unchecked} are not those that were there when the next was "
                "written"
            )
    _check_links(lines, damage)
    intact = tuple(line for number, line in lines.items() if number not in damage)
    return RoundLog(intact, tuple(f"line {number}: {damage[number]}" for number in sorted(damage)))


def _line(text: bytes, number: int, unchecked: str | None) -> Line:
    """Return a line whose own checksum is right.

    Args:
        text: The line without its line break.
        number: Line number, from 1.
        unchecked: Checksum of the previous lines, if neither they nor this line have one. None:
            this line must have a checksum.

    Raises:
        ValueError: The line is damaged. Content that is no record raises TypeError, KeyError or
            AttributeError.
    """
    if unchecked is not None:
        record = _record(json.loads(text))
        if record.round != number:
            raise ValueError(f"it has round {record.round}")
        return Line(text, record, None, _checksum(unchecked, text))
    match = _CHECK.search(text)
    if match is None:
        raise ValueError("it has no checksum")
    previous, check = (part.decode() for part in match.groups())
    plain = text[: match.start()] + b"}"
    if _checksum(previous, plain) != check:
        raise ValueError("its checksum differs")
    return Line(text, _record(json.loads(plain)), previous, check)


def _check_links(lines: Mapping[int, Line], damage: dict[int, str]) -> None:
    """Add lines to `damage` that have changed since the next line was written.

    Rounds must also ascend. The last line is examined first, because a checkpoint has its checksum.
    Lines next to missing rounds have no neighbour to be compared with.

    Args:
        lines: Lines whose own checksums are right, by line number from 1.
        damage: Descriptions of damage by line number. It is changed.
    """
    later: Line | None = None
    for number, line in sorted(lines.items(), reverse=True):
        if number in damage:
            continue
        if later is not None and line.record.round >= later.record.round:
            damage[number] = f"round {line.record.round} comes before round {later.record.round}"
            continue
        if later is not None and not _may_precede(line, later):
            damage[number] = (
                f"it is not the line that was there when round {later.record.round} was written"
            )
            continue
        later = line


def _may_precede(line: Line, later: Line) -> bool:
    """Return True if `later` was written directly after `line`, as far as that is known.

    It is known only if their rounds are consecutive and `later` has the checksum of its
    predecessor.

    Args:
        line: An intact line.
        later: The next intact line.
    """
    is_next = later.record.round == line.record.round + 1
    return not is_next or later.previous in (None, line.check)


def _record(plain: Any) -> Record:
    """Return the record of a round from parsed JSON, after checking the types of its values.

    Raises:
        ValueError: It is no object, or a value has another type. Missing keys raise other errors.
    """
    if not isinstance(plain, dict):
        raise ValueError("it holds no object")
    record = Record.from_dict(plain)
    for field in fields(record):
        value = getattr(record, field.name)
        if not _fits(str(field.type), value):
            raise ValueError(f"{field.name} is {value!r}")
    _check_grades(record.grades)
    return record


def _fits(hint: str, value: object) -> bool:
    """Return True if a value has the type of a record's field.

    Numbers and tuples of whole numbers are checked. Values of other types all fit.

    Args:
        hint: Type hint of the field as text, such as "int" or "float | None".
        value: Value of the field.
    """
    if hint == "int":
        return type(value) is int
    if hint.startswith("float"):
        return _is_number(value) or (value is None and hint.endswith("None"))
    if hint.startswith("tuple[int"):
        return value is None or (
            isinstance(value, tuple) and all(type(item) is int for item in value)
        )
    return True


def _check_grades(grades: Grades) -> None:
    """Refuse grades whose metrics are not tables of numbers by share.

    Raises:
        ValueError: A metric is malformed, or the name of the main one is no text.
    """
    if not isinstance(grades.main, str) or not isinstance(grades.metrics, dict):
        raise ValueError("main is no text, or metrics are no table")
    for name, figures in grades.metrics.items():
        if not isinstance(figures, dict) or not all(map(_is_number, figures.values())):
            raise ValueError(f"the metric {name} is {figures!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checksum(previous: str, text: bytes) -> str:
    return hashlib.sha256(previous.encode() + text).hexdigest()[:NUM_DIGITS]


def gaps(records: Iterable[Record], rounds: int) -> list[Gap]:
    """Return the rounds from 1 to `rounds` without a record, as pairs of first and last round.

    Args:
        records: Records in the order of their rounds.
        rounds: The last round.
    """
    missing = []
    expected = 1
    for number in (*(record.round for record in records), rounds + 1):
        last = min(number - 1, rounds)
        if expected <= last:
            missing.append((expected, last))
        expected = max(expected, number + 1)
    return missing


def rounds_text(missing: Sequence[Sequence[int]]) -> str:
    """Describe gaps in words, such as "rounds 1, 4 to 6" or "round 3".

    Args:
        missing: Pairs of first and last missing round, at least one.
    """
    listed = ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in missing
    )
    is_single = len(missing) == 1 and missing[0][0] == missing[0][1]
    return f"round{'s'[: not is_single]} {listed}"
