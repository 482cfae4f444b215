"""Engine that trains on real devices: it sends requests, and folds the replies that are valid.

Replies are folded in the order of jobs, so that results do not depend on the order in which replies
arrive. A reply that cannot be used costs that client's round and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt.data import FederatedData
from fedquilt.engines.flower.courier import Courier
from fedquilt.engines.flower.evaluation import OnDevices, ServerSamples
from fedquilt.engines.flower.exchange import Exchange
from fedquilt.engines.flower.reply_store import MAX_HELD_BYTES
from fedquilt.engines.flower.validation import ReplyReader, SentJob, batch_sizes
from fedquilt.engines.sequential import Sequential
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.budgets import learner_of
from fedquilt.round.client import known_after, known_weights
from fedquilt.round.client_state import memory_of
from fedquilt.round.device import (
    columns_of,
    download_outline,
    initial_needs,
    initial_positions,
    with_installed,
)
from fedquilt.round.engine import FATES, Engine, Outcome, RosterChange
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Fold
from fedquilt.round.link import Transmission
from fedquilt.round.wire import (
    Message,
    Request,
    packet_file,
)
from fedquilt.terms import ClientState, Job, Payload, Server, Submodel, Weights


def _forget(server: Server, clients: set[int], outcome: Outcome) -> None:
    """Replace the states of clients whose devices lost them by empty states.

    They are written to `outcome`. Scopes that were trained in this round keep their new states.
    """
    for (client, scope), state in server.memory.items():
        if client in clients and (client, scope) not in outcome.memory:
            outcome.memory[client, scope] = ClientState(state.submodel, {})


@dataclass
class Flower(Sequential):
    """Engine that trains clients on real devices, used by `fedquilt serve`.

    The server's samples, if it has any, are used for evaluation and for norm statistics. Else
    devices evaluate, and always where results live on clients (`evaluating`).

    Args:
        courier: It carries messages to devices and back.
        run_id: Identity of the run, which is the same after a resume.
        terms: Function that returns method, link and task of a federation as plain values.
        deadline: Seconds that devices have in a round.
        enough: Valid replies after which a round closes. 0: it waits for all, until the deadline.
        least: Fewest valid replies with which a round counts. With fewer, another cohort is asked.
        max_rms: Largest root mean square of a weight's change or of a slot. Replies above it are
            refused.
        max_rms_ratio: Replies whose change exceeds this multiple of the round's median are refused,
            by the root mean square over all weights. Infinite: none.
        max_held_bytes: Bytes of accepted replies that stay in memory. More are in a temporary file.
        spill_folder: Folder of this file. None: that of the system.
        server_samples: Samples that the server has for itself.
        arrivals: Devices that join or have another budget or other samples, by the first round in
            which they do, from 0. The records list them.
    """

    courier: Courier | None = None
    run_id: str = ""
    terms: Callable[[Federation], Mapping[str, Any]] = field(default=lambda federation: {})
    deadline: float = math.inf
    enough: int = 0
    least: int = 1
    max_rms: float = math.inf
    max_rms_ratio: float = math.inf
    max_held_bytes: int = MAX_HELD_BYTES
    spill_folder: Path | None = None
    server_samples: ServerSamples = ServerSamples()
    arrivals: Mapping[int, Sequence[RosterChange]] = field(default_factory=dict)

    has_client_states: ClassVar[bool] = False

    def online(self) -> Sequence[int] | None:
        """Return the clients whose devices can be reached now, in ascending order."""
        return self.reached.online()

    @property
    def reached(self) -> Courier:
        """Return the courier, which every deployment has."""
        assert self.courier is not None, "a deployment has a courier"
        return self.courier

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        by_client: dict[int, list[Job]] = {}
        for job in jobs:
            by_client.setdefault(job.client.id, []).append(job)
        exchange = Exchange(self)
        exchange.ask(server, by_client)
        if exchange.anew:  # These devices have lost their state, and start as new clients.
            again = {client: by_client[client] for client in sorted(exchange.anew)}
            exchange.ask(replace(server, memory={}), again)
        exchange.refuse_outliers(self.max_rms_ratio)
        with closing(exchange.accepted):
            self._fold(server, exchange, list(by_client), fold, outcome)

    def _fold(
        self,
        server: Server,
        exchange: Exchange,
        asked: Sequence[int],
        fold: Fold,
        outcome: Outcome,
    ) -> None:
        """Add the accepted replies to the fold and to the outcome, in the order of jobs.

        Args:
            server: State that the round started from.
            exchange: Replies of the round, which is over.
            asked: Clients that were asked, in the order of their jobs.
            fold: Fold that collects updates.
            outcome: Outcome of the round.
        """
        replied = {client for client in asked if client in exchange.accepted}
        _forget(server, exchange.anew & replied, outcome)
        arrivals = tuple(self.arrivals.get(server.round, ()))
        attendance = replace(exchange.attendance(asked), arrivals=arrivals)
        outcome.attendance = attendance
        for fate in FATES:
            outcome.missing |= getattr(attendance, fate)
        for client in asked:
            if client not in replied:
                continue
            result = exchange.result(client)
            for number, sent_job in enumerate(exchange.sent[client]):
                job = sent_job.job
                fold.add(result.updates[number])
                outcome.losses.append(result.losses[number])
                outcome.memory[client, job.submodel.scope] = result.client_states[number]
                member = self.world.family.member(job.submodel)
                sizes = batch_sizes(job, sent_job.learner)
                macs = self.macs(client, sent_job.learner, member, sizes)
                outcome.charge(client, sent_job.down, result.up[number], macs, sent_job.first)
                outcome.stacks += 1

    def counts(self, outcome: Outcome) -> bool:
        """Return True if at least `least` devices have sent a usable reply."""
        attendance = outcome.attendance
        return attendance is None or len(attendance.replied) >= self.least

    def _over(self, data: FederatedData) -> Sequential:  # type: ignore[override]
        """Return an engine of this process, because the server itself trains on public samples."""
        return Sequential(data, self.device, self.precision)

    def evaluating(self, server: Server, fleet: Fleet, max_clients: int) -> Engine:
        """Return an engine that evaluates a state on the server's samples and on devices.

        Args:
            server: State that is evaluated.
            fleet: Clients and their budgets.
            max_clients: Most clients that are asked for one test.
        """
        return OnDevices(self, server, fleet, max_clients)

    def _check_federation(self, federation: Federation) -> None:
        super()._check_federation(federation)
        if federation.method.personal or not self.server_samples.test:
            federation.world.task.refuse_collected("an evaluation on devices")

    # --- requests --------------------------------------------------------------------------------

    def request(self, server: Server, jobs: Sequence[Job]) -> tuple[Message, list[SentJob]]:
        """Return the request for all jobs of one client, and what is needed to read its reply.

        There is one `SentJob` for each of `jobs`, in order. `server` is the state of the round's
        start.
        """
        world = self.world
        files, sent, columns, initial = [], [], [], []
        for job in jobs:
            file, sent_job, job_columns, job_initial = self._job_file(server, job)
            files.append(file)
            sent.append(sent_job)
            columns.append(job_columns)
            initial.append(job_initial)
        client = jobs[0].client.id
        # A client may have trained nets of other scopes in its last round that counted.
        states = [server.memory.get((client, scope)) for scope in {"", *server.scopes}]
        base = max((state.round for state in states if state), default=-1)
        request = Request(
            run=self.run_id,
            round=server.round,
            client=jobs[0].client,
            submodels=tuple(job.submodel for job in jobs),
            settings=self.terms(self.federation),
            seed=world.seed,
            precision=self.precision,
            fingerprint=world.family.layout.fingerprint,
            num_clients=world.clients_in(server.round),
            base=base,
            deadline=self.deadline,
            columns=tuple(columns),
            initial=tuple(initial),
            extra_shapes={name: tuple(value.shape) for name, value in server.extras.items()},
            layout=world.family.layout.to_json() if base < 0 else "",
        )
        return request.message(tuple(files)), sent

    def _job_file(
        self, server: Server, job: Job
    ) -> tuple[bytes, SentJob, int | None, Submodel | None]:
        """Return the download of a job, and what the server needs to read the reply.

        Returns:
            The file that is sent. The job as the server remembers it. The number of columns that
            arrive (None: all, 0: nothing). The positions of the initial weights in the file (None:
            it has none).
        """
        federation, link = self.federation, self.federation.link
        learner = learner_of(self.method, job, self.world)
        memory = _counted(memory_of(server, job))
        payload = self.payload(with_installed(server, job), job, learner)
        transmission = Transmission(self.world, job)
        member = self.world.family.member(job.submodel)
        names = learner.received(member)
        known = known_weights(federation, job, names, memory, self.initial) if link.tracks else {}
        bare = Payload(
            payload.submodel, payload.weights, payload.slots, payload.extras, payload.coded_extras
        )
        packet = link.pack(bare, transmission, known)
        columns = None
        arrived = None
        if packet is None:
            columns = 0
        else:
            columns = columns_of(link, job.submodel, transmission)
            outline = download_outline(federation, job, learner, _shapes(payload.extras))
            arrived = link.unpack(packet, outline, transmission, known).payload
        known = known_after(federation, job, names, arrived, known)

        positions = None
        initial: Weights = {}
        if needs := initial_needs(federation, job, learner):
            new_positions = initial_positions(federation, job, memory)
            if memory is None or new_positions.index != memory.submodel.index:
                positions = new_positions
                initial = self.world.family.cutter.gather(self.initial, new_positions, needs)
        file = packet_file(packet, payload.first, initial)
        down = (packet.bytes if packet else 0) + payload.first_bytes
        sent = SentJob(job, learner, known, memory, down, payload.first_bytes)
        return file, sent, columns, positions

    def reader(self, server: Server) -> ReplyReader:
        """Return what reads the replies of a round that starts from the state `server`."""
        return ReplyReader(
            self.federation,
            self.initial,
            server,
            self.run_id,
            self.max_rms,
            needs_rms=math.isfinite(self.max_rms_ratio),
        )


def _counted(memory: ClientState | None) -> ClientState | None:
    """Return what the server remembers of a device, or None if the device has lost its state.

    Such a state has no round (-1).
    """
    return None if memory is None or memory.round < 0 else memory


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}
