"""FedRolex's Table 3 on CIFAR-10, with the tuning that neither the paper nor its code states.

    python examples/fedrolex_table3.py cifar10.npz --out table3.jsonl --device cuda --precision bf16
    python examples/fedrolex_table3.py cifar10.npz --stages full --lrs 0.03 --fleet income   # Table 4
    python examples/fedrolex_table3.py cifar10.npz --stages full --lrs 0.03 --cohort 20      # Table 6
    python examples/fedrolex_table3.py cifar10.npz --stages full --lrs 0.03 --fleet rho:0.3  # Figure 3
    python examples/fedrolex_table3.py cifar10.npz --stages full --lrs 0.03 --fleet gamma:4  # Figure 4

One line of JSON a run: tuning on a held-out tenth of every client's samples (the same learning rates for every
method), the three sub-model methods over the full schedule with what was found, both published presets for 500
rounds, and how often a weight is handed out. With `--rounds` the whole schedule gets shorter, not cut off: the rate
falls at the same parts of it. docs/results/fedrolex.md has what came out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from reproducing import Runs, last_and_best, parser_of, percent

import fedquilt as fq
from fedquilt.data import FederatedData, Labels, Parts, npz
from fedquilt.methods import FedDropout, FedRolex, HeteroFL, Method
from fedquilt.methods.partial import PARTIAL
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Steps

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
CLIENTS = 100
METHODS: dict[str, type[Method]] = {"fedrolex": FedRolex, "heterofl": HeteroFL, "feddropout": FedDropout}
FLEETS: dict[str, Callable[[float], Sequence[float] | fq.fleets.Budgets]] = {
    "uniform": lambda _: SHARES,
    "income": lambda _: fq.fleets.Income(),
    "rho": fq.fleets.TwoLevel,  # Figure 3: so large a part holds the whole model, the others 1/16
    "gamma": lambda times: (1 / times,),  # Figure 4: the model is so many times what any client holds
    "share": lambda share: (share,),  # Table 9: one common model
}


@dataclass(frozen=True)
class Schedule:
    """How many rounds, and after which of them a tenth of the rate is left."""

    rounds: int
    milestones: tuple[int, ...]

    def within(self, rounds: int) -> Schedule:
        """The same in another number of rounds; 0: as it is."""
        if not rounds:
            return self
        return Schedule(rounds, tuple(milestone * rounds // self.rounds for milestone in self.milestones))


def scheduled(labels: int, fleet: str, at: float) -> Schedule:
    """What the paper's Tables 8 to 13 have."""
    match fleet:
        case "share":
            return Schedule({2: 1250, 5: 1500}[labels], (500, 1000))
        case "rho":
            return Schedule(1500, (700, 1200)) if 0.3 <= at <= 0.7 else Schedule(1250, (500, 1000))
        case "gamma":
            return Schedule(1500, (800, 1200))
        case _:
            return {2: Schedule(2500, (800, 1500)), 5: Schedule(2000, (800, 1250))}[labels]


def tuned(kind: type[Method], lr: float, schedule: Schedule, batch_size: int) -> Method:
    """The paper's setting but for the learning rate and the batch size."""
    optimiser, decay = SGD(lr=lr, momentum=0.9, decay=5e-4), Steps(schedule.milestones, 0.1)
    return kind(local=replace(PARTIAL, optimiser=optimiser, schedule=decay, batch_size=batch_size, crop=4))


def held_out(data: FederatedData) -> FederatedData:
    """The same samples, with every tenth of each client's for testing instead of training."""
    kept, out = [], []
    for client in range(data.num_clients):
        part = data.parts[client]
        out += part[::10].tolist()
        kept.append([row for place, row in enumerate(part.tolist()) if place % 10])
    return replace(
        data,
        parts=Parts.of(kept),
        test_parts=None,
        test_inputs=data.inputs[out],
        test_targets=data.targets[out],
        test_domains=None if data.domains is None else data.domains[out],
    )


def coverage(runs: Runs, known: dict[str, Any], fleet: fq.Fleet, on: FederatedData, method: Method, seed: int) -> None:
    """Count how often the channels and the entries of the last convolution are handed out; nothing is trained."""
    rounds = known["rounds"]
    run = fq.prepare(method, runs.family, on, fleet, seed=seed)
    run.server = replace(run.server, round=rounds)
    name = [name for name in runs.family.trainable if len(runs.family.layout.dims[name]) == 4][-1]
    sizes = runs.family.layout.shape(name, runs.family.layout.sizes)[:2]
    held = [torch.zeros(rounds * fleet.sample, size) for size in sizes]  # by client and round
    place = 0
    for played in range(rounds):
        for id in fleet.cohort(played, seed):
            client = fleet.client(id, played, seed, 0)
            index = method.plan(fq.Server(played, {}), client, run.world)[0].index
            for own, kept in zip(held, runs.family.cutter.rows(name, index), strict=False):
                own[place, slice(None) if kept is None else kept.tensor] = 1
            place += 1
    counts = {"channel": held[0].sum(0), "entry": held[0].T @ held[1]}
    told: dict[str, Any] = {"weight": name}
    for what, of in counts.items():
        deviation = float(of.double().std(correction=0))
        told[what] = {"least": int(of.min()), "mean": float(of.double().mean()), "deviation": deviation}
    print(*known.values(), told, flush=True)
    runs.write_costs(known, told, run, f"coverage-{known['method']}-{known['fleet']}-rounds{rounds}")


