"""The messages of one round: requests, the replies that were accepted, and why others were not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedquilt.engines.flower.reply_store import ReplyStore
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

MIN_REPLIES_OF_MEDIAN = 3  # Replies from which on changes are compared with their median


class Exchange:
    """Requests of a round, the replies that were accepted, and why others were not.

    Every client that was asked ends in exactly one of `accepted`, `refused`, `failed`, `late` and
    `missing`.
    """

    def __init__(self, engine: Flower) -> None:
        self._engine = engine
        self.sent: dict[int, list[SentJob]] = {}
        self.accepted = ReplyStore(engine.max_held_bytes, engine.spill_folder)
        self.missing: dict[int, str] = {}  # Clients without a reply, and the reason
        self.late: dict[int, str] = {}  # Clients for whose reply the round was over, and the reason
        self.failed: dict[int, str] = {}  # Clients whose device could not train, and its reason
        self.refused: dict[int, str] = {}  # Clients whose reply was refused, and the reason
        self.anew: set[int] = set()  # Clients whose devices have lost their state
        self.wire_down = self.wire_up = 0  # Bytes of all messages
        self._readers: dict[int, tuple[ReplyReader, str]] = {}  # With the digest of the request
        self._rms: dict[int, float] = {}  # Root mean square of each accepted change

    def ask(self, server: Server, jobs: Mapping[int, Sequence[Job]]) -> None:
        """Send the jobs of clients to their devices, and sort the replies into the fields.

        Reading stops once enough replies are accepted. A reply of a client that was accepted before
        is ignored.

        Args:
            server: State that the round starts from.
            jobs: Jobs of each client, by its number.
        """
        requests: dict[int, Message] = {}
        reader = self._engine.reader(server)
        for client, client_jobs in jobs.items():
            requests[client], self.sent[client] = self._engine.request(server, client_jobs)
            self._readers[client] = reader, requests[client].digest
            self.wire_down += requests[client].bytes
        if not requests:
            return
        for delivery in self._engine.reached.exchange(requests, self._engine.deadline):
            client = delivery.client
            if client not in requests or client in self.accepted:
                continue
            if delivery.message is None:
                self.missing[client] = delivery.reason
                continue
            self.wire_up += delivery.message.bytes
            if delivery.is_late:
                self.late[client] = f"its reply came after {self._engine.deadline:g} s"
                continue
            self._read(delivery.message, client)
            if len(self.accepted) >= (self._engine.enough or math.inf):
                closed = f"the round closed with {len(self.accepted)} replies before it replied"
                waiting = [other for other in requests if not self._has_fate(other)]
                self.late |= dict.fromkeys(waiting, closed)
                break

    def _has_fate(self, client: int) -> bool:
        fates = (self.accepted, self.refused, self.failed, self.late, self.missing)
        return any(client in fate for fate in fates)

    def _read(self, message: Message, client: int) -> None:
        """Read a reply, and store its updates, or the reason why it cannot be used."""
        reader, request = self._readers[client]
        try:
            accepted = reader.read(message, request, self.sent[client])
        except StateLostError:
            self.anew.add(client)
        except DeviceFailedError as error:
            self.failed[client] = str(error)
        except FedquiltError as error:
            self.refused[client] = str(error)
        else:
            self.accepted.put(client, accepted, message)
            self._rms[client] = accepted.rms
            # An earlier message of this client may have been a stale one.
            for reasons in (self.missing, self.failed, self.refused):
                reasons.pop(client, None)

    def refuse_outliers(self, max_ratio: float) -> None:
        """Refuse accepted replies whose change exceeds a multiple of the median of the round.

        Nothing is refused with fewer than three replies, because their median says little.

        Args:
            max_ratio: Largest multiple of the median. Infinite: nothing is refused.
        """
        if math.isinf(max_ratio) or len(self.accepted) < MIN_REPLIES_OF_MEDIAN:
            return
        median = statistics.median(self._rms[client] for client in self.accepted)
        for client in sorted(self.accepted):
            if self._rms[client] > max_ratio * median:
                self.accepted.remove(client)
                self.refused[client] = (
                    f"its change has a root mean square of {self._rms[client]:.3g}; "
                    f"{max_ratio:g} times the median of the round, {median:.3g}, is allowed"
                )

    def result(self, client: int) -> Accepted:
        """Return the accepted reply of a client. One that was on disk is read again."""
        stored = self.accepted.get(client)
        if isinstance(stored, Accepted):
            return stored
        reader, request = self._readers[client]
        return reader.read(stored, request, self.sent[client])

    def attendance(self, asked: Sequence[int]) -> Attendance:
        """Return what became of the requests to the clients `asked`, each in one place.

        A client whose reply was refused, or says that the device failed, is not listed as missing.
        """
        fates: dict[str, dict[int, str]] = {
            name: {} for name in ("refused", "failed", "late", "missing")
        }
        for client in asked:
            if client in self.accepted:
                continue
            name = next((name for name in fates if client in getattr(self, name)), "missing")
            lost = "the device has lost its state" if client in self.anew else "no reply came"
            fates[name][client] = getattr(self, name).get(client, lost)
        anew = tuple(sorted(client for client in self.anew if client in self.accepted))
        return Attendance(
            tuple(asked),
            fates["missing"],
            fates["failed"],
            fates["refused"],
            anew,
            self.wire_down,
            self.wire_up,
            fates["late"],
        )
