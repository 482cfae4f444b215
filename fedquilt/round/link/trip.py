"""One message on its way."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from fedquilt import noise
from fedquilt.terms import Job, Payload, Weights, World

_SITE = 41  # keeps what links draw apart from all other draws


@dataclass(frozen=True)
class Trip:
    """Whose message, of which round, in which direction; all that a link draws is a hash of this."""

    world: World
    job: Job
    up: bool = False

    def key(self, what: int) -> int:
        job = self.job
        scope = zlib.crc32(job.submodel.scope.encode())
        return noise.key(_SITE, self.world.seed, job.client.id, job.round, int(self.up), scope, what)


@dataclass(frozen=True)
class Arrival:
    """What came of a payload, and the bytes it took."""

    payload: Payload | None  # None: nothing arrived
    bytes: int
    error: Weights | None = None  # with error feedback: what coding lost of what arrived
