"""Reading of replies: everything that a device states is checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import FedquiltError, FormatError
from fedquilt.names import said
from fedquilt.round.client import update_of
from fedquilt.round.client_state import steps_behind
from fedquilt.round.device import reach_of, server_memory, upload_outline
from fedquilt.round.federation import Federation
from fedquilt.round.link import Link, Outline, Transmission
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.update_checks import UpdateChecks
from fedquilt.round.wire import (
    MAX_EXTRA_VALUES,
    Expected,
    JobResult,
    Message,
    Reply,
    read_packet,
)
from fedquilt.round.wire_notes import MAX_NOTE_BYTES
from fedquilt.terms import ClientState, Job, Payload, Server, Update, Weights

MAX_LOSS = 1e30  # Largest loss that a reply may state
MAX_ITEM_BYTES = 8  # Bytes of the largest type of numbers


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
    client_states: tuple[ClientState, ...]
    up: tuple[int, ...]  # Bytes of each job's upload
    rms: float = 0.0  # Root mean square of the change of all weights

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors of the updates, decoded."""
        return sum(payload.bytes for update in self.updates for payload in update.sent)


class DeviceFailedError(FormatError):
    """Error for a reply in which a device says why it could not train."""


class StateLostError(FormatError):
    """Error for a reply of a device that has lost the state that a request starts from."""


def batch_sizes(job: Job, learner: Learner) -> list[int]:
    """Return the number of samples in each batch of a client's round, in order."""
    sizes = [len(rows) for rows in itinerary(job.client.size, learner.local, 0)]
    return sizes[: learner.max_batches] if learner.max_batches else sizes


@dataclass(frozen=True)
class ReplyReader:
    """Reads the replies of a round, and refuses those that do not follow from their requests."""

    federation: Federation
    initial: Weights  # Weights of the whole model before the first round
    server: Server  # State that the round started from
    run_id: str  # Identity of the run
    max_rms: float = math.inf  # Largest root mean square of a weight's change or of a slot
    needs_rms: bool = False  # True: the root mean square of each reply's change is computed

    def read(self, message: Message, request: str, sent: Sequence[SentJob]) -> Accepted:
        """Return the updates, losses and client states of a reply, or refuse the whole reply.

        Args:
            message: The reply.
            request: Digest of the request that it must belong to.
            sent: Jobs of the request, in its order.

        Raises:
            FedquiltError: It says what is wrong, and what would fit. StateLostError and
                DeviceFailedError are what the device itself reports.
        """
        allowed = sum(self._max_bytes(sent_job) for sent_job in sent)
        if message.bytes > allowed:
            raise FormatError(f"it has {message.bytes:,} bytes; its jobs allow {allowed:,}")
        reply = Reply.read(message)
        client = sent[0].job.client
        if (reply.run, reply.round, reply.request) != (self.run_id, self.server.round, request):
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
        updates, losses, client_states, up = [], [], [], []
        for sent_job, result, file in zip(sent, reply.results, message.files, strict=True):
            update, client_state, num_bytes = self._update(sent_job, result, file, mask)
            updates.append(update)
            client_states.append(client_state)
            losses.append(result.loss)
            up.append(num_bytes)
        rms = self._rms(updates) if self.needs_rms else 0.0
        return Accepted(tuple(updates), tuple(losses), tuple(client_states), tuple(up), rms)

    def _max_bytes(self, sent: SentJob) -> int:
        """Return the most bytes of a reply to a job: twice its values, and room for notes."""
        member = self.federation.world.family.member(sent.job.submodel)
        state = sent.learner.state
        count = sum(math.prod(member.shape(name)) for name in sent.learner.sent(member))
        values = count * (1 + len(state.slots_up))
        if state.extras_up:
            values += MAX_EXTRA_VALUES
        return MAX_NOTE_BYTES + 2 * MAX_ITEM_BYTES * values

    def _rms(self, updates: Sequence[Update]) -> float:
        """Return the root mean square of all changes of weights in the updates of a reply."""
        squares, count = 0.0, 0
        for update in updates:
            for payload in update.sent:
                for change in self._changes(payload).values():
                    squares += float(change.double().square().sum())
                    count += change.numel()
        return math.sqrt(squares / count) if count else 0.0

    def _changes(self, payload: Payload) -> dict[str, Tensor]:
        """Return the change of every weight from the server's state, by name."""
        cutter = self.federation.world.family.cutter
        before = cutter.gather(self.server.weights, payload.submodel, list(payload.weights))
        return {
            name: value - before[name]
            for name, value in payload.weights.items()
            if value.is_floating_point()
        }

    def _class_mask(self, reply: Reply) -> Tensor:
        """Return a mask (class,) of the classes that a reply states.

        It is True everywhere if `reply.classes` is None. Classes that do not fit are refused.
        """
        outputs = self.federation.world.family.num_outputs
        if reply.classes is None:
            return torch.ones(outputs, dtype=torch.bool)
        if not self.federation.world.task.has_classes or not reply.classes:
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
        transmission = Transmission(self.federation.world, job, up=True)
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
                cutter = self.federation.world.family.cutter
                known = cutter.narrow(known, job.submodel.positions, outline.submodel.positions)
            payload = _unpacked(link, packet, outline, transmission, known)
            self._check_change(job, payload)
            payloads = (payload,)
        update = update_of(job, learner, payloads, result.steps, result.batches)
        UpdateChecks(federation, self.server, [job]).check(update)
        memory = server_memory(federation, job, sent.known, result.steps, sent.memory, self.initial)
        return update, memory, packet.bytes if packet else 0

    def _check_result(self, sent: SentJob, result: JobResult) -> None:
        """Refuse step counts, losses and extras that do not follow from the job."""
        batches = len(batch_sizes(sent.job, sent.learner))
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
        changes = self._changes(payload)
        for slot, values in payload.slots.items():
            changes |= {f"{slot} of {name}": value for name, value in values.items()}
        for name, change in changes.items():
            rms = float(change.double().square().mean().sqrt()) if change.numel() else 0.0
            if not rms <= self.max_rms:
                raise FormatError(
                    f"{name} changed by {rms:.3g} (root mean square); {self.max_rms:.3g} is allowed"
                )

    def _dtypes(self, job: Job, outline: Outline) -> dict[str, torch.dtype]:
        """Return, by name, types of weights that differ from the outline's, such as of counters."""
        scope = job.submodel.scope
        return {
            name: self.server.weights[scope + name].dtype
            for name in outline.weights
            if self.server.weights[scope + name].dtype != outline.dtype
        }


def _unpacked(
    link: Link, packet: Any, outline: Outline, transmission: Transmission, known: Weights
) -> Payload:
    """Unpack an upload, and raise FormatError for messages that cannot be decoded."""
    try:
        return link.unpack(packet, outline, transmission, known).payload
    except FedquiltError:
        raise
    except Exception as error:  # A codec may raise anything for bytes that it did not write.
        raise FormatError(f"its coded values cannot be decoded: {said(error)}") from error
