"""Worker, which is the process of a Ray cluster that trains chunks of a round's jobs."""

from __future__ import annotations

import importlib
import os
import socket
from dataclasses import replace
from typing import Any

import torch

from fedquilt.engines.ray.parcel import Parcel, pack, round_objects, shared_objects, unpack
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.errors import FedquiltError
from fedquilt.hardware.process import keep_pages
from fedquilt.names import said
from fedquilt.round.federation import Federation
from fedquilt.round.update_checks import checked_fold
from fedquilt.terms import Server

WorkerResult = Parcel | FedquiltError | str  # A partial fold and outcome, or an error


class Worker:
    """Process of the cluster that holds family and data, and trains chunks.

    Args:
        threads: CPU threads of the worker.
        deterministic: True if torch must use deterministic algorithms, as the driver does.
    """

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
        data_ref: list[Any],
        federation_ref: list[Any],
        server_ref: list[Any],
        chunk: Parcel,
        device: str,
    ) -> WorkerResult:
        """Train the jobs of a chunk and fold them.

        Errors are returned, because Ray would make a raised error unreadable.

        Args:
            data_ref: Reference to samples and options, in a list so that Ray does not resolve it.
            federation_ref: Reference to the federation, in a list.
            server_ref: Reference to the server's state, in a list.
            chunk: Jobs of the chunk, with the stored states of their clients.
            device: Device on which the worker trains.

        Returns:
            Partial fold and outcome, or the error.
        """
        try:
            engine = self._engine_for(data_ref[0], torch.device(device))
            federation = self._federation_for(federation_ref[0], engine)
            server = self._server_for(server_ref[0], federation, engine)
            jobs, client_states = unpack(chunk, shared_objects(federation), engine.device)
            server = replace(server, memory=client_states)
            checked = checked_fold(federation, server, jobs)
            outcome = engine.train(federation, server, jobs, checked)
            return pack((checked.fold, outcome), round_objects(federation, server))
        except FedquiltError as error:
            return error
        except Exception as error:
            return f"{said(error)} (in process {os.getpid()} on {socket.gethostname()})"

    def _engine_for(self, data_ref: Any, device: torch.device) -> Vectorized:
        """Return the engine for some samples. Only the latest engine is kept.

        If the samples are new, the federation and the server's state are dropped too.

        Args:
            data_ref: Reference to samples and options in the object store.
            device: Device on which the worker trains.
        """
        if self._engine is None or self._engine[0] != data_ref:
            self._engine = self._federation = self._server = None
            data, precision, options = unpack(_get(data_ref), {}, device)
            self._engine = data_ref, Vectorized(data, device, precision, **options)
        return self._engine[1]

    def _federation_for(self, federation_ref: Any, engine: Vectorized) -> Federation:
        """Return the federation that is trained.

        Only the latest federation is kept, and it is unpacked once. If it is new, the server's
        state is dropped.

        Args:
            federation_ref: Reference to the federation in the object store.
            engine: Engine whose device the tensors are moved to.
        """
        if self._federation is None or self._federation[0] != federation_ref:
            self._federation = self._server = None
            unpacked: Federation = unpack(_get(federation_ref), {}, engine.device)
            world, public = unpacked.world, unpacked.world.public
            if public is not None:
                world = replace(world, public=public.to(engine.device))
            self._federation = federation_ref, replace(unpacked, world=world)
        return self._federation[1]

    def _server_for(self, server_ref: Any, federation: Federation, engine: Vectorized) -> Server:
        """Return the state that all chunks of a round start from, without clients' stored states.

        Only the latest state is kept, and it is unpacked once.

        Args:
            server_ref: Reference to the state in the object store.
            federation: Federation whose objects the state refers to by name.
            engine: Engine whose device the tensors are moved to.
        """
        if self._server is None or self._server[0] != server_ref:
            self._server = None
            server = unpack(_get(server_ref), shared_objects(federation), engine.device)
            self._server = server_ref, server
        return self._server[1]


def _get(reference: Any) -> Parcel:
    """Return a parcel from the object store, and wait until it is there."""
    parcel: Parcel = importlib.import_module("ray").get(reference)
    return parcel
