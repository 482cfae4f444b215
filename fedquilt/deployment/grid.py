"""The courier over Flower's grid, through its public interface only."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.envelope import pack, unpack
from fedquilt.deployment.keys import public_key_text
from fedquilt.deployment.roster import Roster
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.errors import FedquiltError
from fedquilt.names import said
from fedquilt.round.wire import Message

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
MAX_TTL_SECONDS = 7 * 24 * 3600.0  # Time that a message without a deadline is valid
POLL_SECONDS = 0.3  # Time between two questions for a reply
POLLS_PER_SECOND = 40  # Questions of all threads together, of about 100 that a SuperLink serves
RETRY_SECONDS = 2.0  # Time before a device is asked again
ENROL_SECONDS = 45.0  # Time in which a device has to introduce itself
# Reasons of Flower's errors by code. The text in an error may have internals of the device.
_REASONS = {
    1: "the device's app could not be loaded",
    2: "the device's app failed",
    3: "no reply came before the deadline",
    5: "the device went offline",
    6: "the reply could not be fetched",
    8: "the device's worker stopped",
}


@dataclass
class GridCourier:
    """Carries messages over Flower's grid. Devices are recognised by their public key.

    Args:
        grid: Flower's grid, as a ServerApp gets it.
        roster: Numbers of clients by public key.
        about: What accompanies every message (`About.to_bytes`).
    """

    grid: Grid
    roster: Roster
    about: bytes = b""
    _push: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def nodes(self) -> dict[str, int]:
        """Return the node of every public key that is online."""
        return {key: node.node_id for key, node in self._online_nodes().items()}

    def sessions(self) -> dict[str, str]:
        """Return the session of every public key that is online.

        A session begins when the node connects, so that it is another one if the node was away.
        """
        return {
            key: f"{node.node_id} {node.last_activated_at}"
            for key, node in self._online_nodes().items()
        }

    def _online_nodes(self) -> dict[str, Any]:
        nodes = {}
        for node in self.grid.get_nodes():
            if node.status not in ("", "online"):
                continue
            try:
                nodes[public_key_text(node.public_key)] = node
            except ValueError:
                _log.warning("The node %d has a key that cannot be read.", node.node_id)
        return nodes

    def online(self) -> Sequence[int]:
        """Return the clients that can be reached now."""
        nodes = self.nodes()
        return [
            entry.client for entry in self.roster if entry.key in nodes and not entry.is_struck_off
        ]

    def enrol(self, keys: Sequence[str]) -> dict[str, Enrolment]:
        """Ask devices to introduce themselves, and return those that did by public key.

        Args:
            keys: Public keys of the devices.
        """
        enrolments = {}
        numbered = dict(enumerate(keys))
        asking = _Asking(self, "query", ENROL_SECONDS, numbered.__getitem__)
        for delivery in asking.all({number: Message(b"{}") for number in numbered}):
            key = numbered[delivery.client]
            if delivery.message is None:
                _log.warning("%s did not introduce itself: %s.", key[-16:], delivery.reason)
                continue
            try:
                enrolments[key] = Enrolment.read(delivery.message.note)
            except FedquiltError as error:
                _log.warning("%s introduced itself in vain: %s.", key[-16:], error)
        return enrolments

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Send requests, and yield each reply when it arrives.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds after which no more replies are awaited.
        """
        asking = _Asking(self, "train", deadline, lambda client: self.roster.entries[client].key)
        yield from asking.all(requests)

    def evaluate(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Send requests to evaluate, and yield each reply when it arrives.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds after which no more replies are awaited.
        """
        asking = _Asking(self, "evaluate", deadline, lambda client: self.roster.entries[client].key)
        yield from asking.all(requests)


class _Asking:
    """One round of messages, with a thread for each, because `pull_messages` blocks.

    A thread that is blocked past the deadline is left behind. It ends with its call, at the latest
    with the process.

    Args:
        courier: The courier.
        kind: Flower's type of the messages.
        deadline: Seconds for all replies.
        key_of: Returns the public key of a client.
    """

    def __init__(
        self, courier: GridCourier, kind: str, deadline: float, key_of: Callable[[int], str]
    ) -> None:
        self._courier, self._kind, self._key_of = courier, kind, key_of
        self._deadline = deadline
        self._end = time.monotonic() + min(deadline, MAX_TTL_SECONDS)
        self._deliveries: queue.Queue[CourierReply] = queue.Queue()
        self._poll = POLL_SECONDS
        self._stopped = threading.Event()

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def all(self, requests: Mapping[int, Message]) -> Iterator[CourierReply]:
        """Yield one delivery for each client."""
        self._poll = max(POLL_SECONDS, len(requests) / POLLS_PER_SECOND)
        for client, message in requests.items():
            threading.Thread(
                target=self._run, args=(client, message), name=f"client {client}", daemon=True
            ).start()
        waiting = set(requests)
        try:
            while waiting and self._left > 0:
                try:
                    delivery = self._deliveries.get(timeout=min(self._left + 0.1, 5.0))
                except queue.Empty:
                    continue
                waiting.discard(delivery.client)
                yield delivery
        finally:
            self._stopped.set()
        while not self._deliveries.empty():  # These came after the last look at the clock.
            delivery = self._deliveries.get()
            if delivery.message is not None and delivery.client in waiting:
                waiting.discard(delivery.client)
                yield replace(delivery, is_late=True)
        shown = "" if math.isinf(self._deadline) else f" within {self._deadline:g} s"
        for client in sorted(waiting):
            yield CourierReply(client, None, f"no reply came{shown}")

    def _run(self, client: int, message: Message) -> None:
        try:
            self._deliveries.put(self._ask(client, message))
        except Exception as error:  # A thread that ends silently would leave the round waiting.
            reason = f"the message could not be sent: {said(error)}"
            self._deliveries.put(CourierReply(client, None, reason))

    def _ask(self, client: int, message: Message) -> CourierReply:
        """Ask one device until it replies.

        Flower never delivers a message twice, even if the node that took it is gone. So a device
        that comes back is asked again. It replies to the same request without training again.
        """
        reason = "the device is offline"
        while self._left > 0 and not self._stopped.is_set():
            node = self._courier.nodes().get(self._key_of(client))
            if node is None:
                self._stopped.wait(RETRY_SECONDS)
                continue
            reply = self._sent(node, message)
            if reply is None:
                reason = "no reply came before the deadline"
                break
            if reply.has_error():
                reason = _REASONS.get(reply.error.code, "the device's app failed")
                self._stopped.wait(RETRY_SECONDS)
                continue
            try:
                return CourierReply(client, unpack(reply.content)[0])
            except FedquiltError as error:
                return CourierReply(client, None, f"the reply cannot be read: {error}")
        return CourierReply(client, None, reason)

    def _sent(self, node: int, message: Message) -> Any:
        """Send a message to a node, and return its reply or error. None: the time is over."""
        from flwr.app import Message as FlowerMessage

        envelope = FlowerMessage(
            pack(message, self._courier.about), node, self._kind, ttl=max(self._left, 1.0)
        )
        with self._courier._push:
            (sent,) = self._courier.grid.push_messages([envelope])
        if not sent:
            raise ConnectionError("the SuperLink did not take it")
        while self._left > 0 and not self._stopped.is_set():
            for reply in self._courier.grid.pull_messages([sent]):
                # Errors have the SuperLink as their sender, so that only this id identifies them.
                if reply.metadata.reply_to_message_id == sent:
                    return reply
            self._stopped.wait(self._poll)
        return None
