"""Stitching ten PreResNet-18 clients of mixed shares: slices, the index grids of released codes,
and boolean masks.

    python bench/stitch.py

Prints CPU seconds (all threads together), the ratios, and the largest difference between the
results. Threads that wait for others sleep, because on a busy machine a spinning one adds CPU
seconds without working.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it when torch is imported.

import published
import torch
from measure import SHARES, machine
from torch import Tensor

import fedquilt as fq
from fedquilt.hardware.process import keep_pages
from fedquilt.round.merge import Mean
from fedquilt.terms import Client, Job, Payload, Server, Submodel, Update

REPEATS = 5


def gridded_mean(family: fq.Family, server: Server, updates: list[Update]) -> dict[str, Tensor]:
    """As HeteroFL's and FedRolex's released codes have it: index tensors a client and weight, and
    counts.
    """
    weights = {name: value.clone() for name, value in server.weights.items()}
    payloads = [update.sent[0] for update in updates]
    indices = [
        {
            name: tuple(
                kept.tensor for kept in family.layout.positions(name, payload.submodel.index)[:2]
            )
            for name in weights
        }
        for payload in payloads
    ]
    everything = [torch.ones(family.num_classes, dtype=torch.bool)] * len(payloads)
    published.combine(weights, [payload.weights for payload in payloads], indices, everything)
    return weights


def masked_mean(family: fq.Family, server: Server, updates: list[Update]) -> dict[str, Tensor]:
    """A boolean mask a client and weight, indexed sums and counts."""
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
    keep_pages()  # as every run from a file or the command line has them
    family = fq.trace(
        lambda: fq.models.MODELS["preresnet18"].factory(num_classes=10), torch.zeros(2, 3, 32, 32)
    )
    server = fq.methods.FedRolex().init(fq.methods.api.World(family))
    torch.manual_seed(0)
    print(f"{'ten PreResNet-18 clients':<26}{'masks':>9}{'grids':>9}{'slices':>9}   of CPU")
    for method in (fq.methods.HeteroFL(), fq.methods.FedRolex()):
        updates = []
        for number in range(10):
            client = Client(number, fq.Budget(share=SHARES[number % 5]), 100)
            submodel: Submodel = method.plan(Server(7, {}), client, fq.methods.api.World(family))[0]
            cut = family.cutter.gather(server.weights, submodel, list(server.weights))
            weights = {name: torch.randn_like(value) for name, value in cut.items()}
            updates.append(Update(Job(client, submodel, 7), (Payload(submodel, weights),), 1))
        slow, fast = gridded_mean(family, server, updates), sliced_mean(family, server, updates)
        worst = max(float((slow[name] - fast[name]).abs().max()) for name in slow)
        means = (masked_mean, gridded_mean, sliced_mean)
        masks, grids, slices = (
            cpu_seconds(partial(mean, family, server, updates)) for mean in means
        )
        print(
            f"{type(method).__name__:<26}{masks:>7.3f} s{grids:>7.3f} s{slices:>7.3f} s   "
            f"{masks / slices:.0f} and {grids / slices:.0f} times less; results differ by "
            f"{worst:.0e}"
        )
    print(machine())


if __name__ == "__main__":
    main()
