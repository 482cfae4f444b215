"""The app of `examples/flower_app` in Flower's own simulation, beside the sequential engine.

    pip install -e '.[bench]'
    python bench/flower_simulation.py [--rounds 3]

Three simulated nodes with shares 1, 1/2 and 1/4 train FedRolex in float64. It prints the largest
difference between the weights of both runs, and fails above 1e-9. A SuperLink is started for it on
a free port of loopback and stopped afterwards. Nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

import fedquilt as fq
from fedquilt.config.toml import read_toml
from fedquilt.deployment.processes import (
    Process,
    environment,
    free_port,
    program,
    wait_until_listening,
)
from fedquilt.deployment.server import SETTINGS, WORKPLACE, Status

APP = Path(__file__).parents[1] / "examples" / "flower_app"
NODES = 3
SECONDS = 400.0  # The simulation takes about a minute, of which Ray's start is the most.
MAX_DIFFERENCE = 1e-9


def why_not() -> str:
    """Return why Flower's simulation cannot run here. Empty: it can."""
    try:
        needed = metadata.requires("flwr") or []
        installed = metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed"
    pins = [line.split(";")[0] for line in needed if line.startswith("ray")]
    if not any(pin.partition("==")[2].strip() == installed for pin in pins):
        return f"flwr's simulation needs {' or '.join(pins)}; {installed} is installed"
    return ""


def simulate(folder: Path, rounds: int) -> Path:
    """Run the app in Flower's simulation, and return the folder of the run."""
    out, home, port = folder / "run", folder / "home", free_port()
    home.mkdir(parents=True)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "simulation"\n[superlink.simulation]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {**environment(home), "PYTHONWARNINGS": "ignore"}
    words = [program("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--isolation", "subprocess"]
    superlink = Process("the SuperLink", words, env, folder / "superlink.log")
    superlink.start()
    try:
        wait_until_listening(superlink, port)
        words = [program("flwr"), "run", str(APP), "simulation"]
        words += ["--federation-config", f"num-supernodes={NODES} client-resources-num-cpus=1"]
        for override in (
            f"out={json.dumps(str(out))}",
            f"rounds={rounds}",
            'engine.precision="fp64"',
        ):
            words += ["-c", override]
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        end = time.monotonic() + SECONDS
        while (status := Status.load(out)) is None or status.state != "finished":
            assert time.monotonic() < end, superlink.tail
            assert status is None or status.state != "failed", status
            time.sleep(0.5)
    finally:
        superlink.stop()
    return out


def difference(out: Path) -> float:
    """Return the largest difference between a run's weights and those of the sequential engine."""
    settings = read_toml(out / WORKPLACE / SETTINGS)
    settings["engine"]["name"] = "sequential"
    truth = fq.Experiment.of(settings).prepare()
    truth.train(settings["rounds"])
    weights = fq.load_run(out).server.weights
    assert weights.keys() == truth.server.weights.keys()
    return max(
        float((value - weights[name]).abs().max()) for name, value in truth.server.weights.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"{reason}. pip install -e '.[bench]' installs it.")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        out = simulate(Path(folder), arguments.rounds)
        seconds = time.perf_counter() - began
        largest = difference(out)
    print(
        f"{arguments.rounds} rounds of FedRolex on {NODES} simulated nodes in {seconds:.0f} s: the "
        f"largest difference to sequential is {largest:.1e}"
    )
    assert largest <= MAX_DIFFERENCE


if __name__ == "__main__":
    main()
