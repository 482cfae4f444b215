"""What a large population costs: start, resident memory and time per round, for 2,000 and 342,477
clients.

    python bench/population.py
    python bench/population.py --clients 2000 100000 --sample 50 --rounds 30 --available diurnal

342,477 is the number of users of Stack Overflow's federated data set. Each population is measured
in a process of its own: `start` is from its begin to a run that is ready (imports, data, dealing,
tracing), `memory` the most that was resident at any time, `round` the median over rounds after the
first three, each evaluated, in seconds and in seconds of CPU, which other work on the machine
disturbs less; the ratio is that of the latter.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from measure import images, machine

POPULATIONS = (2_000, 342_477)
SAMPLES = (2, 8)  # a client has at least and at most


def measure(
    num_clients: int, sample: int, rounds: int, engine: str, available: str
) -> dict[str, float]:
    """One population, in this process."""
    began = time.perf_counter()
    import torch
    from torch import nn

    import fedquilt as fq
    from fedquilt.data.parts import Parts
    from fedquilt.fleets.fleet import Devices

    torch.set_num_threads(1)  # tiny tensors: more threads would wait for each other
    low, high = SAMPLES
    sizes = torch.randint(low, high + 1, (num_clients,), generator=torch.Generator().manual_seed(0))
    count = int(sizes.sum())
    pool, tests = images(count, 1, 8, 8), images(1_000, 1, 8, 8, seed=1)
    data = fq.FederatedData.of(pool, tests, Parts.split(torch.arange(count), sizes))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    family = fq.trace(net, data.example)
    fleet = Devices(cohort=sample, availability=available).fleet(num_clients)
    run = fq.prepare(fq.methods.HeteroFL(), family, data, fleet, engine)
    start = time.perf_counter() - began
    clock = [time.process_time()]
    run.train(rounds, lambda record: clock.append(time.process_time()))
    seconds, cpu = [record.seconds for record in run.records], [b - a for a, b in pairwise(clock)]
    return {
        "clients": num_clients,
        "start": start,
        "memory": resident(),
        "round": statistics.median(seconds[3:] or seconds),
        "cpu": statistics.median(cpu[3:] or cpu),
    }


def resident() -> int:
    """The most bytes this process had in memory. `ru_maxrss` would count those of its parent, from
    before the exec.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "Linux tells it"
    return int(found[1]) * 1024


def compare(populations: Sequence[int], options: Sequence[str] = ()) -> None:
    """The table: every population in a process of its own."""
    found = []
    print(f"{'clients':>10} {'start':>9} {'memory':>10} {'round':>11} {'of CPU':>11}")
    for population in populations:
        command = [sys.executable, __file__, "--child", f"--clients={population}", *options]
        began = time.perf_counter()
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        one = json.loads(answer.splitlines()[-1])
        found.append(one)
        print(
            f"{population:>10,} {one['start']:>7.1f} s {one['memory'] / 1e6:>7,.0f} MB "
            f"{1e3 * one['round']:>8.1f} ms"
            f" {1e3 * one['cpu']:>8.1f} ms   {time.perf_counter() - began:.1f} s in all",
            flush=True,
        )
    ratio = found[-1]["cpu"] / found[0]["cpu"]
    print(
        f"time per round, {populations[-1]:,} clients against {populations[0]:,}: {ratio:.2f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=POPULATIONS)
    parser.add_argument("--sample", type=int, default=200, help="clients a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engine", default="vectorized")
    parser.add_argument(
        "--available", default="", help="a trace.csv, or diurnal; always if left out"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(
            json.dumps(
                measure(asked.clients[0], asked.sample, asked.rounds, asked.engine, asked.available)
            )
        )
        return
    compare(
        asked.clients,
        [
            f"--{name}={getattr(asked, name)}"
            for name in ("sample", "rounds", "engine", "available")
        ],
    )
    print(machine())


if __name__ == "__main__":
    main()
