"""FedResCuE's tables on CIFAR-10 and Digits-Five, in Table 17's setting.

    python examples/fedrescue_tables.py cifar10.npz --table sufficiency loss --seeds 3 5 7 --device cuda
    python examples/fedrescue_tables.py digits5.npz --table digits --lr 0.03 --every 2 --results results --device cuda

`sufficiency`: Tables 2 and 11, on a fifth of the images (`--part 1`: on all of them). `clusters`: Table 3. `loss`:
Tables 4 and 12, on all images (`--part 0.2`: on a fifth). `digits`: Tables 5 and 13. `samples`: Figures 6 and 10, S
from 1 to 16. `parts`: Table 14 and Figures 5, 7, 11 and 12, FedSeq and FedRush. `norms`: Table 9. Rounds to an accuracy
(Tables 6 and 10) are printed for every run. Last round and best round are a table each. docs/results/fedrescue.md has
the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from reproducing import Runs, last_and_best, markdown, of_digits, parser_of, percent, told_of

import fedquilt as fq
from fedquilt.data import Domains, FederatedData, Iid, Pool, npz
from fedquilt.methods import FedAvg, FedBN, FedResCuE, FedRush, FedSeq, FedSlim, FjORD, HeteroFL, LocalOnly, Method
from fedquilt.methods.nested import TABLE_17
from fedquilt.precision import DTYPES
from fedquilt.round.link import PERFECT, Columns
from fedquilt.round.training.learner import Freeze

SHARES = (1.0, 0.75, 0.5, 0.25)
FIVE = (1.0, 0.75, 0.5, 0.35, 0.2)
SCALE = {"mean": (0.5,), "std": (0.5,)}  # to [-1, 1]
RATES = {"none": None, "0.1-0.2": Columns(0.1, 0.2), "0.2-0.3": Columns(0.2, 0.3)}
# Table 13: SVHN, SYN and MNIST-M have good connections, USPS and MNIST bad ones; two clients a domain.
DOMAIN_RATES = {"svhn": 0.05, "syn": 0.05, "mnistm": 0.05, "usps": 0.3, "mnist": 0.3}
UNIFORM: dict[str, Method] = {
    "FedAvg": FedAvg(local=TABLE_17, weighting="uniform"),
    "FjORD": FjORD(),
    "FedSlim": FedSlim(),
    "FedResCuE": FedResCuE(),
}
CLUSTER: dict[str, Method] = {"HeteroFL": HeteroFL(local=TABLE_17)} | {
    k: v for k, v in UNIFORM.items() if k != "FedAvg"
}
TABLE_SAMPLES = FedResCuE().samples  # S
TARGETS = (0.5, 0.55, 0.6, 0.65)


@dataclass(frozen=True)
class Case:
    """One run of a table, but for its seed."""

    table: str
    method: str
    how: Method
    setting: str = "uniform"
    link: str = "none"
    part: float = 0.2


def cases(table: str, asked: float | None = None) -> Iterator[Case]:
    """The cases of a table, on its own part of the images or on another one."""
    part, whole = asked or 0.2, asked or 1.0
    settings = {"uniform": UNIFORM, "cluster": CLUSTER}
    match table:
        case "sufficiency":
            for setting, methods in settings.items():
                yield from (Case(table, name, how, setting, part=part) for name, how in methods.items())
        case "clusters":
            yield from (Case(table, name, how, "five clusters", part=part) for name, how in CLUSTER.items())
        case "loss":
            for link in ("0.1-0.2", "0.2-0.3"):
                for setting, methods in settings.items():
                    yield from (Case(table, name, how, setting, link, whole) for name, how in methods.items())
        case "samples":
            for count in (1, 2, 4, 8, 16):
                for name in ("FedResCuE", "FjORD", "FedSlim"):
                    yield Case(table, name, replace(UNIFORM[name], samples=count), f"S = {count}", part=part)
        case "parts":
            for link, share in (("none", part), ("0.1-0.2", whole)):
                for kind in (FedResCuE, FedSeq, FedRush):
                    yield Case(table, kind.__name__, kind(), "uniform", link, share)
        case "norms":
            yield Case(table, "FedAvg", UNIFORM["FedAvg"], "batch", part=part)
            tracked = replace(TABLE_17, norm="tracked")
            yield Case(table, "FedAvg", FedAvg(local=tracked, weighting="uniform"), "tracked", part=part)
            yield Case(
                table, "FedBN", FedBN(local=replace(TABLE_17, norm="local"), weighting="uniform"), "own", part=part
            )
        case "digits":
            for name, how in {"Local": LocalOnly(local=TABLE_17), **UNIFORM}.items():
                grid: dict[str, Any] = {}
                if hasattr(how, "granularity"):
                    grid = {"smallest": 0.125, "granularity": 0.125}
                if name == "FjORD":
                    grid["samples"] = 1  # its sum of nine losses diverges with four
                yield Case(table, name, replace(how, **grid), part=0.05, link="by domain")


def fleet(setting: str, clients: int, seed: int) -> fq.Fleet:
    budgets: Any = (1.0,)
    if "cluster" in setting:
        budgets = fq.fleets.Clusters(SHARES if setting == "cluster" else FIVE)
    return fq.Fleet.of(budgets, clients, 5, seed=seed)


class Tables:
    """All cases of one data set."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.digits = "digits" in asked.table
        self.pool: Pool = npz(asked.data, **SCALE)
        self.clients = 10 if self.digits else 20
        model = fq.models.MODELS["digits_cnn" if self.digits else "rescue_resnet"].factory
        family = fq.trace(model, self.pool.example)
        self.runs = Runs.asked(family, asked, "fedrescue")
        self.data: dict[tuple[float, int], FederatedData] = {}

    def deal(self, part: float, seed: int) -> FederatedData:
        if (part, seed) not in self.data:
            how = Domains(fraction=of_digits(part, self.pool)) if self.digits else Iid(fraction=part)
            dealt = self.pool.deal(self.clients, how, seed)
            where, precision = torch.device(self.asked.device), DTYPES[self.asked.precision]
            self.data = {(part, seed): dealt.to(where, precision)}
        return self.data[part, seed]

    def link(self, name: str, data: FederatedData) -> fq.Link:
        if name == "by domain":
            rates = [DOMAIN_RATES[domain] for domain in data.domain_names for _ in range(2)]
            return fq.Link(loss=Columns(tuple(rates)))
        loss = RATES[name]
        return PERFECT if loss is None else fq.Link(loss=loss)

    def play(self, case: Case, seed: int) -> dict[str, Any]:
        asked = self.asked
        data = self.deal(case.part, seed)
        how = fq.Evaluation(every=asked.every, batch_size=250, local=False, shares=SHARES)
        known = {name: value for name, value in vars(case).items() if name != "how"}
        known |= {
            "augmented": asked.augment and not self.digits,
            "lr": asked.lr,
            "clip": asked.clip,
            "samples": asked.samples,
        }
        if asked.freeze != "update":
            known["freeze"] = asked.freeze
        local = case.how.local
        local = replace(local, optimiser=replace(local.optimiser, lr=asked.lr, clip=asked.clip))
        if known["augmented"]:
            local = replace(local, crop=4, flip=True)
        method = replace(case.how, local=local)
        if asked.samples and hasattr(method, "samples"):
            method = replace(method, samples=asked.samples)
        if hasattr(method, "freeze"):
            method = replace(method, freeze=asked.freeze)
        rounds = asked.rounds or (100 if self.digits else 300)
        devices = fleet(case.setting, self.clients, seed)
        link, name = self.link(case.link, data), name_of(case, method, asked)
        return self.runs.run(known, method, data, devices, rounds, how, seed, link, name=name)


