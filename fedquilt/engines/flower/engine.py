"""Engine that trains on real devices: it sends requests, validates replies, and folds them.

Replies are folded in the order of jobs, so that results do not depend on the order in which replies
arrive. A reply that cannot be used costs that client's round and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt.data import FederatedData
from fedquilt.engines.flower.courier import Courier
from fedquilt.engines.flower.evaluation import OnDevices, ServerSamples
from fedquilt.engines.sequential import Sequential
from fedquilt.errors import FedquiltError, FormatError
from fedquilt.fleets.fleet import Fleet
from fedquilt.names import said
from fedquilt.round.budgets import learner_of
from fedquilt.round.client import known_after, known_weights, update_of
from fedquilt.round.client_checks import check_sent, check_state
from fedquilt.round.client_state import memory_of, steps_behind
from fedquilt.round.device import (
    columns_of,
    download_outline,
    initial_needs,
    initial_positions,
    reach_of,
    server_memory,
    upload_outline,
    with_installed,
)
from fedquilt.round.engine import Attendance, Engine, Outcome
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Fold
from fedquilt.round.link import Outline, Transmission
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.wire import (
    Expected,
    JobResult,
    Message,
    Reply,
    Request,
    packet_file,
    read_packet,
)
from fedquilt.terms import ClientState, Job, Payload, Server, Submodel, Update, Weights, in_slots

CPU = torch.device("cpu")
MAX_LOSS = 1e30  # Largest loss that a reply may state


@dataclass(frozen=True)
class SentJob:
    """A job that was sent to a device, with all that is needed to read the reply."""

    job: Job
    learner: Learner
    known: Weights  # Weights that both sides know the client received
    memory: ClientState | None  # What the server remembers of the device
    down: int  # Bytes of the download
    first: int  # Bytes that the client gets once

    @property
    def transmission(self) -> str:
        """Return the scope of the job's net, by which jobs of one client differ."""
        return self.job.submodel.scope


@dataclass(frozen=True)
class Accepted:
    """A validated reply: one update, loss and memory for each job."""

    updates: tuple[Update, ...]
    losses: tuple[float, ...]
    memories: tuple[ClientState, ...]
    up: tuple[int, ...]  # Bytes of each job's upload


class Exchange:
    """Requests of a round, the replies that were accepted, and why others were not."""

    def __init__(self, engine: Flower) -> None:
        self._engine = engine
        self.sent: dict[int, list[SentJob]] = {}
        self.accepted: dict[int, Accepted] = {}
        self.missing: dict[int, str] = {}  # Clients without a reply, and the reason
        self.failed: dict[int, str] = {}  # Clients whose device could not train, and its reason
        self.refused: dict[int, str] = {}  # Clients whose reply was refused, and the reason
        self.anew: set[int] = set()  # Clients whose devices have lost their state
        self.wire_down = self.wire_up = 0  # Bytes of all messages

    def ask(self, server: Server, jobs: Mapping[int, Sequence[Job]]) -> None:
        """Send the jobs of clients to their devices, and sort the replies into the fields.

        Reading stops once enough replies are accepted. A reply of a client that was accepted before
        is ignored.

        Args:
            server: State that the round starts from.
            jobs: Jobs of each client, by its number.
        """
        requests: dict[int, Message] = {}
        for client, client_jobs in jobs.items():
            requests[client], self.sent[client] = self._engine.request(server, client_jobs)
            self.wire_down += requests[client].bytes
        if not requests:
            return
        for delivery in self._engine.reached.exchange(requests, self._engine.deadline):
            client = delivery.client
            if client not in requests or client in self.accepted:
                continue
            if delivery.message is None:
                self.missing[client] = delivery.reason
                continue
            self.wire_up += delivery.message.bytes
            self._read(delivery.message, requests[client].digest, client, server)
            if len(self.accepted) >= (self._engine.enough or math.inf):
                closed = f"the round closed with {len(self.accepted)} replies"
                self.missing |= {other: closed for other in requests if other not in self.accepted}
                break
        for client in requests:
            if client not in self.accepted.keys() | self.failed | self.refused.keys() | self.anew:
                self.missing.setdefault(client, "no reply came")

    def _read(self, message: Message, request: str, client: int, server: Server) -> None:
        """Read a reply, and store its updates, or the reason why it cannot be used.

        `request` is the digest of the request that the reply must belong to.
        """
        try:
            self.accepted[client] = self._engine.validated(
                message, request, server, self.sent[client]
            )
        except StateLostError:
            self.anew.add(client)
        except DeviceFailedError as error:
            self.failed[client] = str(error)
        except FedquiltError as error:
            self.refused[client] = str(error)
        else:  # An earlier message may have been a stale one.
            for reasons in (self.missing, self.failed, self.refused):
                reasons.pop(client, None)

    def attendance(self, asked: Sequence[int]) -> Attendance:
        """Return what became of the requests to the clients `asked`.

        A client whose reply was refused, or says that the device failed, is not listed as missing.
        """
        used = {**self.refused, **self.failed}
        missing = {client: why for client, why in self.missing.items() if client not in used}
        anew = tuple(sorted(self.anew & self.accepted.keys()))
        return Attendance(
            tuple(asked), missing, self.failed, self.refused, anew, self.wire_down, self.wire_up
        )


