"""What survives the way between server and client, and how many bytes it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedquilt.terms import Client, Job, Memory, Payload


class Link(Protocol):
    """A way in both directions. What is lost is a payload with a smaller index, and nothing else differs."""

    def down(self, payload: Payload, client: Client, round: int) -> tuple[Payload, int]:
        """What arrives at the client, and the bytes sent."""

    def up(self, payload: Payload, job: Job, memory: Memory | None) -> tuple[Payload, int]:
        """What arrives at the server, and the bytes sent."""


@dataclass(frozen=True)
class Perfect:
    """Everything arrives as it was sent."""

    def down(self, payload: Payload, client: Client, round: int) -> tuple[Payload, int]:
        return payload, payload.bytes

    def up(self, payload: Payload, job: Job, memory: Memory | None) -> tuple[Payload, int]:
        return payload, payload.bytes
