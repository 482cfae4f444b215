"""Every method on devices that are reached by bytes, against the sequential engine: fp64, 1e-9."""

from __future__ import annotations

import pytest

import fedquilt as fq
from fedquilt.methods import METHODS
from tests.conftest import QUICK_METHODS, with_local
from tests.deployed import (
    assert_same_states,
    assert_same_training,
    device_states,
    trained_both_ways,
)
from tests.engines.test_links import LINKS, RAGGED, SHARES, SHARP
from tests.engines.test_rafl import METHODS as RAFL
from tests.engines.test_rafl import NUM_PUBLIC
from tests.pairs import limits, plain_pairs


def both(name, family, play, make_data, **options):
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data = make_data(family, RAGGED, labels=2)
    fleet = fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True)
    return trained_both_ways(
        method, family, data, play, fleet=fleet, evaluation=fq.Evaluation(every=0), **options
    )


@pytest.mark.parametrize("name", QUICK_METHODS)
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_every_method_gives_the_same_numbers_on_devices(name, family, play, make_data):
    truth, other, courier = both(name, family, play, make_data)
    assert_same_training(truth, other)
    assert_same_states(truth.server.memory, device_states(courier, other))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", QUICK_METHODS)
@pytest.mark.parametrize(
    "family", ["residual", pytest.param("language", marks=pytest.mark.slow)], indirect=True
)
def test_every_method_over_every_link_gives_the_same_numbers_on_devices(
    name, link, family, play, make_data
):
    truth, other, courier = both(name, family, play, make_data, link=LINKS[link])
    assert_same_training(truth, other)
    assert_same_states(truth.server.memory, device_states(courier, other))


@pytest.mark.parametrize("link", ["perfect", "everything"])
@pytest.mark.parametrize("name", RAFL)
def test_pairs_of_nets_give_the_same_numbers_on_devices(name, link, play, make_data):
    family = plain_pairs()
    data = make_data(family, RAGGED, labels=2, public=NUM_PUBLIC)
    fleet = fq.Fleet.of(limits(family), 6, cohort=5, dynamic=True)
    how = fq.Evaluation(training=True)
    options = {"fleet": fleet, "link": LINKS.get(link, fq.Link()), "evaluation": how}
    truth, other, courier = trained_both_ways(RAFL[name], family, data, play, **options)
    assert_same_training(truth, other)
    assert_same_states(truth.server.memory, device_states(courier, other))
    assert "training_private_accuracy" in other.metrics
    for metric, expected in truth.metrics.items():
        if metric.startswith(("local_", "training_")):
            assert other.metrics[metric] == pytest.approx(expected, abs=1e-9), metric
