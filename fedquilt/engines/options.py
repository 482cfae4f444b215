"""Options of engines. Each engine takes those that it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedquilt.precision import Precision

CHUNKS = 8


@dataclass(frozen=True)
class EngineOptions:
    """Options that decide where and how clients are trained.

    Args:
        device: Where clients are trained, and where the server's state is kept.
        precision: Precision of products.
        memory: Bytes that clients which are trained at the same time may take. 0: the engine decides.
        workers: Workers of a cluster. 0: as many as it has room for.
        address: Address of a cluster. "": one of this machine's is started.
        chunks: Number of chunks that a cluster cuts a round's jobs into.
    """

    device: torch.device = torch.device("cpu")
    precision: Precision = "fp32"
    memory: int = 0
    workers: int = 0
    address: str = ""
    chunks: int = CHUNKS
