"""Runs one after another on one engine, for the scripts that reproduce tables.

Each run is a line of JSON in the file `--out`, and with `--results DIR` also a folder `DIR/PAPER/NAME`, as the pages
need it (`results.py`). A run that is there already is not made again, so that a script that was stopped can be started
once more. With `--keep DIR` it resumes in the middle of a run.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedquilt as fq
import fedquilt.config  # registers the names that settings are written with
from fedquilt.data import FederatedData, Pool
from fedquilt.errors import TrainingError
from fedquilt.methods import Method
from fedquilt.precision import Precision
from fedquilt.round.link import PERFECT
from fedquilt.round.serve import Grades, grade
from fedquilt.settings import write
from results import rounds_of, store, summary_of

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
    parser.add_argument("--results", type=Path, help="a folder for PAPER/NAME, one per run, as pages report them")
    parser.add_argument("--keep", type=Path, help="a folder for states, from which a run that was stopped goes on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    return parser


def slug(name: str) -> str:
    """Return a name in lower case for a folder, without what a shell would read."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


class Runs:
    """Runs of one family that share an engine, and what it has recorded.

    Args:
        family: The model of all runs.
        out: File with one line of JSON per run.
        device: Device of all runs.
        precision: Precision of all runs.
        keep: Folder for states from which an interrupted run resumes. None keeps no states.
        results: Folder for one folder per run, such as `results/fedrescue`. None stores none.
    """

    def __init__(
        self,
        family: fq.Family,
        out: Path,
        device: str,
        precision: Precision,
        keep: Path | None = None,
        results: Path | None = None,
    ) -> None:
        self.family, self.out, self.device, self.precision, self.keep = family, out, device, precision, keep
        self.results = results
        self.engine: fq.engines.Engine | str = "vectorised"
        self.lines: list[dict[str, Any]] = []
        if out.exists():
            self.lines = [json.loads(line) for line in out.read_text().splitlines()]

    @staticmethod
    def asked(family: fq.Family, asked: argparse.Namespace, paper: str) -> Runs:
        """Return the runs of one paper's script, with the options of `parser_of`."""
        results = asked.results / paper if asked.results else None
        return Runs(family, asked.out, asked.device, asked.precision, asked.keep, results)

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
        name: str = "",
    ) -> dict[str, Any]:
        """Train and write down, or return what was written down.

        Args:
            known: Which run it is, as names and plain values.
            method: Method with all its settings.
            data: Samples by client.
            fleet: Devices and the size of a cohort.
            rounds: Number of rounds.
            how: Evaluation during the run.
            seed: Random seed.
            link: Link between server and clients.
            local: Evaluate on clients' own parts of the test set as well, once, at the end.
            name: Name of the folder in `results`, to which the seed is added. "" makes one of `known`.
        """
        known = {**known, "rounds": rounds, "seed": seed, "precision": self.precision}
        folder = self._stored(name or "-".join(map(str, known.values())), seed)
        if (line := self._found(known, folder)) is not None:
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
        final = grade(run.federation, run.server, run.fleet, run.engine, replace(how, local=local))
        line = {**known, **_outcome(run, final)}
        if run.server.round < rounds:
            line["diverged"] = run.server.round + 1
        if folder:
            summary = {key: value for key, value in line.items() if key != "curves"}
            store(folder, settings_of(run, rounds, known), summary, [record.to_dict() for record in run.records])
        self.write(line)
        return line

    def _stored(self, name: str, seed: int) -> Path | None:
        """Return the folder in which a run's results belong, if they are stored."""
        return self.results / f"{slug(name)}-seed{seed}" if self.results else None

    def _found(self, known: Mapping[str, Any], folder: Path | None) -> dict[str, Any] | None:
        """Return a run that was written down: in its folder, or where results are not stored, in the file."""
        known = json.loads(json.dumps(known))
        if folder is None:
            return next((line for line in self.lines if "best" in line and known.items() <= line.items()), None)
        if not folder.exists():
            return None
        line = summary_of(folder)
        if other := [f"{key} = {line.get(key)!r}" for key, value in known.items() if line.get(key) != value]:
            raise FileExistsError(f"{folder} has another run, with {', '.join(other)}. Move it, or name another DIR.")
        return {**line, "curves": curves_of(rounds_of(folder))}

    def _folder(self, known: Mapping[str, Any]) -> Path | None:
        """Where a run's states are kept, if they are."""
        return self.keep / re.sub(r"[^\w.]+", "-", "-".join(map(str, known.values()))) if self.keep else None

    def write_costs(self, known: Mapping[str, Any], costs: Mapping[str, Any], run: fq.Run, name: str) -> None:
        """Write down what was computed about a run without training it."""
        folder = self._stored(name, run.world.seed)
        if folder:
            store(folder, settings_of(run, run.server.round, known), {**known, **costs})
        self.write({**known, **costs})

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _tell(self, known: dict[str, Any], record: fq.round.Record, began: float) -> None:
        if record.grades.accuracy:
            accuracy = {share: f"{100 * value:.1f}" for share, value in record.grades.accuracy.items()}
            print(*known.values(), record.round, f"{time.perf_counter() - began:.0f} s", accuracy, flush=True)


def _outcome(run: fq.Run, final: Grades) -> dict[str, Any]:
    """Return what a run came to: its last state, its best evaluated round, and what it took.

    The best round is the one in which the widest model has the highest test accuracy, as released codes choose the
    checkpoint that they report. All shares and domains are those of that round.
    """
    graded = {record.round: record.grades for record in run.records if record.grades.accuracy}
    graded.setdefault(run.server.round, final)
    widest = max(final.accuracy, key=float)
    best = max(graded, key=lambda at: graded[at].accuracy[widest])
    down, up = (sum(getattr(record, name) for record in run.records) for name in ("bytes_down", "bytes_up"))
    return {
        "seconds": sum(record.seconds for record in run.records),
        "accuracy": final.accuracy,
        "metrics": final.metrics,
        "best": {"round": best, "accuracy": graded[best].accuracy, "metrics": graded[best].metrics},
        "curves": curves_of([record.to_dict() for record in run.records]),
        "bytes_down": down,
        "bytes_up": up,
        "gigabytes": (down + up) / 1e9,
    }


def curves_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return accuracies by round, as JSON has them."""
    return {str(record["round"]): record["accuracy"] for record in rounds if "accuracy" in record}


def settings_of(run: fq.Run, rounds: int, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that repeats a run, as tables of plain values for `config.toml`."""
    device, data, fleet = run.engine.device, run.data, run.fleet
    family = run.world.family
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "command": shlex.join(["python", f"examples/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        "seed": run.world.seed,
        "precision": run.engine.precision,
        "engine": type(run.engine).__name__.lower(),
        "device": f"{device.type}, {card}",
        "versions": {"fedquilt": fq.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "case": dict(known),
        "model": {"name": run.summary["model"], "parameters": family.cost(family.whole).params},
        "data": {
            "name": data.name,
            "train": len(data.targets),
            "test": len(data.test_targets),
            "samples_of_clients": data.parts.sizes.tolist(),
        },
        "fleet": {
            "cohort": fleet.sample,
            "budgets": [write(budget) for budget in fleet.kinds],
            "budget_of_clients": fleet.which.tolist(),
        },
        "link": write(run.link),
        "evaluation": write(run.evaluation),
        "method": write(run.method, Method),
    }


def last_and_best(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs twice: with the accuracies of their last rounds, and with those of their best rounds."""
    best = [{**line, **line["best"]} for line in lines]
    return {"last round": list(lines), "best round, chosen by the accuracy of the widest model": best}


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
