"""Availability of clients: traces and daily patterns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt import noise
from fedquilt.checks import File, within
from fedquilt.errors import ConfigError
from fedquilt.fleets.from_csv import read_csv

Ints = NDArray[np.int64]
_FOREVER = np.iinfo(np.int64).max


class Availability(Protocol):
    """A setting that determines which clients are available in which rounds."""

    def presence(self, num_clients: int, seed: int) -> Presence:
        """Return the stays of all clients.

        Args:
            num_clients: Number of clients in the fleet.
            seed: Random seed. Settings without randomness ignore it.
        """
        ...


@dataclass(frozen=True)
class Trace:
    """Availability from a CSV file with the columns client, start, end.

    A client is available in the rounds start ≤ round < end, where the first round is 0. Without an
    end it stays available. Clients without a row are never available. With a period, the trace
    repeats after that many rounds.
    """

    file: File  # CSV file with the columns client, start, end.
    period: int = 0  # Rounds after which the trace repeats. 0: it does not repeat.

    def __post_init__(self) -> None:
        within(self, period="[0, inf)")

    def presence(self, num_clients: int, seed: int) -> Presence:
        """Read the stays of all clients from the file. The seed has no effect.

        Args:
            num_clients: Number of clients in the fleet. Larger client numbers are refused.
            seed: Random seed.
        """
        rows = read_csv(
            self.file, "availability", needs=("client", "start"), knows=("client", "start", "end")
        )
        stays = np.array([self._stay(line, row, num_clients) for line, row in rows], dtype=np.int64)
        return Presence(stays[:, 0], stays[:, 1], stays[:, 2], self.period, self.file)

    def _stay(self, line: int, row: dict[str, str], num_clients: int) -> tuple[int, int, int]:
        location = f"{self.file}, line {line}"
        numbers = {}
        for name, text in row.items():
            if not text and name == "end":
                numbers[name] = self.period or _FOREVER
            elif text.isascii() and text.isdigit() and len(text) < 19:
                numbers[name] = int(text)
            else:
                raise ConfigError(
                    f"{location}: {name} = {text!r} was found; it is a whole number, 0 or above."
                )
        client, start = numbers["client"], numbers["start"]
        end = numbers.get("end", self.period or _FOREVER)
        if client >= num_clients:
            raise ConfigError(
                f"{location}: there is no client {client}; the fleet has {num_clients}, from 0."
            )
        if not start < end or (self.period and end > self.period):
            period_hint = f" and is within the period of {self.period}" if self.period else ""
            raise ConfigError(
                f"{location}: a stay from {start} to {end} was found; it ends after it "
                f"starts{period_hint}."
            )
        return client, start, end


@dataclass(frozen=True)
class Diurnal:
    """Every client is available for `awake` rounds of each `period`, from a start of its own.

    The starts are drawn uniformly from the first `spread` of the period. 1 is a fleet all around
    the world, and with 0 all clients start together. Values in between give rounds with many
    clients and rounds with few.
    """

    period: int = 24  # Rounds of a day, after which availability repeats.
    awake: int = 8  # Rounds of each period in which a client is available.
    spread: float = 1.0  # Share of the period over which clients' starts are spread. 0: all equal.

    def __post_init__(self) -> None:
        within(self, period="[1, inf)", spread="[0, 1]")
        within(self, awake=f"[1, {self.period}]")

    def presence(self, num_clients: int, seed: int) -> Presence:
        """Draw at random when every client's stay starts within the period.

        A stay that goes beyond the end of the period continues at its beginning.

        Args:
            num_clients: Number of clients in the fleet.
            seed: Random seed of the starts.
        """
        key = torch.tensor(noise.key(seed, noise.Stream.AWAKE_HOURS))
        fractions = noise.uniform(key, (num_clients,), torch.float64).numpy()
        clients = np.arange(num_clients)
        starts = (fractions * self.spread * self.period).astype(np.int64)
        ends = starts + self.awake
        # A stay that continues in the next period is split into two.
        wrapped = np.flatnonzero(ends > self.period)
        return Presence(
            np.concatenate([clients, clients[wrapped]]),
            np.concatenate([starts, np.zeros_like(wrapped)]),
            np.concatenate([np.minimum(ends, self.period), ends[wrapped] - self.period]),
            period=self.period,
            name="the daily pattern",
        )


AVAILABILITY: dict[str, type[Trace] | type[Diurnal]] = {"trace": Trace, "diurnal": Diurnal}


class Presence:
    """Stays of clients, each from a start to an end, and draws from the clients of a round.

    Starts and ends cut the rounds into slots. The rounds of one slot have the same clients, which
    a comparison of all stays with the slot finds.

    Args:
        clients: (stay,) Client of each stay.
        starts: (stay,) First round of each stay.
        ends: (stay,) Round after the last of each stay.
        period: Rounds after which all stays repeat. 0: they do not repeat.
        name: Name for messages.
    """

    def __init__(
        self, clients: Ints, starts: Ints, ends: Ints, period: int = 0, name: str = "availability"
    ) -> None:
        self.period = period
        self.name = name
        self._sums: dict[int, list[int]] = {}
        has_no_end = ends == _FOREVER
        # First round of each slot. After the last one only stays without an end remain.
        self._cuts = np.unique(np.concatenate([starts, ends[~has_no_end]]))
        # Round from which on no client is available. None: there is no such round.
        self.last = None if period or has_no_end.any() else int(self._cuts[-1])

        num_slots = len(self._cuts)
        first_slots = np.searchsorted(self._cuts, starts)
        end_slots = np.where(has_no_end, num_slots, np.searchsorted(self._cuts, ends))
        # (stay,) Client, first slot, and slot after the last one.
        self._clients, self._first, self._end = _merged(clients, first_slots, end_slots, num_slots)
        arrivals = np.bincount(self._first, minlength=num_slots + 1)
        departures = np.bincount(self._end, minlength=num_slots + 1)
        self._counts = np.cumsum(arrivals - departures)  # (slot,) Number of available clients.

    @cached_property
    def fingerprint(self) -> str:
        """Return a checksum of all stays and the period, as 16 hexadecimal digits.

        Equal checksums mean that the same clients are drawn with the same seed.
        """
        digest = hashlib.sha256(str(self.period).encode())
        for array in (self._cuts, self._clients, self._first, self._end):
            digest.update(array.astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    def count(self, round: int) -> int:
        """Return the number of clients that are available in a round."""
        slot = self._slot(round)
        return int(self._counts[slot]) if slot >= 0 else 0

    def before(self, round: int, max_clients: int) -> int:
        """Return the number of clients drawn in all rounds before a round. Sums are cached.

        Args:
            round: Round, from 0.
            max_clients: Clients that are drawn in each round, at most.
        """
        sums = self._sums.setdefault(max_clients, [0])
        while len(sums) <= round:
            sums.append(sums[-1] + min(max_clients, self.count(len(sums) - 1)))
        return sums[round]

    def draw(self, round: int, count: int, word: int) -> list[int]:
        """Draw different clients uniformly from those that are available in a round.

        They are returned in ascending order.

        Args:
            round: Round, from 0.
            count: Number of clients. If fewer are available, all of them are returned.
            word: Key of the random numbers.
        """
        available = self._in_draw_order(round)
        positions = noise.choose(word, min(count, len(available)), len(available))
        return sorted(available[positions].tolist())

    def among(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return those of `clients` that are available in a round, in the order of the list."""
        available = set(self._clients[self._is_present(self._slot(round))].tolist())
        return [client for client in clients if client in available]

    def _slot(self, round: int) -> int:
        """Return the index of the slot of a round. −1: the round is before the first start.

        A slot is an interval of rounds in which no stay starts or ends, so that the same clients
        are available.
        """
        if self.period:
            round %= self.period
        return int(np.searchsorted(self._cuts, round, side="right")) - 1

    def _is_present(self, slot: int) -> NDArray[np.bool_]:
        """Return a mask (stay,) that is True for stays that include the slot.

        Args:
            slot: Index of a slot, as `_slot` returns it. −1 is in no stay.
        """
        return (self._first <= slot) & (slot < self._end)

    def _in_draw_order(self, round: int) -> Ints:
        """Return the clients of a round in the order to which random positions refer.

        Clients with short stays come first. Slot s has the number n + s, where n is the number of
        slots. The level of a stay is the largest h for which it includes all 2^h numbers that
        differ from the round's number in the last h bits only. Clients are sorted by level.
        Those of equal level keep their order in `_clients`. Any fixed order gives uniform draws,
        but another one gives other cohorts, and runs with the same seed would no longer be the same
        (test_cohorts_of_earlier_releases_are_drawn in tests/unit/fleets/test_fleet.py).
        """
        slot = self._slot(round)
        is_present = self._is_present(slot)
        clients = self._clients[is_present]
        num_slots = len(self._cuts)
        first = num_slots + self._first[is_present]
        end = num_slots + self._end[is_present]

        levels = np.zeros(len(clients), dtype=np.int8)
        for level in range(1, (2 * num_slots).bit_length()):
            block = (num_slots + slot) >> level << level
            levels += (first <= block) & (block + 2**level <= end)
        return clients[np.argsort(levels, kind="stable")]  # Stays are sorted by client already.


def _merged(clients: Ints, starts: Ints, ends: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Merge stays of one client that overlap or touch, so that a slot has every client once.

    Args:
        clients: Client of each stay, (stay,).
        starts: First slot of each stay, (stay,).
        ends: Slot after the last one of each stay, (stay,).
        size: Number of slots. No stay ends later.

    Returns:
        Clients, starts and ends of the merged stays, in ascending order of clients and starts.
    """
    order = np.lexsort((starts, clients))
    base = clients[order] * (size + 1)  # Intervals of clients follow one another.
    begin, reach = base + starts[order], np.maximum.accumulate(base + ends[order])
    first = np.flatnonzero(np.concatenate([[True], begin[1:] > reach[:-1]]))
    until = reach[np.concatenate([first[1:], [len(reach)]]) - 1]
    client = clients[order][first]
    return client, begin[first] - client * (size + 1), until - client * (size + 1)
