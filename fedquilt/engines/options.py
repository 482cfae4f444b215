"""Options of engines. Each engine uses only those that apply to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedquilt.hardware.precision import Precision

CHUNKS = 8  # Default number of chunks into which a cluster cuts a round's jobs


@dataclass(frozen=True)
class EngineOptions:
    """Options that decide on which device and how clients are trained.

    Args:
        device: Device on which clients are trained and the server's state is kept.
        precision: Precision of matrix products and convolutions.
        memory: Bytes that clients which are trained at the same time may take. 0: the engine
            decides.
        workers: Number of workers of a cluster. 0: as many as it has room for.
        address: Address of a cluster. "": a cluster is started on this machine.
        chunks: Number of chunks into which a cluster cuts a round's jobs.
    """

    device: torch.device = torch.device("cpu")
    precision: Precision = "fp32"
    memory: int = 0
    workers: int = 0
    address: str = ""
    chunks: int = CHUNKS
