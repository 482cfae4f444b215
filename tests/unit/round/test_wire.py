"""Requests and replies as bytes: they are read back as they were, and anything else is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import FormatError, RecordError
from fedquilt.family.cut import prefix
from fedquilt.methods.api import Client, Job, Payload
from fedquilt.round.federation import World
from fedquilt.round.link import PERFECT, Outline, Packet, Transmission
from fedquilt.round.wire import (
    Expected,
    JobResult,
    Message,
    Reply,
    Request,
    packet_file,
    read_packet,
)
from fedquilt.round.wire_notes import MAX_NOTE_BYTES


def request(family) -> Request:
    submodel = prefix(family.fit(fq.Budget(share=0.5)))
    client = Client(3, fq.Budget(share=0.5), 12, 7)
    return Request(
        "run1", 4, client, (submodel,), {"method": {"name": "fedavg"}}, 1, "fp64",
        family.layout.fingerprint, 9, base=2, deadline=30.0, columns=(None,), initial=(submodel,),
        extra_shapes={"predictions": (5, 3)}, layout=family.layout.to_json(), sample={"shape": [4]},
    )  # fmt: skip


REPLY = Reply(
    "run1", 4, 2, "0" * 64, (JobResult(3, 8, 4, 0.5, {"predictions": (5, 3)}),), 12, (0, 2)
)


def test_a_request_is_read_back_as_it_was(perceptron):
    original = request(perceptron)
    assert Request.read(original.message((b"file",))) == original
    unbounded = replace(original, deadline=float("inf"), initial=(None,), columns=(0,))
    assert Request.read(unbounded.message((b"file",))) == unbounded


def test_a_reply_is_read_back_as_it_was():
    assert Reply.read(REPLY.message((b"file",))) == REPLY
    failed = Reply("run1", 4, 2, "0" * 64, failed="no samples", anew=True)
    assert Reply.read(failed.message()) == failed


def test_equal_requests_have_equal_digests_and_others_do_not(perceptron):
    original = request(perceptron)
    digest = original.message((b"file",)).digest
    assert original.message((b"file",)).digest == digest
    assert original.message((b"fil", b"e")).digest != digest
    assert replace(original, base=1).message((b"file",)).digest != digest


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (b"", "checksum differs"),
        (b"{}", "checksum differs"),
        (pickle.dumps({"kind": "reply"}), "checksum differs"),
        (Message.of({"kind": "request", "version": 1}).note, "it is no reply"),
        (Message.of({"kind": "reply", "version": 9}).note, "it has version 9 of the format"),
        (Message.of({"kind": "reply", "version": 1}).note, "no list of at most 64 results"),
        (Message.of({"deep": json.loads("[" * 30 + "]" * 30)}).note, "nests deeper than 24"),
        (b"x" * (MAX_NOTE_BYTES + 1), "bytes; 4,194,304 are allowed"),
    ],
)
def test_notes_that_are_no_reply_are_refused(note, reason):
    with pytest.raises(FormatError, match=reason):
        Reply.read(Message(note))


def test_a_changed_byte_anywhere_is_noticed():
    message = REPLY.message((b"file",))
    for place in range(len(message.note)):
        note = bytearray(message.note)
        note[place] ^= 1
        with pytest.raises(FormatError):
            Reply.read(Message(bytes(note), message.files))
    with pytest.raises(FormatError, match="checksum differs"):
        Reply.read(Message(message.note, (b"filf",)))


def expected(family) -> tuple[Expected, Packet]:
    """Return a job's upload and what its file must have: two weights at half the width."""
    submodel = prefix(family.fit(fq.Budget(share=0.5)))
    job = Job(Client(0, fq.Budget(share=0.5), 4), submodel, 0)
    names = ("first.weight", "last.bias")
    weights = {"first.weight": torch.ones(3, 4), "last.bias": torch.zeros(3)}
    outline = Outline(submodel, names, torch.float32, torch.device("cpu"))
    transmission = Transmission(World(family), job, up=True)
    return (
        Expected(outline, submodel, transmission, PERFECT),
        Packet(Payload(submodel, weights)),
    )


def test_tensors_of_a_job_are_read_back(perceptron):
    wanted, packet = expected(perceptron)
    received = read_packet(packet_file(packet), wanted, "the upload")
    assert received.packet is not None
    torch.testing.assert_close(dict(received.packet.plain.weights), dict(packet.plain.weights))
    assert received.packet.plain.submodel == packet.plain.submodel


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"first.weight": torch.ones(3, 4)}, "lacks 'weights/last.bias'"),
        ({"first.weight": torch.ones(3, 4), "foreign": torch.ones(1)}, "it has 'weights/foreign'"),
        ({"first.weight": torch.ones(6, 4), "last.bias": torch.zeros(3)}, r"\[3, 4\] would fit"),
        ({"first.weight": torch.ones(3, 4).double(), "last.bias": torch.zeros(3)}, "float32"),
    ],
)
def test_tensors_that_are_not_those_of_the_job_are_refused(perceptron, weights, reason):
    wanted, packet = expected(perceptron)
    other = Packet(Payload(packet.plain.submodel, weights))
    with pytest.raises(FormatError, match=reason):
        read_packet(packet_file(other), wanted, "the upload")


def test_a_pickle_in_place_of_tensors_is_refused(perceptron):
    wanted, packet = expected(perceptron)
    with pytest.raises(RecordError, match="the upload cannot be read as safetensors"):
        read_packet(pickle.dumps(packet.plain.weights), wanted, "the upload")