def name_of(case: Case, method: Method, asked: argparse.Namespace) -> str:
    """Return the name of a stored run: its table and method, and where it departs from the table's usual setting."""
    samples = getattr(method, "samples", TABLE_SAMPLES)
    departures = {
        case.setting: case.setting != "uniform" and case.table != "samples",
        case.link: case.table in ("loss", "parts") and case.link != "none",
        f"s{samples}": samples != TABLE_SAMPLES or (case.table == "samples"),
        f"part{case.part:g}": asked.part is not None,
        f"lr{asked.lr:g}": asked.lr != TABLE_17.optimiser.lr,
        f"clip{asked.clip:g}": asked.clip != 0,
        f"freeze-{asked.freeze}": asked.freeze != "update",
        "not-augmented": not asked.augment,
        f"rounds{asked.rounds}": asked.rounds != 0,
    }
    return "-".join([case.table, case.method, *(name for name, departs in departures.items() if departs)])


def told(lines: list[dict[str, Any]]) -> str:
    """The runs of a table, means over their seeds."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["setting"], line["link"], line["part"], line["method"]), []).append(line)
    shares = sorted({share for line in lines for share in line["accuracy"]}, key=float)
    domains = sorted({name for line in lines for name in line["metrics"] if name.startswith("accuracy/")})
    head = ["setting", "loss", "data", "method", *(f"×{share}" for share in shares)]
    head += [f"×1 {name.removeprefix('accuracy/')}" for name in domains] + ["rounds to, at ×0.5", "GB", "s"]
    table = []
    for (setting, link, part, method), same in rows.items():
        row = [setting, link, f"{100 * part:g} %", told_of(method, same)]
        row += [percent([one["accuracy"][share] for one in same if share in one["accuracy"]]) for share in shares]
        row += [percent([one["metrics"][name]["1.0"] for one in same if name in one["metrics"]]) for name in domains]
        row += [", ".join(_reached(same)), f"{same[0]['gigabytes']:.1f}", f"{same[0]['seconds']:.0f}"]
        table.append(row)
    return markdown(head, table)


def _reached(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Rounds to each accuracy, means over those seeds that reach it."""
    for target in TARGETS:
        found = [
            next((int(at) for at, accuracy in line["curves"].items() if accuracy.get("0.5", 0) >= target), None)
            for line in lines
        ]
        if all(at is not None for at in found):
            yield f"{100 * target:g} %: {sum(at for at in found if at is not None) / len(found):.0f}"


