"""Engine that distributes the jobs of a round over the workers of a Ray cluster.

The workers may be on many machines, or be processes of one machine. Jobs are cut into chunks, which
depend only on the order of jobs and the number of chunks. The next free worker trains a chunk and
folds it. Partial folds are joined in the order of the chunks.

The results therefore depend neither on the number of workers nor on their speed. A chunk whose
worker died is trained again, with the same result.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary, finalize

import torch

from fedquilt.engines.options import CHUNKS
from fedquilt.engines.ray.parcel import Parcel, pack, unpack
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.errors import ConfigError, FedquiltError, TrainingError
from fedquilt.errors.extras import how_to_install
from fedquilt.hardware.precision import DTYPES
from fedquilt.hardware.process import keep_pages
from fedquilt.names import said
from fedquilt.round.engine import Outcome
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Fold
from fedquilt.terms import ClientState, Job, Server

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.engines.options import EngineOptions
    from fedquilt.round.method import Method

_log = logging.getLogger("fedquilt")

_TRIES = 3  # Attempts to train a chunk whose workers die, and to start a worker
_PATIENCE = 300.0  # Seconds to wait for the first worker


@dataclass(frozen=True)
class Cluster:
    """Ray cluster, and the number of its workers to use."""

    # Address of a running cluster. "": the address in RAY_ADDRESS, or if that is not set, a cluster
    # is started on this machine.
    address: str = ""
    workers: int = 0  # Number of workers. 0: one per GPU, or as many as the CPU cores allow


@dataclass
class Ray(Vectorized):
    """Engine that distributes a round's jobs over the workers of a Ray cluster.

    Every worker runs the engine `vectorized`.
    """

    # Number of chunks into which a round's jobs are cut. Results depend on it in their last digits,
    # but not on the number of workers.
    chunks: int = CHUNKS
    cluster: Cluster = Cluster()  # Cluster whose workers train

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "the engine 'ray' was asked for; it needs the package ray, which is not installed: "
                f"{how_to_install('ray')}."
            )

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
        self._crew: WorkerPool | None = None
        self._placed: Any = None  # Reference to samples and options in the object store.
        # Federation that is in the object store, and its reference.
        self._sent: tuple[Federation, Any] | None = None

    @classmethod
    def create(cls, data: FederatedData, options: EngineOptions) -> Self:
        cluster = Cluster(options.address, options.workers)
        return cls(
            data,
            options.device,
            options.precision,
            memory=options.memory,
            chunks=options.chunks,
            cluster=cluster,
        )

    @property
    def engine_options(self) -> EngineOptions:
        cluster = self.cluster
        return replace(
            super().engine_options,
            workers=cluster.workers,
            address=cluster.address,
            chunks=self.chunks,
        )

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Broadcast the server's state, train the chunks, and join their results in order."""
        self._check_fold(self.method, server)
        crew, chunks = self._gathered(), cut(jobs, self.chunks)
        driver_objects, shared = _known(self.federation, server), _shared(self.federation)
        everyone = crew.put(pack(replace(server, memory={}), shared))
        federation = self._sent_federation(crew)
        packed = [pack((chunk, _memory(server, chunk)), shared) for chunk in chunks]
        calls = [
            Call(self._placed, federation, everyone, parcel, chunk)
            for parcel, chunk in zip(packed, chunks, strict=True)
        ]
        with closing(crew.answers(calls)) as answers:
            for answer in answers:
                partial_fold, partial_outcome = unpack(answer, driver_objects, self.device)
                fold.join(partial_fold)
                outcome.join(partial_outcome)

    def _over(self, data: FederatedData) -> Vectorized:  # type: ignore[override]
        """Return an engine of this process.

        Training on the server is not sent to workers.
        """
        return Vectorized(data, self.device, self.precision, self.memory, self.record, self.layout)

    def _gathered(self) -> WorkerPool:
        """Return the worker pool, with the samples in its object store."""
        crew = WorkerPool.of(self.cluster, self.device, torch.get_num_threads())
        if crew is not self._crew:
            self._crew, self._placed, self._sent = crew, None, None
        options = (
            self.precision,
            {name: value for name, value in self.settings.items() if name in _WORKER_OPTIONS},
        )
        if self._placed is None:
            cpu_data = self.data.to(torch.device("cpu"), DTYPES[self.precision])
            self._placed = crew.put(pack((cpu_data, *options), {}))
        return crew

    def _sent_federation(self, crew: WorkerPool) -> Any:
        """Put the federation into the object store, and return its reference.

        It includes the initial weights, because workers may be unable to draw the same.
        """
        if self._sent is None or self._sent[0] is not self.federation:
            world = self.world
            family = world.family.seeded(world.seed)
            public = None if world.public is None else world.public.cpu()
            sendable = replace(self.federation, world=replace(world, family=family, public=public))
            self._sent = (
                self.federation,
                crew.put(pack(replace(sendable, received=self.federation.initial), {})),
            )
        return self._sent[1]

    def _check_fold(self, method: Method, server: Server) -> None:
        """Refuse a method whose partial folds cannot be joined.

        Two empty folds are joined as a test.
        """
        first, second = (method.fold(server, self.world) for _ in range(2))
        why = ""
        if getattr(type(first), "join", Fold.join) is Fold.join:
            why = "it has no join"
        else:
            try:
                first.join(second)
            except NotImplementedError as error:
                why = said(error)
        if why:
            raise ConfigError(
                f"{type(method).__name__} was asked for on the engine 'ray', whose workers fold "
                "what they trained; "
                f"its fold {type(first).__name__} cannot take another's partial result ({why}). "
                "Engines that fold in "
                "one place, such as 'vectorized', fit."
            )


