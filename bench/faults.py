"""Faults of a deployment on this machine, and what they cost.

    pip install -e '.[cli,flower]'
    python bench/faults.py [--times 5] [--minutes 30] [--only worker,link]
    python bench/faults.py --random 50 --seed 0

Three devices of shares 1, 1/2 and 1/4 train FedRolex over TLS, with node keys, in fp64. A fault
happens while a device trains (`in mid-round`). It is over once a round has counted that all three
devices replied to. Faults that leave the deployment alive come one after another in the same run.
In the end the model has to equal a sequential replay in which the clients that the records list as
absent are absent, and the records have to account for every request.

`replies lost` is the number of replies that are missing, failed or refused in the records of the
rounds from the fault to its end. `next round` is the time until a round counted, `all back` until
one with all devices did.

`10 MB over 40 kB/s` takes five minutes, because 10 MB at 40 kB/s take 250 s. `wrong clock` needs a
C compiler. Without it the fault is skipped, and the table says why. So is `three namespaces`, which
needs root and a kernel with `tc netem`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deployments import Deployment, DeploymentError, Plan
from measure import machine
from namespaces import Namespaces, NotPermittedError

EPOCHS = 150  # A device trains for two to three seconds, so that it can be caught in the act.
DEADLINE_SECONDS = 100.0  # A killed SuperNode is back after 75 s.
INTO_TRAINING_SECONDS = 0.8  # Time from the request to the fault
VICTIM = 1  # Client whose device suffers
MAX_KILLS = 2  # Random kills in one round. A killed SuperNode costs more than a minute.
RECOVERY_SECONDS = 400.0  # Longest time in which a fault has to be over
SLOW_BYTES_PER_SECOND = 40e3
SLOW_DEADLINE_SECONDS = 580.0
NETEM = ("delay", "80ms", "20ms", "loss", "3%")  # Both ways on each of three links
LARGE_MODEL = 'name = "tiny_resnet"\nwidths = [136, 272]'  # 11 MB in fp64


class SkippedError(Exception):
    """A fault that this machine cannot have."""


@dataclass
class Result:
    """What a fault did, once or several times."""

    name: str
    lost: list[int] = field(default_factory=list)  # Replies, by run
    next_round: list[float] = field(default_factory=list)  # Seconds, by run
    all_back: list[float] = field(default_factory=list)  # Seconds, by run
    errors: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def row(self) -> str:
        """Return a row of the table."""
        if self.skipped:
            return f"| {self.name} | skipped: {self.skipped} | | | | |"
        right = len(self.lost)
        cells = [self.name, str(right + len(self.errors)), str(right)]
        cells.append(_range(self.lost, "d"))
        cells += [_range(self.next_round, ".0f"), _range(self.all_back, ".0f")]
        return f"| {' | '.join(cells)} |"


def _range(values: list[float] | list[int], style: str) -> str:
    if not values:
        return "–"
    low, high = min(values), max(values)
    middle = f"{statistics.median_low(values):{style}}"
    return middle if low == high else f"{middle} ({low:{style}} to {high:{style}})"


HEADER = (
    "| fault | runs | ended right | replies lost | next round, s | all back, s |\n"
    "|---|---:|---:|---:|---:|---:|"
)

Fault = Callable[[Deployment], None]


# --- faults that leave the deployment alive -------------------------------------------------------


def worker(deployment: Deployment) -> None:
    """Kill the worker of a device that trains."""
    deployment.kill("worker", VICTIM)


def supernode(deployment: Deployment) -> None:
    """Kill the SuperNode of a device that trains."""
    deployment.kill("supernode", VICTIM)


def join(deployment: Deployment) -> None:
    """Kill `join`, and start it again, as its owner would."""
    deployment.kill("join", VICTIM)
    time.sleep(1)
    deployment.join(VICTIM)


def serverapp(deployment: Deployment) -> None:
    """Kill the ServerApp."""
    deployment.kill("serverapp")


def superlink(deployment: Deployment, seconds: float) -> None:
    """Kill the SuperLink, and keep `serve` from starting it again for some time."""
    deployment.send(signal.SIGSTOP, "serve")
    try:
        deployment.kill("superlink")
        time.sleep(seconds)
    finally:
        deployment.send(signal.SIGCONT, "serve")


def serve(deployment: Deployment) -> None:
    """Kill `serve`, and start it again, as its owner would."""
    deployment.kill("serve")
    time.sleep(1)
    deployment.serve()


def deadline(deployment: Deployment) -> None:
    """Pause the worker of a device until its deadline is over."""
    process = deployment.send(signal.SIGSTOP, "worker", VICTIM)
    before = deployment.num_rounds
    try:
        deployment.wait_for_round(before + 1)
    finally:
        os.kill(process, signal.SIGCONT)
    attendance = deployment.records[before].attendance
    assert attendance is not None
    assert VICTIM in attendance.missing, attendance


def link(deployment: Deployment) -> None:
    """Cut the link of a device while its request is on the way, for five seconds."""
    proxy = deployment.links[VICTIM]
    proxy.rates["down"] = 15e3  # A request of 24 kB takes more than a second.
    try:
        _wait_for_flow(deployment, "down", 12_000)
        proxy.cut()
        time.sleep(5)
    finally:
        proxy.rates.clear()
        proxy.restore()


def _wait_for_flow(deployment: Deployment, way: str, count: int) -> None:
    """Wait until bytes flow through the victim's link, beyond the polls of an idle device."""
    proxy = deployment.links[VICTIM]
    past = [(time.monotonic(), proxy.bytes[way])]

    def flows() -> bool:
        now = time.monotonic()
        past.append((now, proxy.bytes[way]))
        while past[0][0] < now - 2:
            past.pop(0)
        return past[-1][1] - past[0][1] > count

    deployment.wait(flows, "a message is on the way")


