"""docs/tutorial.ipynb, executed cell by cell: stored outputs are those that it prints.

It has no magics, so that a namespace can replace a kernel. Figures are not compared. `pytest
tests/docs/test_tutorial.py --update-golden` stores what is printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "tutorial.ipynb"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The initial namespace of a kernel. Figures are drawn and not shown."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    threads = torch.get_num_threads()
    yield {"__name__": "__main__", "shown": shown}
    plt.close("all")
    torch.set_num_threads(threads)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.slow
def test_every_cell_runs_and_prints_what_is_stored(
    namespace: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, notebook = request.config.getoption("--update-golden"), json.loads(FILE.read_text())
    for place, cell in enumerate(code_cells(notebook)):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(
                compile("".join(cell["source"]), f"{FILE.name}, code cell {place}", "exec"),
                namespace,
            )
        found = printed.getvalue()
        if update:
            lines = found.splitlines(keepends=True)
            cell["outputs"] = (
                [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            )
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert NUMBER.sub("#", found) == NUMBER.sub("#", stored)
        # float32, another processor
        assert numbers(found) == pytest.approx(numbers(stored), rel=0.05, abs=0.05)
    if update:
        FILE.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    assert len(namespace["shown"]) >= 2
    for run in namespace["runs"].values():
        assert min(run.accuracy.values()) > 0.8


def test_the_notebook_is_small_and_its_links_work() -> None:
    notebook = json.loads(FILE.read_text())
    assert FILE.stat().st_size < 20_000
    assert all(
        set(output) == {"name", "output_type", "text"}
        for c in code_cells(notebook)
        for output in c["outputs"]
    )
    assert all(cell["execution_count"] is None for cell in code_cells(notebook))
    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        assert (DOCS / path).exists(), path
