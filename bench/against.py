"""Compare this tree's speed with another checkout's, in alternation: `python bench/against.py
../before`.

    git worktree add ../before COMMIT
    python bench/against.py ../before                           # rounds, scaling, population
    python bench/against.py ../before --only gpu               # on a GPU

Every case runs in a process of its own, once for each tree, as often as `--times` says. Printed are
the medians of both and their ratio. Times are seconds of CPU of all threads, on a GPU milliseconds
of wall time. A case measures fedquilt alone. The scripts that the cases come from compare it with
other ways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_CASES = ("rounds", "scaling", "population")
Times = dict[str, float]


def rounds() -> Times:
    """A round and an evaluation of bench/rounds.py."""
    import rounds as script
    import torch

    from fedquilt.hardware.process import keep_pages

    torch.set_num_threads(1)
    keep_pages()
    ours: Any = script.Ours(16, script.data(100, 2_000))
    ours.train()
    ours.clock.reset()
    ours.train()
    ours.evaluate()
    return {f"rounds: {stage}": seconds for stage, seconds in ours.clock.cpu.items()}


def scaling() -> Times:
    """Rounds of 10 and 50 clients of bench/scaling.py."""
    import cluster
    import torch

    torch.set_num_threads(1)
    found: Times = {}
    for clients in (10, 50):
        run = cluster.prepare(clients, 64)
        taken = []
        for _ in range(cluster.WARM + 5):
            began = time.process_time()
            cluster.play(run)
            taken.append(time.process_time() - began)
        found[f"scaling: {clients} clients"] = statistics.median(taken[cluster.WARM :])
    return found


def population() -> Times:
    """Rounds of 200 clients out of 2,000 and of 342,477, as in bench/population.py."""
    import population as script

    return {
        f"population: {count:,} clients": script.measure(count, 200, 15, "vectorized", "")["cpu"]
        for count in (2_000, 342_477)
    }


def gpu() -> Times:
    """Cases (a) with ten clients, (b), and (e) with test-batch norms, of bench/gpu.py in tf32."""
    import gpu as script
    import torch

    import fedquilt as fq

    family = fq.trace(fq.models.MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    method = script.HeteroFL(local=script.LOCAL)
    cohorts = {"a": [share for share in script.SHARES for _ in range(2)], "b": [1 / 8] * 40}
    found: Times = {}
    for name, shares in cohorts.items():
        case = script.Case(name, family, script.images(len(shares)), shares, method)
        step, whole = script.ours(case, "tf32")
        found |= {f"gpu ({name}): recorded step": step, f"gpu ({name}): step in a round": whole}

    fleet, how = fq.Fleet.of(script.SHARES, 100, 10), fq.Evaluation(5, script.EXAM)
    data = script.images(100, 10_000)
    run = fq.prepare(method, family, data, fleet, device="cuda", precision="tf32", evaluation=how)
    run.engine.memory = script.MEMORY
    run.train(25)
    records = run.records[10:]
    plain = statistics.median(one.seconds for one in records if not one.grades.accuracy)
    tested = statistics.median(one.seconds for one in records if one.grades.accuracy)
    return found | {"gpu (e): round": 1e3 * plain, "gpu (e): evaluation": 1e3 * (tested - plain)}


CASES: dict[str, Callable[[], Times]] = {
    "rounds": rounds,
    "scaling": scaling,
    "population": population,
    "gpu": gpu,
}


def measured(case: str, tree: Path) -> Times:
    """Run a case of a tree's own script, in a process that imports the tree's package.

    Names may have changed between the trees, so that one script cannot serve both.
    """
    path = os.pathsep.join(
        filter(None, (str(tree), str(tree / "bench"), os.environ.get("PYTHONPATH", "")))
    )
    command = [sys.executable, str(tree / "bench" / "against.py"), str(tree), "--child", case]
    # Without PYTHONSAFEPATH the folder of this script would come first, whatever the tree.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: Times = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="+", default=CPU_CASES, choices=CASES)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(CASES[asked.child]()))
        return
    trees = {"other": asked.other.resolve(), "this": Path(__file__).resolve().parents[1]}
    print(f"{'':<36}{'other':>10}{'this':>10}{'ratio':>8}   medians of {asked.times}", flush=True)
    for case in asked.only:
        taken: dict[str, list[Times]] = {name: [] for name in trees}
        for time_ in range(asked.times):
            for name in list(trees)[:: 1 if time_ % 2 == 0 else -1]:
                taken[name].append(measured(case, trees[name]))
                print(f"    {case}, {name}: {taken[name][-1]}", file=sys.stderr, flush=True)
        for line in taken["this"][0]:
            other, this = (
                statistics.median(one[line] for one in taken[name]) for name in ("other", "this")
            )
            print(f"{line:<36}{other:>10.4g}{this:>10.4g}{this / other:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
