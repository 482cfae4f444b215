"""The page of `fedquilt report` in headless Chromium: drawn charts, controls and accessibility."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.unit.report.conftest import record, write_run, write_summary

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu")
METHODS = ("fedavg", "heterofl", "fedrolex", "feddropout", "splitmix")
SHORT = ["--rounds", "6", "--clients", "6", "--cohort", "3", "--epochs", "1", "--model", "mlp"]
BUDGETS = ["--set", 'fleet.budgets={name="uniform",shares=[1.0,0.5,0.25]}']
TIMEOUT = 60_000  # Milliseconds for one step in the browser
# The script of the npm package axe-core, fetched by hand: npm pack axe-core
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing"),
]
pytest.importorskip("altair")
playwright = pytest.importorskip("playwright.sync_api")

# Number of drawn marks, and of the rows that the chart was given, by figure.
COUNTS = """() => Object.fromEntries([...fedquilt.views].map(([name, result]) => {
  const marks = {};
  const visit = (item) => {
    if (item.marktype && item.role === "mark") {
      const name = item.name || "";
      const isPath = item.marktype === "line" || item.marktype === "area";
      if (name.includes("marks") && !isPath) marks[name] = item.items.length;
    }
    for (const child of item.items || []) visit(child);
  };
  visit(result.view.scenegraph().root);
  const data = Object.values(result.spec.datasets).map((rows) => rows.length);
  return [name, { marks: Object.values(marks), rows: data }];
}))"""


@pytest.fixture(scope="module")
def browser():
    """Return a browser that is closed after the tests of this file."""
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return the pages of a study of five methods and three seeds, and of one of its runs."""
    root = tmp_path_factory.mktemp("browser")
    seeds = ["--seeds", "0", "1", "2"]
    out = root / "study"
    command = ["compare", *METHODS, *SHORT, *BUDGETS, *seeds, "--set", "evaluation.every=2"]
    assert main([*command, "--out", str(out)]) == 0
    assert main(["report", str(out), "--out", str(root / "study.html")]) == 0
    run = next(out.glob("fedrolex*/seed0"))
    assert main(["report", str(run), "--out", str(root / "run.html")]) == 0
    return root


@pytest.fixture
def opened(browser):
    """Return a function that opens a page, and checks at the end that nothing went wrong."""
    problems, contexts = [], []

    def open_page(file, **options):
        context = browser.new_context(**options)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: m.type in ("error", "warning") and problems.append(m.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda r: r.url.startswith("http") and problems.append(r.url))
        tab.goto(file.as_uri())
        tab.evaluate("fedquilt.ready")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["study", "run"])
def test_every_chart_draws_every_row(study, opened, name, scheme):
    tab = opened(study / f"{name}.html", color_scheme=scheme)
    counts = tab.evaluate(COUNTS)
    assert len(counts) == tab.locator(".chart").count() > 5
    for figure, count in counts.items():
        assert count["rows"], figure
        assert count["marks"], figure
        assert all(marks == count["rows"][0] for marks in count["marks"]), (figure, count)


def test_the_drawn_quilts_are_a_diagonal_and_a_prefix(study, opened):
    tab = opened(study / "study.html")
    titles = tab.locator("#quilts figure h3").all_inner_texts()
    drawn = {
        title: tab.evaluate(
            "name => Object.values(fedquilt.views.get(name).spec.datasets)[0]", f"quilt-{index}"
        )
        for index, title in enumerate(titles)
    }
    always = {}  # Positions that all clients of a round train: those of the smallest window
    for title in ("heterofl", "fedrolex"):
        for cell in drawn[title]:
            positions = always.setdefault(title, {}).setdefault(cell["first"], set())
            if cell["times"] == 3:
                positions.update(range(cell["start"], cell["stop"]))
    prefixes = always["heterofl"].values()
    assert all(positions == set(range(len(positions))) for positions in prefixes)
    assert {min(positions) for positions in always["heterofl"].values() if positions} == {0}
    starts = {number: min(positions) for number, positions in always["fedrolex"].items()}
    assert starts == {number: number - 1 for number in starts}


def test_controls_change_the_chart_by_keyboard(study, opened):
    tab = opened(study / "run.html")
    chart = tab.locator('.chart[data-figure="curves"]')
    before = chart.inner_html()
    tab.locator("#curves-0").focus()
    tab.keyboard.press("ArrowDown")
    tab.wait_for_function(
        "document.querySelector('.chart[data-figure=curves]').dataset.drawn.includes('bytes')"
    )
    assert chart.inner_html() != before
    quilt = tab.locator('.chart[data-figure="quilt"]')
    before = quilt.inner_html()
    tab.locator("#quilt-0").select_option(index=1)
    axis = tab.locator("#quilt-0").input_value()
    tab.wait_for_function(
        "axis => JSON.parse(document.querySelector('.chart[data-figure=quilt]').dataset.drawn)[0]"
        " === axis",
        arg=axis,
    )
    assert quilt.inner_html() != before
    tab.keyboard.press("Home")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.tagName") in ("A", "SELECT", "SUMMARY")


def test_a_narrow_page_does_not_scroll_sideways(study, opened):
    tab = opened(study / "study.html", viewport={"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["study", "run"])
def test_axe_finds_no_serious_problem(study, opened, name, scheme):
    if not AXE.is_file():
        pytest.skip(f"{AXE} is missing: npm pack axe-core, and AXE_CORE=…/axe.min.js")
    tab = opened(study / f"{name}.html", color_scheme=scheme)
    for details in tab.locator("details").all()[:4]:
        details.evaluate("element => { element.open = true; }")
    tab.evaluate(AXE.read_text())
    found = tab.evaluate("axe.run().then((result) => result.violations)")
    serious = [
        (problem["id"], [node["html"][:200] for node in problem["nodes"]])
        for problem in found
        if problem["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_hostile_names_run_nothing(tmp_path, opened):
    hostile = "<img src=x onerror=alert(1)>\"'</script><script>document.title='ran'</script>"
    folder = write_run(tmp_path / "run", [record(1, {"1.0": 0.5})], "rounds = 1\n")
    write_summary(folder, method=hostile, rounds=1, metrics={hostile: {"1.0": 0.5}}, main=hostile)
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    tab = opened(out)
    assert tab.title().startswith("fedquilt report: <img")
    assert tab.locator("img").count() == 0


def test_new_content_keeps_what_the_reader_chose(study, opened):
    tab = opened(study / "run.html")
    tab.locator("#quilt-1").select_option("smallest")
    tab.locator("figure#curves details").evaluate("element => { element.open = true; }")
    shown = tab.evaluate(
        """async () => {
          const charts = JSON.parse(document.getElementById("charts").textContent);
          const body = document.getElementById("content").innerHTML;
          await fedquilt.show({ title: "anew", body, charts });
          return document.querySelector(".chart[data-figure=quilt]").dataset.drawn;
        }"""
    )
    assert json.loads(shown)[1] == "smallest"
    assert tab.title() == "anew"
    assert tab.locator("figure#curves details").evaluate("element => element.open")
    assert re.search("<svg", tab.locator('.chart[data-figure="curves"]').inner_html())