# Settings of `Vectorized` that are passed on to workers.
_WORKER_OPTIONS = ("memory", "record", "layout")


def cut(jobs: Sequence[Job], chunks: int) -> list[Sequence[Job]]:
    """Cut jobs into chunks of neighbours, of about equal size.

    The chunks depend only on the order of jobs and on the number of chunks.
    """
    count = min(chunks, len(jobs))
    edges = [len(jobs) * number // count for number in range(count + 1)] if count else [0]
    return [jobs[first:last] for first, last in pairwise(edges)]


def _memory(server: Server, jobs: Sequence[Job]) -> dict[tuple[int, str], ClientState]:
    """Return the stored states of the clients of these jobs."""
    keys = {(job.client.id, job.submodel.scope): None for job in jobs}
    memories = ((key, server.memory.get(key)) for key in keys)
    return {key: memory for key, memory in memories if memory is not None}


def _shared(federation: Federation) -> dict[str, object]:
    """Return objects that both the driver and the workers have, by name."""
    world, family = federation.world, federation.world.family
    return {
        "federation": federation,
        "method": federation.method,
        "world": world,
        "family": family,
        "cutter": family.cutter,
        "layout": family.layout,
    }


def _known(federation: Federation, server: Server) -> dict[str, object]:
    """Return objects that both sides have once a round has begun, by name.

    They include the server's weights, so that a fold which holds them does not send them back.
    """
    weights = {f"weight {name}": value for name, value in server.weights.items()}
    for slot, values in server.slots.items():
        weights |= {f"slot {slot} {name}": value for name, value in values.items()}
    return {**_shared(federation), "server": server, **weights}


# --- in the workers -----------------------------------------------------------------------------


Answer = Parcel | FedquiltError | str  # A partial fold and outcome, or an error


class Worker:
    """Process of the cluster that holds family and data, and trains chunks."""

    def __init__(self, threads: int, deterministic: bool) -> None:
        keep_pages()
        torch.set_num_threads(threads)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._engine: tuple[Any, Vectorized] | None = None
        self._federation: tuple[Any, Federation] | None = None
        self._server: tuple[Any, Server] | None = None

    def ready(self) -> int:
        """Return the process id, once the worker has started."""
        return os.getpid()

    def train(
        self,
        placed: list[Any],
        federation: list[Any],
        everyone: list[Any],
        chunk: Parcel,
        device: str,
    ) -> Answer:
        """Train the jobs of a chunk and fold them.

        Errors are returned, because Ray would make a raised error unreadable.

        Args:
            placed: Reference to samples and options, in a list so that Ray does not resolve it.
            federation: Reference to the federation, in a list.
            everyone: Reference to the server's state, in a list.
            chunk: Jobs of the chunk, with the stored states of their clients.
            device: Device on which the worker trains.

        Returns:
            Partial fold and outcome, or the error.
        """
        try:
            engine = self._hold(placed[0], torch.device(device))
            current_federation = self._follow(federation[0], engine)
            server = self._begin(everyone[0], current_federation, engine)
            jobs, memory = unpack(chunk, _shared(current_federation), engine.device)
            server = replace(server, memory=memory)
            fold = current_federation.method.fold(server, current_federation.world)
            outcome = engine.train(current_federation, server, jobs, fold)
            return pack((fold, outcome), _known(current_federation, server))
        except FedquiltError as error:
            return error
        except Exception as error:
            return f"{said(error)} (in process {os.getpid()} on {socket.gethostname()})"

    def _hold(self, placed: Any, device: torch.device) -> Vectorized:
        """Return the engine for some samples. Only the latest engine is kept."""
        if self._engine is None or self._engine[0] != placed:
            self._engine = self._federation = self._server = None
            data, precision, options = unpack(_get(placed), {}, device)
            self._engine = placed, Vectorized(data, device, precision, **options)
        return self._engine[1]

    def _follow(self, federation: Any, engine: Vectorized) -> Federation:
        """Return the federation that is trained. It is unpacked once."""
        if self._federation is None or self._federation[0] != federation:
            self._federation = self._server = None
            unpacked: Federation = unpack(_get(federation), {}, engine.device)
            public = (
                None if unpacked.world.public is None else unpacked.world.public.to(engine.device)
            )
            self._federation = (
                federation,
                replace(unpacked, world=replace(unpacked.world, public=public)),
            )
        return self._federation[1]

    def _begin(self, everyone: Any, federation: Federation, engine: Vectorized) -> Server:
        """Return the state that all chunks of a round start from. It is unpacked once."""
        if self._server is None or self._server[0] != everyone:
            self._server = None
            self._server = everyone, unpack(_get(everyone), _shared(federation), engine.device)
        return self._server[1]


def _get(reference: Any) -> Parcel:
    """Return a parcel from the object store."""
    parcel: Parcel = importlib.import_module("ray").get(reference)
    return parcel


# --- in the driver ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Chunk that waits for a free worker."""

    placed: Any  # Reference to the samples and options in the object store.
    federation: Any  # Reference to the federation.
    everyone: Any  # Reference to the server's state.
    chunk: Parcel  # Packed jobs, with the stored states of their clients.
    jobs: Sequence[Job]  # Jobs of the chunk.

    @property
    def who(self) -> str:
        """Return a description of the chunk's worker, for messages."""
        ids = list(dict.fromkeys(str(job.client.id) for job in self.jobs))
        shown_ids = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return f"the worker that trained clients {shown_ids} in round {self.jobs[0].round + 1}"


class WorkerPool:
    """Workers of a cluster.

    Engines that ask for the same cluster, device and threads share a pool, one after another.

    Args:
        cluster: Cluster and number of workers.
        device: Device on which workers train.
        threads: CPU threads of each worker.
    """

    def __init__(self, cluster: Cluster, device: torch.device, threads: int) -> None:
        self._ray = ray = _import()
        gpus = device.type == "cuda"
        self._home = RayConnection.of(cluster, threads, gpus)
        resources = ray.cluster_resources()
        max_workers = (
            int(resources.get("GPU", 0)) if gpus else int(resources.get("CPU", 1)) // threads
        )
        self.size = cluster.workers or max(1, max_workers)
        # A cluster that this process started is its own, so that several pools may use it at once.
        needs: dict[str, float] = {"num_cpus": 0 if self._home.started else threads}
        if gpus:
            needs["num_gpus"] = min(1, max_workers / self.size) if self._home.started else 1
        self._needs, self._device, self._threads = needs, device.type, threads
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}

    @staticmethod
    def of(cluster: Cluster, device: torch.device, threads: int) -> WorkerPool:
        """Return the existing worker pool, or a new one.

        A pool lives as long as an engine refers to it.

        Args:
            cluster: Cluster and number of workers.
            device: Device on which workers train.
            threads: CPU threads of each worker.
        """
        key = cluster, device.type, threads, torch.are_deterministic_algorithms_enabled()
        crew = _CREWS.get(key)
        if crew is None or not crew._ray.is_initialized():
            crew = _CREWS[key] = WorkerPool(cluster, device, threads)
        return crew

    def put(self, parcel: Parcel) -> Any:
        """Put a parcel into the object store for all workers, and return its reference."""
        return self._ray.put(parcel)

    def answers(self, calls: Sequence[Call]) -> Generator[Parcel]:
        """Yield the results of the workers in the order of the calls.

        A call whose worker died is sent to another worker.
        """
        waiting, lost = deque(range(len(calls))), Counter[int]()
        running: dict[Any, tuple[Any, int]] = {}
        done: dict[int, Parcel] = {}
        failures = 0  # Failed starts of workers in a row
        try:
            for next_call in range(len(calls)):
                while next_call not in done:
                    self._hire(len(running), len(running) + len(waiting))
                    while waiting and self._idle:
                        worker, number = self._idle.pop(), waiting.popleft()
                        running[self._send(worker, calls[number])] = worker, number
                    for reference in self._wait([*running, *self._starting], patient=bool(running)):
                        if reference in self._starting:
                            worker = self._starting.pop(reference)
                            error = self._failed(reference)
                            failures = failures + 1 if error else 0
                            if failures >= _TRIES:
                                raise TrainingError(
                                    f"no worker of the Ray cluster could be started: {error}"
                                )
                            self._idle += [] if error else [worker]
                            continue
                        worker, number = running.pop(reference)
                        if error := self._failed(reference):
                            lost[number] += 1
                            self._dismiss(worker)
                            self._on_worker_death(calls[number], lost[number], error)
                            waiting.appendleft(number)
                            continue
                        self._idle.append(worker)
                        done[number] = self._answer(calls[number], reference)
                yield done.pop(next_call)
        finally:
            # After an error or ctrl-C, no caller waits for these workers.
            for worker, _ in running.values():
                self._dismiss(worker)

    def _hire(self, busy: int, useful: int) -> None:
        """Start missing workers, as far as there are calls for them."""
        remote = self._ray.remote(max_restarts=0, **self._needs)(Worker)
        while busy + len(self._idle) + len(self._starting) < min(self.size, useful):
            worker = remote.remote(self._threads, torch.are_deterministic_algorithms_enabled())
            self._starting[worker.ready.remote()] = worker

    def _send(self, worker: Any, call: Call) -> Any:
        """Send a call to a worker, and return the reference to its result."""
        # Ray does not resolve references in lists. The worker resolves only those it does not have.
        stored = [call.placed], [call.federation], [call.everyone]
        return worker.train.remote(*stored, call.chunk, self._device)

    def _wait(self, references: list[Any], patient: bool) -> list[Any]:
        """Wait for results, or refuse to wait longer for the first worker to start."""
        finished: list[Any]
        finished, _ = self._ray.wait(references, timeout=None if patient else _PATIENCE)
        if not finished:
            raise TrainingError(
                f"no worker came up within {_PATIENCE:.0f} s: {self.size} with {self._needs} each "
                "were asked for, and "
                f"the Ray cluster has {self._ray.available_resources()} free."
            )
        return finished

    def _failed(self, reference: Any) -> str:
        """Return the reason why a result is missing, or an empty string if it is there."""
        errors: Any = importlib.import_module("ray.exceptions")
        try:
            self._ray.get(reference)
        except errors.RayError as error:
            return said(error)
        return ""

    def _answer(self, call: Call, reference: Any) -> Parcel:
        """Return the result of a call, or raise the error that the worker returned."""
        answer = self._ray.get(reference)
        if isinstance(answer, FedquiltError):
            raise answer
        if isinstance(answer, str):
            raise TrainingError(f"{call.who} failed: {answer}")
        assert isinstance(answer, Parcel)
        return answer

    def _on_worker_death(self, call: Call, times: int, error: str) -> None:
        """Warn that a worker died, or give up after several deaths.

        One death may be chance, but repeated deaths are caused by the chunk.
        """
        if times >= _TRIES:
            raise TrainingError(
                f"{call.who} died, and so did {times - 1} others that tried again. Too little "
                "memory is the usual "
                "reason; smaller stacks (engine.memory) or more chunks (engine.chunks) may help. "
                "Ray "
                f"says: {error}"
            )
        _log.warning("%s died; another does it again.", call.who.capitalize())

    def _dismiss(self, worker: Any) -> None:
        """End a worker."""
        self._ray.kill(worker)


