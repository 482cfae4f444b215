"""What the engine `ray` costs on one machine: a round with 1 and 2 local workers against `vectorised`, in one run.

    python bench/cluster.py
    python bench/cluster.py --clients 40 --samples 200 --rounds 10 --chunks 2

Each worker and `vectorised` have one thread. `ray` cuts a round's jobs into chunks, each with stacks of its own;
`vectorised, in chunks` is the one engine on the same chunks, so that the difference to `ray` with one worker is what
sending, folding apart and joining take. Medians over the rounds after the first two, which start the cluster. Engines
take turns round by round, so that other work on the machine disturbs them alike. (Not named ray.py: it would be
imported in place of Ray.)
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time

import torch

import fedquilt as fq
from fedquilt.engines import Ray
from fedquilt.engines.ray import Cluster, cut
from fedquilt.models import PreResNet
from fedquilt.terms import Job

WARM = 2  # rounds that are not counted


def in_chunks(run: fq.Run, chunks: int) -> float:
    """Seconds that `vectorised` takes for the next round's jobs, chunk by chunk; nothing comes of it."""
    method, server, engine = run.method, run.server, run.engine
    cohort = [run.fleet.client(id, server.round, 0, engine.data.size(id)) for id in run.fleet.cohort(server.round, 0)]
    jobs = [Job(one, submodel, server.round) for one in cohort for submodel in method.plan(server, one, engine.world)]
    began = time.perf_counter()
    for chunk in cut(jobs, chunks):
        engine.train(method, server, chunk, method.fold(server, engine.world))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20, help="all of them in every round")
    parser.add_argument("--samples", type=int, default=64, help="a client")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def pool(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randint(256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (count,), generator=generator)

    count = asked.clients * asked.samples
    data = fq.FederatedData.of(pool(count), pool(100), torch.arange(count).split(asked.samples))
    family = fq.trace(lambda: PreResNet((1, 1, 1), 10, 3, widths=(16, 32, 64)), data.example)
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), asked.clients, asked.clients)
    method = fq.methods.HeteroFL()
    runs = {}
    for name, workers in (("vectorised", 0), ("ray, 1 worker", 1), ("ray, 2 workers", 2)):
        engine = "ray" if workers else "vectorised"
        run = runs[name] = fq.prepare(method, family, data, fleet, engine, evaluation=fq.Evaluation(every=0))
        if isinstance(run.engine, Ray):
            run.engine.cluster, run.engine.chunks = Cluster(workers=workers), asked.chunks
    chunked = "vectorised, in chunks"
    taken: dict[str, list[float]] = {name: [] for name in (*runs, chunked)}
    for done in range(1, WARM + asked.rounds + 1):
        taken[chunked].append(in_chunks(runs["vectorised"], asked.chunks))
        for name, run in runs.items():
            # One more is announced than is played: the last would be evaluated.
            played = fq.round.play(run.method, run.server, run.fleet, run.engine, done + 1, run.evaluation)
            run.server = played.server
            taken[name].append(played.record.seconds)
    state = sum(weight.nbytes for weight in runs["vectorised"].server.weights.values())
    print(f"{asked.clients} clients of {asked.samples} images, {state / 1e6:.1f} MB of weights, {asked.chunks} chunks")
    one = {name: statistics.median(seconds[WARM:]) for name, seconds in taken.items()}
    for name, seconds in one.items():
        print(f"{name:<24}{1e3 * seconds:>9.1f} ms a round {seconds / one['vectorised']:>7.2f} times")
    print(f"started: {taken['ray, 1 worker'][0]:.1f} s for the first round with a cluster of its own")
    print(f"a round's overhead with one worker: {1e3 * (one['ray, 1 worker'] - one[chunked]):.0f} ms")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}")


if __name__ == "__main__":
    main()
