"""Seconds to read a long run and to write its report, and the size of the page.

    python bench/report.py [--rounds 5000] [--clients 200] [--cohort 20]
        [--browser /usr/bin/chromium]

The folder has the settings of a run of FedRolex on digits, and records that the project's own
writer of lines has written. Nothing is trained. With a browser that is installed, the time until
all charts are drawn is measured too.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from measure import machine

from fedquilt.report.collect import collect
from fedquilt.report.document import content_of, document, sections_of
from fedquilt.round import Grades, Record
from fedquilt.runs.round_log import encoded

MAX_BYTES = 6_000_000  # Limit on the size of the page
SETTINGS = """
rounds = {rounds}
seed = 0

[method]
name = "fedrolex"

[data]
name = "digits"

[model]
name = "tiny_resnet"

[fleet]
clients = {clients}
cohort = {cohort}

[fleet.budgets]
name = "uniform"
shares = [1.0, 0.5, 0.25, 0.125]
"""


def write(folder: Path, rounds: int, clients: int, cohort: int) -> None:
    """Write settings, and a record for every round, each of which was evaluated."""
    config = SETTINGS.format(rounds=rounds, clients=clients, cohort=cohort)
    (folder / "config.toml").write_text(config)
    draw = random.Random(0)
    check = ""
    with (folder / "rounds.jsonl").open("wb") as file:
        for round in range(1, rounds + 1):
            figures = {share: draw.random() for share in ("1.0", "0.5", "0.25", "0.125")}
            grades = Grades("accuracy", {"accuracy": figures, "loss": figures})
            late = tuple(id for id in range(cohort) if draw.random() < 0.05)
            record = Record(round, 0.5, cohort, 10**6, 10**6, 10**9, 1.0, grades=grades, late=late)
            line, check = encoded(record, check)
            file.write(line)


def drawing_seconds(page: Path, browser: Path) -> float | None:
    """Return the seconds until a browser has drawn all charts. None: there is no browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if not browser.exists():
        return None
    with sync_playwright() as play:
        arguments = ["--headless", "--no-sandbox", "--disable-gpu"]
        chromium = play.chromium.launch(executable_path=str(browser), args=arguments)
        tab = chromium.new_page()
        began = time.perf_counter()
        tab.goto(page.as_uri())
        tab.evaluate("fedquilt.ready")
        seconds = time.perf_counter() - began
        chromium.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--browser", type=Path, default=Path("/usr/bin/chromium"))
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, asked.rounds, asked.clients, asked.cohort)
        times = [time.perf_counter()]
        collection = collect([folder])
        times.append(time.perf_counter())
        sections = sections_of(collection)
        times.append(time.perf_counter())
        page = document(content_of(collection, sections))
        times.append(time.perf_counter())
        file = folder / "report.html"
        file.write_text(page)
        size = file.stat().st_size
        drawn = drawing_seconds(file, asked.browser)
    read, drew, wrote = (later - earlier for earlier, later in pairwise(times))
    print(f"{asked.rounds:,} rounds, {asked.clients} clients, {asked.cohort} in a round")
    print(f"read records {read:.1f} s, plans and charts {drew:.1f} s, page {wrote:.1f} s")
    print(f"page {size / 1e6:.2f} MB of at most {MAX_BYTES / 1e6:.0f} MB")
    print("no browser" if drawn is None else f"all charts drawn after {drawn:.1f} s")
    assert size <= MAX_BYTES


if __name__ == "__main__":
    main()
