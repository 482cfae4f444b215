"""When clients can be reached: traces and daily patterns, indexed once, so that a cohort costs what it holds."""

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
from fedquilt.fleets import read_csv

Ints = NDArray[np.int64]

_FOREVER = np.iinfo(np.int64).max


class Availability(Protocol):
    """A setting that says who is there in which rounds."""

    def presence(self, num_clients: int, seed: int) -> Presence: ...


@dataclass(frozen=True)
class Trace:
    """Stays of clients from a CSV file with the columns client, start, end.

    A client is there in the rounds start ≤ round < end, the first round being 0; without an end, from then on. Clients
    without a row are never there. With a period, the trace repeats after so many rounds.
    """

    file: File
    period: int = 0  # rounds; 0: does not repeat

    def __post_init__(self) -> None:
        within(self, period="[0, inf)")

    def presence(self, num_clients: int, seed: int) -> Presence:
        rows = read_csv(
            self.file, "availability", needs=("client", "start"), knows=("client", "start", "end")
        )
        stays = np.array([self._stay(line, row, num_clients) for line, row in rows], dtype=np.int64)
        return Presence(stays[:, 0], stays[:, 1], stays[:, 2], self.period, self.file)

    def _stay(self, line: int, row: dict[str, str], num_clients: int) -> tuple[int, int, int]:
        where = f"{self.file}, line {line}"
        numbers = {}
        for name, text in row.items():
            if not text and name == "end":
                numbers[name] = self.period or _FOREVER
            elif text.isascii() and text.isdigit() and len(text) < 19:
                numbers[name] = int(text)
            else:
                raise ConfigError(
                    f"{where}: {name} = {text!r} was found; it is a whole number, 0 or above."
                )
        client, start, end = (
            numbers["client"],
            numbers["start"],
            numbers.get("end", self.period or _FOREVER),
        )
        if client >= num_clients:
            raise ConfigError(
                f"{where}: there is no client {client}; the fleet has {num_clients}, from 0."
            )
        if not start < end or (self.period and end > self.period):
            within = f" and lies within the period of {self.period}" if self.period else ""
            raise ConfigError(
                f"{where}: a stay from {start} to {end} was found; it ends after it starts{within}."
            )
        return client, start, end


@dataclass(frozen=True)
class Diurnal:
    """Every client is there for `awake` rounds of each `period`, from its own hour on.

    The hours at which clients' days begin are drawn from the first `spread` of the period: 1 is a fleet all around the
    world, 0 has all days begin together, and what lies between has rounds with many clients and rounds with few.
    """

    period: int = 24
    awake: int = 8
    spread: float = 1.0

    def __post_init__(self) -> None:
        within(self, period="[1, inf)", spread="[0, 1]")
        within(self, awake=f"[1, {self.period}]")

    def presence(self, num_clients: int, seed: int) -> Presence:
        drawn = noise.uniform(
            torch.tensor(noise.key(seed, 25)), (num_clients,), torch.float64
        ).numpy()
        clients, start = (
            np.arange(num_clients),
            (drawn * self.spread * self.period).astype(np.int64),
        )
        over = np.flatnonzero(
            start + self.awake > self.period
        )  # a stay that goes on into the next period is two
        return Presence(
            np.concatenate([clients, clients[over]]),
            np.concatenate([start, np.zeros_like(over)]),
            np.concatenate(
                [
                    np.minimum(start + self.awake, self.period),
                    start[over] + self.awake - self.period,
                ]
            ),
            period=self.period,
            name="the daily pattern",
        )


AVAILABILITY: dict[str, type[Trace] | type[Diurnal]] = {"trace": Trace, "diurnal": Diurnal}


