"""Inference time on a CPU: the nets of RaFL's presets beside ResNet-18 and -34.

    python bench/inference.py [--threads 1] [--batch 1] [--repeats 41]

The nets are the knowledge net and the private nets that `rafl/figure2` (space resnet50) and
`rafl/figure2-mobilenet` (space mobilenetv3) search for their limits. ResNets have the stem of
ImageNet. All nets have 10 classes and take images of 32×32. They take turns. Prints the costs and
the number of convolutions and linear layers of each net, the median ms of a batch, and the medians
of its ratios to both ResNets in the same turn. Weights are untrained, because nothing here depends
on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import NUM_CLASSES, images, machine
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import Pool
from fedquilt.fleets.presets import FlopLimited
from fedquilt.models import MODELS
from fedquilt.studies.papers import parsed_preset
from fedquilt.supernet.model import SearchedModel
from fedquilt.supernet.nets import KNOWLEDGE

SHAPE = (3, 32, 32)
# Presets, and the row that has searched nets.
PRESETS = {"rafl/figure2": "RaFL (a)", "rafl/figure2-mobilenet": "RaFL (b), public data"}
BASELINES = {"ResNet-18": "resnet18", "ResNet-34": "resnet34"}


@dataclass(frozen=True)
class Net:
    """A net, and its costs."""

    module: nn.Module
    macs: int  # Multiply-adds of a sample
    params: int

    @property
    def layers(self) -> int:
        """Return the number of convolutions and linear layers."""
        modules = self.module.modules()
        return sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in modules)


@dataclass(frozen=True)
class Timed:
    """Time of a net for a batch, in every turn."""

    milliseconds: Sequence[float]  # (turn,)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def ratio(self, other: Timed) -> float:
        """Return the median over turns of this net's time divided by that of another."""
        return statistics.median(
            own / their for own, their in zip(self.milliseconds, other.milliseconds, strict=True)
        )


def searched(pool: Pool, settings: Mapping[str, Any]) -> dict[str, Net]:
    """Search the nets of a preset's row, and build them with fresh weights, by their names."""
    model, fleet = dict(settings["model"]), settings["fleet"]
    budgets = dict(fleet["budgets"])
    assert (model.pop("name"), budgets.pop("name")) == ("searched", "flop_limited")
    devices = fq.Fleet.of(FlopLimited(**budgets), fleet["clients"], cohort=fleet["cohort"])
    found = SearchedModel(**model).search(pool, devices.counts, account="private")
    costs = {KNOWLEDGE: found.knowledge.costs}
    costs |= {name: member.costs for name, member in found.private.items()}
    nets = {}
    for name, factory in found.nets.items():
        assert not isinstance(factory, nn.Module), "nets without a supernet are functions"
        nets[name] = Net(factory(), costs[name].macs, costs[name].params)
    return nets


def baseline(name: str, pool: Pool) -> Net:
    """Build a ResNet with the stem of ImageNet, by its name in `fedquilt list models`."""
    factory = partial(MODELS[name].factory, num_classes=NUM_CLASSES, stem="imagenet")
    family = fq.trace(factory, pool.example)
    cost = family.cost(family.whole)
    return Net(factory(), cost.macs, cost.params)


def timed(nets: Mapping[str, Net], batch: Tensor, repeats: int) -> dict[str, Timed]:
    """Time every net on a batch, `repeats` times in turn after a turn that warms up."""
    times: dict[str, list[float]] = {name: [] for name in nets}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for name, net in nets.items():
                began = time.perf_counter()
                net.module.eval()(batch)
                if turn:  # the first warms up
                    times[name].append(1e3 * (time.perf_counter() - began))
    return {name: Timed(milliseconds) for name, milliseconds in times.items()}


def report(nets: Mapping[str, Net], times: Mapping[str, Timed]) -> None:
    """Print a line for each net, with its ratios to the baselines."""
    width = max(map(len, nets)) + 2
    print(
        f"{'net':<{width}}{'multiply-adds, M':>18}{'parameters':>13}{'layers':>8}{'ms':>9}"
        + "".join(f"{f'/ {name}':>13}" for name in BASELINES)
    )
    for name, net in nets.items():
        ratios = "".join(f"{times[name].ratio(times[other]):>13.2f}" for other in BASELINES)
        print(
            f"{name:<{width}}{net.macs / 1e6:>18.2f}{net.params:>13,}{net.layers:>8}"
            f"{times[name].median:>9.2f}{ratios}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1, help="images in a forward pass")
    parser.add_argument("--repeats", type=int, default=41, help="turns, whose median is printed")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    pool = Pool.of(images(64, *SHAPE), images(32, *SHAPE, seed=1))
    nets = {name: baseline(model, pool) for name, model in BASELINES.items()}
    for preset, row in PRESETS.items():
        settings = dict(parsed_preset(preset).rows_at("full"))[row]
        space = settings["model"]["space"]
        nets |= {f"{space}, {name}": net for name, net in searched(pool, settings).items()}
    batch = torch.randn(asked.batch, *SHAPE, generator=torch.Generator().manual_seed(0))
    report(nets, timed(nets, batch, asked.repeats))
    print(f"batches of {asked.batch}; {machine()}")


if __name__ == "__main__":
    main()
