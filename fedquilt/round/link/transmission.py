"""One message between server and client: its identity, and its result."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedquilt import noise
from fedquilt.terms import Job, Payload, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World

# Purposes of the random numbers of a transmission. Codecs have two keys for each message.
LOSS = 1
FIRST_CODEC_KEY = 2


@dataclass(frozen=True)
class Transmission:
    """Client, round and direction of a message, whose hashes are the link's random numbers."""

    world: World  # It has the random seed.
    job: Job  # It has client, round and scope.
    up: bool = False  # True: from client to server.

    def key(self, purpose: int) -> int:
        """Return the random key of this transmission for one purpose, such as `LOSS`.

        It depends on seed, client, round, direction, scope and purpose, and on nothing else.
        """
        job = self.job
        scope = zlib.crc32(job.submodel.scope.encode())
        return noise.key(
            noise.Stream.LINK,
            self.world.seed,
            job.client.id,
            job.round,
            int(self.up),
            scope,
            purpose,
        )

    def codec_keys(self, message: int = 0) -> tuple[int, int]:
        """Return the two random keys of a coded message of this transmission.

        Args:
            message: Number of the message. 0 has the weights, and slots and extras have later ones.
        """
        first = FIRST_CODEC_KEY + 2 * message
        return self.key(first), self.key(first + 1)


@dataclass(frozen=True)
class Arrival:
    """The part of a payload that arrived, and its bytes on the wire."""

    payload: Payload | None  # None: nothing arrived.
    bytes: int  # Bytes that arrived.
    # Error of coding at the values that arrived. None: there is no error feedback.
    error: Weights | None = None
