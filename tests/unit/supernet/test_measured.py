"""Predictor and search against measured accuracies of a small supernet, trained on rotated digits.

Three disjoint sets of images are used: public images for the training and norm statistics, the
other training images to measure members for the predictor, and test images to compare members
afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from fedquilt.data.sources import digits
from fedquilt.supernet import (
    StageOptions,
    Supernet,
    SupernetData,
    SupernetTraining,
    TinySpace,
    rotations,
    train_supernet,
)
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.mobilenet import InvertedStage
from fedquilt.supernet.predictor import rank_correlation
from fedquilt.supernet.scoring import MeasuredAccuracy, Validation, fit_score
from fedquilt.supernet.search import Search, SearchOptions

pytestmark = pytest.mark.slow

NUM_MEASURED = 128
NUM_TRIED = 10  # members that are compared at each limit, of the search and of random draws
SEEDS = (0, 1, 2)  # of the draws
POOL = digits(public=0.6)


@dataclass(frozen=True)
class DigitsSpace(TinySpace):
    """17 million nets for 8×8 images: three stages of one to three blocks."""

    name = "digits"
    rows = (InvertedStage(8, 1, "relu"), InvertedStage(16, 2, "relu"), InvertedStage(24, 1, "relu"))
    options = (StageOptions((1, 2, 3), (2, 3, 4), (3, 5)),) * 3


@pytest.fixture(scope="module")
def supernet() -> Supernet:
    data = SupernetData.of_pool(POOL)
    settings = SupernetTraining(epochs=8, phase_epochs=4, lr=0.1, phase_lr=0.05)
    return train_supernet(data.fit(DigitsSpace()), data, settings)


@pytest.fixture(scope="module")
def measured(supernet: Supernet) -> MeasuredAccuracy:
    return _accuracy(supernet, POOL.inputs)


@pytest.fixture(scope="module")
def compared(supernet: Supernet) -> MeasuredAccuracy:
    return _accuracy(supernet, POOL.test_inputs)


def _accuracy(supernet: Supernet, stored: Tensor) -> MeasuredAccuracy:
    assert POOL.public is not None
    images, labels = rotations(stored.float())
    calibration, _ = rotations(POOL.public[:500].float())
    return MeasuredAccuracy(supernet, Validation(images, labels, calibration))


@pytest.fixture(scope="module")
def search(measured: MeasuredAccuracy) -> Search:
    meter = Meter(measured.supernet.space)
    return Search(meter, fit_score(Search(meter), measured, NUM_MEASURED), measure=measured)


def test_predicted_and_measured_accuracies_of_held_out_members_have_similar_ranks(
    search: Search, compared: MeasuredAccuracy
) -> None:
    fitted = set(search.sample(NUM_MEASURED))
    held_out = [
        config for config in search.sample(100 + NUM_MEASURED, seed=1) if config not in fitted
    ][:100]
    assert rank_correlation(search.score(held_out), [compared(config) for config in held_out]) > 0.6


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6])
def test_members_found_are_more_accurate_than_the_best_of_as_many_random_draws(
    search: Search, compared: MeasuredAccuracy, share: float
) -> None:
    low, high = (
        search.meter.cost(config).macs for config in (search.space.smallest, search.space.largest)
    )
    limits = Limits(macs=low + share * (high - low))
    found = search.top(limits, NUM_TRIED)
    best_drawn = []
    for seed in SEEDS:
        options = SearchOptions("random", tolerance=0.1, draws=100_000, seed=seed)
        drawn = search.with_options(options).top(limits, NUM_TRIED)
        assert len(found) == len(drawn) == NUM_TRIED
        best_drawn.append(max(compared(member.config) for member in drawn))
    assert max(compared(member.config) for member in found) > np.mean(best_drawn)


def test_members_with_fewer_multiply_adds_are_less_accurate(compared: MeasuredAccuracy) -> None:
    space = compared.supernet.space
    assert compared(space.largest) > compared(space.smallest) > 0.5
