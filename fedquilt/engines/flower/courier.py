"""The contract of what carries requests to devices and brings their replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedquilt.round.wire import Message


@dataclass(frozen=True)
class CourierReply:
    """A reply that arrived, or the reason why there is none."""

    client: int
    message: Message | None  # None: nothing arrived
    reason: str = ""  # Why nothing arrived, such as "no reply within 60 s"
    is_late: bool = False  # True: the message arrived after the deadline


class Courier(Protocol):
    """Carries requests to devices and brings their replies. It does not look into messages."""

    def online(self) -> Sequence[int]:
        """Return the clients that can be reached now, in ascending order."""

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Send requests to train, and yield each reply when it arrives.

        Every client is yielded at least once, with a reply or with the reason why there is none. A
        reply may arrive twice, and may belong to an earlier request.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds after which no more replies are awaited.
        """

    def evaluate(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Send requests to evaluate, and yield each reply as `exchange` does.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds after which no more replies are awaited.
        """
