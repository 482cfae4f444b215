"""Split-Mix's tables on Digits-Five and CIFAR-10, in the settings of its appendix A.2.

    python examples/splitmix_tables.py digits5.npz --table digits ablation --device cuda
    python examples/splitmix_tables.py cifar10.npz --table cifar10 --rounds 100 --device cuda --precision bf16

`digits` and `cifar10`: Table 1. `clients`: what a client of Figures 5 and 6 (left) computes, sends and trains, which
takes no training. `ablation`: Table 4. `iid`: Table 5. `budgets`: Figure 11. `contact`: Figure 12. `sizes`: what Table
1's nets cost.
Every width's accuracy is that on the whole test set, and, where there are domains, the mean over them.
docs/results/splitmix.md has what came out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from reproducing import Runs, last_and_best, markdown, of_digits, parser_of, percent, told_of

import fedquilt as fq
from fedquilt.data import Domains, FederatedData, Iid, Labels, Partition, npz
from fedquilt.fleets import Budgets, Groups, LogNormal, Quarters, Step
from fedquilt.methods import FedAvg, Method, SHeteroFL, SplitMix
from fedquilt.precision import DTYPES
from fedquilt.round.training.local import Local

WIDTHS = (1.0, 0.5, 0.25, 0.125)
DIGITS, CIFAR10 = SplitMix.preset("digits"), SplitMix.preset("cifar10")
SCALE = {"mean": (0.5,), "std": (0.5,)}  # to [-1, 1]
ROUNDS = 400
PART = 0.3  # of the paper's Digits-Five
CLIENTS = {"digits": 50, "cifar10": 100}


@dataclass(frozen=True)
class Case:
    """One run of a table, but for its seed."""

    table: str
    method: str
    how: Method
    fleet: Budgets | tuple[float, ...] = Quarters()
    setting: str = ""
    contact: float = 1.0  # of the clients, in every round


def compared(table: str, local: Local) -> Iterator[Case]:
    """Table 1's three: under budgets, and, as if there were none, a net of every width."""
    plain = replace(local, scaler=False)
    mix = DIGITS if table == "digits" else CIFAR10
    yield Case(table, "Split-Mix", mix)
    yield Case(table, "SHeteroFL", SHeteroFL(local=plain))
    for width in WIDTHS:
        yield Case(table, f"FedAvg ×{width:g}", FedAvg(local=plain, share=width), (1.0,))


def cases(table: str) -> Iterator[Case]:
    match table:
        case "digits" | "cifar10":
            yield from compared(table, (DIGITS if table == "digits" else CIFAR10).local)
        case "iid":
            local = replace(CIFAR10.local, masked="")
            for case in compared("cifar10", local):
                how = replace(case.how, local=replace(case.how.local, masked=""))
                yield replace(case, table=table, setting="iid", how=how)
        case "ablation":
            for norm in ("batch", "post", "tracked", "local"):
                for rescale_init in (False, True):
                    for scaler in (False, True):
                        local = replace(DIGITS.local, norm=norm, scaler=scaler)
                        name = f"{norm}, init {'✓' if rescale_init else '✗'}, layer {'✓' if scaler else '✗'}"
                        yield Case(table, name, replace(DIGITS, local=local, rescale_init=rescale_init))
        case "budgets":
            groups = ("8-4-2-1", "8-4-4-1", "8-2-2-1", "8-2-1-1", "8-1-1-1")
            fleets: dict[str, Budgets] = {name: Groups(name) for name in groups}
            slim = SHeteroFL(local=replace(DIGITS.local, scaler=False))
            for name, fleet in {**fleets, "step": Step(), "log-normal": LogNormal()}.items():
                yield Case(table, "Split-Mix", DIGITS, fleet, name)
                yield Case(table, "SHeteroFL", slim, fleet, name)
        case "contact":
            for contact in (1.0, 0.5, 0.2, 0.1):
                yield Case(table, "Split-Mix", DIGITS, setting=f"{contact:g} of clients", contact=contact)


class Tables:
    """All cases of one data set."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.kind = "cifar10" if {"cifar10", "iid"} & set(asked.table) else "digits"
        self.pool = npz(asked.data, **SCALE)
        resnet = partial(fq.models.preresnet18, zero_output_bias=True)  # as the authors' start
        model = fq.models.digits_cnn_norm if self.kind == "digits" else resnet
        self.runs = Runs.asked(fq.trace(model, self.pool.example), asked, "splitmix")
        self.data: dict[tuple[str, int], FederatedData] = {}

    def deal(self, table: str, seed: int) -> FederatedData:
        if (table, seed) not in self.data:
            how: dict[str, Partition] = {"cifar10": Labels(3), "iid": Iid()}
            fraction = 1.0 if self.kind == "cifar10" else of_digits(self.asked.part, self.pool)
            partition = how.get(table, Domains(fraction=fraction))
            dealt = self.pool.deal(CLIENTS[self.kind], partition, seed)
            self.data = {(table, seed): dealt.to(torch.device(self.asked.device), DTYPES[self.asked.precision])}
        return self.data[table, seed]

    def play(self, case: Case, seed: int) -> dict[str, Any]:
        asked, data = self.asked, self.deal(case.table, seed)
        contact = case.contact if self.kind == "digits" else 0.1 * case.contact
        fleet = fq.Fleet.of(case.fleet, CLIENTS[self.kind], contact, seed=seed)
        how = fq.Evaluation(every=asked.every, batch_size=100, local=False, shares=WIDTHS)
        known = {"table": case.table, "method": case.method, "setting": case.setting, "part": asked.part}
        method, rounds = case.how, asked.rounds or ROUNDS
        if isinstance(method.local.schedule, fq.Cosine):  # which ends with the run
            method = replace(method, local=replace(method.local, schedule=fq.Cosine(rounds)))
        name = name_of(case, asked)
        return self.runs.run(known, method, data, fleet, rounds, how, seed, local=True, name=name)


def name_of(case: Case, asked: argparse.Namespace) -> str:
    """Return the name of a stored run: its table, method and setting, and where it departs from the paper's."""
    parts = [case.table, case.method.replace("✓", "on").replace("✗", "off"), case.setting]
    if asked.part != PART:
        parts.append(f"part{asked.part:g}")
    if asked.rounds:
        parts.append(f"rounds{asked.rounds}")
    return "-".join(part for part in parts if part)


