"""Payloads as they travel: what is unpacked is what a simulated link delivers."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.family.cut import prefix
from fedquilt.methods.api import Client, Job, Payload
from fedquilt.round.federation import World
from fedquilt.round.link import Outline, Transmission

LINKS = {
    "perfect": fq.Link(),
    "lossy": fq.Link(loss=fq.links.ColumnLoss(0.3, 0.4)),
    "coded": fq.Link(codec=fq.links.Codec(bits=4, keep=0.5, feedback=True)),
    "both": fq.Link(loss=fq.links.ColumnLoss(0.1, 0.2), codec=fq.links.Codec(bits=8, rotate=True)),
}


def payload_of(family) -> tuple[Payload, dict[str, torch.Tensor]]:
    """Return an upload with a slot and two extras, and the weights that both sides know."""
    member = family.fit(fq.Budget(share=1.0))
    names = list(family.trainable)
    weights = family.cutter.gather(family.init(1), prefix(member), names)
    known = family.cutter.gather(family.init(0), prefix(member), names)
    slots = {"variate": {name: value * 2 for name, value in weights.items()}}
    extras = {"predictions": torch.rand(5, 3), "round": torch.ones(1)}
    return Payload(prefix(member), weights, slots, extras, ("predictions",)), known


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_packet_is_unpacked_to_what_a_simulated_link_delivers(link, perceptron):
    payload, known = payload_of(perceptron)
    for client in range(20):
        job = Job(Client(client, fq.Budget(share=1.0), 4), payload.submodel, 0)
        transmission = Transmission(World(perceptron, seed=3), job, up=True)
        arrival = link.up(payload, transmission, known)
        packet = link.pack(payload, transmission, known)
        if packet is None:
            assert arrival.payload is None
            continue
        assert packet.bytes == arrival.bytes
        unpacked = link.unpack(packet, Outline.of(payload), transmission, known).payload
        assert arrival.payload is not None
        assert unpacked.submodel == arrival.payload.submodel
        for name in ("weights", "slots", "extras"):
            mine, theirs = getattr(unpacked, name), getattr(arrival.payload, name)
            torch.testing.assert_close(dict(mine), dict(theirs), rtol=0, atol=0)


def test_an_outline_has_the_shapes_of_the_positions_that_are_sent(perceptron):
    submodel = prefix(perceptron.fit(fq.Budget(share=0.5)))
    outline = Outline(submodel, (), torch.float32, torch.device("cpu"))
    shapes = outline.shapes(("first.weight", "last.weight", "last.bias"), World(perceptron))
    assert shapes == {
        "first.weight": torch.Size((3, 4)),
        "last.weight": torch.Size((3, 3)),
        "last.bias": torch.Size((3,)),
    }


def test_a_packet_without_a_codec_is_the_payload_itself(perceptron):
    payload, known = payload_of(perceptron)
    job = Job(Client(0, fq.Budget(share=1.0), 4), payload.submodel, 0)
    transmission = Transmission(World(perceptron), job, up=True)
    packet = fq.Link().pack(payload, transmission, known)
    assert packet is not None
    assert packet.plain is payload
    assert packet.bytes == payload.bytes