def lost_state(deployment: Deployment) -> None:
    """Lose the state folder of a device between two starts of `join`."""
    before = deployment.num_rounds
    _end_join(deployment)
    shutil.rmtree(deployment.state_of(VICTIM))
    deployment.join(VICTIM)
    deployment.wait(
        lambda: any(
            VICTIM in record.attendance.anew
            for record in deployment.records[before:]
            if record.attendance
        ),
        "the device starts anew, and the records say so",
    )


def wrong_clock(deployment: Deployment) -> None:
    """Set the clock of a device ten minutes ahead, and then right."""
    library = _wrong_clock_library(deployment.folder)
    _end_join(deployment)
    said = len(deployment.said(f"join-{VICTIM}"))
    deployment.join(VICTIM, LD_PRELOAD=str(library), CLOCK_SHIFT="600")
    process = deployment.processes[f"join-{VICTIM}"]
    deployment.wait(
        lambda: "s ahead of the server's" in deployment.said(f"join-{VICTIM}")[said:],
        "join warns of the clock",
    )
    before = deployment.num_rounds
    deployment.wait_for_round(before + 2)
    assert process.is_running, process.tail
    asked = deployment.records[before + 1].attendance
    assert asked is not None
    assert VICTIM not in asked.replied, asked
    _end_join(deployment)
    deployment.join(VICTIM)


def _wrong_clock_library(folder: Path) -> Path:
    """Compile the library that shifts the time of day, and return its path."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SkippedError("there is no C compiler (Debian: apt-get install gcc)")
    library, source = folder / "clock.so", Path(__file__).parent / "clock.c"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def other_family(deployment: Deployment) -> None:
    """Join with another model than the server's, and then with the right one."""
    _end_join(deployment)
    code = deployment.folder / "other.py"
    code.write_text(
        "from fedquilt.models.resnet import ResNet\n\n\n"
        "def net(num_classes=10):\n"
        "    return ResNet('basic', (1, 1), num_classes, 1, widths=(16, 24))\n"
    )
    process = deployment.join(VICTIM, "--model", f"{code}:net")
    deployment.wait(lambda: not process.is_running, "the device says that its model differs")
    assert process.status == 2, process.status
    assert "model" in process.tail, process.tail
    deployment.join(VICTIM)


def _end_join(deployment: Deployment) -> None:
    """End `join` as ctrl-C does."""
    deployment.processes[f"join-{VICTIM}"].stop()


