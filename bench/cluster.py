"""What the engine `ray` costs on one machine: a round with 1 and 2 local workers against
`vectorized`, in one run.

    python bench/cluster.py
    python bench/cluster.py --clients 40 --samples 200 --rounds 10 --chunks 2

Each worker and `vectorized` have one thread. `ray` cuts a round's jobs into chunks, each with
stacks of its own; `vectorized, in chunks` is the one engine on the same chunks, so that the
difference to `ray` with one worker is what sending, folding apart and joining take. Medians over
the rounds after the first two, which start the cluster. Engines take turns round by round, so that
other work on the machine disturbs them alike. (Not named ray.py: it would be imported in place of
Ray.)
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from measure import images, machine

import fedquilt as fq
from fedquilt.engines import Ray
from fedquilt.engines.ray.connection import Cluster
from fedquilt.engines.ray.engine import cut
from fedquilt.models import PreResNet
from fedquilt.terms import Job

WARM = 2  # rounds that are not counted


def in_chunks(run: fq.Run, chunks: int) -> float:
    """Seconds that `vectorized` takes for the next round's jobs, chunk by chunk; nothing comes of
    it.
    """
    method, server, engine = run.method, run.server, run.engine
    cohort = [
        run.fleet.client(id, server.round, 0, engine.data.size(id))
        for id in run.fleet.draw_cohort(server.round, 0)
    ]
    jobs = [
        Job(one, submodel, server.round)
        for one in cohort
        for submodel in method.plan(server, one, run.world)
    ]
    began = time.perf_counter()
    for chunk in cut(jobs, chunks):
        engine.train(run.federation, server, chunk, method.fold(server, run.world))
    return time.perf_counter() - began


def prepare(clients: int, samples: int, workers: int = 0, chunks: int = 8) -> fq.Run:
    """HeteroFL with three shares on a small PreResNet, everybody in every round, nothing evaluated.

    With workers it runs on a cluster, else on `vectorized`.
    """
    pool, parts = images(clients * samples, 3, 16, 16), torch.arange(clients * samples)
    data = fq.FederatedData.of(pool, images(100, 3, 16, 16), list(torch.split(parts, samples)))
    family = fq.trace(lambda: PreResNet((1, 1, 1), 10, 3, widths=(16, 32, 64)), data.example)
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), clients, clients)
    engine = Ray(data, cluster=Cluster(workers=workers), chunks=chunks) if workers else "vectorized"
    return fq.prepare(
        fq.methods.HeteroFL(), family, data, fleet, engine, evaluation=fq.Evaluation(every=0)
    )


def play(run: fq.Run) -> float:
    """Return the seconds of the next round, which is not the last, so that it is not evaluated."""
    rounds = run.server.round + 2
    played = fq.round.run_round(
        run.federation, run.server, run.fleet, run.engine, rounds, run.evaluation
    )
    run.server = played.server
    return played.record.seconds


def compare(clients: int = 20, samples: int = 64, rounds: int = 8, chunks: int = 8) -> None:
    """The table: a round in every engine."""
    runs = {"vectorized": prepare(clients, samples)}
    for name, workers in (("ray, 1 worker", 1), ("ray, 2 workers", 2)):
        runs[name] = prepare(clients, samples, workers, chunks)
    chunked = "vectorized, in chunks"
    taken: dict[str, list[float]] = {name: [] for name in (*runs, chunked)}
    for _ in range(WARM + rounds):
        taken[chunked].append(in_chunks(runs["vectorized"], chunks))
        for name, run in runs.items():
            taken[name].append(play(run))
    state = sum(weight.nbytes for weight in runs["vectorized"].server.weights.values())
    print(
        f"{clients} clients of {samples} images, {state / 1e6:.1f} MB of weights, {chunks} chunks"
    )
    one = {name: statistics.median(seconds[WARM:]) for name, seconds in taken.items()}
    for name, seconds in one.items():
        print(
            f"{name:<24}{1e3 * seconds:>9.1f} ms a round {seconds / one['vectorized']:>7.2f} times"
        )
    print(
        f"started: {taken['ray, 1 worker'][0]:.1f} s for the first round with a cluster of its own"
    )
    print(
        f"a round's overhead with one worker: {1e3 * (one['ray, 1 worker'] - one[chunked]):.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20, help="all of them in every round")
    parser.add_argument("--samples", type=int, default=64, help="a client")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    compare(asked.clients, asked.samples, asked.rounds, asked.chunks)
    print(machine())


if __name__ == "__main__":
    main()
