"""Devices in one process: a courier with real devices and real bytes, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fedquilt.data import FederatedData
from fedquilt.data.parts import Parts
from fedquilt.deployment.device import Device
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.round.wire import Message


class Faults(Protocol):
    """Decides what happens to a reply on its way."""

    def __call__(self, client: int, reply: Message) -> Sequence[Message | None]:
        """Return the messages that arrive at the server in place of a device's reply.

        None stands for a message that got lost. Several messages may arrive.

        Args:
            client: Number of the client.
            reply: Reply of its device.
        """


@dataclass
class InProcess:
    """Courier to devices in the same process. Only bytes pass between server and device."""

    devices: Mapping[int, Device]
    faults: Faults | None = None  # None: every reply to a request to train arrives
    offline: set[int] = field(default_factory=set)  # Clients that cannot be reached
    bytes_down: int = 0  # Bytes of all requests
    bytes_up: int = 0  # Bytes of all replies
    evaluation_faults: Faults | None = None  # None: every reply to a request to evaluate arrives

    def online(self) -> Sequence[int]:
        """Return the clients whose devices can be reached, in ascending order."""
        return [client for client in sorted(self.devices) if client not in self.offline]

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Let every device answer, one after another, and yield what arrives of each reply.

        A device that is offline gets no request. Faults may lose, change or repeat a reply.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds that devices have. Devices in one process have as long as they need.
        """
        answers = {client: device.answer for client, device in self.devices.items()}
        yield from self._delivered(requests, answers, self.faults)

    def evaluate(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Let every device evaluate, one after another, and yield what arrives of each reply.

        Args:
            requests: Request of each client, by its number.
            deadline: Seconds that devices have. Devices in one process have as long as they need.
        """
        answers = {client: device.evaluate for client, device in self.devices.items()}
        yield from self._delivered(requests, answers, self.evaluation_faults)

    def _delivered(
        self,
        requests: Mapping[int, Message],
        answers: Mapping[int, Callable[[Message], Message]],
        faults: Faults | None,
    ) -> Iterator[CourierReply]:
        """Yield what arrives of the reply to each request.

        Args:
            requests: Request of each client, by its number.
            answers: Function of each client's device that answers a request.
            faults: What happens to replies on their way. None: they arrive.
        """
        for client, request in requests.items():
            if client in self.offline:
                yield CourierReply(client, None, "the device is offline")
                continue
            self.bytes_down += request.bytes
            reply = answers[client](request)
            replies = [reply] if faults is None else faults(client, reply)
            for arrived in replies:
                if arrived is None:
                    yield CourierReply(client, None, "the reply got lost")
                else:
                    self.bytes_up += arrived.bytes
                    yield CourierReply(client, arrived)


def own_data(data: FederatedData, client: int) -> FederatedData:
    """Return the samples of one client alone, as its device has them.

    The result has a single client with number 0, and neither domains nor validation samples.
    Without test samples by client, it has the first test sample only.

    Args:
        data: Samples of all clients.
        client: Number of the client.
    """
    rows = data.parts[client]
    test_rows = torch.arange(1) if data.test_parts is None else data.test_parts[client]
    return replace(
        data,
        inputs=data.inputs[rows],
        targets=data.targets[rows],
        test_inputs=data.test_inputs[test_rows],
        test_targets=data.test_targets[test_rows],
        clients=None,
        test_clients=None,
        domains=None,
        test_domains=None,
        parts=Parts.split(torch.arange(len(rows)), torch.tensor([len(rows)])),
        test_parts=None,
        validation_parts=None,
    )