# Faults by the name of the table. True: they come while the device trains.
FAULTS: dict[str, tuple[Fault, bool]] = {
    "worker killed": (worker, True),
    "SuperNode killed": (supernode, True),
    "`join` killed": (join, True),
    "ServerApp killed": (serverapp, True),
    "SuperLink killed, back after 5 s": (lambda deployment: superlink(deployment, 5), True),
    "SuperLink killed, back after 80 s": (lambda deployment: superlink(deployment, 80), True),
    "`serve` killed": (serve, True),
    "device past its deadline": (deadline, True),
    "link cut for 5 s in mid-message": (link, False),
    "state folder lost": (lost_state, False),
    "wrong clock": (wrong_clock, False),
    "another model on the device": (other_family, False),
}
SLOW = "10 MB over 40 kB/s"
LOSSY = "three namespaces that lose and delay"


def everybody_replied(deployment: Deployment, after: int) -> bool:
    """Return True if a round after this one has counted with all devices."""
    count = len(deployment.plan.shares)
    attendances = [record.attendance for record in deployment.records[after:]]
    return any(found is not None and len(found.replied) == count for found in attendances)


def suffer(deployment: Deployment, name: str, result: Result) -> None:
    """Let a fault happen, wait until it is over, and measure that."""
    fault, in_training = FAULTS[name]
    if in_training:
        deployment.wait_for_request(VICTIM)
        time.sleep(INTO_TRAINING_SECONDS)
    before = deployment.num_rounds
    began = time.monotonic()
    counted: list[float] = []
    fault(deployment)
    after = before if in_training else deployment.num_rounds

    def is_over() -> bool:
        has_ended = everybody_replied(deployment, after)  # A round may count after this line.
        if not counted and deployment.num_rounds > before:
            counted.append(time.monotonic() - began)
        return has_ended

    deployment.wait(is_over, f"all devices are back after: {name}", RECOVERY_SECONDS)
    lost = 0
    for record in deployment.records[before:]:
        attendance = record.attendance
        assert attendance is not None
        lost += len(deployment.plan.shares) - len(attendance.replied)
    result.lost.append(lost)
    result.next_round.append(counted[0])
    result.all_back.append(time.monotonic() - began)


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a folder for a deployment, which stays for its logs if the deployment fails."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield folder
    except BaseException:
        print(f"    the logs are in {folder}", flush=True)
        raise
    shutil.rmtree(folder)


@contextmanager
def running(folder: Path, rounds: int = 10_000, **options: object) -> Iterator[Deployment]:
    """Start a deployment whose rounds take a few seconds, with a link to each device."""
    plan = Plan(rounds=rounds, epochs=EPOCHS)
    deployment = Deployment(folder, plan, DEADLINE_SECONDS, has_links=True, **options)
    with deployment:
        deployment.start()
        deployment.wait_for_round(1)
        yield deployment


def live(
    names: list[str], times: int, minutes: float, say: Callable[[str], None]
) -> dict[str, Result]:
    """Let faults happen one after another in one run, and compare it with its replay.

    Args:
        names: Names of the faults.
        times: Number of times that each happens.
        minutes: Time after which no further fault begins.
        say: Prints a line.
    """
    results = {name: Result(name) for name in names}
    end = time.monotonic() + 60 * minutes
    with workplace() as folder, running(folder) as deployment:
        for name in names * times:
            result = results[name]
            if result.skipped or time.monotonic() > end:
                continue
            try:
                suffer(deployment, name, result)
            except SkippedError as skipped:
                result.skipped = str(skipped)
            except (DeploymentError, AssertionError) as error:
                result.errors.append(str(error))
                say(f"{name}: {error}")
                raise
            say(result.row)
        deployment.end()
        assert not deployment.leftovers, deployment.leftovers
        deployment.check()
    return results


# --- faults with a deployment of their own --------------------------------------------------------


def slow_link(say: Callable[[str], None]) -> Result:
    """Send a reply of 10 MB over a link of 40 kB/s."""
    result = Result(SLOW)
    plan = Plan(rounds=2, shares=(1.0,), models=(LARGE_MODEL,))
    with workplace() as folder:
        deployment = Deployment(folder, plan, SLOW_DEADLINE_SECONDS, has_links=True)
        with deployment:
            deployment.start()
            deployment.wait_for_round(1)
            before = deployment.links[0].bytes["up"]
            deployment.links[0].rates["up"] = SLOW_BYTES_PER_SECOND
            began = time.monotonic()
            deployment.wait_for_round(2, SLOW_DEADLINE_SECONDS)
            seconds = time.monotonic() - began
            sent = deployment.links[0].bytes["up"] - before
            assert sent > 10e6, sent
            deployment.finish()
            deployment.end()
            deployment.check()
    say(f"{sent / 1e6:.1f} MB were sent in {seconds:.0f} s")
    result.lost.append(0)
    result.next_round.append(seconds)
    result.all_back.append(seconds)
    return result


