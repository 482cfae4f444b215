"""Many machines, or many processes of one: the jobs of a round are dealt to the workers of a Ray cluster.

Jobs are cut into chunks by their order and the number of chunks alone; whichever worker is free trains the next chunk
and folds it, and the partial folds are joined in the order of the chunks. So the numbers depend neither on how many
workers there are nor on who is fast, and a chunk whose worker died is trained again with the same result.
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

from fedquilt.devices import keep_pages
from fedquilt.engines.options import CHUNKS
from fedquilt.engines.parcel import Parcel, pack, unpack
from fedquilt.engines.vectorised import Vectorised
from fedquilt.errors import ConfigError, FedquiltError, TrainingError
from fedquilt.names import said
from fedquilt.precision import DTYPES
from fedquilt.round.engine import Outcome
from fedquilt.round.federation import Federation
from fedquilt.round.merge import Fold
from fedquilt.terms import Job, Memory, Server

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.engines.options import EngineOptions
    from fedquilt.methods.method import Method

_log = logging.getLogger("fedquilt")

_TRIES = (
    3  # times a chunk is trained whose workers die, and a worker is started that does not come up
)
_PATIENCE = 300.0  # seconds to wait for the first worker


@dataclass(frozen=True)
class Cluster:
    """Which Ray cluster, and how much of it."""

    address: str = ""  # of a cluster that is there; "": that of RAY_ADDRESS, else one of this machine's, started for it
    workers: int = 0  # 0: as many as there are GPUs, or on CPUs as many as have `threads` each


@dataclass
class Ray(Vectorised):
    """Deals a round's jobs to the workers of a Ray cluster, each a `vectorised` of its own."""

    chunks: int = CHUNKS  # that a round's jobs are cut into: numbers depend on it in their last digits, not on the workers
    cluster: Cluster = Cluster()

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "the engine 'ray' was asked for; it needs the package ray, which is not installed: "
                "pip install 'fedquilt[ray]'."
            )

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
        self._crew: Crew | None = None
        self._placed: Any = None  # Samples and options, in the object store.
        self._sent: tuple[Federation, Any] | None = (
            None  # The federation that the object store has, and where.
        )

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

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Broadcast the server's state once, have the chunks trained, and join what comes back in their order."""
        self._check_fold(self.method, server)
        crew, chunks = self._gathered(), cut(jobs, self.chunks)
        known, shared = _known(self.federation, server), _shared(self.federation)
        everyone = crew.put(pack(replace(server, memory={}), shared))
        federation = self._sent_federation(crew)
        packed = [pack((chunk, _memory(server, chunk)), shared) for chunk in chunks]
        calls = [
            Call(self._placed, federation, everyone, parcel, chunk)
            for parcel, chunk in zip(packed, chunks, strict=True)
        ]
        with closing(crew.answers(calls)) as answers:
            for answer in answers:
                theirs, left = unpack(answer, known, self.device)
                fold.join(theirs)
                outcome.join(left)

    def _over(self, data: FederatedData) -> Vectorised:  # type: ignore[override]
        """Return an engine of this process: the server's own training is not sent to workers."""
        return Vectorised(data, self.device, self.precision, self.memory, self.record, self.layout)

    def _gathered(self) -> Crew:
        crew = Crew.of(self.cluster, self.device, torch.get_num_threads())
        if crew is not self._crew:
            self._crew, self._placed, self._sent = crew, None, None
        options = (
            self.precision,
            {name: value for name, value in self.settings.items() if name in _WORKER_OPTIONS},
        )
        if self._placed is None:
            here = self.data.to(torch.device("cpu"), DTYPES[self.precision])
            self._placed = crew.put(pack((here, *options), {}))
        return crew

    def _sent_federation(self, crew: Crew) -> Any:
        """Put the federation into the object store, with the initial weights, which workers may be unable to draw."""
        if self._sent is None or self._sent[0] is not self.federation:
            world = self.world
            family = world.family.seeded(world.seed)
            public = None if world.public is None else world.public.cpu()
            own = replace(self.federation, world=replace(world, family=family, public=public))
            self._sent = (
                self.federation,
                crew.put(pack(replace(own, received=self.federation.initial), {})),
            )
        return self._sent[1]

    def _check_fold(self, method: Method, server: Server) -> None:
        """Say now if partial folds cannot be joined: two empty ones can, or none can."""
        one, other = (method.fold(server, self.world) for _ in range(2))
        why = ""
        if getattr(type(one), "join", Fold.join) is Fold.join:
            why = "it has no join"
        else:
            try:
                one.join(other)
            except NotImplementedError as error:
                why = said(error)
        if why:
            raise ConfigError(
                f"{type(method).__name__} was asked for on the engine 'ray', whose workers fold what they trained; "
                f"its fold {type(one).__name__} cannot take another's partial result ({why}). Engines that fold in "
                "one place, such as 'vectorised', fit."
            )