def main() -> None:
    parser = parser_of(__doc__, ", and domains for `digits`", "fedrescue.jsonl", rounds=0, every=10)
    names = ("sufficiency", "clusters", "loss", "samples", "parts", "norms", "digits")
    parser.add_argument("--table", nargs="+", default=["sufficiency"], choices=names)
    parser.add_argument("--methods", nargs="*", default=[], help="only these")
    parser.add_argument("--settings", nargs="*", default=[], help="only these")
    parser.add_argument("--links", nargs="*", default=[], help="only these")
    parser.add_argument("--part", type=float, help="of CIFAR-10's training images, another than the table's")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=0.0, help="of gradients; 0: none")
    parser.add_argument("--samples", type=int, default=0, help="S; 0: the table's")
    parser.add_argument(
        "--freeze", default="update", choices=get_args(Freeze), help="FedResCuE's: gradient masks those alone (A.6.2)"
    )
    parser.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="crops and flips of CIFAR-10: the paper does not say, and has accuracies that need them",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    asked = parser.parse_args()
    if "digits" in asked.table and len(asked.table) > 1:
        parser.error("digits is another data set: a command of its own")
    tables = Tables(asked)
    for table in asked.table:
        lines = []
        for seed in asked.seeds:
            for case in cases(table, asked.part):
                wanted = ((asked.methods, case.method), (asked.settings, case.setting), (asked.links, case.link))
                if all(not names or own in names for names, own in wanted):
                    lines.append(tables.play(case, seed))
        for when, same in last_and_best(lines).items():
            print(f"\n{table}, {when}\n{told(same)}\n")


if __name__ == "__main__":
    main()
