"""Messages of an evaluation: requests to devices, and the sums in their replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedquilt.errors import FedquiltError, FormatError
from fedquilt.round.engine import Attendance
from fedquilt.round.wire import MAX_JOBS, Message
from fedquilt.round.wire_evaluation import (
    EvalReply,
    EvalRequest,
    EvalTask,
    ExpectedTensor,
    TaskWeights,
    read_sums,
    weights_file,
)
from fedquilt.tasks.metrics.base import SumMetric
from fedquilt.terms import Server, Submodels

if TYPE_CHECKING:
    from fedquilt.engines.flower.engine import Flower
    from fedquilt.fleets.fleet import Fleet
    from fedquilt.round.federation import Federation, World

MAX_SUM = 1e30  # Largest sum of losses or of norm statistics that a reply may state


@dataclass(frozen=True)
class Work:
    """One task of one device, and the sums that it must send."""

    number: int  # Number of the test or net that the task belongs to
    task: EvalTask
    weights: TaskWeights
    expected: Mapping[str, ExpectedTensor]  # Sums by name
    count: int | None  # Samples or batches that follow from the client's size. None: any number


@dataclass(frozen=True)
class DeviceSums:
    """Sums that a device sent for one task."""

    count: int  # Samples of a test, or batches of a measurement
    sums: Mapping[str, Tensor]


class DeviceReportedError(FormatError):
    """Error for a reply in which a device says why it could not evaluate."""


@dataclass(eq=False)
class EvalExchange:
    """Requests of one evaluation, and what became of them.

    A device that does not answer in time is not asked again, so that it costs one deadline at most.

    Args:
        flower: Engine of the deployment.
        server: State that is evaluated.
        fleet: Clients and their budgets.
    """

    flower: Flower
    server: Server
    fleet: Fleet
    asked: set[int] = field(default_factory=set)  # Clients that got a request
    missing: dict[int, str] = field(default_factory=dict)  # Clients without a reply, and why
    failed: dict[int, str] = field(default_factory=dict)  # Clients that could not evaluate, and why
    refused: dict[int, str] = field(default_factory=dict)  # Clients whose reply was refused
    wire_down: int = 0  # Bytes of all requests
    wire_up: int = 0  # Bytes of all replies

    @property
    def absent(self) -> set[int]:
        """Return the clients that are not asked again."""
        return {*self.missing, *self.failed, *self.refused}

    @property
    def attendance(self) -> Attendance:
        """Return what became of all requests."""
        return Attendance(
            tuple(sorted(self.asked)),
            self.missing,
            self.failed,
            self.refused,
            (),
            self.wire_down,
            self.wire_up,
        )

    def ask(
        self, federation: Federation, work: Mapping[int, Sequence[Work]], batch_size: int
    ) -> dict[tuple[int, int], DeviceSums]:
        """Ask devices, and return their sums by the number of the test or net, and by client.

        A device gets at most `MAX_JOBS` tasks in one message.

        Args:
            federation: World, method and link.
            work: Tasks of each client.
            batch_size: Samples in a batch.
        """
        results: dict[tuple[int, int], DeviceSums] = {}
        most = max((len(tasks) for tasks in work.values()), default=0)
        for first in range(0, most, MAX_JOBS):
            absent = self.absent
            parts = {
                client: tasks[first : first + MAX_JOBS]
                for client, tasks in work.items()
                if client not in absent and len(tasks) > first
            }
            results |= self._exchange(federation, parts, batch_size)
        return results

    def _exchange(
        self, federation: Federation, work: Mapping[int, Sequence[Work]], batch_size: int
    ) -> dict[tuple[int, int], DeviceSums]:
        """Send one request to each client, and return the sums of valid replies.

        Args:
            federation: World, method and link.
            work: At most `MAX_JOBS` tasks of each client.
            batch_size: Samples in a batch.
        """
        stored: dict[tuple[int, Submodels, bool], bytes] = {}  # Equal files are written once.
        requests = {
            client: self._request(federation, client, tasks, batch_size, stored)
            for client, tasks in work.items()
        }
        results: dict[tuple[int, int], DeviceSums] = {}
        if not requests:
            return results
        self.asked |= requests.keys()
        self.wire_down += sum(request.bytes for request in requests.values())
        accepted: set[int] = set()
        for delivery in self.flower.reached.evaluate(requests, self.flower.deadline):
            client = delivery.client
            if client not in requests or client in accepted:
                continue
            if delivery.message is None:
                self.missing[client] = delivery.reason
                continue
            self.wire_up += delivery.message.bytes
            try:
                sums = self._validated(
                    federation, delivery.message, requests[client].digest, work[client]
                )
            except DeviceReportedError as error:
                self.failed[client] = str(error)
            except FedquiltError as error:
                self.refused[client] = str(error)
            else:
                accepted.add(client)
                for reasons in (self.missing, self.failed, self.refused):
                    reasons.pop(client, None)
                results |= {
                    (tasks.number, client): result
                    for tasks, result in zip(work[client], sums, strict=True)
                }
        for client in requests.keys() - accepted - self.failed.keys() - self.refused.keys():
            self.missing.setdefault(client, "no reply came")
        return results

    def _request(
        self,
        federation: Federation,
        client: int,
        work: Sequence[Work],
        batch_size: int,
        stored: dict[tuple[int, Submodels, bool], bytes],
    ) -> Message:
        """Return the request for all tasks of one client.

        Args:
            federation: World, method and link.
            client: Number of the client.
            work: Its tasks.
            batch_size: Samples in a batch.
            stored: Files that were written for other clients, which are added to.
        """
        world, server = federation.world, self.server
        files: dict[bytes, int] = {}
        tasks = []
        for part in work:
            key = id(part.weights.weights), part.task.nets, part.task.has_initial
            if key not in stored:
                stored[key] = weights_file(part.weights)
            number = files.setdefault(stored[key], len(files))
            tasks.append(_with_file(part.task, number))
        states = [server.memory.get((client, scope)) for scope in {"", *server.scopes}]
        is_personal = any(task.source != "server" for task in tasks)
        round = server.last(client) if is_personal else server.round
        request = EvalRequest(
            run=self.flower.run_id,
            round=server.round,
            client=self.fleet.client(client, round, world.seed, self.flower.size(client)),
            tasks=tuple(tasks),
            settings=self.flower.terms(federation),
            seed=world.seed,
            precision=world.precision,
            fingerprint=world.family.layout.fingerprint,
            num_clients=world.clients_in(server.round),
            batch_size=batch_size,
            base=max((state.round for state in states if state), default=-1),
            deadline=self.flower.deadline,
        )
        return request.message(tuple(files))

    def _validated(
        self, federation: Federation, message: Message, request: str, work: Sequence[Work]
    ) -> list[DeviceSums]:
        """Return the sums of a reply, or refuse the whole reply.

        Args:
            federation: World, method and link.
            message: The reply.
            request: Digest of the request that it must belong to.
            work: Tasks of the request.

        Raises:
            FedquiltError: It says what is wrong, and what would fit. DeviceReportedError is what
                the device itself reports.
        """
        reply = EvalReply.read(message)
        if (reply.run, reply.round, reply.request) != (
            self.flower.run_id,
            self.server.round,
            request,
        ):
            raise FormatError(
                f"it belongs to the state after round {reply.round} of the run {reply.run!r}, or "
                "to another request"
            )
        if reply.failed:
            raise DeviceReportedError(reply.failed)
        if len(reply.counts) != len(work) or len(message.files) != 1:
            raise FormatError(
                f"it has {len(reply.counts)} counts and {len(message.files)} files; the request "
                f"has {len(work)} tasks, and one file would fit"
            )
        for part, count in zip(work, reply.counts, strict=True):
            if part.count is not None and count != part.count:
                raise FormatError(
                    f"it states {count} samples or batches; {part.count} follow from the request"
                )
        free = {count for part, count in zip(work, reply.counts, strict=True) if part.count is None}
        if len(free) > 1:
            raise FormatError(f"it states {sorted(free)} test samples for one and the same set")
        title = "the file of sums"
        expected = [part.expected for part in work]
        sums = read_sums(message.files[0], reply.counts, expected, title)
        for part, count, values in zip(work, reply.counts, sums, strict=True):
            _check_sums(federation.world, part, count, values)
        return [DeviceSums(*pair) for pair in zip(reply.counts, sums, strict=True)]


def _with_file(task: EvalTask, file: int) -> EvalTask:
    return replace(task, file=file)


def _check_sums(world: World, work: Work, count: int, sums: Mapping[str, Tensor]) -> None:
    """Refuse sums that cannot be those of a number of samples.

    Args:
        world: Family and task.
        work: What was asked for.
        count: Samples of a test, or batches of a measurement.
        sums: Sums by name.

    Raises:
        FormatError: There are more hits than targets, more targets than samples, a negative
            variance, or a number that is too large.
    """
    for name, value in sums.items():
        if value.is_floating_point() and value.numel() and float(value.abs().max()) > MAX_SUM:
            raise FormatError(f"the sums of {name!r} are above {MAX_SUM:g}")
    if work.task.calibrates:
        for name, value in sums.items():
            if name.endswith("running_var") and value.numel() and float(value.min()) < 0:
                raise FormatError(f"the sums of {name!r} are variances below 0")
        return
    shape = world.family.output_shape
    for metric in world.task.measured:
        if not isinstance(metric, SumMetric) or metric.name not in sums:
            continue
        if problem := metric.implausible(sums[metric.name], count, shape):
            raise FormatError(f"its sums cannot be those of {count} samples: {problem}")