_WORKER_OPTIONS = (
    "memory",
    "record",
    "layout",
)  # Settings of `Vectorised` that its workers have too.


def cut(jobs: Sequence[Job], chunks: int) -> list[Sequence[Job]]:
    """Neighbours in about equal numbers; nothing but the order and the number of chunks counts."""
    count = min(chunks, len(jobs))
    edges = [len(jobs) * place // count for place in range(count + 1)] if count else [0]
    return [jobs[first:last] for first, last in pairwise(edges)]


def _memory(server: Server, jobs: Sequence[Job]) -> dict[tuple[int, str], Memory]:
    """What the clients of these jobs remember."""
    keys = {(job.client.id, job.submodel.scope): None for job in jobs}
    found = ((key, server.memory.get(key)) for key in keys)
    return {key: memory for key, memory in found if memory is not None}


def _shared(federation: Federation) -> dict[str, object]:
    """Return what driver and workers both have, by name."""
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
    """Return the same once a round has begun: a fold may hold the server's weights, which need not come back."""
    weights = {f"weight {name}": value for name, value in server.weights.items()}
    for slot, values in server.slots.items():
        weights |= {f"slot {slot} {name}": value for name, value in values.items()}
    return {**_shared(federation), "server": server, **weights}


# --- in the workers ---------------------------------------------------------------------------------------------


Answer = Parcel | FedquiltError | str  # a partial fold and outcome, or why there are none


class Worker:
    """A process of the cluster: holds family and data once, and trains chunks."""

    def __init__(self, threads: int, deterministic: bool) -> None:
        keep_pages()
        torch.set_num_threads(threads)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._engine: tuple[Any, Vectorised] | None = None
        self._federation: tuple[Any, Federation] | None = None
        self._server: tuple[Any, Server] | None = None

    def ready(self) -> int:
        return os.getpid()

    def train(
        self,
        placed: list[Any],
        federation: list[Any],
        everyone: list[Any],
        chunk: Parcel,
        device: str,
    ) -> Answer:
        """Train some jobs and fold them. Errors are returned, because Ray would make a raised one unreadable."""
        try:
            engine = self._hold(placed[0], torch.device(device))
            own = self._follow(federation[0], engine)
            server = self._begin(everyone[0], own, engine)
            jobs, memory = unpack(chunk, _shared(own), engine.device)
            server = replace(server, memory=memory)
            fold = own.method.fold(server, own.world)
            outcome = engine.train(own, server, jobs, fold)
            return pack((fold, outcome), _known(own, server))
        except FedquiltError as error:
            return error
        except Exception as error:
            return f"{said(error)} (in process {os.getpid()} on {socket.gethostname()})"

    def _hold(self, placed: Any, device: torch.device) -> Vectorised:
        """Return the engine for some samples. Only the last is kept."""
        if self._engine is None or self._engine[0] != placed:
            self._engine = self._federation = self._server = None
            data, precision, options = unpack(_get(placed), {}, device)
            self._engine = placed, Vectorised(data, device, precision, **options)
        return self._engine[1]

    def _follow(self, federation: Any, engine: Vectorised) -> Federation:
        """Return the federation that is trained, unpacked once."""
        if self._federation is None or self._federation[0] != federation:
            self._federation = self._server = None
            found: Federation = unpack(_get(federation), {}, engine.device)
            public = None if found.world.public is None else found.world.public.to(engine.device)
            self._federation = federation, replace(found, world=replace(found.world, public=public))
        return self._federation[1]

    def _begin(self, everyone: Any, federation: Federation, engine: Vectorised) -> Server:
        """Return the state that all chunks of a round start from, unpacked once."""
        if self._server is None or self._server[0] != everyone:
            self._server = None
            self._server = everyone, unpack(_get(everyone), _shared(federation), engine.device)
        return self._server[1]


def _get(reference: Any) -> Parcel:
    found: Parcel = importlib.import_module("ray").get(reference)
    return found


# --- in the driver ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A chunk on its way to whoever is free."""

    placed: Any  # References to the object store: samples, federation, and the server's state.
    federation: Any
    everyone: Any
    chunk: Parcel
    jobs: Sequence[Job]

    @property
    def who(self) -> str:
        ids = list(dict.fromkeys(str(job.client.id) for job in self.jobs))
        some = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return f"the worker that trained clients {some} in round {self.jobs[0].round + 1}"


class Crew:
    """The workers of a cluster. Engines that ask for the same have the same, one after another."""

    def __init__(self, cluster: Cluster, device: torch.device, threads: int) -> None:
        self._ray = ray = _import()
        gpus = device.type == "cuda"
        self._home = Home.of(cluster, threads, gpus)
        there = ray.cluster_resources()
        most = int(there.get("GPU", 0)) if gpus else int(there.get("CPU", 1)) // threads
        self.size = cluster.workers or max(1, most)
        # A cluster of our own has nobody to share with; several crews may then be there at once.
        needs: dict[str, float] = {"num_cpus": 0 if self._home.started else threads}
        if gpus:
            needs["num_gpus"] = min(1, most / self.size) if self._home.started else 1
        self._needs, self._device, self._threads = needs, device.type, threads
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}

    @staticmethod
    def of(cluster: Cluster, device: torch.device, threads: int) -> Crew:
        """The crew there is, or a new one; it lasts as long as somebody holds it."""
        key = cluster, device.type, threads, torch.are_deterministic_algorithms_enabled()
        crew = _CREWS.get(key)
        if crew is None or not crew._ray.is_initialized():
            crew = _CREWS[key] = Crew(cluster, device, threads)
        return crew

    def put(self, parcel: Parcel) -> Any:
        """Into the object store, from where every worker takes it."""
        return self._ray.put(parcel)

    def answers(self, calls: Sequence[Call]) -> Generator[Parcel]:
        """What the workers answered, in the order of the calls, whoever trained them and when."""
        waiting, lost = deque(range(len(calls))), Counter[int]()
        running: dict[Any, tuple[Any, int]] = {}
        done: dict[int, Parcel] = {}
        failures = 0  # to start a worker, in a row
        try:
            for place in range(len(calls)):
                while place not in done:
                    self._hire(len(running), len(running) + len(waiting))
                    while waiting and self._idle:
                        worker, which = self._idle.pop(), waiting.popleft()
                        running[self._send(worker, calls[which])] = worker, which
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
                        worker, which = running.pop(reference)
                        if error := self._failed(reference):
                            lost[which] += 1
                            self._dismiss(worker)
                            self._mourn(calls[which], lost[which], error)
                            waiting.appendleft(which)
                            continue
                        self._idle.append(worker)
                        done[which] = self._answer(calls[which], reference)
                yield done.pop(place)
        finally:
            for (
                worker,
                _,
            ) in running.values():  # an error, or ctrl-C: nobody waits for these any more
                self._dismiss(worker)

    def _hire(self, busy: int, useful: int) -> None:
        """Start the workers that are missing and would have something to do."""
        remote = self._ray.remote(max_restarts=0, **self._needs)(Worker)
        while busy + len(self._idle) + len(self._starting) < min(self.size, useful):
            worker = remote.remote(self._threads, torch.are_deterministic_algorithms_enabled())
            self._starting[worker.ready.remote()] = worker

    def _send(self, worker: Any, call: Call) -> Any:
        # In lists references stay references: the worker looks only at what it does not have yet.
        stored = [call.placed], [call.federation], [call.everyone]
        return worker.train.remote(*stored, call.chunk, self._device)

    def _wait(self, references: list[Any], patient: bool) -> list[Any]:
        found: list[Any]
        found, _ = self._ray.wait(references, timeout=None if patient else _PATIENCE)
        if not found:
            raise TrainingError(
                f"no worker came up within {_PATIENCE:.0f} s: {self.size} with {self._needs} each were asked for, and "
                f"the Ray cluster has {self._ray.available_resources()} free."
            )
        return found

    def _failed(self, reference: Any) -> str:
        """Why there is no answer; "" if there is one."""
        errors: Any = importlib.import_module("ray.exceptions")
        try:
            self._ray.get(reference)
        except errors.RayError as error:
            return said(error)
        return ""

    def _answer(self, call: Call, reference: Any) -> Parcel:
        answer = self._ray.get(reference)
        if isinstance(answer, FedquiltError):
            raise answer
        if isinstance(answer, str):
            raise TrainingError(f"{call.who} failed: {answer}")
        assert isinstance(answer, Parcel)
        return answer

    def _mourn(self, call: Call, times: int, error: str) -> None:
        """A worker died: once may be chance, again and again is what it was asked to do."""
        if times >= _TRIES:
            raise TrainingError(
                f"{call.who} died, and so did {times - 1} others that tried again. Too little memory is the usual "
                f"reason; smaller stacks (engine.memory) or more chunks (engine.chunks) may help. Ray "
                f"says: {error}"
            )
        _log.warning("%s died; another does it again.", call.who.capitalize())

    def _dismiss(self, worker: Any) -> None:
        self._ray.kill(worker)


