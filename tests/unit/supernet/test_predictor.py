"""The predictor of accuracy and its rank correlation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fedquilt.errors import ConfigError, DataError
from fedquilt.supernet import SPACES, MemberCost, TinySpace
from fedquilt.supernet.elastic import Supernet
from fedquilt.supernet.images import SupernetData
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.predictor import PENALTIES, Predictor, rank_correlation
from fedquilt.supernet.scoring import (
    MeasuredMember,
    Validation,
    accuracy_by_size,
    features,
    fit_score,
)
from fedquilt.supernet.search import Search

RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(60, 5)) * [1, 10, 0.1, 1, 1] + 3
TARGETS = FEATURES @ [0.2, -0.01, 3.0, 0.0, 0.1] + RANDOM.normal(size=60) * 0.05


def test_the_regression_is_scikit_learns() -> None:
    predictor = Predictor.fit(FEATURES, TARGETS.tolist())
    standardized = (FEATURES - FEATURES.mean(0)) / FEATURES.std(0)
    reference = Ridge(alpha=predictor.penalty).fit(standardized, TARGETS)
    assert predictor.predict(FEATURES) == pytest.approx(reference.predict(standardized))


def test_the_penalty_has_the_smallest_leave_one_out_error() -> None:
    predictor = Predictor.fit(FEATURES, TARGETS.tolist())
    standardized = (FEATURES - FEATURES.mean(0)) / FEATURES.std(0)

    def error(penalty: float) -> float:
        residuals = []
        for left_out in range(60):
            rows = np.arange(60) != left_out
            # The closed form keeps the penalty and the scale of all samples, so the reference does
            # too.
            reference = Ridge(alpha=penalty).fit(standardized[rows], TARGETS[rows])
            residuals.append(
                TARGETS[left_out] - reference.predict(standardized[left_out : left_out + 1])[0]
            )
        return float(np.sqrt(np.mean(np.square(residuals))))

    errors = {penalty: error(penalty) for penalty in PENALTIES}
    assert predictor.penalty == min(errors, key=errors.__getitem__)
    assert predictor.error == pytest.approx(errors[predictor.penalty], rel=1e-6)


def test_a_constant_feature_has_no_effect() -> None:
    constant = np.concatenate([FEATURES, np.ones((60, 1))], axis=1)
    plain, more = (
        Predictor.fit(FEATURES, TARGETS.tolist()),
        Predictor.fit(constant, TARGETS.tolist()),
    )
    assert more.predict(constant) == pytest.approx(plain.predict(FEATURES))


def test_a_few_measured_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 measured members; at least 8"):
        Predictor.fit(FEATURES[:3], TARGETS[:3].tolist())


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == 1
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    # Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5.
    assert rank_correlation([0, 5, 5, 9], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert np.isnan(rank_correlation([1, 1], [1, 2]))


def test_a_score_ranks_members_by_measured_accuracy() -> None:
    space = SPACES["tiny"]()
    meter = Meter(space)
    search = Search(meter)

    def measure(config: object) -> float:
        return 0.1 * config.kernels[0] + 0.01 * config.expansions[2]  # type: ignore[attr-defined]

    counts: list[int] = []
    score = fit_score(
        search, measure, num_measured=60, watch=lambda done, total: counts.append(done)
    )
    held_out = search.sample(40, seed=9)
    assert rank_correlation(score(held_out), [measure(config) for config in held_out]) > 0.95
    assert counts == list(range(1, 61))
    assert features(meter, held_out).shape == (40, len(space.choices) + 2)


def test_accuracy_is_measured_with_the_members_own_statistics() -> None:
    supernet = Supernet(SPACES["tiny"](), seed=0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 1, 8, 8, generator=generator)
    config = supernet.space.smallest
    member = supernet.member(config).train()
    # a batch that is all of the samples: its statistics are the measured ones
    labels = member(inputs).argmax(1)
    with pytest.raises(DataError, match="64 images with 3 labels"):
        Validation(inputs, labels[:3], inputs)
    validation = Validation(inputs, labels, inputs)
    assert validation.accuracy(supernet, config) > 0.9


def test_validation_images_are_not_those_of_the_calibration() -> None:
    images = torch.arange(20.0)[:, None, None, None].expand(20, 1, 2, 2)
    validation = Validation.of(SupernetData(images.clone()))
    assert sorted(set(validation.images.flatten().tolist())) == [16, 17, 18, 19]
    assert len(validation.images) == len(validation.labels) == 16  # four rotations of each
    assert set(validation.calibration.flatten().tolist()) == set(range(16))


def test_accuracies_by_size_are_means_over_quarters_of_the_range() -> None:
    """Multiply-adds 100 to 200: quarters begin at 125, 150 and 175. The second has no member."""
    config = TinySpace().smallest
    sizes = {100: 0.25, 124: 0.35, 150: 0.5, 175: 0.6, 200: 0.8}
    members = [
        MeasuredMember(config, MemberCost(macs, 1), accuracy) for macs, accuracy in sizes.items()
    ]
    assert accuracy_by_size(members) == pytest.approx(
        {"smallest": 0.25, "quarter1": 0.3, "quarter3": 0.5, "quarter4": 0.7, "largest": 0.8}
    )
