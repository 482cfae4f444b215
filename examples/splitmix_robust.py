"""Split-Mix's Figure 7: standard accuracy against accuracy under attack, chosen by λ when a net is used.

    python examples/splitmix_robust.py digits5.npz --figure full --device cuda     # (a, b): one ×1 base net, no budgets
    python examples/splitmix_robust.py digits5.npz --figure widths --device cuda   # (c, d): widths under budgets
    python examples/splitmix_robust.py digits5.npz --rounds 3 --fraction 0.01 --tests 500 --model tiny_resnet

Split-Mix with dual norms (algorithm 4) gives a whole curve from one run, and so does FedAvg with OAT, whose norms are
conditioned on λ; FedAvg with adversarial training gives a point a run, one for each λn of equation 1. Under budgets
FedAvg can only train what the smallest device holds, ×0.125, and OAT is left out, as in the paper.
Both accuracies are means over users. The setting is the paper's for Digits (A.2): 50 clients, 30 % of the data, 400
rounds. Norm statistics are tracked, as in the authors' adversarial runs. An attacked step takes 20
forward passes where a plain one takes 3: this is meant for a GPU.

Runs do not depend on each other, so that parts can run side by side on one GPU, each with a file of its
own. `--methods` and `--weights` choose the part:

    python examples/splitmix_robust.py digits5.npz --methods "Split-Mix + DAT" --out dual.jsonl &
    python examples/splitmix_robust.py digits5.npz --methods "FedAvg + OAT" --out oat.jsonl &
    python examples/splitmix_robust.py digits5.npz --methods "FedAvg + AT" --weights 0.2 0.5 --out at.jsonl &
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from reproducing import Runs, last_and_best, markdown, of_digits, parser_of

import fedquilt as fq
from fedquilt.config import Model
from fedquilt.data import Domains, Pool, npz
from fedquilt.fleets import Quarters
from fedquilt.methods import FedAvg, Method, SplitMix
from fedquilt.precision import DTYPES

Figure = Literal["full", "widths"]
LAMBDAS = (0.0, 0.2, 0.5, 0.8, 1.0)  # of the mixed norms, when a net is used
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # of the attacked samples, when it is trained
OAT = (0.0, 0.1, 0.2, 0.3, 0.4, 1.0)  # what OAT's samples draw (Wang et al. 2020)
SMALLEST = 0.125


@dataclass(frozen=True)
class Entrant:
    """A method and the norms of its nets: dual, conditioned, or single."""

    name: str
    method: Method
    norms: Literal["dual", "conditioned", "single"]

    @property
    def names(self) -> frozenset[str]:
        """Names that `--methods` knows it by: with and without λn."""
        return frozenset((self.name, self.name.partition(",")[0]))


def entrants(
    figure: Figure,
    rounds: int,
    weights: Sequence[float],
    norm: str = "tracked",
) -> Iterator[Entrant]:
    """Return what the figure compares; learning rates fall to 0 over the rounds that are played."""
    base = 1.0 if figure == "full" else SMALLEST
    mixing = SplitMix.preset("digits-robust", base=base)
    local = replace(mixing.local, schedule=fq.Cosine(rounds), norm=norm)
    yield Entrant("Split-Mix + DAT", replace(mixing, local=local), "dual")
    if figure == "full" and weights:
        drawn = replace(local, adversarial=fq.AdversarialTraining(OAT))
        yield Entrant("FedAvg + OAT", FedAvg(local=drawn), "conditioned")
    for weight in weights:
        hardened = replace(local, adversarial=fq.AdversarialTraining(weight))
        yield Entrant(f"FedAvg + AT, λn {weight:g}", FedAvg(local=hardened, share=base), "single")


def thinned(pool: Pool, tests: int) -> Pool:
    """The pool with so many test samples."""
    if not tests or tests >= len(pool.test_targets):
        return pool
    rows = torch.linspace(0, len(pool.test_targets) - 1, tests).long()
    homes = None if pool.test_domains is None else pool.test_domains[rows]
    inputs, targets = pool.test_inputs[rows], pool.test_targets[rows]
    return replace(pool, test_inputs=inputs, test_targets=targets, test_domains=homes, test_clients=None)


def curve(line: dict[str, Any], share: str) -> list[tuple[float | None, float, float]]:
    """(λ, standard, robust) of a run at a share; λ is None for single norms."""
    metrics, found = line["metrics"], []
    for name, values in metrics.items():
        kind, _, robustness = name.partition("/")
        if kind == "standard":
            robust = metrics[name.replace("standard", "robust", 1)]
            found.append((float(robustness) if robustness else None, values[share], robust[share]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ", domain_train and domain_test", "robust.jsonl", rounds=0, every=0)
    parser.add_argument("--figure", choices=("full", "widths"), default="full")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--fraction", type=float, default=0.3, help="of the paper's Digits, 7,438 images a domain")
    parser.add_argument("--tests", type=int, default=0, help="test samples, evenly from all of them; 0: all")
    parser.add_argument("--lambdas", type=float, nargs="+", default=list(LAMBDAS), help="to test dual norms with")
    parser.add_argument("--methods", nargs="*", default=[], help="only these, such as 'FedAvg + AT'")
    parser.add_argument("--weights", type=float, nargs="*", default=list(WEIGHTS), help="to train FedAvg with")
    parser.add_argument(
        "--norm",
        choices=("tracked", "batch", "post"),
        default="tracked",
        help="statistics to test with: tracked in training, of the test batch, measured afterwards",
    )
    parser.add_argument("--model", default="digits_cnn_norm", help="a name of `fedquilt list models`")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    rounds = asked.rounds or 400
    fq.keep_pages()
    pool: Pool = npz(asked.data, normalise="none")  # attacks are defined on images between 0 and 1
    pool = thinned(pool, asked.tests)
    dealt = pool.deal(asked.clients, Domains(fraction=of_digits(asked.fraction, pool)), asked.seed)
    data = dealt.to(torch.device(asked.device), DTYPES[asked.precision])
    budgets = [1.0] if asked.figure == "full" else Quarters()
    fleet = fq.Fleet.of(budgets, asked.clients, 1.0)
    how = fq.Evaluation(every=asked.every, robustness=tuple(asked.lambdas), local=False, domains=False)
    known = {name: vars(asked)[name] for name in ("figure", "clients", "fraction", "tests", "lambdas", "norm", "model")}
    runs: dict[str, Runs] = {}  # by their norms: other nets
    lines = []
    entered = list(entrants(asked.figure, rounds, asked.weights, asked.norm))
    if unknown := set(asked.methods) - {name for entrant in entered for name in entrant.names}:
        parser.error(f"--methods {sorted(unknown)}: {asked.figure} has {[one.name for one in entered]}")
    for entrant in entered:
        if asked.methods and not entrant.names & set(asked.methods):
            continue
        norms = entrant.norms
        if norms not in runs:
            family = Model(asked.model, dual=norms == "dual", conditioned=norms == "conditioned").trace(data)
            runs[norms] = Runs.asked(family, asked, "splitmix")
        own = {"method": entrant.name, **known}
        name = f"figure7-{asked.figure}-{entrant.name}-{asked.norm}-rounds{rounds}"
        lines.append(runs[norms].run(own, entrant.method, data, fleet, rounds, how, asked.seed, name=name))
    for when, same in list(last_and_best(lines).items())[: 2 if asked.every else 1]:
        print(f"\n{when}\n{table(same)}\n")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The curve of a method from standard to robust, at every share."""
    rows = []
    for line in lines:
        for share in line["accuracy"]:
            for robustness, *scores in curve(line, share):
                chosen = "" if robustness is None else f"{robustness:g}"
                rows.append([line["method"], f"{float(share):g}", chosen, *(f"{100 * score:.2f}" for score in scores)])
    return markdown(["method", "share", "λ", "SA %", "RA %"], rows)


if __name__ == "__main__":
    main()
