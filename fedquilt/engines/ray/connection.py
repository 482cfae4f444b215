"""Connection of this process to a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch

from fedquilt.errors import ConfigError
from fedquilt.names import said


@dataclass(frozen=True)
class Cluster:
    """Ray cluster, and the number of its workers to use."""

    # Address of a running cluster. "": the address in RAY_ADDRESS, or if that is not set, a cluster
    # is started on this machine.
    address: str = ""
    workers: int = 0  # Number of workers. 0: one per GPU, or as many as the CPU cores allow


class RayConnection:
    """Connection of this process to a cluster.

    It is made once. A connection that was made here ends with the last worker pool.

    Args:
        cluster: Cluster to connect to.
        threads: CPU threads of each worker.
        gpus: True if workers train on GPUs.
    """

    def __init__(self, cluster: Cluster, threads: int, gpus: bool) -> None:
        ray = import_ray()
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
            check_reachable(self.address)
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if self.started:
                raise ConfigError(f"no Ray cluster could be started: {said(error)}.") from error
            raise ConfigError(
                f"no Ray cluster could be reached at {self.address!r}: {said(error)}. If it asks "
                "for a token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must have it."
            ) from error
        finally:
            if main:
                # Ray's handler would end the run without a checkpoint.
                signal.signal(signal.SIGTERM, handler)
        finalize(self, ray.shutdown)

    @staticmethod
    def of(cluster: Cluster, threads: int, gpus: bool) -> RayConnection:
        """Return the existing connection of this process, or a new one.

        Args:
            cluster: Cluster to connect to. An empty address accepts any existing connection.
            threads: CPU threads of each worker.
            gpus: True if workers train on GPUs.

        Raises:
            ConfigError: The process is connected to another cluster, or none can be reached or
                started.
        """
        connection = _CONNECTIONS.get("current")
        if connection is None or not import_ray().is_initialized():
            connection = _CONNECTIONS["current"] = RayConnection(cluster, threads, gpus)
        if cluster.address and connection.address and cluster.address != connection.address:
            raise ConfigError(
                f"the Ray cluster at {cluster.address!r} was asked for; this process is connected "
                f"to that at {connection.address!r}, and can be to one at a time."
            )
        return connection


_CONNECTIONS: WeakValueDictionary[str, RayConnection] = WeakValueDictionary()


def check_reachable(address: str) -> None:
    """Refuse an address `host:port` at which no process listens within ten seconds.

    Ray itself would try for a quarter of an hour. Addresses without a port, such as "auto", are not
    checked.
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


def import_ray() -> Any:
    """Import Ray with its usage statistics disabled, and return the module."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this setting, Ray warns of a future change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return importlib.import_module("ray")