_CREWS: WeakValueDictionary[tuple[Cluster, str, int, bool], WorkerPool] = WeakValueDictionary()


class RayConnection:
    """Connection of this process to a cluster.

    It is made once. A connection that was made here ends with the last worker pool.

    Args:
        cluster: Cluster to connect to.
        threads: CPU threads of each worker.
        gpus: True if workers train on GPUs.
    """

    def __init__(self, cluster: Cluster, threads: int, gpus: bool) -> None:
        ray = _import()
        self.address = cluster.address or os.environ.get("RAY_ADDRESS", "")
        self.started = not ray.is_initialized() and not self.address
        if ray.is_initialized():  # The user has connected already
            return
        options: Mapping[str, Any] = {"address": self.address}
        if self.started:
            workers = cluster.workers or max(1, (os.cpu_count() or 1) // threads)
            options = {
                "address": "local",
                "num_cpus": workers * threads,
                "num_gpus": torch.cuda.device_count() if gpus else 0,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            }
        else:
            _check_reachable(self.address)
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            done = "started" if self.started else f"reached at {self.address!r}"
            hint = (
                ""
                if self.started
                else " If it asks for a token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must have it."
            )
            raise ConfigError(f"no Ray cluster could be {done}: {said(error)}.{hint}") from error
        finally:
            if main:
                # Ray's handler would end the run without a checkpoint.
                signal.signal(signal.SIGTERM, handler)
        finalize(self, ray.shutdown)

    @staticmethod
    def of(cluster: Cluster, threads: int, gpus: bool) -> RayConnection:
        """Return the existing connection, or a new one.

        Args:
            cluster: Cluster to connect to.
            threads: CPU threads of each worker.
            gpus: True if workers train on GPUs.

        Raises:
            ConfigError: The process is connected to another cluster.
        """
        home = _HOME.get("here")
        if home is None or not _import().is_initialized():
            home = _HOME["here"] = RayConnection(cluster, threads, gpus)
        if cluster.address and home.address and cluster.address != home.address:
            raise ConfigError(
                f"the Ray cluster at {cluster.address!r} was asked for; this process is connected "
                "to that at "
                f"{home.address!r}, and can be to one at a time."
            )
        return home


_HOME: WeakValueDictionary[str, RayConnection] = WeakValueDictionary()


def _check_reachable(address: str) -> None:
    """Refuse an address `host:port` at which no process listens.

    Ray itself would try for a quarter of an hour.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # Such as "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster could be reached at {address!r}: {said(error)}"
        ) from error


def _import() -> Any:
    """Import Ray, with its usage statistics disabled."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this setting, Ray warns of a future change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return importlib.import_module("ray")


__all__ = ["Cluster", "Ray", "WorkerPool"]
