"""Stitching ten ResNet-18 clients of mixed shares: slices against the boolean masks that published codes use.

    python bench/stitch.py

Prints CPU seconds (all threads together), the ratio, and the largest difference between the two results.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.round.merge import Mean
from fedquilt.terms import Client, Job, Payload, Server, Submodel, Update

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
REPEATS = 5


def masked_mean(family: fq.Family, server: Server, updates: list[Update]) -> dict[str, Tensor]:
    """The reference: a boolean mask a client and weight, indexed sums and counts."""
    merged = {}
    for name, old in server.weights.items():
        total, count = torch.zeros_like(old), torch.zeros_like(old)
        for update in updates:
            payload = update.sent[0]
            mask = torch.ones(old.shape, dtype=torch.bool)
            for dim, kept in enumerate(family.layout.positions(name, payload.submodel.index)):
                row = torch.zeros(old.shape[dim], dtype=torch.bool)
                row[kept.tensor] = True
                mask &= row.reshape([-1 if d == dim else 1 for d in range(old.dim())])
            total[mask] += payload.weights[name].flatten()
            count[mask] += 1
        touched = count > 0
        merged[name] = torch.where(touched, total / count.clamp(min=1), old)
    return merged


def sliced_mean(family: fq.Family, server: Server, updates: list[Update]) -> dict[str, Tensor]:
    fold = Mean(family.cutter).begin(server)
    for update in updates:
        fold.add(update)
    return dict(fold.finish(server)[0])


def cpu_seconds(work: Callable[[], object]) -> float:
    work()  # warm
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def main() -> None:
    family = fq.trace(lambda: fq.models.MODELS["preresnet18"].factory(num_classes=10), torch.zeros(2, 3, 32, 32))
    server = fq.methods.FedRolex().init(fq.World(family))
    torch.manual_seed(0)
    for method in (fq.methods.HeteroFL(), fq.methods.FedRolex()):
        updates = []
        for number in range(10):
            client = Client(number, fq.Budget(share=SHARES[number % 5]), 100)
            submodel: Submodel = method.plan(Server(7, {}), client, fq.World(family))[0]
            cut = family.cutter.gather(server.weights, submodel, list(server.weights))
            weights = {name: torch.randn_like(value) for name, value in cut.items()}
            updates.append(Update(Job(client, submodel, 7), (Payload(submodel, weights),), 1))
        # A window that wraps holds its channels out of order; masks know only ascending ones.
        if isinstance(method, fq.methods.HeteroFL):
            slow, fast = masked_mean(family, server, updates), sliced_mean(family, server, updates)
            worst = max(float((slow[name] - fast[name]).abs().max()) for name in slow)
            print(f"largest difference between the two: {worst:.1e}")
        masks = cpu_seconds(partial(masked_mean, family, server, updates))
        slices = cpu_seconds(partial(sliced_mean, family, server, updates))
        print(
            f"{type(method).__name__:9} ten PreResNet-18 clients of shares 1 … 1/16: masks {masks:.3f} s, "
            f"slices {slices:.3f} s of CPU, {masks / slices:.1f} times less"
        )
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
