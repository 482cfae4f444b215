"""The messages of one round: requests, the replies that were accepted, and why others were not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedquilt.engines.flower.validation import (
    Accepted,
    DeviceFailedError,
    ReplyReader,
    SentJob,
    StateLostError,
)
from fedquilt.errors import FedquiltError
from fedquilt.round.engine import Attendance
from fedquilt.round.wire import Message
from fedquilt.terms import Job, Server

if TYPE_CHECKING:
    from fedquilt.engines.flower.engine import Flower


class Exchange:
    """Requests of a round, the replies that were accepted, and why others were not."""

    def __init__(self, engine: Flower) -> None:
        self._engine = engine
        self.sent: dict[int, list[SentJob]] = {}
        self.accepted: dict[int, Accepted] = {}
        self.missing: dict[int, str] = {}  # Clients without a reply, and the reason
        self.failed: dict[int, str] = {}  # Clients whose device could not train, and its reason
        self.refused: dict[int, str] = {}  # Clients whose reply was refused, and the reason
        self.anew: set[int] = set()  # Clients whose devices have lost their state
        self.wire_down = self.wire_up = 0  # Bytes of all messages

    def ask(self, server: Server, jobs: Mapping[int, Sequence[Job]]) -> None:
        """Send the jobs of clients to their devices, and sort the replies into the fields.

        Reading stops once enough replies are accepted. A reply of a client that was accepted before
        is ignored.

        Args:
            server: State that the round starts from.
            jobs: Jobs of each client, by its number.
        """
        requests: dict[int, Message] = {}
        for client, client_jobs in jobs.items():
            requests[client], self.sent[client] = self._engine.request(server, client_jobs)
            self.wire_down += requests[client].bytes
        if not requests:
            return
        reader = self._engine.reader(server)
        for delivery in self._engine.reached.exchange(requests, self._engine.deadline):
            client = delivery.client
            if client not in requests or client in self.accepted:
                continue
            if delivery.message is None:
                self.missing[client] = delivery.reason
                continue
            self.wire_up += delivery.message.bytes
            self._read(delivery.message, requests[client].digest, client, reader)
            if len(self.accepted) >= (self._engine.enough or math.inf):
                closed = f"the round closed with {len(self.accepted)} replies"
                self.missing |= {other: closed for other in requests if other not in self.accepted}
                break
        for client in requests:
            if client not in self.accepted.keys() | self.failed | self.refused.keys() | self.anew:
                self.missing.setdefault(client, "no reply came")

    def _read(self, message: Message, request: str, client: int, reader: ReplyReader) -> None:
        """Read a reply, and store its updates, or the reason why it cannot be used.

        `request` is the digest of the request that the reply must belong to.
        """
        try:
            self.accepted[client] = reader.read(message, request, self.sent[client])
        except StateLostError:
            self.anew.add(client)
        except DeviceFailedError as error:
            self.failed[client] = str(error)
        except FedquiltError as error:
            self.refused[client] = str(error)
        else:  # An earlier message may have been a stale one.
            for reasons in (self.missing, self.failed, self.refused):
                reasons.pop(client, None)

    def attendance(self, asked: Sequence[int]) -> Attendance:
        """Return what became of the requests to the clients `asked`.

        A client whose reply was refused, or says that the device failed, is not listed as missing.
        """
        used = {**self.refused, **self.failed}
        missing = {client: why for client, why in self.missing.items() if client not in used}
        anew = tuple(sorted(self.anew & self.accepted.keys()))
        return Attendance(
            tuple(asked), missing, self.failed, self.refused, anew, self.wire_down, self.wire_up
        )