def lossy_network(say: Callable[[str], None], netem: Sequence[str] = NETEM) -> Result:
    """Train on three devices in network namespaces whose links lose and delay packets.

    Args:
        say: Prints a line.
        netem: Arguments of `tc qdisc … netem`. Empty: the links lose and delay nothing.
    """
    result = Result(LOSSY)
    began = time.monotonic()
    try:
        with Namespaces(3, netem) as spaces, workplace() as folder:
            deployment = Deployment(folder, Plan(), DEADLINE_SECONDS, spaces=spaces)
            with deployment:
                deployment.start()
                deployment.finish(RECOVERY_SECONDS)
                records = deployment.records
                deployment.end()
                deployment.check()
    except NotPermittedError as reason:
        result.skipped = str(reason)
        say(f"{LOSSY}: skipped, {reason}")
        return result
    replied = [len(record.attendance.replied) for record in records if record.attendance]
    result.lost.append(3 * len(records) - sum(replied))
    result.all_back.append(time.monotonic() - began)
    result.next_round.append(result.all_back[0] / len(records))
    return result


def run_random(rounds: int, seed: int, say: Callable[[str], None]) -> Result:
    """Kill random processes at random times until a number of rounds has counted."""
    dice = random.Random(seed)
    result = Result(f"{rounds} rounds under random kills")
    killed: list[str] = []
    killed_in: list[int] = []  # Round of each kill
    began = time.monotonic()
    with workplace() as folder, running(folder, rounds) as deployment:
        while deployment.num_rounds < rounds and deployment.processes["serve"].is_running:
            time.sleep(dice.uniform(2, 25))
            number = deployment.num_rounds
            if killed_in.count(number) >= MAX_KILLS:  # A slow machine would never end a round.
                deployment.wait(
                    lambda number=number: deployment.num_rounds > number,
                    f"round {number + 1} counts",
                    RECOVERY_SECONDS,
                )
                continue
            name = dice.choice(["worker", "supernode", "join", "serverapp", "superlink", "serve"])
            client = dice.randrange(3) if name in ("worker", "supernode", "join") else None
            if deployment.pid(name, client) is None:
                continue  # It is away because of an earlier kill.
            try:
                deployment.kill(name, client)
            except (DeploymentError, ProcessLookupError):
                continue
            killed.append(name)
            killed_in.append(number)
            say(f"round {deployment.num_rounds + 1}: killed {name} {client or ''}")
            if name == "join":
                assert client is not None
                deployment.join(client)
            if name == "serve" and deployment.num_rounds < rounds:
                deployment.serve()
        deployment.finish(RECOVERY_SECONDS)
        deployment.end()
        assert not deployment.leftovers, deployment.leftovers
        records = deployment.records
        assert len(records) == rounds
        deployment.check()
    replied = [len(record.attendance.replied) for record in records if record.attendance]
    result.lost.append(3 * rounds - sum(replied))
    result.next_round.append((time.monotonic() - began) / rounds)
    result.all_back.append(time.monotonic() - began)
    counts = {name: killed.count(name) for name in sorted(set(killed))}
    say(f"{len(killed)} kills: {counts}; the model equals its replay")
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="no fault begins after these")
    parser.add_argument("--only", default="", help="parts of the names of faults, by commas")
    parser.add_argument("--random", type=int, default=0, help="rounds under random kills")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(machine())

    def say(text: str) -> None:
        print(f"    {time.strftime('%H:%M:%S')} {text}", flush=True)

    if asked.random:
        result = run_random(asked.random, asked.seed, say)
        print(f"replies lost: {result.lost[0]}; {result.all_back[0]:.0f} s in all")
        return
    parts = asked.only.split(",")
    names = [name for name in FAULTS if any(part in name for part in parts)]
    results = list(live(names, asked.times, asked.minutes, say).values()) if names else []
    if any(part in SLOW for part in parts):
        results.append(slow_link(say))
    if any(part in LOSSY for part in parts):
        results.append(lossy_network(say))
    print(HEADER)
    for result in results:
        print(result.row)


if __name__ == "__main__":
    main()
