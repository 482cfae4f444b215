"""Simulated time of a round, from the speed of links and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedquilt.checks import outside, refuse
from fedquilt.round.link.per_client import (
    PerClient,
    as_text,
    check_lengths,
    convert_lists,
    empty_lists,
    value_of,
)

_UNITS = ((1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit"), (1.0, "bit"))


@dataclass(frozen=True)
class Clock:
    """Speeds and latencies that give the simulated time of a round.

    Each is one number for all clients, or a list that is assigned to clients in turn.
    """

    down: PerClient = 20e6  # Download speed of clients in bits per second
    up: PerClient = 10e6  # Upload speed of clients in bits per second
    latency: PerClient = 0.05  # Latency of each direction in seconds
    compute: PerClient = 0.0  # Multiply-adds per second of clients. 0: training takes no time
    # Seconds of simulated time after which updates are dropped. None: the server waits for all
    deadline: float | None = None

    def __post_init__(self) -> None:
        convert_lists(self, "down", "up", "latency", "compute")
        problems = outside(
            self, down="[1, 1e15]", up="[1, 1e15]", latency="[0, 1e9]", compute="[0, 1e21]"
        )
        problems |= empty_lists(self, "down", "up", "latency", "compute")
        if self.deadline is not None:
            problems |= outside(self, deadline="(0, inf)")
            if not problems and self.deadline < 2 * self._least_latency:
                problems["deadline"] = (
                    f"{self.deadline:g} was asked for; two latencies take at least "
                    f"{2 * self._least_latency:g} s, so that every update would be late. A later "
                    "deadline would work, or none, with which the server waits for all."
                )
        refuse(self, problems)

    def __str__(self) -> str:
        until = "" if self.deadline is None else f", updates dropped after {self.deadline:g} s"
        return (
            f"{_speed(self.down)} down, {_speed(self.up)} up, {as_text(self.latency)} s each "
            f"way{until}"
        )

    @property
    def _least_latency(self) -> float:
        return min(self.latency) if isinstance(self.latency, tuple) else self.latency

    def check(self, num_clients: int) -> None:
        """Raise a ConfigError if the length of a list does not divide `num_clients`."""
        check_lengths(self, num_clients, "down", "up", "latency", "compute")

    def slowest(self, costs: Mapping[int, tuple[int, ...]], wire_factor: int = 1) -> float:
        """Return the seconds that the slowest client takes, or 0 if there is no client.

        Args:
            costs: Bytes received, bytes sent and multiply-adds of each client, by its number.
                Further values are ignored.
            wire_factor: Factor by which bytes are multiplied. 1 has no effect.
        """
        return max(self.times(costs, wire_factor).values(), default=0.0)

    def late(self, costs: Mapping[int, tuple[int, ...]], wire_factor: int = 1) -> dict[int, float]:
        """Return the seconds of each client that takes longer than the deadline, by its number.

        The result is empty if there is no deadline.

        Args:
            costs: Bytes received, bytes sent and multiply-adds of each client, by its number.
                Further values are ignored.
            wire_factor: Factor by which bytes are multiplied. 1 has no effect.
        """
        if self.deadline is None:
            return {}
        return {
            id: seconds
            for id, seconds in self.times(costs, wire_factor).items()
            if seconds > self.deadline
        }

    def times(self, costs: Mapping[int, tuple[int, ...]], wire_factor: int = 1) -> dict[int, float]:
        """Return the seconds that each client takes to receive, train and send, by its number.

        Args:
            costs: Bytes received, bytes sent and multiply-adds of each client, by its number.
                Further values are ignored.
            wire_factor: Factor by which bytes are multiplied. 1 has no effect.
        """
        return {
            id: self.seconds(id, down * wire_factor, up * wire_factor, macs)
            for id, (down, up, macs, *_) in costs.items()
        }

    def seconds(self, client: int, bytes_down: int, bytes_up: int, macs: int) -> float:
        """Return the seconds that a client needs to receive, to train and to send.

        Two latencies are included. Training takes no time if `compute` is 0.

        Args:
            client: Number of the client.
            bytes_down: Bytes that it receives.
            bytes_up: Bytes that it sends.
            macs: Multiply-adds of its training.
        """
        rate = value_of(self.compute, client)
        download = 8 * bytes_down / value_of(self.down, client)
        upload = 8 * bytes_up / value_of(self.up, client)
        training = macs / rate if rate else 0.0
        return 2 * value_of(self.latency, client) + (download + upload) + training


def _speed(value: PerClient) -> str:
    """Return one or more speeds as text with a fitting unit, such as `20 Mbit/s`.

    Speeds are in bits per second. Several are joined by commas.
    """
    if isinstance(value, tuple):
        return ", ".join(map(_speed, value))
    size, unit = next((entry for entry in _UNITS if value >= entry[0]), _UNITS[-1])
    return f"{value / size:g} {unit}/s"
