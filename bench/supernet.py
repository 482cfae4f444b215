"""How well members of a supernet are predicted and searched, and how much of a fleet's limits they use.

    python bench/supernet.py [--supernet FILE --data NAME] [--labels rotations] [--measured 128] [--device cpu]

Without a file a small supernet is trained on rotated digits first, which takes some minutes on a CPU. Accuracy is
measured on the test images of the data, and norm statistics on training or public images. Prints

- Spearman's rank correlation of predicted and measured accuracy on 100 members that the predictor was not fitted on,
  and on 50 whose multiply-adds differ by less than 5 %;
- at three limits, the best measured accuracy of the members that the search ranks highest, and of as many random draws;
- the utilisation of fleets with the mean limits of RaFL's Table 3.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from measure import machine

from fedquilt.data.sources import source
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
from fedquilt.supernet.scoring import MAX_CALIBRATION, Validation, fit_score
from fedquilt.supernet.search import Options, Search
from fedquilt.supernet.service import SearchService

NUM_HELD_OUT = 100  # members on which the predictor is tested
NUM_NEAR = 50  # members with multiply-adds that differ by less than `NEAR`
NEAR = 0.05
NUM_TRIED = 10  # members that are measured at each limit, of the search and of random draws
LIMITS = (0.3, 0.45, 0.6)  # between the multiply-adds of the smallest member, 0, and the largest, 1
TABLE_3 = (("resnet50", 48.0e6), ("resnet50", 79.7e6), ("mobilenetv3", 13.6e6), ("mobilenetv3", 15.5e6))


@dataclass(frozen=True)
class DigitsSpace(TinySpace):
    """Some million nets for 8×8 images: three stages of one to three blocks."""

    name = "digits"
    rows = (InvertedStage(8, 1, "relu"), InvertedStage(16, 2, "relu"), InvertedStage(24, 1, "relu"))
    options = (StageOptions((1, 2, 3), (2, 3, 4), (3, 5)),) * 3


class Accuracy:
    """Measured accuracies of members, each measured once."""

    def __init__(self, supernet: Supernet, validation: Validation) -> None:
        self._supernet = supernet
        self._validation = validation
        self._known: dict[Config, float] = {}

    def __call__(self, config: Config) -> float:
        if config not in self._known:
            self._known[config] = self._validation.accuracy(self._supernet, config)
        return self._known[config]


def trained(data: SupernetData) -> Supernet:
    """Train a small supernet on rotated digits."""
    began = time.perf_counter()
    settings = SupernetTraining(epochs=8, phase_epochs=4, lr=0.1, phase_lr=0.05)
    supernet = train_supernet(data.fit(DigitsSpace()), data, settings)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    return supernet.eval()


def validation(name: str, labels: str, data: SupernetData, device: torch.device) -> Validation:
    """Return the test images of a data set with the labels of the pre-training task."""
    pool = source(name)()
    images = pool.test_inputs.float() if pool.scale is None else pool.scale(pool.test_inputs)
    targets = pool.test_targets
    if labels == "rotations":
        images, targets = rotations(images)
    calibration, _ = data.batch(torch.arange(min(MAX_CALIBRATION, len(data.images))))
    return Validation(images.to(device), targets.to(device), calibration.to(device))


def near(search: Search, without: set[Config]) -> list[Config]:
    """Draw members whose multiply-adds differ by less than `NEAR`, in the middle of the range."""
    low, high = (search.meter.cost(config).macs for config in (search.space.smallest, search.space.largest))
    limit = (low + high) / 2
    options = Options(strategy="random", tolerance=NEAR, draws=100_000, seed=2)
    members = search.with_options(options).top(Limits(macs=limit), NUM_NEAR + len(without))
    shuffled = np.random.default_rng(0).permutation(len(members))  # they are ordered by their predicted accuracy
    configs = [members[place].config for place in shuffled]
    return [config for config in configs if config not in without][:NUM_NEAR]


def report_predictor(search: Search, accuracy: Accuracy, num_measured: int) -> None:
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
        print(f"{title}: {len(configs)} members, {spread}, rank correlation {ranks:.2f} (of multiply-adds {macs:.2f})")


def report_search(search: Search, accuracy: Accuracy) -> None:
    """Print measured accuracies of searched and of random members at some limits."""
    low, high = (search.meter.cost(config).macs for config in (search.space.smallest, search.space.largest))
    for place in LIMITS:
        limits = Limits(macs=low + place * (high - low))
        began = time.perf_counter()
        found = [accuracy(member.config) for member in search.top(limits, NUM_TRIED)]
        seconds = time.perf_counter() - began
        options = Options(strategy="random", tolerance=0.1, draws=100_000, seed=1)
        drawn = [accuracy(member.config) for member in search.with_options(options).top(limits, NUM_TRIED)]
        print(
            f"limit {limits.macs:,.0f} multiply-adds, best of {NUM_TRIED}: searched {max(found):.2%}, random "
            f"{max(drawn):.2%}; means {np.mean(found):.2%} and {np.mean(drawn):.2%}; {seconds:.1f} s"
        )


def report_utilization() -> None:
    """Print the utilisation of fleets whose limits are uniform within 25 % of Table 3's means."""
    for name, mean in TABLE_3:
        limits = np.random.default_rng(0).uniform(0.75 * mean, 1.25 * mean, 100)
        fleet = {Limits(macs=float(limit)): 1 for limit in limits}
        for strategy in ("evolution", "random"):
            service = SearchService(Search(Meter(SPACES[name]()), options=Options(strategy=strategy)))
            began = time.perf_counter()
            service.prepare(fleet)
            seconds = time.perf_counter() - began
            print(f"{name}, mean limit {mean / 1e6:g} M, {strategy}: {service.utilization(fleet)}; {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supernet", default="", help="supernet file of a built-in space")
    parser.add_argument("--data", default="digits", help="data of the supernet, as `fedquilt supernet train` takes it")
    parser.add_argument("--labels", default="rotations", choices=("rotations", "own"))
    parser.add_argument("--measured", type=int, default=128, help="members on which the predictor is fitted")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    print(machine())

    data = SupernetData.of_pool(source(asked.data)(), asked.labels)
    supernet = load_supernet(asked.supernet, device=asked.device) if asked.supernet else trained(data).to(asked.device)
    accuracy = Accuracy(supernet, validation(asked.data, asked.labels, data, torch.device(asked.device)))
    space = supernet.space
    print(f"{space.name}: largest member {accuracy(space.largest):.2%}, smallest {accuracy(space.smallest):.2%}")

    plain = Search(Meter(space))
    search = Search(plain.meter, fit_score(plain, accuracy, asked.measured))
    report_predictor(search, accuracy, asked.measured)
    report_search(search, accuracy)
    report_utilization()


if __name__ == "__main__":
    main()
