"""The live page in a browser: the next round appears without reloading."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("altair")
pytest.importorskip("uvicorn")

from playwright.sync_api import sync_playwright

from fedquilt.report.watch import LiveServer
from tests.unit.report.live import GrowingLog

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_MS = 60_000
ROUNDS = "document.querySelector('header tbody tr').cells[2].textContent"
FOLDER = "document.querySelector('header tbody tr').cells[5].textContent"
# Rounds of the drawn curves, as Vega has them
DRAWN = """[...new Set([...document.querySelectorAll('[data-figure=curves] .mark-symbol path')]
    .map((path) => path.getAttribute('transform')))].length"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
]


def test_a_round_appears_without_reloading_and_nothing_foreign_is_asked_for(tmp_path):
    log = GrowingLog(tmp_path / "<b>run", rounds=2)
    with LiveServer([log.folder]) as server, sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=str(CHROMIUM),
            args=["--headless", "--no-sandbox", "--disable-gpu"],
        )
        try:
            page = browser.new_page()
            requests: list[str] = []
            problems: list[str] = []
            page.on("request", lambda request: requests.append(request.url))
            page.on("console", lambda message: problems.append(message.text))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(server.url, timeout=TIMEOUT_MS)
            page.wait_for_function(f"{ROUNDS} === '2'", timeout=TIMEOUT_MS)
            page.wait_for_function(f"{DRAWN} >= 4", timeout=TIMEOUT_MS)
            page.evaluate("window.loadedOnce = true")
            before = page.evaluate(DRAWN)

            log.append()
            page.wait_for_function(f"{ROUNDS} === '3'", timeout=TIMEOUT_MS)
            page.wait_for_function(f"{DRAWN} > {before}", timeout=TIMEOUT_MS)
            assert page.evaluate("window.loadedOnce") is True
            assert page.evaluate(FOLDER).endswith("<b>run")

            # A killed run is resumed from round 1, on the same page.
            log.half()
            log.resume(1)
            page.wait_for_function(f"{ROUNDS} === '1'", timeout=TIMEOUT_MS)
            assert page.evaluate("window.loadedOnce") is True
        finally:
            browser.close()
    assert problems == []
    assert {url for url in requests if not url.startswith(server.url)} == set()
