"""Payloads as they travel: the sender packs them, and the receiver unpacks them.

A packet has values and nothing else. Names, positions and shapes are in the `Outline` that sender
and receiver both derive from the job, so that they cost no bytes and a sender cannot choose them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedquilt.errors.faults import is_out_of_memory
from fedquilt.round.link.codec import BaseCodec, ChangeSpec
from fedquilt.round.link.coding import (
    NOTHING,
    CodecError,
    change_of,
    decoded,
    encoded,
    with_change,
)
from fedquilt.round.link.transmission import Transmission
from fedquilt.tensors import Flat
from fedquilt.terms import Payload, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World

Names = tuple[str, ...]
Shapes = Mapping[str, torch.Size]
WEIGHTS = "weights"  # Key of the message that has the weights


@dataclass(frozen=True)
class Outline:
    """The names, positions and types of a payload's tensors, without their values."""

    submodel: Submodel  # Positions that are sent, before any of them get lost
    weights: Names  # Names of weights, without the scope
    dtype: torch.dtype  # Floating-point type of all values that a codec codes
    device: torch.device  # Device that values are unpacked on
    slots: Mapping[str, Names] = field(default_factory=dict)  # Names of weights, by slot
    extras: Shapes = field(default_factory=dict)  # Shapes of extras, by name
    coded_extras: Names = ()  # Extras that a codec codes. Others are sent uncoded

    @staticmethod
    def of(payload: Payload) -> Outline:
        """Return the outline of a payload: names, positions and shapes of its tensors.

        Type and device are those of its first tensor.
        """
        some = next(iter(_tensors(payload)))
        return Outline(
            payload.submodel,
            tuple(payload.weights),
            some.dtype,
            some.device,
            {slot: tuple(values) for slot, values in payload.slots.items()},
            {name: value.shape for name, value in payload.extras.items()},
            payload.coded_extras,
        )

    def shapes(self, names: Names, world: World) -> dict[str, torch.Size]:
        """Return the shapes of the weights `names` at the positions that are sent.

        They follow from the layout of the family in `world`.
        """
        layout = world.family.layout
        kept = {axis: len(positions) for axis, positions in self.submodel.index.items()}
        sizes = layout.sizes | self.submodel.arch.sizes | kept
        return {name: torch.Size(layout.shape(name, sizes)) for name in names}

    def coded_state(self) -> Iterator[tuple[int, str, str, Names]]:
        """Yield the messages that code slots and extras: number, kind, name and tensors of each.

        Message 0 has the weights. An empty slot, or an extra that is not sent, has no message, but
        its number is not used for another one.
        """
        number = 0
        for slot, names in sorted(self.slots.items()):
            number += 1
            if names:
                yield number, "slots", slot, names
        for name in sorted(self.coded_extras):
            number += 1
            if name in self.extras:
                yield number, "extras", name, (name,)


@dataclass(frozen=True)
class Packet:
    """A payload as it travels: uncoded tensors, and messages of a codec.

    Only values at positions that arrive are in it, because the sender simulates the losses.
    """

    plain: Payload  # Uncoded tensors, at the positions that arrive
    # (byte,) Messages of the codec by key: "weights", "slots/NAME" and "extras/NAME"
    messages: Mapping[str, Tensor] = field(default_factory=dict)
    # Change that the message of the weights encodes. It stays with the sender, who needs it for
    # error feedback.
    change: Flat | None = None

    @property
    def bytes(self) -> int:
        """Return the number of bytes that travel: uncoded tensors and messages, without headers."""
        return self.plain.bytes + sum(message.nbytes for message in self.messages.values())


@dataclass(frozen=True)
class Unpacked:
    """A payload as it arrived, and the change of weights that was decoded for it."""

    payload: Payload  # Weights, slots and extras at the positions that arrived
    change: Tensor | None = None  # (value,) Decoded change. None: weights are not coded


def pack(
    codec: BaseCodec | None,
    payload: Payload,
    reach: Submodel,
    transmission: Transmission,
    reference: Weights,
    residual: Weights = NOTHING,
) -> Packet:
    """Pack a payload for its transmission.

    Weights that `reference` has are coded as changes from it, in one message. Slots and extras are
    coded against zero and without error feedback, each as a message of its own. Feedback repairs a
    change that the next change adds to, but a slot is a value of this round. So a codec that sends
    only some values has to scale them up there.

    Args:
        codec: Codec of this direction. None: nothing is coded.
        payload: What is sent.
        reach: Positions that will arrive.
        transmission: Client, round and direction, which give the random keys of messages.
        reference: Weights that both sides have.
        residual: Error of earlier coding, which is added to the change.
    """
    changes = {name: value for name, value in payload.weights.items() if name in reference}
    if codec is None or not (changes or payload.slots or payload.coded_extras):
        return Packet(part(payload, reach, transmission))

    outline = Outline.of(payload)
    messages: dict[str, Tensor] = {}
    change = None
    if changes:
        change = change_of(changes, reference, residual)
        spec = _spec(outline, change.shapes, reach, transmission)
        messages[WEIGHTS] = encoded(codec, change.vector, spec, transmission.codec_keys())

    codec = _without_feedback(codec)
    for number, kind, name, _ in outline.coded_state():
        is_slot = kind == "slots"
        state = change_of(payload.slots[name] if is_slot else {name: payload.extras[name]})
        spec = _spec(outline, state.shapes, reach if is_slot else outline.submodel, transmission)
        with _coding(codec, kind, name):
            messages[f"{kind}/{name}"] = encoded(
                codec, state.vector, spec, transmission.codec_keys(number)
            )

    plain = replace(
        payload,
        weights={name: value for name, value in payload.weights.items() if name not in changes},
        slots={},
        extras={
            name: value
            for name, value in payload.extras.items()
            if name not in payload.coded_extras
        },
    )
    return Packet(part(plain, reach, transmission), messages, change)


