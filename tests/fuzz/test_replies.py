"""Replies of devices that were changed on the way or by the device: none is accepted.

A changed reply is sealed again, as a hostile device would do it. What changes nothing is not
counted as a change.
"""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

import fedquilt as fq
from fedquilt.deployment.in_process import InProcess
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.methods import FedRolex, Scaffold
from fedquilt.round.wire import Message
from tests.conftest import with_local
from tests.deployed import deployed, devices_of

LINKS = {
    "perfect": fq.Link(),
    "lossy": fq.Link(loss=fq.links.ColumnLoss(0.2, 0.3)),
    "coded": fq.Link(codec=fq.links.Codec(bits=4, feedback=True)),
}
METHODS = {"fedrolex": FedRolex(), "scaffold": Scaffold()}
MAX_GROWTH = 200 << 20  # Bytes that the process may grow by while it reads hostile replies


def resealed(note: dict, files: tuple[bytes, ...]) -> Message:
    return Message.of({key: value for key, value in note.items() if key != "sha256"}, files)


def split(file: bytes) -> tuple[dict, bytes]:
    """Return the header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(header: dict, dice: random.Random) -> str:
    return dice.choice([name for name in header if name != "__metadata__"])


def flipped(reply: Message, dice: random.Random) -> Message:
    """Flip a bit anywhere, without a new seal."""
    parts = [bytearray(reply.note), *map(bytearray, reply.files)]
    part = dice.choice([part for part in parts if part])
    part[dice.randrange(len(part))] ^= 1 << dice.randrange(8)
    return Message(bytes(parts[0]), tuple(map(bytes, parts[1:])))


def with_note(reply: Message, dice: random.Random) -> Message:
    note = json.loads(reply.note)
    key = dice.choice(["run", "round", "base?", "request", "size", "classes", "results", "version"])
    wrong = {
        "run": "another",
        "round": note["round"] + dice.choice([1, 7, -1]),
        "request": "0" * 64,
        "size": note["size"] + dice.choice([1, 10**6]),
        "classes": dice.choice([[0, 10**6], [2, 1], ["a"], []]),
        "results": dice.choice([[], note["results"] * 2, None, [{}]]),
        "version": 2,
    }
    if key == "base?":
        result = dice.choice(note["results"])
        result[dice.choice(["steps", "batches"])] += dice.choice([1, 10**9])
    else:
        note[key] = wrong[key]
    return resealed(note, reply.files)


def with_loss(reply: Message, dice: random.Random) -> Message:
    note = json.loads(reply.note)
    dice.choice(note["results"])["loss"] = dice.choice([1e300, "x", None, True])
    return resealed(note, reply.files)


def with_values(value: float) -> Callable[[Message, random.Random], Message]:
    def change(reply: Message, dice: random.Random) -> Message:
        header, data = split(reply.files[0])
        floats = [
            name
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] == "F64" and entry["shape"] != [0]
        ]
        if not floats:
            return flipped(reply, dice)
        begin, end = header[dice.choice(floats)]["data_offsets"]
        place = begin + 8 * dice.randrange((end - begin) // 8)
        changed = data[:place] + struct.pack("<d", value) + data[place + 8 :]
        return resealed(json.loads(reply.note), (joined(header, changed), *reply.files[1:]))

    return change


def with_header(reply: Message, dice: random.Random) -> Message:
    header, data = split(reply.files[0])
    names = [name for name in header if name != "__metadata__"]
    if not names:
        header["weights/foreign"] = {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}
        return resealed(json.loads(reply.note), (joined(header, data), *reply.files[1:]))
    name = dice.choice(names)
    entry = header[name]
    match dice.randrange(7):
        case 0:
            header["weights/foreign"] = header.pop(name)
        case 1:
            entry["shape"] = [2**31, 2**31]
        case 2:
            entry["data_offsets"] = [0, 2**40]
        case 3:
            entry["shape"] = [*entry["shape"], 1]
        case 4:
            entry["dtype"] = "F32" if entry["dtype"] != "F32" else "F64"
        case 5:
            header["../../etc/passwd"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        case 6:
            del header[name]
    return resealed(json.loads(reply.note), (joined(header, data), *reply.files[1:]))


def with_files(reply: Message, dice: random.Random) -> Message:
    note = json.loads(reply.note)
    files = dice.choice(
        [(), reply.files * 2, (b"",), (reply.files[0][:-1],), (dice.randbytes(200),)]
    )
    return resealed(note, tuple(files))


CHANGES = [
    flipped,
    with_note,
    with_loss,
    with_header,
    with_files,
    with_values(float("nan")),
    with_values(float("inf")),
    with_values(1e200),
]


@dataclass
class Hostile(InProcess):
    """Courier that changes every reply, many times over."""

    dice: random.Random = field(default_factory=random.Random)
    times: int = 1
    changed: int = 0

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        for client, request in requests.items():
            reply = self.devices[client].answer(request)
            for _ in range(self.times):
                hostile = self.dice.choice(CHANGES)(reply, self.dice)
                if hostile != reply:
                    self.changed += 1
                    yield CourierReply(client, hostile)


def refused(method: str, link: str, times: int, family, make_data, play) -> int:
    data = make_data(family, (7, 4, 9, 5), labels=2, public=0)
    plan = with_local(METHODS[method], batch_size=4)
    start = play(plan, family, data, rounds=1, link=LINKS[link])
    courier = Hostile(devices_of(family, data), dice=random.Random(f"{method}{link}"), times=times)
    engine = deployed(start, family, data, courier, max_rms=1e3, least=0)
    fleet = fq.Fleet.of((1.0, 0.5), 4, 4)
    run = fq.prepare(
        plan, family, data, fleet, engine, evaluation=fq.Evaluation(every=0), link=LINKS[link]
    )
    before = {name: value.clone() for name, value in run.server.weights.items()}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.train(1)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
    assert grown < MAX_GROWTH
    assert run.records[0].attendance.absent == (0, 1, 2, 3)
    torch.testing.assert_close(dict(run.server.weights), before, rtol=0, atol=0)
    return courier.changed


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("method", METHODS)
def test_no_changed_reply_is_accepted(method, link, perceptron, make_data, play):
    assert refused(method, link, 40, perceptron, make_data, play) > 100


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("method", METHODS)
def test_none_of_ten_thousand_changed_replies_is_accepted(
    method, link, perceptron, make_data, play
):
    assert refused(method, link, 450, perceptron, make_data, play) > 1_700
