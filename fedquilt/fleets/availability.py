"""Availability of clients: traces and daily patterns.

Both are indexed once. The cost of drawing a cohort then depends on its size, not on the fleet's.
"""

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
from fedquilt.fleets.budgets import read_csv

Ints = NDArray[np.int64]

_FOREVER = np.iinfo(np.int64).max


class Availability(Protocol):
    """A setting that determines which clients are available in which rounds."""

    def presence(self, num_clients: int, seed: int) -> Presence: ...


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
        client, start, end = (
            numbers["client"],
            numbers["start"],
            numbers.get("end", self.period or _FOREVER),
        )
        if client >= num_clients:
            raise ConfigError(
                f"{location}: there is no client {client}; the fleet has {num_clients}, from 0."
            )
        if not start < end or (self.period and end > self.period):
            period_hint = f" and lies within the period of {self.period}" if self.period else ""
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
        fractions = noise.uniform(
            torch.tensor(noise.key(seed, noise.Stream.AWAKE_HOURS)), (num_clients,), torch.float64
        ).numpy()
        clients, start = (
            np.arange(num_clients),
            (fractions * self.spread * self.period).astype(np.int64),
        )
        # A stay that continues in the next period is split into two.
        wrapped = np.flatnonzero(start + self.awake > self.period)
        return Presence(
            np.concatenate([clients, clients[wrapped]]),
            np.concatenate([start, np.zeros_like(wrapped)]),
            np.concatenate(
                [
                    np.minimum(start + self.awake, self.period),
                    start[wrapped] + self.awake - self.period,
                ]
            ),
            period=self.period,
            name="the daily pattern",
        )


AVAILABILITY: dict[str, type[Trace] | type[Diurnal]] = {"trace": Trace, "diurnal": Diurnal}


class Presence:
    """Stays (client, start, end) of clients, indexed by a segment tree over rounds.

    The leaves are the intervals between rounds at which a client comes or goes. A stay is stored at
    the O(log) nodes that tile it. The clients of a round are thus the O(log) lists between a leaf
    and the root. They can be counted and drawn from without listing all of them.

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
        self.period, self.name = period, name
        self._sums: dict[int, list[int]] = {}
        open_end = ends == _FOREVER
        # Rounds between two neighbouring cuts have the same clients. After the last cut only stays
        # without an end remain.
        self._cuts = np.unique(np.concatenate([starts, ends[~open_end]]))
        # Round from which on no client is available. None: there is no such round.
        self.last = None if period or open_end.any() else int(self._cuts[-1])
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
        """Return a checksum that is equal if the same clients are drawn.

        It is computed from the index, because the order of the index determines the draws.
        """
        digest = hashlib.sha256(f"{self.period} {self._size}".encode())
        for array in (self._cuts, self._offsets, self._owners):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]

    def count(self, round: int) -> int:
        """Return the number of clients that are available in a round."""
        return sum(stop - start for start, stop in self._lists(round))

    def before(self, round: int, most: int) -> int:
        """Return the number of clients drawn before a round. Sums are cached.

        Args:
            round: Round, from 0.
            most: Clients that are drawn in each round, at most.
        """
        sums = self._sums.setdefault(most, [0])
        while len(sums) <= round:
            sums.append(sums[-1] + min(most, self.count(len(sums) - 1)))
        return sums[round]

    def draw(self, round: int, count: int, word: int) -> list[int]:
        """Draw clients uniformly from those that are available, in ascending order.

        Args:
            round: Round, from 0.
            count: Number of clients. If fewer are available, all of them are returned.
            word: Key of the random numbers.
        """
        lists = self._lists(round)
        ends = np.cumsum([stop - start for start, stop in lists], dtype=np.int64)
        total = int(ends[-1]) if lists else 0
        places = np.array(noise.choose(word, min(count, total), total), dtype=np.int64)
        list_index = np.searchsorted(ends, places, side="right")
        shift = np.array([stop for _, stop in lists], dtype=np.int64) - ends
        return sorted(self._owners[places + shift[list_index]].tolist())

    def among(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return the clients of a list that are available in a round, in their order."""
        present: set[int] = set()
        for start, stop in self._lists(round):
            present.update(self._owners[start:stop].tolist())
        return [client for client in clients if client in present]

    def _lists(self, round: int) -> list[tuple[int, int]]:
        """Return the slices of `_owners` that together are the clients of a round.

        They belong to the nodes between the round's leaf and the root.
        """
        if self.period:
            round %= self.period
        slot = int(np.searchsorted(self._cuts, round, side="right")) - 1
        node, slices = slot + self._size if slot >= 0 else 0, []
        while node:
            start, stop = int(self._offsets[node]), int(self._offsets[node + 1])
            if stop > start:
                slices.append((start, stop))
            node >>= 1
        return slices


def _merged(clients: Ints, starts: Ints, ends: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Merge stays of one client that overlap or touch, so that no client is listed twice."""
    order = np.lexsort((starts, clients))
    base = clients[order] * (size + 1)  # Intervals of clients follow one another.
    begin, reach = base + starts[order], np.maximum.accumulate(base + ends[order])
    first = np.flatnonzero(np.concatenate([[True], begin[1:] > reach[:-1]]))
    until = reach[np.concatenate([first[1:], [len(reach)]]) - 1]
    client = clients[order][first]
    return client, begin[first] - client * (size + 1), until - client * (size + 1)