def unpack(
    codec: BaseCodec | None,
    packet: Packet,
    outline: Outline,
    transmission: Transmission,
    reference: Weights,
) -> Unpacked:
    """Return the payload that a packet has, at the positions that arrived.

    Args:
        codec: Codec of this direction. None: nothing is coded.
        packet: What arrived.
        outline: Names, positions and types of what was sent.
        transmission: Client, round and direction.
        reference: Weights that both sides have, the same as in `pack`.
    """
    if codec is None or not packet.messages:
        return Unpacked(packet.plain)

    reach = packet.plain.submodel
    weights = dict(packet.plain.weights)
    change = None
    if WEIGHTS in packet.messages:
        coded = tuple(name for name in outline.weights if name in reference)
        spec = _spec(outline, outline.shapes(coded, transmission.world), reach, transmission)
        change = decoded(codec, packet.messages[WEIGHTS], spec)
        received = with_change(spec.shapes, change, reference)
        weights |= part(Payload(outline.submodel, received), reach, transmission).weights

    codec = _without_feedback(codec)
    slots: dict[str, Weights] = {slot: {} for slot in outline.slots}
    extras = dict(packet.plain.extras)
    for _, kind, name, names in outline.coded_state():
        is_slot = kind == "slots"
        shapes = (
            outline.shapes(names, transmission.world) if is_slot else {name: outline.extras[name]}
        )
        spec = _spec(outline, shapes, reach if is_slot else outline.submodel, transmission)
        with _coding(codec, kind, name):
            values = decoded(codec, packet.messages[f"{kind}/{name}"], spec)
        tensors = with_change(shapes, values)
        if is_slot:
            slots[name] = part(Payload(outline.submodel, tensors), reach, transmission).weights
        else:
            extras |= tensors
    payload = replace(
        packet.plain,
        weights={name: weights[name] for name in outline.weights},
        slots=slots,
        extras={name: extras[name] for name in outline.extras},
    )
    return Unpacked(payload, change)


@contextmanager
def _coding(codec: BaseCodec, kind: str, name: str) -> Iterator[None]:
    """Raise any error inside as a CodecError that names the slot or the extra.

    An error of memory passes unchanged.

    Args:
        codec: Codec of the link.
        kind: "slots" or "extras".
        name: Name of the slot or of the extra.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        kind_text = "" if isinstance(error, CodecError) else f"{type(error).__name__}: "
        raise CodecError(
            f"{type(codec).__name__} was asked to code the {kind.removesuffix('s')} {name!r} of "
            f"the method, and failed: {kind_text}{error}. Another codec would work; so would "
            "coded = False of a method that has this setting."
        ) from error


def part(payload: Payload, reach: Submodel, transmission: Transmission) -> Payload:
    """Return the part of a payload at the positions that arrive. Extras always arrive completely.

    Args:
        payload: What was sent. It is returned itself if `reach` is its sub-model.
        reach: Positions that arrive.
        transmission: Client, round and direction. Its world has the family.
    """
    if reach is payload.submodel:
        return payload
    narrow, sent_index = transmission.world.family.cutter.narrow, payload.submodel.positions
    slots = {
        slot: narrow(values, sent_index, reach.positions) for slot, values in payload.slots.items()
    }
    return replace(
        payload,
        submodel=reach,
        weights=narrow(payload.weights, sent_index, reach.positions),
        slots=slots,
    )


def _spec(
    outline: Outline, shapes: Shapes, reach: Submodel, transmission: Transmission
) -> ChangeSpec:
    """Return the description of a change for the codec, with a mask of its values that arrive.

    Args:
        outline: Names, positions and types of what is sent.
        shapes: Shape of every tensor of the change, by name.
        reach: Positions that arrive. The mask is None if it is the outline's sub-model itself.
        transmission: Client, round and direction. Its world has the family.
    """
    arrives = None
    if reach is not outline.submodel:
        count = sum(shape.numel() for shape in shapes.values())
        numbered = Flat(torch.arange(count, device=outline.device), shapes)
        arrived = part(Payload(outline.submodel, numbered.parts), reach, transmission).weights
        mask = torch.zeros(count, dtype=torch.bool, device=outline.device)
        arrives = mask.index_fill_(0, Flat.of(arrived).vector, True)
    return ChangeSpec(shapes, outline.dtype, outline.device, arrives)


def _tensors(payload: Payload) -> Iterator[Tensor]:
    yield from payload.weights.values()
    for values in payload.slots.values():
        yield from values.values()
    yield from payload.extras.values()


def _without_feedback(codec: BaseCodec) -> BaseCodec:
    changes: dict[str, Any] = {
        setting.name: False for setting in fields(codec) if setting.name == "feedback"
    }
    return replace(codec, **changes)
