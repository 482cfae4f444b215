"""Predictor and search against measured accuracies of a small supernet, trained on rotated digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedquilt.data.sources import digits
from fedquilt.supernet import SPACES, Config, Supernet, SupernetData, SupernetTraining, rotations, train_supernet
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.predictor import rank_correlation
from fedquilt.supernet.scoring import Validation, fit_score
from fedquilt.supernet.search import Options, Search

pytestmark = pytest.mark.slow

NUM_MEASURED = 100
TRIED = 5  # members that are measured at each limit, of the search and of random draws


@pytest.fixture(scope="module")
def supernet() -> Supernet:
    data = SupernetData.of_pool(digits())
    settings = SupernetTraining(epochs=6, phase_epochs=3, batch_size=256, lr=0.1, phase_lr=0.05)
    return train_supernet(data.fit(SPACES["tiny"]()), data, settings)


@pytest.fixture(scope="module")
def accuracy(supernet: Supernet) -> Accuracy:
    return Accuracy(supernet)


class Accuracy:
    """Accuracies on rotated test images, each measured once."""

    def __init__(self, supernet: Supernet) -> None:
        pool = digits()
        images, labels = rotations(pool.test_inputs.float())
        calibration, _ = rotations(pool.inputs[:250].float())
        self.space = supernet.space
        self._supernet = supernet
        self._validation = Validation(images, labels, calibration)
        self._known: dict[Config, float] = {}

    def __call__(self, config: Config) -> float:
        if config not in self._known:
            self._known[config] = self._validation.accuracy(self._supernet, config)
        return self._known[config]


@pytest.fixture(scope="module")
def search(accuracy: Accuracy) -> Search:
    plain = Search(Meter(accuracy.space))
    return Search(plain.meter, fit_score(plain, accuracy, NUM_MEASURED))


def test_predicted_and_measured_accuracies_of_held_out_members_have_similar_ranks(
    search: Search, accuracy: Accuracy
) -> None:
    fitted = set(search.sample(NUM_MEASURED))
    held_out = [config for config in search.sample(300, seed=1) if config not in fitted][:100]
    assert len(held_out) == 100
    measured = [accuracy(config) for config in held_out]
    assert rank_correlation(search.score(held_out), measured) > 0.6


def test_members_found_are_more_accurate_than_the_best_of_as_many_random_draws(
    search: Search, accuracy: Accuracy
) -> None:
    largest = search.meter.cost(accuracy.space.largest).macs
    gains = []
    for share in (0.4, 0.5, 0.7):
        limits = Limits(macs=share * largest)
        found = [accuracy(member.config) for member in search.top(limits, TRIED)]
        random = search.with_options(Options(strategy="random", tolerance=0.1, seed=1))
        drawn = [accuracy(member.config) for member in random.top(limits, TRIED)]
        assert len(found) == len(drawn) == TRIED
        gains.append(max(found) - max(drawn))
    assert min(gains) >= 0
    assert np.mean(gains) > 0


def test_members_with_fewer_multiply_adds_are_less_accurate(supernet: Supernet, accuracy: Accuracy) -> None:
    torch.manual_seed(0)
    assert accuracy(accuracy.space.largest) > accuracy(accuracy.space.smallest) > 0.5
