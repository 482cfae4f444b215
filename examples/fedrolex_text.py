"""FedRolex's language model (Table 3, Stack Overflow) on texts of your own, such as the roles of Shakespeare's plays.

    python examples/fedrolex_text.py shakespeare.npz --lrs 0.1,0.3,1 --device cuda --precision tf32

Next-word prediction by the paper's transformer, of which devices hold a part of the nodes in the heads; one user is one
client. Table 8's setting but for the learning rate, which is looked for on the held-out texts of a short run, the same
ones for every method, and the cohort. The homogeneous rows are HeteroFL with one share for all. One line of JSON a run.
docs/results/fedrolex.md has what came out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from fedrolex_table3 import METHODS, SHARES
from reproducing import Runs, markdown, parser_of, percent

import fedquilt as fq
from fedquilt.config import Model
from fedquilt.data import Natural, text
from fedquilt.methods import Method
from fedquilt.round.local import SGD, Steps

ROUNDS, MILESTONES = 1200, (600, 800)


def method_of(name: str, lr: float, rounds: int, decays: bool) -> Method:
    """The paper's setting but for the learning rate, in so many rounds."""
    kind = METHODS[name]
    local = kind.preset("fedrolex-stackoverflow").local
    milestones = tuple(milestone * rounds // ROUNDS for milestone in MILESTONES) if decays else ()
    optimiser = SGD(lr=lr, momentum=0.9, decay=5e-4)
    return kind(local=replace(local, optimiser=optimiser, schedule=Steps(milestones, 0.1)), weighting="uniform")


def main() -> None:
    parser = parser_of(__doc__, "; or users, text and start (docs/data.md)", "text.jsonl", rounds=0, every=100)
    parser.add_argument("--methods", default=",".join((*METHODS, "largest", "smallest")))
    parser.add_argument("--lrs", default="0.1,0.3,1", help="tuned over; a single one is taken as it is")
    parser.add_argument("--tuning-rounds", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--min-size", type=int, default=10, help="users with fewer samples are left out")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    data = text(asked.data, vocabulary=10_000, length=20).deal(None, Natural(min_size=asked.min_size), asked.seed)
    data = data.to(torch.device(asked.device), torch.float32)
    family = Model("transformer_lm").trace(data)
    runs = Runs(family, asked.out, asked.device, asked.precision, asked.keep)
    shares = {"largest": (1.0,), "smallest": (1 / 16,)}
    rows = []
    for name in asked.methods.split(","):
        fleet = fq.Fleet.of(shares.get(name, SHARES), data.num_clients, asked.cohort)
        kind = "heterofl" if name in shares else name  # with one share for all, HeteroFL is FedAvg on that part
        found = {}
        lrs = [float(lr) for lr in asked.lrs.split(",")]
        for lr in lrs if len(lrs) > 1 else ():
            how, some = fq.Evaluation(every=asked.tuning_rounds, local=False, shares=(1.0,)), asked.tuning_rounds
            known = {"stage": "tune", "method": name, "lr": lr, "cohort": asked.cohort}
            line = runs.run(known, method_of(kind, lr, some, False), data, fleet, some, how, asked.seed)
            found[lr] = line["accuracy"]["1.0"]
        best = max(found, key=lambda lr: found[lr]) if found else lrs[0]
        rounds = asked.rounds or ROUNDS
        known = {"stage": "full", "method": name, "lr": best, "cohort": asked.cohort}
        method, how = method_of(kind, best, rounds, True), fq.Evaluation(every=asked.every, local=False)
        line = runs.run(known, method, data, fleet, rounds, how, asked.seed)
        accuracy = [percent([value]) for value in line["accuracy"].values()]
        rows.append([name, f"{best:g}", ", ".join(accuracy), f"{line['gigabytes']:.2f}", f"{line['seconds']:.0f}"])
    print(markdown(["method", "rate", "accuracy, %", "GB", "s"], rows))


if __name__ == "__main__":
    main()
