"""A study of several methods and seeds, against one `fedquilt run` after another.

    python bench/studies.py [--methods fedavg heterofl fedrolex] [--seeds 3] [--rounds 10]

The baseline is a process per run, as a shell script would start them. Prints seconds and their
ratio to the baseline for the same runs in one process (`--jobs 1`) and in two processes at a time
(`--jobs 2`), and the seconds to open the finished study again. Model and data are the demo's, and
every way writes the same files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import machine


def seconds(commands: Sequence[Sequence[str]]) -> float:
    """Return the time that commands take one after another."""
    began = time.perf_counter()
    for command in commands:
        subprocess.run(
            [sys.executable, "-m", "fedquilt", *command], check=True, capture_output=True
        )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=["fedavg", "heterofl", "fedrolex"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    seeds = [str(seed) for seed in range(asked.seeds)]
    rounds = ["--rounds", str(asked.rounds)]
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        single = [
            [
                "run",
                "--method",
                method,
                "--seed",
                seed,
                *rounds,
                "--out",
                str(root / f"{method}{seed}"),
            ]
            for method in asked.methods
            for seed in seeds
        ]
        study = ["compare", *asked.methods, "--seeds", *seeds, *rounds]
        ways = {
            f"{len(single)} times `fedquilt run` (baseline)": single,
            "compare, one process": [[*study, "--out", str(root / "one")]],
            "compare --jobs 2": [[*study, "--jobs", "2", "--out", str(root / "two")]],
            "the finished study again": [["compare", "--resume", str(root / "one")]],
        }
        baseline = 0.0
        for name, commands in ways.items():
            took = seconds(commands)
            baseline = baseline or took
            print(f"{name:<36} {took:6.1f} s  {took / baseline:5.2f}", flush=True)


if __name__ == "__main__":
    main()
