"""The log of a run, `rounds.jsonl`: one JSON object per round, chained by checksums.

A line ends with the key `check`, which holds the checksum of the line before and its own:

    {"round": 7, …, "check": "1f0c5d9be2a34876-a8e01b44c2d95f37"}

The second part is the SHA-256, cut to 16 digits, of the first part followed by the line as it would be without the key.
Each line can be checked by itself, so that one damaged line does not make the others useless. The first part shows
whether the line before is the one that was there when this line was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from fedquilt.round import Record

Gap = tuple[int, int]  # first and last of the rounds that are missing

NUM_DIGITS = 16  # hexadecimal digits of a checksum
MAX_REASON = 200  # characters of a reason for damage

_CHECK = re.compile(rb', "check": "([0-9a-f]{16}|)-([0-9a-f]{16})"\}$')


@dataclass(frozen=True)
class Line:
    """A line of the log that holds the record of a round."""

    text: bytes  # without the line's end
    record: Record
    previous: (
        str | None
    )  # checksum of the line before, as this line has it; None: written by an earlier version
    check: str  # checksum of this line


@dataclass(frozen=True)
class RoundLog:
    """The intact lines of a log, and what is wrong with the others."""

    lines: tuple[Line, ...] = ()
    damage: tuple[str, ...] = ()  # reason by damaged line, such as "line 3: its checksum differs"

    @property
    def records(self) -> list[Record]:
        return [line.record for line in self.lines]

    @property
    def check(self) -> str:
        """Return the checksum of the last line. Empty: there is none."""
        return self.lines[-1].check if self.lines else ""

    @property
    def content(self) -> bytes:
        """Return the intact lines as the file should have them."""
        return b"".join(line.text + b"\n" for line in self.lines)

    def missing(self, rounds: int) -> list[Gap]:
        """Return the rounds up to `rounds` that no intact line has."""
        return gaps(self.records, rounds)

    def until(self, rounds: int, check: str | None = None) -> RoundLog:
        """Return the intact lines up to a round.

        Args:
            rounds: The last round.
            check: Checksum of its line, which a checkpoint has. A log of another run has another one, and nothing of it
                is returned. None: it is not known.
        """
        lines = tuple(line for line in self.lines if line.record.round <= rounds)
        is_another = (
            bool(lines)
            and lines[-1].record.round == rounds
            and check not in (None, lines[-1].check)
        )
        return RoundLog(() if is_another else lines)


def encoded(record: Record, previous: str) -> tuple[bytes, str]:
    """Return the line of a record, with its end, and its checksum.

    Args:
        record: Record of a round.
        previous: Checksum of the line before. Empty: there is none.
    """
    text = json.dumps(record.to_dict()).encode()
    check = _checksum(previous, text)
    return text[:-1] + f', "check": "{previous}-{check}"}}\n'.encode(), check


def parse(content: bytes) -> RoundLog:
    """Read a log line by line.

    Lines of earlier versions have no checksum. They are accepted at the beginning of a file, and the first line with a
    checksum covers all of them.
    """
    texts = content.split(b"\n")
    unfinished = texts.pop()
    damage = {len(texts) + 1: "it was not written to its end"} if unfinished else {}
    num_unchecked = next(
        (place for place, text in enumerate(texts) if _CHECK.search(text)), len(texts)
    )
    previous = ""
    lines: dict[int, Line] = {}  # by number, from 1
    for number, text in enumerate(texts, 1):
        try:
            lines[number] = _line(text, number, previous if number <= num_unchecked else None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            damage[number] = str(error)[:MAX_REASON] or type(error).__name__
        if number <= num_unchecked:
            previous = _checksum(previous, text)

    first = lines.get(num_unchecked + 1)
    if num_unchecked and first is not None and first.previous != previous:
        for number in range(1, num_unchecked + 1):
            damage[number] = (
                f"the lines up to {num_unchecked} are not those that were there when the next was written"
            )
    _check_links(lines, damage)
    intact = tuple(line for number, line in lines.items() if number not in damage)
    return RoundLog(intact, tuple(f"line {number}: {damage[number]}" for number in sorted(damage)))


def _line(text: bytes, number: int, unchecked: str | None) -> Line:
    """Return a line that is intact by itself.

    Args:
        text: The line without its end.
        number: Its number, from 1.
        unchecked: Checksum of the lines before, if all of them and this line have none. None: it must have one.

    Raises:
        ValueError: It is damaged. Content that is no record raises TypeError, KeyError or AttributeError.
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
    """Add lines to `damage` that are not those which were there when the next line was written.

    It begins with the last line, because a checkpoint has its checksum. Lines next to missing rounds have no neighbour
    to be compared with.
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
    """Return True if the next intact line was written after this one, or if that cannot be known."""
    is_next = later.record.round == line.record.round + 1
    return not is_next or later.previous in (None, line.check)


def _record(plain: Any) -> Record:
    """Return the record of a round whose values have the types that a run writes."""
    if not isinstance(plain, dict):
        raise ValueError("it holds no object")
    record = Record.from_dict(plain)
    wrong = [
        name
        for name in ("round", "clients", "bytes_down", "bytes_up", "macs")
        if type(plain[name]) is not int
    ]
    wrong += [
        name for name in ("seconds", "loss") if not isinstance(plain[name], (int, float, NoneType))
    ]
    if wrong:
        raise ValueError(f"{wrong[0]} is {plain[wrong[0]]!r}")
    return record


def _checksum(previous: str, text: bytes) -> str:
    return hashlib.sha256(previous.encode() + text).hexdigest()[:NUM_DIGITS]


def gaps(records: Iterable[Record], rounds: int) -> list[Gap]:
    """Return the rounds from 1 to `rounds` without a record, as pairs of the first and the last of each gap.

    Args:
        records: Records in the order of their rounds.
        rounds: The last round.
    """
    found = []
    expected = 1
    for number in (*(record.round for record in records), rounds + 1):
        last = min(number - 1, rounds)
        if expected <= last:
            found.append((expected, last))
        expected = max(expected, number + 1)
    return found


def rounds_text(missing: Sequence[Sequence[int]]) -> str:
    """Return gaps in words, such as "rounds 1, 4 to 6"."""
    listed = ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in missing
    )
    is_single = len(missing) == 1 and missing[0][0] == missing[0][1]
    return f"round{'s'[: not is_single]} {listed}"
