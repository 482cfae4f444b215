"""How long a round would take over real links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedquilt.checks import outside, refuse
from fedquilt.round.link.dealt import Dealt, check_dealt, dealt, empty, shown, take_lists

_UNITS = ((1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit"), (1.0, "bit"))


@dataclass(frozen=True)
class Clock:
    """What simulated time is counted by; each may be one number for all, or a list dealt to clients in turn."""

    down: Dealt = 20e6  # bits a second to a client
    up: Dealt = 10e6  # bits a second from a client
    latency: Dealt = 0.05  # seconds each way
    compute: Dealt = 0.0  # multiply-adds a second of a client; 0: training takes no time

    def __post_init__(self) -> None:
        take_lists(self, "down", "up", "latency", "compute")
        bounds = outside(
            self, down="[1, 1e15]", up="[1, 1e15]", latency="[0, 1e9]", compute="[0, 1e21]"
        )
        refuse(self, bounds | empty(self, "down", "up", "latency", "compute"))

    def __str__(self) -> str:
        return f"{_speed(self.down)} down, {_speed(self.up)} up, {shown(self.latency)} s each way"

    def check(self, num_clients: int) -> None:
        """Refuse what does not fit so many clients."""
        check_dealt(self, num_clients, "down", "up", "latency", "compute")

    def slowest(self, costs: Mapping[int, tuple[int, ...]], copies: int = 1) -> float:
        """A round's seconds, by what each client received, sent and computed, charged so many times for its bytes."""
        each = (
            self.seconds(id, down * copies, up * copies, macs)
            for id, (down, up, macs, *_) in costs.items()
        )
        return max(each, default=0.0)

    def seconds(self, client: int, bytes_down: int, bytes_up: int, macs: int) -> float:
        """What a client needs to receive, to train and to send."""
        rate = dealt(self.compute, client)
        travel = 8 * bytes_down / dealt(self.down, client) + 8 * bytes_up / dealt(self.up, client)
        return 2 * dealt(self.latency, client) + travel + (macs / rate if rate else 0.0)


def _speed(value: Dealt) -> str:
    """Bits a second in the unit one says them in, or all that are dealt."""
    if isinstance(value, tuple):
        return ", ".join(map(_speed, value))
    size, unit = next((one for one in _UNITS if value >= one[0]), _UNITS[-1])
    return f"{value / size:g} {unit}/s"
