"""Outage probability of a radio link: FedResCuE's appendix A.4, after LTE-A.

The rate is R = B·log2(1 + P·d^−σ·|h|² / (N0 + I)) (equation 6). A column is lost if R < R_min,
which means that the received power P·|h|² / d^σ is below (N0 + I)·(2^(R_min/B) − 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.round.link.columns import Loss
from fedquilt.round.link.per_client import as_text, check_lengths, convert_lists, value_of

Fading = Literal["rayleigh", "constant"]  # Distribution of a channel's gain |h|².


def min_received_power(bandwidth: float, noise_power: float, min_rate: float) -> float:
    """Return the received power that a rate of `min_rate` needs: (N0 + I)·(2^(R_min/B) − 1).

    Args:
        bandwidth: B, in Hz.
        noise_power: N0 + I, in watts.
        min_rate: R_min, in bits per second.

    Returns:
        Power in watts.
    """
    return noise_power * math.expm1(min(min_rate / bandwidth * math.log(2), 700.0))


def outage_poisson(distance: float, power: float, exponent: float, min_power: float) -> float:
    """Return the outage probability without fading (equation 7): Pr{d > (P / min_power)^(1/σ)}.

    The distance d in metres is Poisson distributed.

    Args:
        distance: Mean of the distance, in metres.
        power: P, in watts.
        exponent: σ of the path loss.
        min_power: Received power in watts below which a column is lost.
    """
    reach = math.floor((power / min_power) ** (1 / exponent))
    # Pr{d ≤ k} = Γ(k + 1, mean) / k!
    return float(
        torch.special.gammainc(torch.tensor(reach + 1.0).double(), torch.tensor(distance).double())
    )


def outage_rayleigh(distance: float, power: float, exponent: float, min_power: float) -> float:
    """Return the outage probability under Rayleigh fading: Pr{|h|² < min_power·d^σ / P}.

    |h|² is exponentially distributed with mean 1, and the distance is fixed.

    Args:
        distance: d, in metres.
        power: P, in watts.
        exponent: σ of the path loss.
        min_power: Received power in watts below which a column is lost.
    """
    return -math.expm1(-min_power * distance**exponent / power)


@dataclass(frozen=True)
class Wireless(Loss):
    """Columns lost over radio, at an error rate given by each client's distance.

    This is FedResCuE's appendix A.4. The paper gives no values. The defaults describe a small LTE-A
    cell: ten resource blocks, a 23 dBm sender, urban path loss, thermal noise with a 9 dB receiver,
    and −90 dBm from other cells. At 500 m under Rayleigh fading, 8 % of columns fail.
    """

    bandwidth: float = 1.8e6  # Bandwidth B in Hz
    power: float = 0.2  # Power P of the sender in watts
    exponent: float = 3.5  # Exponent σ of the path loss
    noise: float = 5.7e-14  # Noise power N0 in watts
    interference: float = 1e-12  # Interference I in watts
    min_rate: float = 5e6  # Rate R_min in bits per second, below which a column is lost
    # Distances in metres, assigned to clients in turn. Empty: drawn evenly over a disc of `radius`
    distances: tuple[float, ...] = ()
    radius: float = 600.0  # Radius of the cell in metres
    # Fading of each column. With "constant", distances are Poisson about the client's distance
    fading: Fading = "rayleigh"

    def __post_init__(self) -> None:
        super().__post_init__()
        convert_lists(self, "distances")
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
        distance_text = (
            f"at {as_text(self.distances)} m" if self.distances else f"within {self.radius:g} m"
        )
        return f"columns lost by radio {distance_text}, {self.fading} fading"

    @override
    def check(self, num_clients: int) -> None:
        if self.distances:
            check_lengths(self, num_clients, "distances")

    def distance(self, client: int, seed: int) -> float:
        """Return the distance between a client and the server in metres, at least 1.

        It is the one that `distances` gives. If that is empty, it is drawn evenly over the disc,
        from the random `seed` of the run and the client's number.
        """
        if self.distances:
            return value_of(self.distances, client)
        key = torch.tensor(noise.key(noise.Stream.WIRELESS_DISTANCE, seed, client))
        fraction = noise.uniform(key, (1,), torch.float64)
        # The square root makes clients uniform over the area of the disc.
        return max(1.0, self.radius * math.sqrt(float(fraction)))

    @override
    def rates(self, client: int, seed: int) -> tuple[float, float]:
        outage = outage_rayleigh if self.fading == "rayleigh" else outage_poisson
        min_power = min_received_power(
            self.bandwidth, self.noise + self.interference, self.min_rate
        )
        rate = outage(self.distance(client, seed), self.power, self.exponent, min_power)
        return rate, rate
