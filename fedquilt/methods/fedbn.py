"""FedBN: norm layers stay on the client (Li et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from fedquilt.family.norms import AllLocal
from fedquilt.methods.fedavg import FedAvg
from fedquilt.round.method import Presets
from fedquilt.round.training.local import LocalTraining


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of all weights but those of norm layers, which stay on each client.

    This is FedAvg with the norm policy `per_client-all`. Any other policy is changed so that norm
    weights and statistics stay on the client. Every client ends with a net of its own, and the mean
    of their accuracies is reported.
    """

    local: LocalTraining = LocalTraining(norm=AllLocal())
    paper = "Li et al. 2021"
    presets: ClassVar[Presets] = {}  # FedAvg's presets measure norms on all clients.

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "local", replace(self.local, norm=self.local.norm.localized()))

    @property
    @override
    def note(self) -> str:
        return f"{super().note}; accuracy is the mean over clients, each with its norms"
