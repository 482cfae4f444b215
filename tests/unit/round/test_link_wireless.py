"""The radio model of FedResCuE's appendix A.4: its closed forms against Monte-Carlo, and the rates
that follow.
"""

from __future__ import annotations

import math

import pytest
import torch

import fedquilt as fq
from fedquilt.round.link.wireless import min_received_power, outage_poisson, outage_rayleigh

DRAWS = 200_000
RADIO = fq.links.Wireless()
BANDWIDTH, POWER, EXPONENT, NOISE = 1.8e6, 0.2, 3.5, 1.057e-12


def rate(distance, gain, bandwidth=BANDWIDTH, power=POWER):
    """Equation 6: R = B·log2(1 + P·d^−σ·|h|² / (N0 + I))."""
    return bandwidth * torch.log2(1 + power * distance**-EXPONENT * gain / NOISE)


@pytest.mark.parametrize("mean", [800.0, 990.0, 1004.0, 1030.0])
@pytest.mark.parametrize("min_rate", [5e6, 4.9e6])
def test_equation_7_with_poisson_distances(mean, min_rate):
    distances = torch.poisson(
        torch.full((DRAWS,), mean).double(), generator=torch.Generator().manual_seed(1)
    )
    lost = (rate(distances, torch.tensor(1.0)) < min_rate).double().mean()
    expected = outage_poisson(mean, POWER, EXPONENT, min_received_power(BANDWIDTH, NOISE, min_rate))
    assert abs(float(lost) - expected) < 4 * math.sqrt(max(expected * (1 - expected), 1e-5) / DRAWS)


@pytest.mark.parametrize("distance", [50.0, 300.0, 500.0, 1000.0])
@pytest.mark.parametrize("min_rate", [1e6, 5e6])
def test_equation_7_with_rayleigh_fading_at_a_fixed_distance(distance, min_rate):
    draw = torch.Generator().manual_seed(1)
    real, imaginary = torch.randn(2, DRAWS, generator=draw, dtype=torch.float64) / math.sqrt(2)
    lost = (
        (rate(torch.tensor(distance).double(), real**2 + imaginary**2) < min_rate).double().mean()
    )
    expected = outage_rayleigh(
        distance, POWER, EXPONENT, min_received_power(BANDWIDTH, NOISE, min_rate)
    )
    assert abs(float(lost) - expected) < 4 * math.sqrt(max(expected * (1 - expected), 1e-5) / DRAWS)


def test_the_documented_rate():
    """At 500 m under Rayleigh fading 8 % of the columns fail."""
    low, high = fq.links.Wireless(distances=(500.0,)).rates(0, 0)
    assert low == high == pytest.approx(0.08, abs=0.005)


def test_error_rates_rise_with_the_distance_of_a_client():
    radio = fq.links.Wireless(distances=(100.0, 400.0, 900.0))
    rates = [radio.rates(client, 0)[0] for client in range(6)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[3:] == rates[:3]


def test_distances_are_drawn_evenly_over_a_disc_from_the_seed():
    drawn = torch.tensor([RADIO.distance(client, 3) for client in range(2000)])
    assert drawn.max() <= 600
    # half the radius, a quarter of the area
    assert abs(float((drawn < 300).double().mean()) - 0.25) < 0.04
    assert RADIO.distance(7, 4) != RADIO.distance(7, 3)


def test_unreachable_rates_are_always_lost_and_those_of_near_clients_never():
    hopeless = fq.links.Wireless(min_rate=1e12)
    assert hopeless.rates(0, 0)[0] == 1.0
    for fading in ("rayleigh", "constant"):
        assert fq.links.Wireless(distances=(1.0,), fading=fading).rates(0, 0)[0] < 1e-6
        assert fq.links.Wireless(distances=(1e5,), fading=fading).rates(0, 0)[0] > 1 - 1e-6
