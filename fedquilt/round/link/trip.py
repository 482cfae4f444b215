"""One message on its way."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedquilt import noise
from fedquilt.terms import Job, Payload, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World

_SITE = 41  # keeps what links draw apart from all other draws
_FIRST_CODEC_KEY = 2  # a loss has 1


@dataclass(frozen=True)
class Trip:
    """Whose message, of which round, in which direction; all that a link draws is a hash of this."""

    world: World
    job: Job
    up: bool = False

    def key(self, what: int) -> int:
        job = self.job
        scope = zlib.crc32(job.submodel.scope.encode())
        return noise.key(
            _SITE, self.world.seed, job.client.id, job.round, int(self.up), scope, what
        )

    def codec_keys(self, message: int = 0) -> tuple[int, int]:
        """Return the random keys of a coded message. Message 0 of a transmission has the weights."""
        first = _FIRST_CODEC_KEY + 2 * message
        return self.key(first), self.key(first + 1)


@dataclass(frozen=True)
class Arrival:
    """What came of a payload, and the bytes it took."""

    payload: Payload | None  # None: nothing arrived
    bytes: int
    error: Weights | None = None  # with error feedback: what coding lost of what arrived
