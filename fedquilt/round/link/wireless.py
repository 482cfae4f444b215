"""How likely a radio link fails: FedResCuE's appendix A.4, after LTE-A.

The rate is R = B·log2(1 + P·d^−σ·|h|² / (N0 + I)) (equation 6), and what is sent is lost when R < R_min. That is when
P·|h|² / d^σ falls short of (N0 + I)·(2^(R_min/B) − 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.round.link.columns import Loss
from fedquilt.round.link.dealt import check_dealt, dealt, shown, take_lists

Fading = Literal["rayleigh", "constant"]
_SITE = 42


def needed(bandwidth: float, noise_power: float, min_rate: float) -> float:
    """The power in watts that must arrive for a rate of `min_rate`: (N0 + I)·(2^(R_min/B) − 1)."""
    return noise_power * math.expm1(min(min_rate / bandwidth * math.log(2), 700.0))


def outage_poisson(distance: float, power: float, exponent: float, needed: float) -> float:
    """Equation 7 with |h| = 1: Pr{d > (P / needed)^(1/σ)} of distances in metres that are Poisson about a mean."""
    reach = math.floor((power / needed) ** (1 / exponent))
    # Pr{d ≤ k} = Γ(k + 1, mean) / k!
    return float(
        torch.special.gammainc(torch.tensor(reach + 1.0).double(), torch.tensor(distance).double())
    )


def outage_rayleigh(distance: float, power: float, exponent: float, needed: float) -> float:
    """Pr{|h|² < needed·d^σ / P} at a fixed distance, with |h|² exponential of mean 1: Rayleigh fading."""
    return -math.expm1(-needed * distance**exponent / power)


@dataclass(frozen=True)
class Wireless(Loss):
    """Columns over radio: each client's error rate follows from its distance (FedResCuE, appendix A.4).

    The paper gives no values. These are of a small LTE-A cell: ten resource blocks, a 23 dBm sender, urban path loss,
    thermal noise with a 9 dB receiver, −90 dBm from other cells. At 500 m under Rayleigh fading 8 % of columns fail.
    """

    bandwidth: float = 1.8e6  # Hz, B
    power: float = 0.2  # watts sent, P
    exponent: float = 3.5  # of the path loss, σ
    noise: float = 5.7e-14  # watts, N0
    interference: float = 1e-12  # watts, I
    min_rate: float = 5e6  # bits a second, R_min: below, a column is lost
    distances: tuple[
        float, ...
    ] = ()  # metres, dealt to clients in turn; (): drawn evenly over a disc of `radius`
    radius: float = 600.0  # metres
    fading: Fading = "rayleigh"  # of every column, at the client's distance; constant: distances are Poisson about it

    def __post_init__(self) -> None:
        super().__post_init__()
        take_lists(self, "distances")
        within(
            self,
            bandwidth="[1, 1e12]",
            power="[1e-9, 1e9]",
            exponent="[1, 10]",
            noise="[1e-30, 1]",
            interference="[0, 1]",
            min_rate="[1, 1e13]",
            distances="[1, 1e8]",
            radius="[1, 1e8]",
        )
        one_of(self, fading=Fading)

    def __str__(self) -> str:
        where = f"at {shown(self.distances)} m" if self.distances else f"within {self.radius:g} m"
        return f"columns lost by radio {where}, {self.fading} fading"

    def check(self, num_clients: int) -> None:
        if self.distances:
            check_dealt(self, num_clients, "distances")

    def distance(self, client: int, seed: int) -> float:
        """Metres between a client and the server."""
        if self.distances:
            return dealt(self.distances, client)
        drawn = noise.uniform(torch.tensor(noise.key(_SITE, seed, client)), (1,), torch.float64)
        return max(
            1.0, self.radius * math.sqrt(float(drawn))
        )  # as many in every ring of equal area

    def rates(self, client: int, seed: int) -> tuple[float, float]:
        outage = outage_rayleigh if self.fading == "rayleigh" else outage_poisson
        least = needed(self.bandwidth, self.noise + self.interference, self.min_rate)
        rate = outage(self.distance(client, seed), self.power, self.exponent, least)
        return rate, rate
