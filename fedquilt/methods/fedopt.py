"""FedAvg with an optimizer on the server.

FedAvgM is from Hsu et al. 2019, FedAdam and FedYogi are from Reddi et al., ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods.fedavg import FedAvg
from fedquilt.round.method import Presets
from fedquilt.round.server_optimizers import Plain, ServerAdam, ServerMomentum, ServerYogi


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg whose server takes steps with momentum towards the mean of the clients.

    The server's step is `ServerMomentum`. With lr 1 and momentum 0 this is FedAvg.
    """

    # Optimizer that the server uses on the mean change of the clients.
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = ServerMomentum()
    paper = "Hsu et al. 2019"
    presets: ClassVar[Presets] = {}


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAvg whose server takes Adam's steps towards the mean of the clients (algorithm 2).

    The server's step is `ServerAdam`. The paper tunes its learning rate for each task.
    """

    # Optimizer that the server uses on the mean change of the clients.
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = ServerAdam()
    paper = "Reddi et al. 2021"
    presets: ClassVar[Presets] = {}


@dataclass(frozen=True)
class FedYogi(FedAvg):
    """FedAvg whose server takes Yogi's steps towards the mean of the clients (algorithm 2).

    The server's step is `ServerYogi`. The paper tunes its learning rate for each task.
    """

    # Optimizer that the server uses on the mean change of the clients.
    server_optimizer: Plain | ServerMomentum | ServerAdam | ServerYogi = ServerYogi()
    paper = "Reddi et al. 2021"
    presets: ClassVar[Presets] = {}
