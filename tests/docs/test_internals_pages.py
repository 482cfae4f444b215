"""docs/architecture.md and docs/internals: links, tables of files, settings and commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from fedquilt.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INTERNALS = sorted((DOCS / "internals").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS.glob("*.md"), *INTERNALS, *(DOCS / "results").glob("*.md")]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", without_code(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


def test_the_overview_is_short_and_names_every_page() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert len(text.splitlines()) <= 250
    linked = set(re.findall(r"\(internals/(\w+\.md)\)", text))
    assert linked == {page.name for page in INTERNALS}


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_pages_end_with_what_was_rejected(page: Path) -> None:
    titles = re.findall(r"^## (.*)", without_code(page.read_text()), re.MULTILINE)
    assert titles[-2:] == ["Where it is", "Why not …"]


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_tables_name_files_that_exist(page: Path) -> None:
    table = page.read_text().split("## Where it is\n")[1].split("\n## ")[0]
    folder = re.search(r"^\| in `(\S+)` \|", table, re.MULTILINE)
    assert folder
    first_cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert len(first_cells) >= 3
    for name in re.findall(r"`([^`]+)`", " ".join(first_cells)):
        assert (ROOT / folder[1] / name).exists(), name


def test_settings_of_the_page_can_be_read() -> None:
    page = (DOCS / "internals" / "persistence.md").read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert Experiment.of(tomllib.loads(settings)).method.shift == 1


def test_flags_of_the_page_are_those_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "internals" / "persistence.md").read_text()
    (usage,) = re.findall(r"```\n(fedquilt run .*?)```", page, re.DOTALL)
    for command in re.split(r"\n(?=fedquilt)", usage):
        words = command.split()[1:3]
        name = words if words[0] in ("supernet", "data") else words[:1]
        with pytest.raises(SystemExit):
            main([*name, "--help"])
        help_text = capsys.readouterr().out
        for flag in set(re.findall(r"--[a-z-]+", command)):
            assert re.search(rf"{flag}\b", help_text), f"{' '.join(name)} {flag}"
