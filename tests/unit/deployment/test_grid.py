"""The courier over Flower's grid, with a grid in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
from flwr.app import Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity

from fedquilt.deployment import grid as grid_module
from fedquilt.deployment.envelope import pack, unpack
from fedquilt.deployment.grid import GridCourier
from fedquilt.deployment.keys import KeyFolder, make_keys, public_key_text
from fedquilt.deployment.roster import Roster
from fedquilt.round.wire import Message
from fedquilt.terms import Budget

Behavior = Callable[[FlowerMessage], Any]


class MemoryGrid:
    """Grid whose nodes are functions. A node returns a reply, an error, or None for no reply."""

    def __init__(self, keys: list[bytes], nodes: list[Behavior]) -> None:
        self.keys, self.nodes = keys, nodes
        self.online = set(range(len(nodes)))
        self.pushed: list[FlowerMessage] = []
        self._lock = threading.Lock()

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=number, public_key=self.keys[number], status="online")
            for number in sorted(self.online)
        ]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        with self._lock:
            self.pushed += messages
            return [str(len(self.pushed) - 1)]

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        (number,) = ids
        message = self.pushed[int(number)]
        reply = self.nodes[message.metadata.dst_node_id](message)
        if reply is None:
            return []
        metadata = SimpleNamespace(reply_to_message_id=number)
        is_error = isinstance(reply, Error)
        return [
            SimpleNamespace(
                metadata=metadata, has_error=lambda: is_error, error=reply, content=reply
            )
        ]


def echo(message: FlowerMessage) -> RecordDict:
    """Reply with the same message."""
    return pack(unpack(message.content)[0])


@pytest.fixture
def courier_of(tmp_path, monkeypatch) -> Callable[..., tuple[GridCourier, MemoryGrid]]:
    monkeypatch.setattr(grid_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(grid_module, "RETRY_SECONDS", 0.05)
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower sets them in a ServerApp.
        monkeypatch.setattr(TaskIdentity, name, 1)

    def make(*nodes: Behavior) -> tuple[GridCourier, MemoryGrid]:
        make_keys(tmp_path, len(nodes))
        keys = [path.read_bytes() for path in KeyFolder(tmp_path).device_public_keys]
        roster = Roster()
        for number, key in enumerate(keys):
            roster.enrol(public_key_text(key), f"device {number}", Budget(share=1), 10)
        grid = MemoryGrid(keys, list(nodes))
        return GridCourier(grid, roster, b"about"), grid  # type: ignore[arg-type]

    return make


def test_messages_arrive_with_the_deadline_as_their_ttl(courier_of):
    courier, grid = courier_of(echo, echo)
    requests = {0: Message(b"zero", (b"file",)), 1: Message(b"one")}
    deliveries = list(courier.exchange(requests, 20.0))
    assert {delivery.client: delivery.message for delivery in deliveries} == requests
    assert all(19 < message.metadata.ttl <= 20 for message in grid.pushed)
    assert all(unpack(message.content)[1] == b"about" for message in grid.pushed)


def test_a_node_that_blocks_does_not_hold_up_the_others(courier_of):
    released = threading.Event()

    def blocks(message: FlowerMessage) -> None:
        released.wait(10)

    courier, _ = courier_of(blocks, echo)
    began = time.monotonic()
    deliveries = list(courier.exchange({0: Message(b"a"), 1: Message(b"b")}, 0.5))
    released.set()
    assert time.monotonic() - began < 5
    assert [delivery.client for delivery in deliveries] == [1, 0]
    assert deliveries[1].message is None
    assert deliveries[1].reason == "no reply came within 0.5 s"


def test_a_device_that_comes_back_is_asked_again(courier_of):
    seen = []

    def fails_once(message: FlowerMessage) -> Any:
        seen.append(message)
        if len(seen) > 1:
            return echo(message)
        return Error(code=5, reason="secret internals")

    courier, grid = courier_of(fails_once)
    (delivery,) = courier.exchange({0: Message(b"a")}, 20.0)
    assert delivery.message == Message(b"a")
    assert len(grid.pushed) == 2


def test_a_device_that_stays_away_is_missing_with_a_reason(courier_of):
    courier, grid = courier_of(echo, lambda _: Error(code=8, reason="secret internals"))
    grid.online.discard(0)
    assert courier.online() == [1]
    deliveries = list(courier.exchange({0: Message(b"a"), 1: Message(b"b")}, 0.4))
    assert {delivery.client for delivery in deliveries} == {0, 1}
    assert all(delivery.message is None for delivery in deliveries)
    assert not any("secret" in delivery.reason for delivery in deliveries)


def test_a_device_that_was_struck_off_is_not_online(courier_of):
    courier, _ = courier_of(echo, echo)
    courier.roster.strike_off(0)
    assert courier.online() == [1]


def test_records_that_are_no_message_are_a_reason(courier_of):
    courier, _ = courier_of(lambda _: RecordDict({}))
    (delivery,) = courier.exchange({0: Message(b"a")}, 20.0)
    assert delivery.message is None
    assert "cannot be read" in delivery.reason