def main() -> None:
    parser = parser_of(__doc__, "", "table3.jsonl", rounds=0, every=250)
    parser.add_argument("--stages", default="tune,full,presets,coverage", help="also bounds: one common share")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--presets", default="paper,released-settings")
    parser.add_argument("--labels", type=int, default=2, choices=(2, 5))
    parser.add_argument("--fleet", default="uniform", help="or income, rho:0.3, gamma:4, share:0.0625")
    parser.add_argument("--cohort", type=int, default=10, help="of 100; 5 and 20 are Table 6's others")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lrs", default="0.007,0.015,0.03,0.06", help="tuned over; a single one is taken as it is")
    parser.add_argument("--tuning-rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.fleet.partition(":")[0] not in FLEETS:
        parser.error(f"argument --fleet: there is no {asked.fleet}; {', '.join(FLEETS)} are there")
    data = npz(asked.data).deal(CLIENTS, Labels(asked.labels), asked.seed).to(torch.device(asked.device), torch.float32)
    family = fq.trace(partial(fq.models.preresnet18, zero_output_bias=True), data.example)  # as the authors' start
    runs = Runs.asked(family, asked, "fedrolex")
    lrs, stages = [float(lr) for lr in asked.lrs.split(",")], asked.stages.split(",")
    best = dict.fromkeys(asked.methods.split(","), lrs[0])

    def fleet_of(name: str) -> tuple[fq.Fleet, Schedule]:
        kind, _, at = name.partition(":")
        fleet = fq.Fleet.of(FLEETS[kind](float(at or 1)), CLIENTS, asked.cohort)
        return fleet, scheduled(asked.labels, kind, float(at or 1)).within(asked.rounds)

    def run(
        stage: str,
        name: str,
        method: Method,
        on: FederatedData,
        rounds: int,
        every: int,
        to: str = asked.fleet,
        **own: Any,
    ) -> float:
        how = fq.Evaluation(every=every, local=False)
        known = {"stage": stage, "method": name, **own, "labels": asked.labels, "fleet": to, "cohort": asked.cohort}
        settings = "-".join(f"{key}{value}" for key, value in own.items())
        folder = f"{stage}-{name}-{settings}-labels{asked.labels}-{to}-cohort{asked.cohort}-rounds{rounds}"
        line = runs.run(known, method, on, fleet_of(to)[0], rounds, how, asked.seed, local=True, name=folder)
        for when, (same,) in last_and_best([line]).items():
            print(folder, when, {share: percent([value]) for share, value in same["accuracy"].items()})
        return float(line["accuracy"]["1.0"])

    def train(stage: str, name: str, lr: float, fleet: str = asked.fleet) -> None:
        """One method with the tuned preset, over the whole schedule of a fleet."""
        schedule = fleet_of(fleet)[1]
        method = tuned(METHODS[name], lr, schedule, asked.batch_size)
        run(stage, name, method, data, schedule.rounds, asked.every, fleet, lr=lr, batch_size=asked.batch_size)

    if "tune" in stages and len(lrs) > 1:
        small, some = held_out(data), asked.tuning_rounds
        for name in best:
            found = {}
            for lr in lrs:
                method = tuned(METHODS[name], lr, Schedule(some, ()), asked.batch_size)
                found[lr] = run("tune", name, method, small, some, some // 2, lr=lr, batch_size=asked.batch_size)
            best[name] = max(found, key=lambda lr: found[lr])
    if "full" in stages:
        for name, lr in best.items():
            train("full", name, lr)
    if "presets" in stages:
        for preset in asked.presets.split(","):
            run("preset", "fedrolex", FedRolex.preset(preset), data, 500, 100, preset=preset)
    if "bounds" in stages:
        for share in (1.0, 1 / 16):  # with one share for all, HeteroFL is FedAvg on that part of the model
            train("bounds", "heterofl", best.get("heterofl", lrs[0]), f"share:{share}")
    if "coverage" in stages:
        fleet, schedule = fleet_of(asked.fleet)
        for name in best:
            known = {"stage": "coverage", "method": name, "fleet": asked.fleet, "cohort": asked.cohort}
            known |= {"rounds": schedule.rounds, "seed": asked.seed}
            coverage(runs, known, fleet, data, METHODS[name](), asked.seed)


if __name__ == "__main__":
    main()