_CREWS: WeakValueDictionary[tuple[Cluster, str, int, bool], Crew] = WeakValueDictionary()


class Home:
    """This process' connection to a cluster: made once, and ended with the last crew if it was made here."""

    def __init__(self, cluster: Cluster, threads: int, gpus: bool) -> None:
        ray = _import()
        self.address = cluster.address or os.environ.get("RAY_ADDRESS", "")
        self.started = not ray.is_initialized() and not self.address
        if ray.is_initialized():  # the user's own connection
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
            _knock(self.address)
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
                signal.signal(
                    signal.SIGTERM, handler
                )  # Ray's would end the run without a checkpoint
        finalize(self, ray.shutdown)

    @staticmethod
    def of(cluster: Cluster, threads: int, gpus: bool) -> Home:
        home = _HOME.get("here")
        if home is None or not _import().is_initialized():
            home = _HOME["here"] = Home(cluster, threads, gpus)
        if cluster.address and home.address and cluster.address != home.address:
            raise ConfigError(
                f"the Ray cluster at {cluster.address!r} was asked for; this process is connected to that at "
                f"{home.address!r}, and can be to one at a time."
            )
        return home


_HOME: WeakValueDictionary[str, Home] = WeakValueDictionary()


def _knock(address: str) -> None:
    """Whether somebody listens at `host:port`: Ray itself would try for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # "auto" and the like
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster could be reached at {address!r}: {said(error)}"
        ) from error


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # else it warns of what it will do one day
    return importlib.import_module("ray")


__all__ = ["Cluster", "Crew", "Ray"]
