"""FedRolex's language model (Table 3, Stack Overflow) on texts of your own, such as the roles of Shakespeare's plays.

    python examples/fedrolex_text.py shakespeare.npz --device cuda --precision tf32

Next-word prediction by the paper's transformer, of which devices hold a part of the nodes in the heads; one user is one
client. Table 8's setting but for the cohort and the learning rate, which is looked for on a held-out tenth of every
user's samples, the same rates for every method. The homogeneous rows are HeteroFL with one share for all. One line of
JSON a run; accuracies are those of the widest model that is trained. docs/results/fedrolex.md has what came out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from fedrolex_table3 import METHODS, SHARES, Schedule, held_out
from reproducing import Runs, markdown, parser_of, percent

import fedquilt as fq
from fedquilt.config import Model
from fedquilt.data import FederatedData, Natural, text
from fedquilt.methods import Method
from fedquilt.round.local import SGD, Steps

TABLE_8 = Schedule(1200, (600, 800))
ALIKE = {"largest": 1.0, "smallest": 1 / 16}  # the homogeneous rows


def method_of(name: str, lr: float, schedule: Schedule) -> Method:
    """The paper's setting but for the learning rate."""
    kind = METHODS["heterofl" if name in ALIKE else name]
    found = kind.preset("fedrolex-stackoverflow")
    optimiser, decay = SGD(lr=lr, momentum=0.9, decay=5e-4), Steps(schedule.milestones, 0.1)
    return replace(found, local=replace(found.local, optimiser=optimiser, schedule=decay))


def main() -> None:
    parser = parser_of(__doc__, "; or users, text and start (docs/data.md)", "text.jsonl", rounds=0, every=100)
    parser.add_argument("--methods", default=",".join((*METHODS, *ALIKE)))
    parser.add_argument("--lrs", default="0.01,0.03,0.1", help="tuned over; a single one is taken as it is")
    parser.add_argument("--tuning-rounds", type=int, default=50)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--min-size", type=int, default=10, help="users with fewer samples are left out")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    pool = text(asked.data, vocabulary=asked.vocabulary, length=20)
    data = pool.deal(None, Natural(min_size=asked.min_size), asked.seed).to(torch.device(asked.device), torch.float32)
    runs = Runs(Model("transformer_lm").trace(data), asked.out, asked.device, asked.precision, asked.keep)
    lrs = [float(lr) for lr in asked.lrs.split(",")]
    schedule, small = TABLE_8.within(asked.rounds), held_out(data)

    def train(
        stage: str, name: str, lr: float, schedule: Schedule, on: FederatedData, every: int
    ) -> tuple[float, list[str]]:
        widest = ALIKE.get(name, 1.0)
        fleet = fq.Fleet.of((widest,) if name in ALIKE else SHARES, on.num_clients, asked.cohort)
        known = {"stage": stage, "method": name, "lr": lr, "vocabulary": asked.vocabulary, "cohort": asked.cohort}
        how = fq.Evaluation(every=every, local=False, shares=(widest,))
        line = runs.run(known, method_of(name, lr, schedule), on, fleet, schedule.rounds, how, asked.seed)
        accuracy = line["accuracy"][str(float(widest))]
        return accuracy, [percent([accuracy]), f"{line['gigabytes']:.2f}", f"{line['seconds']:.0f}"]

    rows = []
    for name in asked.methods.split(","):
        best = lrs[0]
        if len(lrs) > 1:
            short = Schedule(asked.tuning_rounds, ())
            best = max(lrs, key=lambda lr: train("tune", name, lr, short, small, 0)[0])
        rows.append([name, f"{best:g}", *train("full", name, best, schedule, data, asked.every)[1]])
    print(markdown(["method", "rate", "accuracy, %", "GB", "s"], rows))


if __name__ == "__main__":
    main()
