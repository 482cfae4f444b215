"""Delay of the live page, and what recording and watching cost a run.

    pip install -e '.[cli,watch]'
    python bench/watch.py [--rounds 40] [--watchers 200]

`recording` is the time in which a round's record is written, without checkpoints, beside the time
of the round. `noticing` is the time in which a round is planned on a state that notices whether
plans read it, beside that on the state itself. `delay` is the time from the write of a record to
the event that tells a reader, and to the end of the reader's request for the new content. The run
goes on in another process, and `round` is the median time of its rounds without and with watchers.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.request import urlopen

from measure import machine

from fedquilt import Run
from fedquilt.report.watch import wait_for_run
from fedquilt.round import ObservedState
from fedquilt.round.budgets import planned
from fedquilt.runs.folder import Folder
from fedquilt.runs.recipe import config_text

RUN = [sys.executable, "-m", "fedquilt", "run", "--method", "heterofl"]
WATCH = [sys.executable, "-m", "fedquilt", "watch"]
TIMEOUT_SECONDS = 120.0
PLAN_TIMES = 200  # Plans of a round whose median is printed
SETTLE_SECONDS = 15.0  # Time after the run in which the last events come


class Watcher:
    """A stream of events. The first one of a page is read in a thread, which notes the times.

    Args:
        port: Port of the live page.
        reads: True: it notes when each event came, and asks for the new content as a browser does.
            False: it leaves the events to its socket.
    """

    def __init__(self, port: int, reads: bool) -> None:
        self.events: list[float] = []
        self.contents: list[float] = []
        self._url = f"http://127.0.0.1:{port}/content.json"
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)
        request = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        self._socket.sendall(request.encode())
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._socket.makefile("rb"):
                if line.startswith(b"data:"):
                    self.events.append(time.time())
                    urlopen(self._url, timeout=TIMEOUT_SECONDS).read()
                    self.contents.append(time.time())
        except OSError:
            return  # The socket was closed.

    def close(self) -> None:
        """Close the stream."""
        self._socket.close()


def start(folder: Path, rounds: int) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own."""
    return subprocess.Popen(
        [*RUN, "--rounds", str(rounds), "--out", str(folder)], stdout=subprocess.DEVNULL
    )


def finish(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Wait for the end of a run, and return the median seconds of its rounds after the first."""
    if process.wait(600):
        raise SystemExit(f"the run in {folder} failed with status {process.returncode}.")
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines[1:])


def recording(folder: Path, rounds: int) -> None:
    """Print the time in which records are written, beside the time of a round."""
    from fedquilt.runs.demo import demo
    from fedquilt.runs.experiment import Experiment

    run = Experiment.of({**demo("heterofl"), "rounds": rounds}).prepare()
    seconds: list[float] = []
    with Folder.create(folder, config_text(run, rounds)) as opened:
        opened.watch(run)

        def timed(record: object) -> None:
            began = time.perf_counter()
            opened._append(run.server)
            seconds.append(time.perf_counter() - began)

        run.train(rounds, watch=timed)
    size = (folder / "rounds.jsonl").stat().st_size / rounds
    rest = statistics.median(record.seconds for record in run.records[1:])
    middle = statistics.median(seconds)
    print(
        f"recording   {1e3 * middle:.2f} ms a round of {rest:.2f} s ({middle / rest:.2%}), "
        f"{size:.0f} bytes a round"
    )
    noticing(run)


def noticing(run: Run) -> None:
    """Print the time in which a round is planned, with and without a state that notices reads."""
    server, world = run.server, run.world
    ids = run.fleet.draw_cohort(server.round, world.seed, None, 0)
    cohort = [
        run.fleet.client(id, server.round, world.seed, run.engine.size(id), position)
        for position, id in enumerate(ids)
    ]

    def seconds(observed: bool) -> float:
        began = time.perf_counter()
        state = ObservedState(server).server if observed else server
        for client in cohort:
            planned(run.method, state, client, world)
        return time.perf_counter() - began

    pairs = [(seconds(True), seconds(False)) for _ in range(PLAN_TIMES)]
    noticed, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"noticing    {1e6 * noticed:.0f} µs to plan a round of {len(cohort)} clients, "
        f"{1e6 * plain:.0f} µs without it"
    )


def watched(folder: Path, rounds: int, watchers: int) -> float:
    """Print the delays of a live page while a run goes on, and return its seconds a round."""
    process = start(folder, rounds)
    wait_for_run([folder], TIMEOUT_SECONDS)
    file = folder / "rounds.jsonl"
    written: dict[int, float] = {}  # Time at which the log had this size first
    ended = threading.Event()

    def observe() -> None:
        """Note the time of each write as the file system has it."""
        while not ended.wait(0.002):
            if file.exists():
                stat = file.stat()
                written.setdefault(stat.st_size, stat.st_mtime)

    observer = threading.Thread(target=observe)
    server = subprocess.Popen([*WATCH, str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    readers: list[Watcher] = []
    try:
        port = int(server.stdout.readline().split("/")[2].rpartition(":")[2])
        readers += [Watcher(port, index == 0) for index in range(watchers)]
        begun = time.time()
        observer.start()
        seconds = finish(process, folder)
        last = time.time()
        time.sleep(SETTLE_SECONDS)
        ended.set()
        observer.join()
        events, contents = readers[0].events[1:], readers[0].contents[1:]
    finally:
        ended.set()
        server.send_signal(signal.SIGINT)
        server.wait(TIMEOUT_SECONDS)
        for reader in readers:
            reader.close()
    writes = [at for at in written.values() if begun < at <= last]
    if not writes:
        raise SystemExit("no round ended while the page was open. Ask for more --rounds.")
    print(f"{watchers} watchers, {len(writes)} records, {len(events)} events")
    for name, times in (("event", events), ("content", contents)):
        delays = [min(after for after in times if after >= at) - at for at in writes]
        print(
            f"delay to the {name:<8} median {statistics.median(delays):.2f} s, largest "
            f"{max(delays):.2f} s"
        )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--watchers", type=int, default=200)
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        recording(Path(name) / "recording", asked.rounds)
        alone = Path(name) / "alone"
        without = finish(start(alone, asked.rounds), alone)
        seconds = watched(Path(name) / "watched", asked.rounds, asked.watchers)
    print(f"round       {without:.2f} s alone, {seconds:.2f} s with {asked.watchers} watchers")


if __name__ == "__main__":
    main()
