"""FedAvg with an optimizer on the server: FedAvgM (Hsu et al. 2019), FedAdam and FedYogi (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.method import Presets
from fedquilt.round.merge import Plain, ServerAdam, ServerMomentum, ServerYogi


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg whose server takes steps with momentum towards the mean of the clients.

    The server's step is `ServerMomentum`. With lr 1 and momentum 0 this is FedAvg.
    """

    server: Plain | ServerMomentum | ServerAdam | ServerYogi = (
        ServerMomentum()
    )  # Optimizer of the server
    paper = "Hsu et al. 2019"
    presets: ClassVar[Presets] = {}


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAvg whose server takes Adam's steps towards the mean of the clients (algorithm 2).

    The server's step is `ServerAdam`. The paper tunes its learning rate for each task.
    """

    server: Plain | ServerMomentum | ServerAdam | ServerYogi = (
        ServerAdam()
    )  # Optimizer of the server
    paper = "Reddi et al. 2021"
    presets: ClassVar[Presets] = {}


@dataclass(frozen=True)
class FedYogi(FedAvg):
    """FedAvg whose server takes Yogi's steps towards the mean of the clients (algorithm 2).

    The server's step is `ServerYogi`. The paper tunes its learning rate for each task.
    """

    server: Plain | ServerMomentum | ServerAdam | ServerYogi = (
        ServerYogi()
    )  # Optimizer of the server
    paper = "Reddi et al. 2021"
    presets: ClassVar[Presets] = {}
