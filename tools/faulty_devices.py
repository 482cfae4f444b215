"""A deployment of eight devices in one process, some of which have faults in some rounds.

Requests and replies are the bytes that a deployment sends over the network, and the same code reads
and refuses them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import fedquilt as fq
from fedquilt.deployment.device import Device
from fedquilt.deployment.device_family import emptied
from fedquilt.deployment.in_process import InProcess, own_data
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.engines.flower.engine import Flower
from fedquilt.round import Record
from fedquilt.round.wire import Message

NUM_DEVICES = 8
DEPLOYED_ROUNDS = 30
# First and last round of each fault, with its name in the picture
OFFLINE = (6, 10, "0 to 2 are offline")
DAMAGED = (13, 17, "3 and 4 damage replies")
HASTY = (20, 24, "5 replies are enough")
LOSS = 0.2  # Probability with which a reply of the last device gets lost, in all rounds


@dataclass
class FaultyCourier(InProcess):
    """Courier to devices in one process, some of which have faults in some rounds."""

    round: int = 1
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        clients = list(requests)
        self.draws.shuffle(clients)
        for client in clients:
            if is_in(OFFLINE, self.round) and client in (0, 1, 2):
                yield CourierReply(client, None, "the device is offline")
                continue
            (reply,) = super().exchange({client: requests[client]}, deadline)
            if client == NUM_DEVICES - 1 and self.draws.random() < LOSS:
                reply = CourierReply(client, None, "the reply got lost")
            elif is_in(DAMAGED, self.round) and client in (3, 4):
                assert reply.message is not None
                reply = CourierReply(client, Message(reply.message.note[:-1], reply.message.files))
            yield reply


def is_in(phase: tuple[int, int, str], round: int) -> bool:
    """Return True if a round is one of a phase."""
    first, last, _ = phase
    return first <= round <= last


def deployed(rounds: int) -> fq.Run:
    """Return a run of FedRolex on eight devices in one process, some of which have faults.

    Requests and replies are the bytes that a deployment sends over the network.

    Args:
        rounds: Number of rounds.
    """
    data = fq.data.digits().partition(NUM_DEVICES)
    family = fq.trace(fq.models.tiny_resnet, data.example)
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], NUM_DEVICES, cohort=1.0)
    method = fq.methods.FedRolex().with_local(
        epochs=2, batch_size=16, optimizer=fq.optimizers.SGD(lr=0.1)
    )
    courier = FaultyCourier(
        {client: Device(own_data(data, client), emptied(family)) for client in range(NUM_DEVICES)}
    )
    engine = Flower(data, courier=courier, run_id="gallery", terms=Terms.of)

    def watch(record: Record) -> None:
        courier.round = record.round + 1
        engine.enough = 5 if is_in(HASTY, courier.round) else 0

    return fq.run(method, family, data, fleet, engine, rounds=rounds, watch=watch)
