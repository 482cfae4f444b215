"""Scores of a trained supernet's members: measured accuracies of some, predicted ones of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import DataError
from fedquilt.supernet.blocks import MemberCost
from fedquilt.supernet.elastic import Supernet
from fedquilt.supernet.evaluate import member_accuracy
from fedquilt.supernet.images import SupernetData
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.predictor import Floats, Predictor
from fedquilt.supernet.search import Measure, Search
from fedquilt.supernet.space import Config

NUM_MEASURED = 128  # Members on which a predictor is fitted.
MAX_VALIDATION = 2_000  # Images on which accuracy is measured. Rotation gives four samples of each.
# Images on which norm statistics are measured. Rotation gives four samples of each.
MAX_CALIBRATION = 500
# is called with the number of measured members and of all to be measured
Watch = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Validation:
    """Labelled images on which members of a supernet are evaluated.

    Labels are those of the pre-training task: rotations, or the classes of a labelled pool.
    """

    images: Tensor  # (sample, channel, height, width)
    labels: Tensor  # (sample,)
    # (sample, channel, height, width) Images on which norm statistics are measured.
    calibration: Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.images):
            raise DataError(
                f"members were to be measured on {len(self.images)} images with "
                f"{len(self.labels)} labels; every image needs a label, and there must be some."
            )

    @staticmethod
    def of(data: SupernetData) -> Validation:
        """Split images: the last fifth is for validation, the others are for norm statistics.

        At most `MAX_VALIDATION` and `MAX_CALIBRATION` images are used. The supernet should not have
        been trained on these images. Else members are compared by their training accuracy.

        Args:
            data: Images, with labels or to be rotated.
        """
        held_back = max(1, len(data.images) // 5)
        rows = torch.arange(len(data.images))
        images, labels = data.batch(rows[-held_back:][:MAX_VALIDATION])
        calibration, _ = data.batch(rows[:-held_back][:MAX_CALIBRATION])
        return Validation(images, labels, calibration)

    def to(self, device: torch.device) -> Validation:
        """Return a copy whose images and labels are on a device."""
        return Validation(
            self.images.to(device), self.labels.to(device), self.calibration.to(device)
        )

    def accuracy(self, supernet: Supernet, config: Config) -> float:
        """Return the accuracy of a member on the validation images, in [0, 1].

        The member has the supernet's weights. Its norm statistics are measured on `calibration`.

        Args:
            supernet: A trained supernet, on the device of the images.
            config: Configuration of the member.
        """
        return member_accuracy(supernet, config, self.calibration, self.images, self.labels)


class MeasuredAccuracy:
    """Accuracies of a supernet's members on validation images, each measured once."""

    def __init__(self, supernet: Supernet, validation: Validation) -> None:
        self.supernet = supernet
        self.validation = validation
        self._accuracies: dict[Config, float] = {}

    def __call__(self, config: Config) -> float:
        """Return the accuracy of a member, in [0, 1]. It is measured once, and then cached."""
        if config not in self._accuracies:
            self._accuracies[config] = self.validation.accuracy(self.supernet, config)
        return self._accuracies[config]


@dataclass(frozen=True)
class MeasuredMember:
    """A member of a supernet, and its measured accuracy."""

    config: Config  # Choices of the member.
    costs: MemberCost  # Multiply-adds and parameters.
    accuracy: float  # Measured accuracy, in [0, 1].


def measured_members(
    supernet: Supernet,
    validation: Validation,
    count: int = 32,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[MeasuredMember]:
    """Measure the accuracy of members of different sizes, including the smallest and the largest.

    Args:
        supernet: A trained supernet.
        validation: Images on its device.
        count: Members to measure. A space with fewer has all of them measured.
        seed: Random seed of the sample.
        watch: Function that is called after each member. None: no calls.

    Returns:
        The members, in ascending order of multiply-adds.
    """
    space = supernet.space
    sampled = Search(Meter(space)).sample(count, seed)
    configs = list(dict.fromkeys([space.smallest, space.largest, *sampled]))[:count]
    members = []
    for done, config in enumerate(configs, start=1):
        members.append(
            MeasuredMember(config, space.cost(config), validation.accuracy(supernet, config))
        )
        if watch:
            watch(done, len(configs))
    return sorted(members, key=lambda member: member.costs.macs)


def accuracy_by_size(members: Sequence[MeasuredMember]) -> dict[str, float]:
    """Return the accuracies of the smallest and the largest member, and means by quarter.

    `quarter1` to `quarter4` are the quarters of the range of multiply-adds, the smallest first. A
    quarter without members is left out.

    Args:
        members: Two members or more, in ascending order of multiply-adds.
    """
    low, high = members[0].costs.macs, members[-1].costs.macs
    quarters: dict[str, list[float]] = {f"quarter{number}": [] for number in (1, 2, 3, 4)}
    for member in members:
        position = (member.costs.macs - low) / max(1, high - low)
        quarters[f"quarter{min(3, int(4 * position)) + 1}"].append(member.accuracy)
    means = {name: float(np.mean(found)) for name, found in quarters.items() if found}
    return {"smallest": members[0].accuracy, **means, "largest": members[-1].accuracy}


@dataclass(frozen=True)
class PredictedAccuracy:
    """A score for `Search`: the accuracy that a fitted predictor gives."""

    meter: Meter  # Counter of costs.
    predictor: Predictor  # Predictor that was fitted on measured members.

    def __call__(self, configs: Sequence[Config]) -> Floats:
        """Return the predicted accuracies of configurations, (member,), without running a net."""
        return self.predictor.predict(features(self.meter, configs))


def features(meter: Meter, configs: Sequence[Config]) -> Floats:
    """Return the inputs of a predictor, (member, feature).

    These are the features of the space, and the natural logarithms of multiply-adds and parameters.

    Args:
        meter: Counter of costs.
        configs: Configurations, one for each member.
    """
    rows = []
    for config in configs:
        macs, params = meter.cost(config)
        rows.append([*meter.space.encode(config), math.log(macs), math.log(params)])
    return np.asarray(rows, dtype=np.float64)


def fit_score(
    search: Search,
    measure: Measure,
    num_measured: int = NUM_MEASURED,
    seed: int = 0,
    watch: Watch | None = None,
) -> PredictedAccuracy:
    """Measure members of a space, fit a predictor on them, and return it as a score for `Search`.

    Args:
        search: Search in the space, which draws the members. Its score has no effect.
        measure: Function that returns the accuracy of a member, such as `MeasuredAccuracy` of a
            supernet.
        num_measured: Members to measure.
        seed: Random seed of the sample.
        watch: Function that is called after each member. None: no calls.
    """
    configs = search.sample(num_measured, seed)
    accuracies = []
    for done, config in enumerate(configs, start=1):
        accuracies.append(measure(config))
        if watch:
            watch(done, len(configs))
    return PredictedAccuracy(
        search.meter, Predictor.fit(features(search.meter, configs), accuracies)
    )
