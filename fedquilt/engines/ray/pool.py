"""Pool of workers, which sends chunks to free workers and replaces workers that died."""

from __future__ import annotations

import importlib
import logging
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from fedquilt.engines.ray.connection import Cluster, RayConnection, import_ray
from fedquilt.engines.ray.parcel import Parcel
from fedquilt.engines.ray.worker import Worker
from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.names import said
from fedquilt.terms import Job

_log = logging.getLogger("fedquilt")

MAX_ATTEMPTS = 3  # Attempts to train a chunk whose workers die, and to start a worker
MAX_SHOWN_IDS = 8  # Clients that a message about a chunk names
MAX_START_SECONDS = 300.0  # Seconds to wait for the first worker


@dataclass(frozen=True)
class Call:
    """Chunk that waits for a free worker."""

    data_ref: Any  # Reference to the samples and options in the object store.
    federation_ref: Any  # Reference to the federation.
    server_ref: Any  # Reference to the server's state.
    chunk: Parcel  # Packed jobs, with the stored states of their clients.
    jobs: Sequence[Job]  # Jobs of the chunk.

    @property
    def worker(self) -> str:
        """Return a description of the chunk's worker, for messages."""
        ids = list(dict.fromkeys(str(job.client.id) for job in self.jobs))
        shown_ids = ", ".join(ids[:MAX_SHOWN_IDS])
        if len(ids) > MAX_SHOWN_IDS:
            shown_ids += f" and {len(ids) - MAX_SHOWN_IDS} more"
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
        self._ray = ray = import_ray()
        gpus = device.type == "cuda"
        self._connection = RayConnection.of(cluster, threads, gpus)
        resources = ray.cluster_resources()
        max_workers = (
            int(resources.get("GPU", 0)) if gpus else int(resources.get("CPU", 1)) // threads
        )
        self.size = cluster.workers or max(1, max_workers)
        # A cluster that this process started is its own, so that several pools may use it at once.
        needs: dict[str, float] = {"num_cpus": 0 if self._connection.started else threads}
        if gpus:
            needs["num_gpus"] = min(1, max_workers / self.size) if self._connection.started else 1
        self._needs, self._device, self._threads = needs, device.type, threads
        self._idle: list[Any] = []  # Workers without a call
        self._starting: dict[Any, Any] = {}  # Workers that start, by reference to their reply

    @staticmethod
    def of(cluster: Cluster, device: torch.device, threads: int) -> WorkerPool:
        """Return the worker pool that exists for these arguments, or a new one.

        A pool lives as long as an engine refers to it. Pools also differ in whether torch must be
        deterministic.

        Args:
            cluster: Cluster and number of workers.
            device: Device on which workers train.
            threads: CPU threads of each worker.
        """
        key = cluster, device.type, threads, torch.are_deterministic_algorithms_enabled()
        pool = _POOLS.get(key)
        if pool is None or not pool._ray.is_initialized():
            pool = _POOLS[key] = WorkerPool(cluster, device, threads)
        return pool

    def put(self, parcel: Parcel) -> Any:
        """Put a parcel into the object store for all workers, and return its reference."""
        return self._ray.put(parcel)

    def results(self, calls: Sequence[Call]) -> Generator[Parcel]:
        """Yield the results of the workers in the order of the calls.

        Calls run at the same time on all workers, and results that come early are kept. A call
        whose worker died is sent to another worker. Workers that are still busy when the caller
        stops early are killed.

        Args:
            calls: Chunks to train.

        Raises:
            TrainingError: A chunk failed, its workers died repeatedly, or no worker could be
                started.
            FedquiltError: Error that a worker returned.
        """
        waiting = deque(range(len(calls)))  # Calls without a worker, by number
        deaths = Counter[int]()  # Workers that died, by call
        running: dict[Any, tuple[Any, int]] = {}  # Worker and call, by reference to the result
        done: dict[int, Parcel] = {}  # Results, by call
        failures = 0  # Failed starts of workers in a row
        try:
            for next_call in range(len(calls)):
                while next_call not in done:
                    self._start_workers(len(running), len(running) + len(waiting))
                    while waiting and self._idle:
                        worker, number = self._idle.pop(), waiting.popleft()
                        running[self._send(worker, calls[number])] = worker, number
                    for reference in self._wait([*running, *self._starting], patient=bool(running)):
                        if reference in self._starting:
                            worker = self._starting.pop(reference)
                            error = self._failure(reference)
                            failures = failures + 1 if error else 0
                            if failures >= MAX_ATTEMPTS:
                                raise TrainingError(
                                    f"no worker of the Ray cluster could be started: {error}"
                                )
                            self._idle += [] if error else [worker]
                            continue
                        worker, number = running.pop(reference)
                        if error := self._failure(reference):
                            deaths[number] += 1
                            self._kill(worker)
                            self._on_worker_death(calls[number], deaths[number], error)
                            waiting.appendleft(number)
                            continue
                        self._idle.append(worker)
                        done[number] = self._unwrap(calls[number], reference)
                yield done.pop(next_call)
        finally:
            # After an error or ctrl-C, no caller waits for these workers.
            for worker, _ in running.values():
                self._kill(worker)

    def _start_workers(self, busy: int, useful: int) -> None:
        """Start missing workers, up to the pool's size, without waiting for them.

        Args:
            busy: Number of workers that train a call.
            useful: Number of workers that have or could get a call. More are not started.
        """
        remote = self._ray.remote(max_restarts=0, **self._needs)(Worker)
        while busy + len(self._idle) + len(self._starting) < min(self.size, useful):
            worker = remote.remote(self._threads, torch.are_deterministic_algorithms_enabled())
            self._starting[worker.ready.remote()] = worker

    def _send(self, worker: Any, call: Call) -> Any:
        """Send a call to a worker, and return the reference to its result."""
        # Ray does not resolve references in lists. The worker resolves only those it does not have.
        stored = [call.data_ref], [call.federation_ref], [call.server_ref]
        return worker.train.remote(*stored, call.chunk, self._device)

    def _wait(self, references: list[Any], patient: bool) -> list[Any]:
        """Wait until at least one reference is ready, and return those that are.

        Args:
            references: References to results of calls, and to replies of workers that start.
            patient: True: wait without limit, because a call is running. False: wait
                `MAX_START_SECONDS` for the first worker.

        Raises:
            TrainingError: No worker started in time.
        """
        finished: list[Any]
        finished, _ = self._ray.wait(references, timeout=None if patient else MAX_START_SECONDS)
        if not finished:
            raise TrainingError(
                f"no worker came up within {MAX_START_SECONDS:.0f} s: {self.size} with "
                f"{self._needs} each were asked for, and the Ray cluster has "
                f"{self._ray.available_resources()} free."
            )
        return finished

    def _failure(self, reference: Any) -> str:
        """Return the reason why a result is missing, or an empty string if it is there.

        A result is missing if its worker died. An error that a worker returned is a result.
        """
        errors: Any = importlib.import_module("ray.exceptions")
        try:
            self._ray.get(reference)
        except errors.RayError as error:
            return said(error)
        return ""

    def _unwrap(self, call: Call, reference: Any) -> Parcel:
        """Return the result of a call that has ended, or raise the error that the worker returned.

        Args:
            call: Chunk that the worker trained, for the message.
            reference: Reference to the result, which must be there.

        Raises:
            FedquiltError: Error that the worker returned.
            TrainingError: The worker failed with any other error.
        """
        result = self._ray.get(reference)
        if isinstance(result, FedquiltError):
            raise result
        if isinstance(result, str):
            raise TrainingError(f"{call.worker} failed: {result}")
        assert isinstance(result, Parcel)
        return result

    def _on_worker_death(self, call: Call, times: int, error: str) -> None:
        """Warn that a worker died, or give up after `MAX_ATTEMPTS` deaths.

        One death may be chance, but repeated deaths are caused by the chunk.

        Args:
            call: Chunk that the worker trained.
            times: Number of workers that died with this chunk so far.
            error: Reason that Ray gave.

        Raises:
            TrainingError: The chunk is not tried again.
        """
        if times >= MAX_ATTEMPTS:
            raise TrainingError(
                f"{call.worker} died, and so did {times - 1} others that tried again. Too little "
                "memory is the usual reason; smaller stacks (engine.memory) or more chunks "
                f"(engine.chunks) may help. Ray says: {error}"
            )
        _log.warning("%s died; another worker trains them again.", call.worker.capitalize())

    def _kill(self, worker: Any) -> None:
        """End the process of a worker."""
        self._ray.kill(worker)


_POOLS: WeakValueDictionary[tuple[Cluster, str, int, bool], WorkerPool] = WeakValueDictionary()
