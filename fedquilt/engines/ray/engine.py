"""Engine that distributes the jobs of a round over the workers of a Ray cluster.

The workers may be on many machines, or be processes of one machine. Jobs are cut into chunks, which
depend only on the order of jobs and the number of chunks. The next free worker trains a chunk and
folds it. Partial folds are joined in the order of the chunks.

The results therefore depend neither on the number of workers nor on their speed. A chunk whose
worker died is trained again, with the same result.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from typing_extensions import override

from fedquilt.engines.options import CHUNKS
from fedquilt.engines.ray.connection import Cluster
from fedquilt.engines.ray.parcel import pack, round_objects, shared_objects, unpack
from fedquilt.engines.ray.pool import Call, WorkerPool
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.hardware.precision import DTYPES
from fedquilt.names import said
from fedquilt.round.engine import Outcome
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Fold
from fedquilt.terms import ClientState, Job, Server

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.engines.options import EngineOptions
    from fedquilt.round.method import Method


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
    @override
    def check(cls) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "the engine 'ray' was asked for; it needs the package ray, which is not "
                f"installed: {how_to_install('ray')}."
            )

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
        self._pool: WorkerPool | None = None
        self._data_ref: Any = None  # Reference to samples and options in the object store.
        # Federation that is in the object store, and its reference.
        self._sent: tuple[Federation, Any] | None = None

    @classmethod
    @override
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
    @override
    def engine_options(self) -> EngineOptions:
        cluster = self.cluster
        return replace(
            super().engine_options,
            workers=cluster.workers,
            address=cluster.address,
            chunks=self.chunks,
        )

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Broadcast the server's state, train the chunks, and join their results in order.

        Args:
            server: State that the clients start from. Clients' stored states are sent with their
                chunk.
            jobs: Clients with their sub-models.
            fold: Fold that the partial folds of the chunks are joined to.
            outcome: Outcome that the outcomes of the chunks are joined to.
        """
        self._check_fold(self.method, server)
        pool, chunks = self._worker_pool(), cut(jobs, self.chunks)
        driver_objects = round_objects(self.federation, server)
        shared = shared_objects(self.federation)
        server_ref = pool.put(pack(replace(server, memory={}), shared))
        federation_ref = self._sent_federation(pool)
        packed = [pack((chunk, _client_states(server, chunk)), shared) for chunk in chunks]
        calls = [
            Call(self._data_ref, federation_ref, server_ref, parcel, chunk)
            for parcel, chunk in zip(packed, chunks, strict=True)
        ]
        with closing(pool.results(calls)) as results:
            for result in results:
                partial_fold, partial_outcome = unpack(result, driver_objects, self.device)
                fold.join(partial_fold)
                outcome.join(partial_outcome)

    def _over(self, data: FederatedData) -> Vectorized:  # type: ignore[override]
        """Return a `Vectorized` engine of this process over other samples.

        Training on the server is not sent to workers.
        """
        return Vectorized(data, self.device, self.precision, self.memory, self.record, self.layout)

    def _worker_pool(self) -> WorkerPool:
        """Return the worker pool, with the samples in its object store.

        The samples are put there once, and again only if the pool has changed.
        """
        pool = WorkerPool.of(self.cluster, self.device, torch.get_num_threads())
        if pool is not self._pool:
            self._pool, self._data_ref, self._sent = pool, None, None
        options = (
            self.precision,
            {name: value for name, value in self.settings.items() if name in _WORKER_OPTIONS},
        )
        if self._data_ref is None:
            cpu_data = self.data.to(torch.device("cpu"), DTYPES[self.precision])
            self._data_ref = pool.put(pack((cpu_data, *options), {}))
        return pool

    def _sent_federation(self, pool: WorkerPool) -> Any:
        """Put the federation into the object store unless it is there, and return its reference.

        It includes the initial weights, because workers may be unable to draw the same.
        """
        if self._sent is None or self._sent[0] is not self.federation:
            world = self.world
            family = world.family.seeded(world.seed)
            public = None if world.public is None else world.public.cpu()
            sendable = replace(self.federation, world=replace(world, family=family, public=public))
            self._sent = (
                self.federation,
                pool.put(pack(replace(sendable, received=self.federation.initial), {})),
            )
        return self._sent[1]

    def _check_fold(self, method: Method, server: Server) -> None:
        """Refuse a method whose partial folds cannot be joined.

        Two empty folds are joined as a test.

        Args:
            method: Method whose folds are tested.
            server: State from which the method makes its folds.

        Raises:
            ConfigError: The method's fold has no `join`, or its `join` refuses.
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
                f"what they trained; its fold {type(first).__name__} cannot take another's partial "
                f"result ({why}). Engines that fold in one place, such as 'vectorized', fit."
            )


# Settings of `Vectorized` that are passed on to workers.
_WORKER_OPTIONS = ("memory", "record", "layout")


def cut(jobs: Sequence[Job], chunks: int) -> list[Sequence[Job]]:
    """Cut jobs into chunks of neighbours, of about equal size.

    The chunks depend only on the order of jobs and on the number of chunks. No chunk is empty.

    Args:
        jobs: Jobs of a round.
        chunks: Number of chunks. With fewer jobs, each job is a chunk of its own.
    """
    count = min(chunks, len(jobs))
    edges = [len(jobs) * number // count for number in range(count + 1)] if count else [0]
    return [jobs[first:last] for first, last in pairwise(edges)]


def _client_states(server: Server, jobs: Sequence[Job]) -> dict[tuple[int, str], ClientState]:
    """Return the stored states of the clients of these jobs, by client id and scope.

    Clients without a stored state are left out.
    """
    keys = {(job.client.id, job.submodel.scope): None for job in jobs}
    states = ((key, server.memory.get(key)) for key in keys)
    return {key: state for key, state in states if state is not None}