class Presence:
    """Stays (client, start, end), indexed by a segment tree over the rounds at which somebody comes or goes.

    A stay is kept at the O(log) nodes that tile it, so the clients of a round are the O(log) lists between a leaf and
    the root: they are counted and drawn from without being listed, however many there are.
    """

    def __init__(
        self, clients: Ints, starts: Ints, ends: Ints, period: int = 0, name: str = "availability"
    ) -> None:
        self.period, self.name = period, name
        self._sums: dict[int, list[int]] = {}
        open_end = ends == _FOREVER
        # Rounds between two neighbouring cuts are alike; after the last cut only open stays are left.
        self._cuts = np.unique(np.concatenate([starts, ends[~open_end]]))
        self.last = (
            None if period or open_end.any() else int(self._cuts[-1])
        )  # nobody is there from this round on
        size = self._size = len(self._cuts)
        client, left, right = _merged(
            clients,
            np.searchsorted(self._cuts, starts),
            np.where(open_end, size, np.searchsorted(self._cuts, ends)),
            size,
        )
        left, right = left + size, right + size
        nodes, owners = [], []
        while len(client):
            odd = (left & 1).astype(bool)
            nodes.append(left[odd])
            owners.append(client[odd])
            left = left + odd
            odd = (right & 1).astype(bool)
            right = right - odd
            nodes.append(right[odd])
            owners.append(client[odd])
            left, right = left >> 1, right >> 1
            unfinished = left < right
            client, left, right = client[unfinished], left[unfinished], right[unfinished]
        node, owner = np.concatenate(nodes), np.concatenate(owners)
        order = np.lexsort((owner, node))
        self._owners = owner[order].astype(np.int32)
        self._offsets = np.searchsorted(node[order], np.arange(2 * size + 1))

    @cached_property
    def fingerprint(self) -> str:
        """Equal where the same clients are drawn: that of the index, by whose order draws go, wherever it is from."""
        found = hashlib.sha256(f"{self.period} {self._size}".encode())
        for array in (self._cuts, self._offsets, self._owners):
            found.update(array.tobytes())
        return found.hexdigest()[:16]

    def count(self, round: int) -> int:
        """How many clients are there."""
        return sum(stop - start for start, stop in self._lists(round))

    def before(self, round: int, most: int) -> int:
        """How many were drawn in all earlier rounds, at most so many in each; counted once a round."""
        sums = self._sums.setdefault(most, [0])
        while len(sums) <= round:
            sums.append(sums[-1] + min(most, self.count(len(sums) - 1)))
        return sums[round]

    def draw(self, round: int, count: int, word: int) -> list[int]:
        """At most `count` of the clients that are there, all alike likely, ascending."""
        lists = self._lists(round)
        ends = np.cumsum([stop - start for start, stop in lists], dtype=np.int64)
        total = int(ends[-1]) if lists else 0
        places = np.array(noise.choose(word, min(count, total), total), dtype=np.int64)
        which = np.searchsorted(ends, places, side="right")
        shift = np.array([stop for _, stop in lists], dtype=np.int64) - ends
        return sorted(self._owners[places + shift[which]].tolist())

    def among(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return those of some clients that are there, in their order."""
        there: set[int] = set()
        for start, stop in self._lists(round):
            there.update(self._owners[start:stop].tolist())
        return [client for client in clients if client in there]

    def _lists(self, round: int) -> list[tuple[int, int]]:
        """Where the owners of the nodes above a round's leaf stand."""
        if self.period:
            round %= self.period
        slot = int(np.searchsorted(self._cuts, round, side="right")) - 1
        node, found = slot + self._size if slot >= 0 else 0, []
        while node:
            start, stop = int(self._offsets[node]), int(self._offsets[node + 1])
            if stop > start:
                found.append((start, stop))
            node >>= 1
        return found


def _merged(clients: Ints, starts: Ints, ends: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Stays of one client that overlap or touch become one, so that nobody is listed twice."""
    order = np.lexsort((starts, clients))
    base = clients[order] * (size + 1)  # clients one after another on one line
    begin, reach = base + starts[order], np.maximum.accumulate(base + ends[order])
    first = np.flatnonzero(np.concatenate([[True], begin[1:] > reach[:-1]]))
    until = reach[np.concatenate([first[1:], [len(reach)]]) - 1]
    client = clients[order][first]
    return client, begin[first] - client * (size + 1), until - client * (size + 1)
