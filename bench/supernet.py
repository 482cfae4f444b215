"""How well members of a supernet are predicted and searched, and how much of a fleet's limits they
use.

    python bench/supernet.py [--supernet FILE --data NAME] [--labels rotations] [--measured 128]
    [--device cpu]

Without a file a small supernet is trained on rotated digits first, which takes some minutes on a
CPU. Three disjoint sets of images are used: images of the pre-training for norm statistics, others
to measure members for the search, and test images on which members are compared in the end. Prints

- Spearman's rank correlation of predicted and measured accuracy on 100 members that the predictor
  was not fitted on, and on 50 whose multiply-adds differ by less than 5 %;
- at three limits, the accuracy of the members that the search ranks highest, and of as many random
  draws with at least 90 % of the limit, for three seeds;
- the utilisation of fleets with the mean limits of RaFL's Table 3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from measure import machine
from torch import Tensor

from fedquilt.data import Pool
from fedquilt.data.sources import digits, source
from fedquilt.supernet import (
    SPACES,
    Config,
    StageOptions,
    Supernet,
    SupernetData,
    SupernetTraining,
    TinySpace,
    load_supernet,
    rotations,
    train_supernet,
)
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.mobilenet import InvertedStage
from fedquilt.supernet.predictor import rank_correlation
from fedquilt.supernet.scoring import (
    MAX_CALIBRATION,
    MAX_VALIDATION,
    MeasuredAccuracy,
    Validation,
    fit_score,
)
from fedquilt.supernet.search import Found, Search, SearchOptions
from fedquilt.supernet.service import SearchService

Labeled = tuple[Tensor, Tensor]  # stored images and their targets

NUM_HELD_OUT = 100  # members on which the predictor is tested
NUM_NEAR = 50  # members with multiply-adds that differ by less than `NEAR`
NEAR = 0.05
NUM_TRIED = 10  # members that are compared at each limit, of the search and of random draws
SEEDS = (0, 1, 2)  # of the random draws
PUBLIC = 0.6  # of the training images of digits, on which the supernet is trained
LIMITS = (0.3, 0.45, 0.6)  # between the multiply-adds of the smallest member, 0, and the largest, 1
TABLE_3 = (
    ("resnet50", 48.0e6),
    ("resnet50", 79.7e6),
    ("mobilenetv3", 13.6e6),
    ("mobilenetv3", 15.5e6),
)


@dataclass(frozen=True)
class DigitsSpace(TinySpace):
    """Some million nets for 8×8 images: three stages of one to three blocks."""

    name = "digits"
    rows = (InvertedStage(8, 1, "relu"), InvertedStage(16, 2, "relu"), InvertedStage(24, 1, "relu"))
    options = (StageOptions((1, 2, 3), (2, 3, 4), (3, 5)),) * 3


def trained(data: SupernetData) -> Supernet:
    """Train a small supernet on rotated digits."""
    began = time.perf_counter()
    settings = SupernetTraining(epochs=8, phase_epochs=4, lr=0.1, phase_lr=0.05)
    supernet = train_supernet(data.fit(DigitsSpace()), data, settings)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    return supernet.eval()


def unseen_images(pool: Pool, labels: str) -> tuple[Labeled, Labeled]:
    """Return images that the supernet was not trained on, to measure members and to compare them
    afterwards.

    A supernet trained on public images has seen neither the training nor the test images. Else the
    test images are halved.
    """
    is_public = labels == "rotations" and pool.public is not None
    if is_public:
        return (pool.inputs[:MAX_VALIDATION], pool.targets[:MAX_VALIDATION]), (
            pool.test_inputs,
            pool.test_targets,
        )
    half = len(pool.test_inputs) // 2
    parts = (slice(None, half), slice(half, None))
    first, second = ((pool.test_inputs[part], pool.test_targets[part]) for part in parts)
    return first, second


def validations(
    pool: Pool, labels: str, data: SupernetData, device: torch.device
) -> list[Validation]:
    """Return the images to measure members on and those to compare them on, with labels of the
    pre-training task.

    Norm statistics are measured on images that the supernet was trained on, so that no image has
    two purposes.
    """
    calibration, _ = data.batch(torch.arange(min(MAX_CALIBRATION, len(data.images))))
    sets = []
    for stored, targets in unseen_images(pool, labels):
        images = stored.float() if pool.scale is None else pool.scale(stored)
        if labels == "rotations":
            images, targets = rotations(images)
        sets.append(Validation(images.to(device), targets.to(device), calibration.to(device)))
    return sets


def near(search: Search, without: set[Config]) -> list[Config]:
    """Draw members whose multiply-adds differ by less than `NEAR`, in the middle of the range."""
    low, high = (
        search.meter.cost(config).macs for config in (search.space.smallest, search.space.largest)
    )
    limit = (low + high) / 2
    options = SearchOptions(strategy="random", tolerance=NEAR, draws=100_000, seed=2)
    members = search.with_options(options).top(Limits(macs=limit), NUM_NEAR + len(without))
    # they are ordered by their predicted accuracy
    shuffled = np.random.default_rng(0).permutation(len(members))
    configs = [members[place].config for place in shuffled]
    return [config for config in configs if config not in without][:NUM_NEAR]


def report_predictor(search: Search, accuracy: MeasuredAccuracy, num_measured: int) -> None:
    """Print rank correlations on members that the predictor was not fitted on."""
    fitted = set(search.sample(num_measured))
    drawn = search.sample(NUM_HELD_OUT + num_measured, seed=1)
    held_out = [config for config in drawn if config not in fitted][:NUM_HELD_OUT]
    groups = {"held out": held_out, f"multiply-adds within {NEAR:.0%}": near(search, fitted)}
    for title, configs in groups.items():
        measured = [accuracy(config) for config in configs]
        ranks = rank_correlation(search.score(configs), measured)
        macs = rank_correlation([search.meter.cost(config).macs for config in configs], measured)
        spread = f"accuracies {min(measured):.1%} to {max(measured):.1%}"
        print(
            f"{title}: {len(configs)} members, {spread}, rank correlation {ranks:.2f} (of "
            f"multiply-adds {macs:.2f})"
        )


def report_search(search: Search, compared: MeasuredAccuracy) -> None:
    """Print accuracies of searched and of random members at some limits, on images that the search
    has not used.
    """
    low, high = (
        search.meter.cost(config).macs for config in (search.space.smallest, search.space.largest)
    )
    for place in LIMITS:
        limits = Limits(macs=low + place * (high - low))
        print(f"limit {limits.macs:,.0f} multiply-adds, {NUM_TRIED} members each")
        began = time.perf_counter()
        found = search.top(limits, NUM_TRIED)
        print(
            f"  searched in {time.perf_counter() - began:.1f} s: {summary(found, search, compared)}"
        )
        for seed in SEEDS:
            options = SearchOptions(strategy="random", tolerance=0.1, draws=100_000, seed=seed)
            drawn = search.with_options(options).top(limits, NUM_TRIED)
            print(f"  random, seed {seed}: {summary(drawn, search, compared)}")


def summary(members: Sequence[Found], search: Search, compared: MeasuredAccuracy) -> str:
    """Return the best and the mean accuracy of members, and that of the one chosen by the search's
    own images.
    """
    assert search.measure is not None
    configs = [member.config for member in members]
    accuracies = [compared(config) for config in configs]
    chosen = compared(max(configs, key=search.measure))
    return (
        f"best {max(accuracies):.2%}, mean {np.mean(accuracies):.2%}, chosen by measurement "
        f"{chosen:.2%}"
    )


def report_utilization() -> None:
    """Print the utilisation of fleets whose limits are uniform within 25 % of Table 3's means."""
    for name, mean in TABLE_3:
        limits = np.random.default_rng(0).uniform(0.75 * mean, 1.25 * mean, 100)
        fleet = {Limits(macs=float(limit)): 1 for limit in limits}
        for strategy in ("evolution", "random"):
            service = SearchService(
                Search(Meter(SPACES[name]()), options=SearchOptions(strategy=strategy))
            )
            began = time.perf_counter()
            service.prepare(fleet)
            seconds = time.perf_counter() - began
            print(
                f"{name}, mean limit {mean / 1e6:g} M, {strategy}: {service.utilization(fleet)}; "
                f"{seconds:.1f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supernet", default="", help="supernet file of a built-in space")
    parser.add_argument(
        "--data",
        default="digits",
        help="data of the supernet, as `fedquilt supernet train` takes it",
    )
    parser.add_argument("--labels", default="rotations", choices=("rotations", "own"))
    parser.add_argument(
        "--measured", type=int, default=128, help="members on which the predictor is fitted"
    )
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    print(machine())

    pool = source(asked.data)() if asked.supernet else digits(PUBLIC)
    data = SupernetData.of_pool(pool, asked.labels)
    supernet = (
        load_supernet(asked.supernet, device=asked.device)
        if asked.supernet
        else trained(data).to(asked.device)
    )
    sets = validations(pool, asked.labels, data, torch.device(asked.device))
    measured, compared = (MeasuredAccuracy(supernet, images) for images in sets)
    space = supernet.space
    print(
        f"{space.name}: largest member {compared(space.largest):.2%}, smallest "
        f"{compared(space.smallest):.2%}"
    )

    plain = Search(Meter(space))
    search = Search(plain.meter, fit_score(plain, measured, asked.measured), measure=measured)
    report_predictor(search, compared, asked.measured)
    report_search(search, compared)
    report_utilization()


if __name__ == "__main__":
    main()
