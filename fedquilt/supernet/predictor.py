"""A predictor of members' accuracy, fitted on a sample of members that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import ConfigError

Floats = NDArray[np.float64]
# on squared coefficients of standardized features
PENALTIES = tuple(10.0**power for power in range(-3, 5))
MIN_MEASURED = 8  # Members to fit on, at least. With fewer the choice of a penalty is random.


@dataclass(frozen=True, eq=False)
class Predictor:
    """A ridge regression of accuracy on the features of a configuration.

    Features are standardized. The penalty is the one of `PENALTIES` with the smallest leave-one-out
    error. A ridge regression has this error in closed form, so that fitting takes milliseconds and
    needs neither a random seed nor a split.
    """

    mean: Floats  # (feature,) Mean of each feature.
    scale: Floats  # (feature,) Standard deviation of each feature, or 1 for a constant feature.
    coefficients: Floats  # (feature,) Coefficients of the standardized features.
    intercept: float  # Mean of the measured accuracies.
    penalty: float  # Chosen penalty on squared coefficients.
    error: float  # Leave-one-out root mean square error, in the unit of the accuracies.

    @staticmethod
    def fit(features: Floats, accuracies: Sequence[float]) -> Predictor:
        """Fit the regression, with the penalty that has the smallest leave-one-out error.

        Args:
            features: Features of the measured members, (member, feature).
            accuracies: Their measured accuracies, in the same order.

        Raises:
            ConfigError: Fewer than `MIN_MEASURED` members were measured.
        """
        targets = np.asarray(accuracies, dtype=np.float64)
        if len(targets) < MIN_MEASURED:
            raise ConfigError(
                f"a predictor was to be fitted on {len(targets)} measured members; at least "
                f"{MIN_MEASURED} are needed."
            )
        mean = features.mean(axis=0)
        scale = features.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)  # a feature that all members share has no effect
        left_vectors, values, right_vectors = np.linalg.svd(
            (features - mean) / scale, full_matrices=False
        )
        intercept = float(targets.mean())
        projected = left_vectors.T @ (targets - intercept)

        best: tuple[float, float, Floats] | None = None
        for penalty in PENALTIES:
            shrinkage = values**2 / (values**2 + penalty)
            residuals = targets - intercept - left_vectors @ (shrinkage * projected)
            leverage = (left_vectors**2 @ shrinkage) + 1 / len(targets)
            error = float(np.sqrt(np.mean((residuals / np.maximum(1 - leverage, 1e-9)) ** 2)))
            if best is None or error < best[0]:
                best = (
                    error,
                    penalty,
                    right_vectors.T @ (values / (values**2 + penalty) * projected),
                )
        assert best is not None
        error, penalty, coefficients = best
        return Predictor(mean, scale, coefficients, intercept, penalty, error)

    def predict(self, features: Floats) -> Floats:
        """Return the predicted accuracies, (member,).

        Args:
            features: Features of members, (member, feature), before they are standardized.
        """
        predicted: Floats = (features - self.mean) / self.scale @ self.coefficients + self.intercept
        return predicted


def rank_correlation(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Return Spearman's rank correlation of two sequences, or NaN if one is constant.

    Equal values have their mean rank.
    """
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    centered = [values - values.mean() for values in ranks]
    norm = float(np.sqrt((centered[0] ** 2).sum() * (centered[1] ** 2).sum()))
    return float((centered[0] * centered[1]).sum() / norm) if norm > 0 else float("nan")


def _ranks(values: Floats) -> Floats:
    _, rank_index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[rank_index]
    return ranks
