"""`make docs`: the site has a page for every name, and is refused if a reference is broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedquilt as fq

ROOT = Path(__file__).parents[2]
# Parts of a checkout that pages may link to.
FOLDERS = ("bench", "docs", "examples", "fedquilt", "results", "tests", "tools")
FILES = ("CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml")
NAMESPACES = ("attacks", "data", "fleets", "links", "methods", "models", "optimizers", "schedules")

pytestmark = pytest.mark.slow


def build(checkout: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout by the command in its Makefile."""
    rules = (ROOT / "Makefile").read_text()
    (options,) = re.findall(r"^\t\$\(BIN\)/python (-m sphinx .*) build/docs$", rules, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *options.split(), str(out)],
        cwd=checkout,
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_has_every_page_and_every_public_name(tmp_path: Path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        assert (tmp_path / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    folder = tmp_path / "docs" / "api"
    names = {name for page in folder.glob("*.html") for name in ids(page)}
    assert {f"fedquilt.{name}" for name in fq.__all__ if callable(getattr(fq, name))} <= names
    for namespace in NAMESPACES:
        assert (folder / f"{namespace}.html").is_file()
    expected = {"optimizers.SGD", "links.Codec", "data.Pool.of", "methods.Method.plan"}
    assert {f"fedquilt.{name}" for name in expected} <= names
    assert {f"fedquilt.methods.api.{name}" for name in ("Learner", "Mean", "World")} <= names
    assert "docs/index.html" in (tmp_path / "index.html").read_text()
    text = re.sub(r"<[^>]+>", "", (folder / "methods.html").read_text())
    assert "Channels" in text, "comments of fields are on the page"


def ids(page: Path) -> set[str]:
    """Return the names that a page has anchors for."""
    return set(re.findall(r'id="(fedquilt\.[\w.]+)"', page.read_text()))


def test_broken_references_are_errors(tmp_path: Path):
    """One in a page, one in a docstring, and one to a section, all found in one build."""
    checkout = tmp_path / "checkout"
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, checkout)
    readme = (ROOT / "README.md").read_text()
    (checkout / "README.md").write_text(f"{readme}\n[Lost](docs/lost.md)\n")
    with (checkout / "docs" / "links.md").open("a") as page:
        page.write("\n[Section](data.md#no-such-section)\n")
    schedules = checkout / "fedquilt" / "round" / "training" / "schedules.py"
    source, count = re.subn(
        r"(class Constant:\n +\"\"\")",
        r"\1Schedule like `fq.schedules.Nothing`. ",
        schedules.read_text(),
    )
    assert count == 1
    schedules.write_text(source)

    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    problems = re.findall(r"(?:WARNING|ERROR): (.*)", done.stderr)
    assert len(problems) == 3, done.stderr
    for words in ("docs/lost.md", "no-such-section", "there is no fq.schedules.Nothing"):
        assert any(words in problem for problem in problems), done.stderr
