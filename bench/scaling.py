"""How a round's time grows: with the clients in it, with the workers of a Ray cluster, with the
population.

    python bench/scaling.py [--clients 10 20 50 100 200] [--rounds 5]

The first is the setting of cluster.py, which is the second; the third is population.py. All with
one thread. Numbers of clients take turns round by round; medians, after two rounds that do not
count.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Sequence

import cluster
import population
import torch
from measure import machine

SAMPLES = 64  # a client


def cohorts(sizes: Sequence[int], rounds: int) -> None:
    """The table: rounds with ever more clients, in one stack a share."""
    runs = {size: cluster.prepare(size, SAMPLES) for size in sizes}
    wall: dict[int, list[float]] = {size: [] for size in sizes}
    cpu: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(cluster.WARM + rounds):
        for size, run in runs.items():
            began = time.process_time()
            wall[size].append(cluster.play(run))
            cpu[size].append(time.process_time() - began)
    print(f"{'clients':>10} {'round':>11} {'of CPU':>11} {'a client':>11}   {SAMPLES} images each")
    for size in sizes:
        seconds, busy = (statistics.median(taken[size][cluster.WARM :]) for taken in (wall, cpu))
        print(
            f"{size:>10,} {1e3 * seconds:>8.0f} ms {1e3 * busy:>8.0f} ms {1e3 * busy / size:>8.1f} "
            "ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=(10, 20, 50, 100, 200), help="a round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("--- clients a round")
    cohorts(asked.clients, asked.rounds)
    print("--- workers")
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: left out (pip install -e '.[ray]')")
    else:
        cluster.compare(rounds=asked.rounds, chunks=2)
    print("--- population")
    population.compare(population.POPULATIONS)
    print(machine())


if __name__ == "__main__":
    main()