def told(lines: list[dict[str, Any]]) -> str:
    """Means over seeds; of nets that were trained at one width, that width alone."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["setting"], line["method"]), []).append(line)
    shares = [str(width) for width in reversed(WIDTHS)]
    table = []
    for (setting, method), same in rows.items():
        own = [share for share in shares if "×" not in method or f"×{float(share):g}" == method.split()[-1]]
        row = [setting, told_of(method, same)]
        for share in shares:
            key = "1.0" if "×" in method and share in own else share  # the widest that there is
            found = [_mean(one, key) for one in same] if share in own else []
            row.append(percent([value for value in found if value is not None]))
        row += [percent([v for one in same for v in one["metrics"].get("local_accuracy", {}).values()])]
        table.append([*row, f"{same[0]['gigabytes']:.1f}", f"{same[0]['seconds']:.0f}"])
    return markdown(["setting", "method", *(f"×{share}" for share in shares), "own, ×1", "GB", "s"], table)


def sizes(family: fq.Family) -> str:
    """Parameters and multiply-adds of Table 1, of whole nets and of base nets mixed; nothing is trained."""
    world, rows = fq.World(family), []
    for width in reversed(WIDTHS):
        whole = family.cost(family.fit(fq.Budget(share=width)))
        mix = [family.cost(net) for net in SplitMix().deploy(fq.Server(0, {}), fq.Budget(share=width), world)]
        mixed = sum(cost.params for cost in mix), sum(cost.macs for cost in mix)
        rows.append([f"×{width:g}", *(f"{count / 1e6:.2f} M" for count in (whole.params, whole.macs, *mixed))])
    return markdown(["width", "a whole net: parameters", "MACs", "base nets mixed: parameters", "MACs"], rows)


def clients(tables: Tables, seed: int) -> str:
    """Return what clients of Figures 5 and 6 (left) compute, send and train in 400 rounds; nothing is trained.

    FedAvg is the net that every device can hold. Multiply-adds are those of one training batch, parameters those that
    travel in one round, to the client and back. Of Digits, the last columns say which part of all parameters the
    clients of a domain have ever trained.
    """
    data = replace(tables.deal("digits", seed), test_parts=None)  # no accuracies
    compared = {case.method: case for case in cases("digits")}
    fleet = fq.Fleet.of(Quarters(), CLIENTS["digits"], 1.0, seed=seed)
    rows = []
    for name in ("Split-Mix", "SHeteroFL", "FedAvg ×0.125"):
        run = fq.prepare(compared[name].how, tables.runs.family, data, fleet, seed=seed)
        run.server = replace(run.server, round=ROUNDS)
        found = run.clientwise()
        spreads = {of: dict(zip(("mean", "deviation"), found.spread(of), strict=True)) for of in ("macs", "params")}
        known = {"table": "clients", "method": name, "part": tables.asked.part, "rounds": ROUNDS, "seed": seed}
        tables.runs.write_costs(known, {**spreads, "trained": found.trained}, run, f"clients-{name}")
        row = [f"{one['mean'] / 1e6:.2f} ± {one['deviation'] / 1e6:.2f} M" for one in spreads.values()]
        rows.append([name, *row, *(percent([part]) for part in found.trained.values())])
    return markdown(["method", "MACs of a batch", "parameters, both ways", *found.trained], rows)


def _mean(line: dict[str, Any], share: str) -> float | None:
    """Over domains, where there are some, else over the test set."""
    domains = [v[share] for name, v in line["metrics"].items() if name.startswith("accuracy/") and share in v]
    found: float | None = statistics.fmean(domains) if domains else line["accuracy"].get(share)
    return found


def main() -> None:
    parser = parser_of(__doc__, ", and domains for Digits", "splitmix.jsonl", rounds=0, every=50)
    names = ("sizes", "clients", "digits", "ablation", "budgets", "contact", "cifar10", "iid")
    parser.add_argument("--table", nargs="+", default=["digits"], choices=names)
    parser.add_argument("--methods", nargs="*", default=[], help="only these")
    parser.add_argument("--part", type=float, default=PART, help="of the paper's Digits, 7,438 images a domain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    asked = parser.parse_args()
    tables = Tables(asked)
    for table in asked.table:
        if table == "sizes":
            for name, side in (("digits_cnn_norm", 28), ("preresnet18", 32), ("alexnet", 256)):
                family = fq.trace(fq.models.MODELS[name].factory, torch.zeros(2, 3, side, side))
                print(f"\n{name}\n{sizes(family)}\n")
            continue
        if table == "clients":
            print(f"\n{table}\n{clients(tables, asked.seeds[0])}\n")
            continue
        chosen = [case for case in cases(table) if not asked.methods or case.method in asked.methods]
        lines = [tables.play(case, seed) for seed in asked.seeds for case in chosen]
        for when, same in last_and_best(lines).items():
            print(f"\n{table}, {when}\n{told(same)}\n")


if __name__ == "__main__":
    main()
