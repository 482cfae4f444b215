"""Scores of a trained supernet's members: accuracies of some, measured, and of all others, predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedquilt.errors import DataError
from fedquilt.supernet.elastic import Supernet, recalibrate
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.predictor import Floats, Predictor
from fedquilt.supernet.search import Search
from fedquilt.supernet.space import Config

NUM_MEASURED = 128  # members on which a predictor is fitted

Measure = Callable[[Config], float]  # returns the accuracy of a member
Watch = Callable[[int, int], None]  # is called with the number of measured members and of all to be measured


@dataclass(frozen=True)
class Validation:
    """Labelled samples on which members of a supernet are measured.

    Labels are those of the task that the supernet was trained for: rotations, or the classes of a labelled pool.
    """

    inputs: Tensor  # (sample, channel, height, width)
    labels: Tensor  # (sample,)
    calibration: Tensor  # (sample, channel, height, width) samples on which norm statistics are measured

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or not len(self.inputs):
            raise DataError(
                f"members were to be measured on {len(self.inputs)} samples with {len(self.labels)} labels; every "
                "sample needs a label, and there must be some."
            )

    def accuracy(self, supernet: Supernet, config: Config, batch_size: int = 512) -> float:
        """Return the accuracy of a member with the supernet's weights, in [0, 1].

        Norm statistics are measured anew for the member, because those of the largest net are not its own.

        Args:
            supernet: Trained supernet.
            config: Configuration of the member.
            batch_size: Samples per forward pass. It has no effect on the result.
        """
        member = recalibrate(supernet.member(config), self.calibration).eval()
        return _accuracy(member, self.inputs, self.labels, batch_size)


@torch.no_grad()
def _accuracy(member: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int) -> float:
    batches = zip(torch.split(inputs, batch_size), torch.split(labels, batch_size), strict=True)
    right = sum(int((member(batch).argmax(1) == truth).sum()) for batch, truth in batches)
    return right / len(labels)


@dataclass(frozen=True)
class PredictedAccuracy:
    """A score for `Search`: the accuracy that a fitted predictor gives."""

    meter: Meter
    predictor: Predictor

    def __call__(self, configs: Sequence[Config]) -> Floats:
        """Return the predicted accuracies, (member,)."""
        return self.predictor.predict(features(self.meter, configs))


def features(meter: Meter, configs: Sequence[Config]) -> Floats:
    """Return what a predictor reads of configurations, (member, feature).

    These are the features of the space, and the logarithms of multiply-adds and parameters.
    """
    rows = []
    for config in configs:
        macs, params = meter.cost(config)
        rows.append([*meter.space.encode(config), math.log(macs), math.log(params)])
    return np.asarray(rows, dtype=np.float64)


def fit_score(
    search: Search, measure: Measure, num_measured: int = NUM_MEASURED, seed: int = 0, watch: Watch | None = None
) -> PredictedAccuracy:
    """Measure members of a space and fit a predictor on them.

    Args:
        search: Search in the space. Its score has no effect.
        measure: Function that returns the accuracy of a member, such as `Validation.accuracy` of a supernet.
        num_measured: Members to measure.
        seed: Random seed of the sample.
        watch: Is called after each member.
    """
    configs = search.sample(num_measured, seed)
    accuracies = []
    for done, config in enumerate(configs, start=1):
        accuracies.append(measure(config))
        if watch:
            watch(done, len(configs))
    return PredictedAccuracy(search.meter, Predictor.fit(features(search.meter, configs), accuracies))
