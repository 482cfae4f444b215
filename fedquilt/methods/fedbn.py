"""FedBN: norm layers stay on the client (Li et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedquilt.family.norms import AllLocal
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.method import Presets
from fedquilt.round.training.local import Local


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of everything but the norms: their weights and statistics are each client's own.

    This is FedAvg with the norm policy `local-all`. Another policy is changed so that norms stay
    on the client. The result is as many nets as clients; their mean accuracy is reported.
    """

    local: Local = Local(norm=AllLocal())
    paper = "Li et al. 2021"
    presets: ClassVar[Presets] = {}  # FedAvg's measure norms for all clients

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "local", replace(self.local, norm=self.local.norm.localized()))

    @property
    def note(self) -> str:
        return f"{super().note}; accuracy is the mean over clients, each with its norms"
