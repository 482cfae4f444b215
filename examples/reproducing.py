"""What scripts that reproduce tables share: runs one after another on one engine, each written down as a line of JSON.

A run that stands in the file already is not made again, so that a script can be stopped and goes on where it was; with
`--keep DIR` also in the middle of a run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedquilt as fq
from fedquilt.data import FederatedData, Pool
from fedquilt.errors import TrainingError
from fedquilt.methods import Method
from fedquilt.precision import Precision
from fedquilt.round.link import PERFECT
from fedquilt.round.serve import grade

DIGITS = 7438  # training images of a domain in Digits-Five as the papers have it, from FedBN


def of_digits(part: float, pool: Pool) -> float:
    """What a part of the papers' Digits-Five is of the images that are here: at most all of them."""
    assert pool.domains is not None
    return min(1.0, part * DIGITS * len(pool.domains.unique()) / len(pool.targets))


def file(name: str) -> str:
    """A file that has to be there."""
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {name}; docs/data.md says what it holds")
    return name


def parser_of(title: str | None, data: str, out: str, rounds: int, every: int) -> argparse.ArgumentParser:
    """What all of these scripts can be asked for."""
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=file, help=f"an .npz file with x_train, y_train, x_test, y_test{data}")
    parser.add_argument("--rounds", type=int, default=rounds, help="0: the paper's")
    parser.add_argument("--every", type=int, default=every, help="rounds between evaluations")
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="a line of JSON a run; what stands there is not run"
    )
    parser.add_argument("--keep", type=Path, help="a folder for states, from which a run that was stopped goes on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    return parser


class Runs:
    """Runs of one family that share an engine, and what it has recorded."""

    def __init__(
        self, family: fq.Family, out: Path, device: str, precision: Precision, keep: Path | None = None
    ) -> None:
        self.family, self.out, self.device, self.precision, self.keep = family, out, device, precision, keep
        self.engine: fq.engines.Engine | str = "vectorised"
        self.lines: list[dict[str, Any]] = []
        if out.exists():
            self.lines = [json.loads(line) for line in out.read_text().splitlines()]

    def run(
        self,
        known: dict[str, Any],
        method: Method,
        data: FederatedData,
        fleet: fq.Fleet,
        rounds: int,
        how: fq.Evaluation,
        seed: int = 0,
        link: fq.Link = PERFECT,
        local: bool = False,
    ) -> dict[str, Any]:
        """Train and write down, or what was written down; `known` says which run it is."""
        known = {**known, "rounds": rounds, "seed": seed, "precision": self.precision}
        for line in self.lines:
            if all(line.get(name) == value for name, value in known.items()):
                return line
        began = time.perf_counter()
        try:
            run = fq.run(
                method,
                self.family,
                data,
                fleet,
                self.engine,
                rounds,
                seed,
                self.device,
                self.precision,
                how,
                watch=lambda record: self._tell(known, record, began),
                out=self._folder(known),
                resume=True,
                link=link,
            )
        except TrainingError as error:
            if error.__cause__ is not None:  # a mistake or a full card, not a loss that is no number
                raise
            # What counts is the state it has left: that of the round before.
            print(*known.values(), error, flush=True)
            run = error.run  # type: ignore[attr-defined]
        self.engine = run.engine
        # Clients' own parts are tested once, at the end.
        final = grade(run.method, run.server, run.fleet, run.engine, replace(how, local=local))
        line = {
            **known,
            "seconds": sum(record.seconds for record in run.records),
            "accuracy": final.accuracy,
            "metrics": final.metrics,
            "curves": {r.round: r.grades.accuracy for r in run.records if r.grades.accuracy},
            "gigabytes": sum(r.bytes_down + r.bytes_up for r in run.records) / 1e9,
        }
        if run.server.round < rounds:
            line["diverged"] = run.server.round + 1
        self.write(line)
        return line

    def _folder(self, known: Mapping[str, Any]) -> Path | None:
        """Where a run's states are kept, if they are."""
        return self.keep / re.sub(r"[^\w.]+", "-", "-".join(map(str, known.values()))) if self.keep else None

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _tell(self, known: dict[str, Any], record: fq.round.Record, began: float) -> None:
        if record.grades.accuracy:
            accuracy = {share: f"{100 * value:.1f}" for share, value in record.grades.accuracy.items()}
            print(*known.values(), record.round, f"{time.perf_counter() - began:.0f} s", accuracy, flush=True)


def told_of(method: str, lines: Sequence[dict[str, Any]]) -> str:
    """A method, and when its runs diverged, if some did."""
    found = ", ".join(str(line["diverged"]) for line in lines if "diverged" in line)
    return f"{method}, diverged in round {found}" if found else method


def percent(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, in percent; of one value no deviation."""
    if not values:
        return "–"
    mean = 100 * statistics.fmean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {100 * statistics.pstdev(values):.1f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as pages have them."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
