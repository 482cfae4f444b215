"""One client's round on a real device: requests become jobs, and trained weights become replies.

The server packs what the link carries, and the device unpacks it, trains, and packs its upload. So
both sides run the code of a simulated round (`client.py`), with a link of which each side has one
end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.round.budgets import learner_of
from fedquilt.round.client_state import joined_states
from fedquilt.round.federation import Federation
from fedquilt.round.link import Arrival, Link, Outline, Packet, Transmission
from fedquilt.round.link.coding import NOTHING
from fedquilt.round.training.learner import Learner
from fedquilt.terms import ClientState, Job, Payload, Server, Submodel, Weights

RECEIVED = "received"  # Slot with the weights that a client received last, as a change
# Prefix of extras that name a weight which the device got once, such as one of its private net.
# They have no values, which are on the device.
INSTALLED = "installed/"


@dataclass(frozen=True)
class DeviceLink(Link):
    """The end of a link that is on a device.

    Downloads are the packets that have arrived. Uploads are packed, and kept for the reply.
    """

    # Packets that arrived and the outlines of what was sent, by the scope of the job. None: the
    # packet got lost.
    arrived: Mapping[str, tuple[Packet | None, Outline]] = field(
        default_factory=dict, compare=False
    )
    uploads: dict[str, Packet | None] = field(default_factory=dict, compare=False)

    def down(
        self, payload: Payload, transmission: Transmission, known: Weights = NOTHING
    ) -> Arrival:
        """Return the payload that has arrived for a job, decoded, and its bytes.

        Nothing is sent. The packet is the one in `arrived` for the job's scope.

        Args:
            payload: It is not used, because a device has no values of the server.
            transmission: Client, round and direction. Its job gives the scope.
            known: Weights that both sides know the client received before. Changes from them are
                coded.
        """
        packet, outline = self.arrived[transmission.job.submodel.scope]
        if packet is None:
            return Arrival(None, 0)
        return Arrival(self.unpack(packet, outline, transmission, known).payload, packet.bytes)

    def pack(
        self,
        payload: Payload,
        transmission: Transmission,
        reference: Weights = NOTHING,
        residual: Weights = NOTHING,
    ) -> Packet | None:
        """Pack a payload as `Link.pack` does, and store the packet of an upload in `uploads`.

        Args:
            payload: What the client sends.
            transmission: Client, round and direction.
            reference: Weights that both sides know the client received. Changes from them are
                coded.
            residual: Error of earlier coding, which is added to the change.
        """
        packet = super().pack(payload, transmission, reference, residual)
        if transmission.up:
            self.uploads[transmission.job.submodel.scope] = packet
        return packet


def device_link(link: Link, arrived: Mapping[str, tuple[Packet | None, Outline]]) -> DeviceLink:
    """Return the device's end of a link.

    Args:
        link: The link of the run.
        arrived: Packets that arrived and outlines of what was sent, by the scope of the job.
    """
    return DeviceLink(link.loss, link.codec, link.clock, arrived)


# --- outlines, which both sides derive from a job -----------------------------------------------


def download_outline(
    federation: Federation, job: Job, learner: Learner, extras: Mapping[str, torch.Size]
) -> Outline:
    """Return the names and positions of a job's download.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
        extras: Shapes of the server's extras, by name.
    """
    world = federation.world
    member = world.family.member(job.submodel)
    state = learner.state
    return Outline(
        job.submodel,
        learner.received(member),
        world.dtype,
        torch.device("cpu"),
        {slot: learner.slotted(member) for slot in state.slots_down},
        {name: torch.Size(extras[name]) for name in state.extras_down if name in extras},
        tuple(name for name in state.coded_extras if name in state.extras_down and name in extras),
    )


def upload_outline(
    federation: Federation,
    job: Job,
    learner: Learner,
    classes: Tensor,
    extras: Mapping[str, Sequence[int]],
) -> Outline:
    """Return the names and positions of a job's upload.

    Args:
        federation: World, method and link.
        job: What the client was asked to train.
        learner: How it trained.
        classes: (class,) True where the client has samples of the class.
        extras: Shapes of the extras that it sends, by name.
    """
    world = federation.world
    member = world.family.member(job.submodel)
    state = learner.state
    return Outline(
        learner.upload(member, job.submodel, classes),
        learner.sent(member),
        world.dtype,
        torch.device("cpu"),
        {slot: learner.slotted(member) for slot in state.slots_up},
        {name: torch.Size(shape) for name, shape in extras.items()},
        tuple(name for name in state.coded_extras if name in extras),
    )


def reach_of(
    link: Link, submodel: Submodel, columns: int | None, transmission: Transmission
) -> Submodel | None:
    """Return the positions that arrive if this many columns do. None: nothing arrives.

    They are the first positions of the sub-model.

    Args:
        link: Link of the run. Its loss gives the width of a column.
        submodel: Positions that are sent.
        columns: Columns that arrive. None: all. 0: nothing.
        transmission: Client, round and direction. Its world has the family.
    """
    if columns is None:
        return submodel
    if columns == 0 or link.loss is None:
        return None
    return transmission.world.family.part(submodel, columns * link.loss.granularity)


def columns_of(link: Link, submodel: Submodel, transmission: Transmission) -> int | None:
    """Return the number of columns that arrive in a simulated transmission.

    The result is None if all arrive, and 0 if nothing does.

    Args:
        link: Link of the run.
        submodel: Positions that are sent.
        transmission: Client, round and direction, which give the random numbers.
    """
    if link.loss is None or not link.lossy:
        return None
    count = link.loss.count(transmission.world.family.member(submodel))
    arrived = link.loss.arrived(transmission, count)
    return None if arrived == count else arrived


# --- what the server remembers of a device ------------------------------------------------------


def initial_needs(federation: Federation, job: Job, learner: Learner) -> tuple[str, ...]:
    """Return the names of the initial weights that a device needs to train a job.

    These are all weights of its net or none, those of all stages if the model grows. It needs none
    if it receives all weights over a link that loses nothing and codes no changes from earlier
    downloads.

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        learner: How it trains.
    """
    member = federation.world.family.member(job.submodel)
    names = learner.names(member)
    receives_all = len(learner.received(member)) == len(names)
    is_exact = not federation.link.lossy and not federation.link.tracks
    if receives_all and is_exact:
        return ()
    layout = federation.world.family.layout
    if layout.nets or not layout.variants:
        return names
    stages = [learner.names(member.at(variant)) for variant in layout.variants]
    return tuple(dict.fromkeys(name for stage in stages for name in stage))


def initial_positions(federation: Federation, job: Job, memory: ClientState | None) -> Submodel:
    """Return the positions at which a device needs initial weights: the job's and earlier ones.

    A client's state has the positions of all jobs so far, and pairs of positions that were in no
    job have initial weights (`joined_states`).

    Args:
        federation: World, method and link.
        job: What the client is asked to train.
        memory: What the server remembers of the device. None: nothing.
    """
    if memory is None or memory.submodel.index == job.submodel.index:
        return job.submodel
    index = federation.world.family.cutter.union(memory.submodel.index, job.submodel.index)
    widths = tuple((axis, len(positions)) for axis, positions in index.items())
    arch = replace(job.submodel.arch, widths=widths)
    return replace(job.submodel, arch=arch, index=index)


def server_memory(
    federation: Federation,
    job: Job,
    known: Weights,
    steps: int,
    memory: ClientState | None,
    initial: Weights,
) -> ClientState:
    """Return what the server remembers of a device after a round of it that counted.

    It has no weights, because those are on the device. It has the positions of all jobs so far, the
    optimizer steps, the names of weights that the device gets once, and what it received, if the
    codec needs that.

    Args:
        federation: World, method and link.
        job: What the client trained.
        known: Weights that both sides know the client received. Empty: nobody needs them.
        steps: Its optimizer steps so far.
        memory: What the server remembered before.
        initial: All weights before the first round.
    """
    slots = {}
    if federation.link.tracks and known:
        first = federation.world.family.cutter.gather(initial, job.submodel, list(known))
        slots[RECEIVED] = {name: value - first[name] for name, value in known.items()}
    member = federation.world.family.member(job.submodel)
    installed = learner_of(federation.method, job, federation.world).installed(member)
    extras = dict(memory.extras) if memory else {}
    extras |= {INSTALLED + name: torch.empty(0) for name in installed}
    new = ClientState(job.submodel, {}, slots, steps, job.round, extras)
    return new if memory is None else joined_states(federation, memory, new, initial)


def with_installed(server: Server, job: Job) -> Server:
    """Return a state whose memory of a job has the names of weights that the device got once.

    So the device does not get them again. They have no values.

    Args:
        server: State with what the server remembers of devices.
        job: What the client is asked to train.
    """
    key = job.client.id, job.submodel.scope
    memory = server.memory.get(key)
    if memory is None:
        return server
    names = {
        name.removeprefix(INSTALLED): value
        for name, value in memory.extras.items()
        if name.startswith(INSTALLED)
    }
    return replace(server, memory={key: replace(memory, weights=names)})