def _forget(server: Server, clients: set[int], outcome: Outcome) -> None:
    """Replace the old memories of clients whose devices lost their state by empty ones.

    They are written to `outcome`. Scopes that were trained in this round keep their new memories.
    """
    for (client, scope), state in server.memory.items():
        if client in clients and (client, scope) not in outcome.memory:
            outcome.memory[client, scope] = ClientState(state.submodel, {})


class DeviceFailedError(FormatError):
    """Error for a reply in which a device says why it could not train."""


class StateLostError(FormatError):
    """Error for a reply of a device that has lost the state that a request starts from."""


@dataclass
class Flower(Sequential):
    """Engine that trains clients on devices.

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
        server_samples: Samples that the server has for itself.
    """

    courier: Courier | None = None
    run_id: str = ""
    terms: Callable[[Federation], Mapping[str, Any]] = field(default=lambda federation: {})
    deadline: float = math.inf
    enough: int = 0
    least: int = 1
    max_rms: float = math.inf
    server_samples: ServerSamples = ServerSamples()

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
        accepted, sent = exchange.accepted, exchange.sent
        _forget(server, exchange.anew & accepted.keys(), outcome)
        outcome.attendance = exchange.attendance(list(by_client))
        outcome.missing |= exchange.missing | exchange.failed | exchange.refused
        for client in by_client:
            if client not in accepted:
                continue
            result = accepted[client]
            for number, sent_job in enumerate(sent[client]):
                job = sent_job.job
                fold.add(result.updates[number])
                outcome.losses.append(result.losses[number])
                outcome.memory[client, job.submodel.scope] = result.memories[number]
                member = self.world.family.member(job.submodel)
                sizes = self._batch_sizes(job, sent_job.learner)
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
            num_clients=world.num_clients,
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
            wanted = initial_positions(federation, job, memory)
            if memory is None or wanted.index != memory.submodel.index:
                positions = wanted
                initial = self.world.family.cutter.gather(self.initial, wanted, needs)
        file = packet_file(packet, payload.first, initial)
        down = (packet.bytes if packet else 0) + payload.first_bytes
        sent = SentJob(job, learner, known, memory, down, payload.first_bytes)
        return file, sent, columns, positions

    # --- replies ---------------------------------------------------------------------------------

    def validated(
        self, message: Message, request: str, server: Server, sent: Sequence[SentJob]
    ) -> Accepted:
        """Return the updates, losses and memories of a reply, or refuse the whole reply.

        Args:
            message: The reply.
            request: Digest of the request that it must belong to.
            server: State that the round started from.
            sent: Jobs of the request, in its order.

        Raises:
            FedquiltError: It says what is wrong, and what would fit. StateLostError and
                DeviceFailedError are what the device itself reports.
        """
        reply = Reply.read(message)
        client = sent[0].job.client
        if (reply.run, reply.round, reply.request) != (self.run_id, server.round, request):
            raise FormatError(
                f"it belongs to round {reply.round + 1} of the run {reply.run!r}, or to another "
                "request of this round"
            )
        if reply.anew:
            raise StateLostError("the device has lost its state")
        if reply.failed:
            raise DeviceFailedError(reply.failed)
        if len(reply.results) != len(sent) or len(message.files) != len(sent):
            raise FormatError(
                f"it has {len(reply.results)} results and {len(message.files)} files; the request "
                f"has {len(sent)} jobs"
            )
        if reply.size != client.size:
            raise FormatError(
                f"it states {reply.size} samples; client {client.id} enrolled with {client.size}"
            )
        mask = self._class_mask(reply)
        updates, losses, memories, up = [], [], [], []
        for sent_job, result, file in zip(sent, reply.results, message.files, strict=True):
            update, memory, num_bytes = self._update(sent_job, result, file, mask)
            updates.append(update)
            memories.append(memory)
            losses.append(result.loss)
            up.append(num_bytes)
        return Accepted(tuple(updates), tuple(losses), tuple(memories), tuple(up))

    def _class_mask(self, reply: Reply) -> Tensor:
        """Return a mask (class,) of the classes that a reply states.

        It is True everywhere if `reply.classes` is None. Classes that do not fit are refused.
        """
        outputs = self.world.family.num_outputs
        if reply.classes is None:
            return torch.ones(outputs, dtype=torch.bool)
        if not self.world.task.has_classes or not reply.classes:
            raise FormatError("it states classes that the task does not have, or none")
        if reply.classes[-1] >= outputs:
            raise FormatError(f"it states class {reply.classes[-1]}; the model has {outputs}")
        mask = torch.zeros(outputs, dtype=torch.bool)
        mask[list(reply.classes)] = True
        return mask

    def _update(
        self, sent: SentJob, result: JobResult, file: bytes, mask: Tensor
    ) -> tuple[Update, ClientState, int]:
        """Return the update of one job, what the server remembers, and the bytes of the upload.

        Args:
            sent: The job as it was sent.
            result: Numbers of the reply on this job. They must follow from the job.
            file: Tensors of the reply for this job.
            mask: (class,) True where the client has samples of the class.
        """
        federation, link, job, learner = (
            self.federation,
            self.federation.link,
            sent.job,
            sent.learner,
        )
        self._check_result(sent, result)
        transmission = Transmission(self.world, job, up=True)
        outline = upload_outline(federation, job, learner, mask, result.extra_shapes)
        reach = reach_of(link, outline.submodel, result.columns, transmission)
        expected = Expected(
            outline,
            reach,
            transmission,
            link,
            frozenset(sent.known),
            dtypes=self._dtypes(job, outline),
        )
        packet = read_packet(file, expected, f"the upload of client {job.client.id}").packet
        payloads: tuple[Payload, ...] = ()
        if packet is not None:
            known = sent.known
            if known:
                cutter = self.world.family.cutter
                known = cutter.narrow(known, job.submodel.held, outline.submodel.held)
            payload = _unpacked(self, packet, outline, transmission, known)
            check_sent(job, payload.weights.values())
            check_state(job, [*in_slots(payload.slots), *payload.extras.values()])
            self._check_change(job, payload)
            payloads = (payload,)
        update = update_of(job, learner, payloads, result.steps, result.batches)
        memory = server_memory(federation, job, sent.known, result.steps, sent.memory, self.initial)
        return update, memory, packet.bytes if packet else 0

    def _check_result(self, sent: SentJob, result: JobResult) -> None:
        """Refuse step counts, losses and extras that do not follow from the job."""
        batches = len(self._batch_sizes(sent.job, sent.learner))
        steps = steps_behind(sent.memory, sent.learner, batches)
        if (result.batches, result.steps) != (batches, steps):
            raise FormatError(
                f"it states {result.batches} batches and {result.steps} steps; {batches} and "
                f"{steps} follow from the job"
            )
        if abs(result.loss) > MAX_LOSS:
            raise FormatError(f"it states a loss of {result.loss}")
        if unknown := result.extra_shapes.keys() - {*sent.learner.state.extras_up}:
            raise FormatError(f"it states the extra {min(unknown)!r}, which the job does not have")

    def _check_change(self, job: Job, payload: Payload) -> None:
        """Refuse a slot, or a change from the server's weights, whose RMS exceeds `max_rms`."""
        if math.isinf(self.max_rms):
            return
        names = list(payload.weights)
        before = self.world.family.cutter.gather(self._server.weights, payload.submodel, names)
        changes = {
            name: value - before[name]
            for name, value in payload.weights.items()
            if value.is_floating_point()
        }
        for slot, values in payload.slots.items():
            changes |= {f"{slot} of {name}": value for name, value in values.items()}
        for name, change in changes.items():
            rms = float(change.double().square().mean().sqrt()) if change.numel() else 0.0
            if not rms <= self.max_rms:
                raise FormatError(
                    f"{name} changed by {rms:.3g} (root mean square); {self.max_rms:.3g} is allowed"
                )

    def _batch_sizes(self, job: Job, learner: Learner) -> list[int]:
        """Return the number of samples in each batch of a client's round, in order."""
        sizes = [len(rows) for rows in itinerary(job.client.size, learner.local, 0)]
        return sizes[: learner.max_batches] if learner.max_batches else sizes

    def _dtypes(self, job: Job, outline: Outline) -> dict[str, torch.dtype]:
        """Return, by name, types of weights that differ from the outline's, such as of counters."""
        scope = job.submodel.scope
        return {
            name: self._server.weights[scope + name].dtype
            for name in outline.weights
            if self._server.weights[scope + name].dtype != outline.dtype
        }

    def _begin_round(self, federation: Federation, server: Server, jobs: Sequence[Job]) -> None:
        super()._begin_round(federation, server, jobs)
        self._server = server


def _unpacked(
    engine: Flower, packet: Any, outline: Outline, transmission: Transmission, known: Weights
) -> Payload:
    """Unpack an upload, and raise FormatError for messages that cannot be decoded."""
    try:
        return engine.federation.link.unpack(packet, outline, transmission, known).payload
    except FedquiltError:
        raise
    except Exception as error:  # A codec may raise anything for bytes that it did not write.
        raise FormatError(f"its coded values cannot be decoded: {said(error)}") from error


def _counted(memory: ClientState | None) -> ClientState | None:
    """Return what the server remembers of a device, or None if the device has lost its state.

    Such a state has no round (-1).
    """
    return None if memory is None or memory.round < 0 else memory


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}
