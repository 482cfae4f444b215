"""Simulated links between server and clients: losses, coding, bytes and time.

A link has three optional parts. Any method runs over any link, on every engine.

- Loss: `columns.py` (columns fail at a rate), `wireless.py` (rates of a radio model).
- Codec: `codec.py` (quantized and sparse changes), `rotation.py` (random rotation before it), and
  `coding.py` (messages of named tensors, and checks of a codec).
- Packets: `packing.py` (payloads as they travel, which the sender packs and the receiver unpacks).
- Clock: `clock.py` (time of a client's round).

`transmission.py` has the identity of a message, and `per_client.py` settings that differ by client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedquilt.checks import refuse
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.round.link.clock import Clock
from fedquilt.round.link.codec import BaseCodec, ChangeSpec, Codec, Keys
from fedquilt.round.link.coding import NOTHING, check_codec
from fedquilt.round.link.columns import ColumnLoss, Loss
from fedquilt.round.link.packing import Outline, Packet, Unpacked, pack, part, unpack
from fedquilt.round.link.transmission import Arrival, Transmission
from fedquilt.round.link.wireless import Wireless
from fedquilt.terms import Payload, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World


@dataclass(frozen=True)
class Link:
    """A simulated connection between server and clients, in both directions.

    It has three independent parts: a loss, a codec and a clock. Each may be left out. By default
    everything arrives exactly as it was sent, and takes no time. Bytes are counted in any case.

    A payload is first coded, and then sent through the loss. The random numbers of a transmission
    depend on seed, client, round and direction alone, so that every engine loses the same values.

    Example:
        A link that sends changes of weights with 8 bits each, and takes the time of a mobile phone:

        >>> import fedquilt as fq
        >>> link = fq.Link(codec=fq.links.Codec(bits=8), clock=fq.links.Clock(down=20e6, up=10e6))
        >>> print(link)
        8 bits a value; 20 Mbit/s down, 10 Mbit/s up, 0.05 s each way
        >>> link.lossy, fq.Link.preset("lossy-mild").lossy
        (False, True)
    """

    loss: Loss | None = None  # Model of lost values. None: nothing is lost
    # Codec of the change that is sent. None: weights are sent without coding
    codec: BaseCodec | None = None
    clock: Clock | None = None  # Speeds that give the time of a round. None: time is not simulated

    presets: ClassVar[Mapping[str, Link]]  # Predefined links by name

    def __post_init__(self) -> None:
        parts: dict[str, tuple[type, str]] = {
            "loss": (Loss, "fq.links.ColumnLoss(0.1) or fq.links.Wireless()"),
            "codec": (BaseCodec, "fq.links.Codec(bits=8)"),
            "clock": (Clock, "fq.links.Clock(down=20e6, up=10e6)"),
        }
        problems = {
            name: f"{getattr(self, name)!r} was asked for; {fits} would fit, "
            "None for none, or a whole link by its "
            'name, such as fq.Link.preset("lossy-mild").'
            for name, (kind, fits) in parts.items()
            if not isinstance(getattr(self, name), (kind, type(None)))
        }
        refuse(self, problems)

    def __str__(self) -> str:
        return (
            "; ".join(str(part) for part in (self.loss, self.coder, self.clock) if part)
            or "nothing is lost or coded"
        )

    @classmethod
    def preset(cls, name: str) -> Link:
        """Return a predefined link by its name, such as `lossy-mild`.

        Raises:
            ConfigError: There is no such link.
        """
        if name not in cls.presets:
            raise ConfigError(f"there is no link named {name!r}.{nearest(name, cls.presets)}")
        return cls.presets[name]

    @property
    def lossy(self) -> bool:
        """Return True if values may get lost.

        Clients then keep all that they trained, to fill in what is missing (equation 5).
        """
        return self.loss is not None and self.loss.loses

    @property
    def coder(self) -> BaseCodec | None:
        """Return the codec, or None if it has no effect."""
        return None if self.codec is None or self.codec.neutral else self.codec

    @property
    def feedback(self) -> bool:
        """Return True if clients keep the error of coding and add it to their next change."""
        return self.coder is not None and self.coder.feedback

    @property
    def tracks(self) -> bool:
        """Return True if server and clients must both keep the weights that a client received last.

        A codec codes changes from them. They may differ from what the server sent in this round,
        because values got lost or downloads are coded.
        """
        return self.coder is not None and (self.lossy or self.coder.down)

    @property
    def has_fixed_length(self) -> bool:
        """Return True if the length of a message does not depend on the values that are sent.

        It may depend on the number of values, and on which of them arrive.
        """
        return self.coder is None or self.coder.has_fixed_length

    @property
    def deadline(self) -> float | None:
        """Return the simulated seconds that a client has for its round, or None for no limit."""
        return None if self.clock is None else self.clock.deadline

    def check(self, num_clients: int) -> None:
        """Refuse per-client lists of loss and clock whose length does not divide `num_clients`.

        Raises:
            ConfigError: Names the setting.
        """
        for setting in (self.loss, self.clock):
            if setting is not None:
                setting.check(num_clients)

    def check_codec(self, world: World, device: torch.device) -> None:
        """Refuse a codec that does not decode what it encoded.

        It is tried on changes of the weights in the family and dtype of `world`, on `device`. A
        link without a codec is accepted.

        Raises:
            ConfigError: The codec fails, breaks its contract, or has state.
        """
        if self.codec is not None:
            check_codec(self.codec, world, self.lossy, device)

    def reach(self, submodel: Submodel, transmission: Transmission) -> Submodel | None:
        """Return the part of `submodel` that will arrive, or None if nothing does.

        Nothing is sent. The part depends on random numbers of this transmission only.
        """
        if self.loss is None or not self.lossy:
            return submodel
        return self.loss.reach(submodel, transmission)

    def down(
        self, payload: Payload, transmission: Transmission, reference: Weights = NOTHING
    ) -> Arrival:
        """Send a payload to a client of a simulation, and return what arrives.

        The payload is coded if the codec codes downloads, and the loss may drop some of it.

        Args:
            payload: What the server sends.
            transmission: Client, round and direction.
            reference: Weights that both sides know the client received before. Changes from them
                are coded.
        """
        return self._carry(payload, transmission, reference, NOTHING)

    def up(
        self,
        payload: Payload,
        transmission: Transmission,
        reference: Weights = NOTHING,
        residual: Weights = NOTHING,
    ) -> Arrival:
        """Send a payload of a simulated client to the server, and return what arrives.

        The payload is coded if the link has a codec, and the loss may drop some of it.

        Args:
            payload: What the client sends.
            transmission: Client, round and direction.
            reference: Weights that both sides know the client received. Changes from them are
                coded.
            residual: Error of earlier coding, which is added to the change.
        """
        return self._carry(payload, transmission, reference, residual)

    def _carry(
        self, payload: Payload, transmission: Transmission, reference: Weights, residual: Weights
    ) -> Arrival:
        packet = self.pack(payload, transmission, reference, residual)
        if packet is None:
            return Arrival(None, 0)
        if not packet.messages:
            return Arrival(packet.plain, packet.bytes)
        unpacked = self.unpack(packet, Outline.of(payload), transmission, reference)
        return Arrival(
            unpacked.payload, packet.bytes, self.error(packet, unpacked, payload, transmission)
        )

    def pack(
        self,
        payload: Payload,
        transmission: Transmission,
        reference: Weights = NOTHING,
        residual: Weights = NOTHING,
    ) -> Packet | None:
        """Return a payload as it travels, or None if all of it gets lost.

        The sender simulates losses, so that a packet has only values that arrive.

        Args:
            payload: What is sent.
            transmission: Client, round and direction.
            reference: Weights that both sides know the client received. Changes from them are
                coded.
            residual: Error of earlier coding, which is added to the change of an upload.
        """
        sends = payload.weights or payload.extras
        reach = self.reach(payload.submodel, transmission) if sends else payload.submodel
        if reach is None:
            return None
        return pack(self.codec_of(transmission), payload, reach, transmission, reference, residual)

    def unpack(
        self,
        packet: Packet,
        outline: Outline,
        transmission: Transmission,
        reference: Weights = NOTHING,
    ) -> Unpacked:
        """Return the payload that a packet has, decoded, at the positions that arrived.

        Args:
            packet: What arrived.
            outline: Names, positions and types of what was sent, which the job determines.
            transmission: Client, round and direction.
            reference: Weights that both sides know the client received, the same as in `pack`.
        """
        return unpack(self.codec_of(transmission), packet, outline, transmission, reference)

    def error(
        self, packet: Packet, unpacked: Unpacked, payload: Payload, transmission: Transmission
    ) -> Weights | None:
        """Return the error of coding by weight, at the positions that arrived.

        It is the change that was to be sent minus the decoded one. None: there is no error
        feedback, or no weight was coded.

        Args:
            packet: What the sender packed.
            unpacked: What the receiver makes of it.
            payload: What was sent.
            transmission: Client, round and direction.
        """
        codec = self.codec_of(transmission)
        if codec is None or not codec.feedback or packet.change is None or unpacked.change is None:
            return None
        lost = packet.change.same(packet.change.vector - unpacked.change).parts
        return part(
            Payload(payload.submodel, lost), unpacked.payload.submodel, transmission
        ).weights

    def codec_of(self, transmission: Transmission) -> BaseCodec | None:
        """Return the codec of a `transmission`, or None if nothing is coded in its direction.

        Downloads are coded only if the codec says so (`BaseCodec.down`).
        """
        return self.coder if self.coder and (transmission.up or self.coder.down) else None


LOSSES: dict[str, type[Loss]] = {"columns": ColumnLoss, "wireless": Wireless}
CODECS: dict[str, type[BaseCodec]] = {"linear": Codec}
USUAL_CODEC = "linear"  # Codec of a configuration table that names none.

LINKS: dict[str, Link] = {
    "perfect": Link(),
    "lossy-mild": Link(loss=ColumnLoss(0.1, 0.2)),  # FedResCuE, Table 12
    "lossy-strong": Link(loss=ColumnLoss(0.2, 0.3)),
    "wireless": Link(loss=Wireless()),
    "lq8": Link(codec=Codec(bits=8)),  # ProgFed, Table 10
    "lq4": Link(codec=Codec(bits=4)),
    "lq2": Link(codec=Codec(bits=2)),
    "sp25": Link(codec=Codec(keep=0.25)),
    "sp10": Link(codec=Codec(keep=0.1)),
    "lq8+sp25": Link(codec=Codec(bits=8, keep=0.25)),
    "lq8+sp10": Link(codec=Codec(bits=8, keep=0.1)),
    "mobile": Link(clock=Clock()),
}
Link.presets = LINKS

PERFECT = Link()

__all__ = [
    "CODECS",
    "LINKS",
    "LOSSES",
    "PERFECT",
    "USUAL_CODEC",
    "Arrival",
    "BaseCodec",
    "ChangeSpec",
    "Clock",
    "Codec",
    "ColumnLoss",
    "Keys",
    "Link",
    "Loss",
    "Outline",
    "Packet",
    "Transmission",
    "Unpacked",
    "Wireless",
]
