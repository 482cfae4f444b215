"""docs/links.md: its settings are read, its commands and its Python run, its table is complete, its numbers hold."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import fedquilt as fq
import fedquilt.config  # it knows the tables of names
from fedquilt.cli import main
from fedquilt.round.link import LINKS
from fedquilt.settings import Problem, read

PAGE = (Path(__file__).parents[2] / "docs" / "links.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_settings_make_a_link(block: str) -> None:
    problems: list[Problem] = []
    link: fq.Link = read(fq.Link, tomllib.loads(block)["link"], "link", problems)
    assert not problems
    link.check(20)
    assert link != fq.Link()


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)[1:]
    quick = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"] if words[0] == "run" else []
    assert main([*words, *quick]) == 0
    assert ("over the link" in capsys.readouterr().out) == ("clock" in line)


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(blocks("python")).replace("deal(20)", "deal(4)").replace("20, sample=10", "4, sample=2")
    exec(compile(code, "links.md", "exec", dont_inherit=True), {"__name__": "links"})
    assert len(capsys.readouterr().out.split()) == 2


def test_every_link_is_on_the_page() -> None:
    assert re.findall(r"^\| `([\w+-]+)` \|", PAGE, re.MULTILINE) == list(LINKS)
    assert '`link = "lq8"`' in PAGE


@pytest.mark.parametrize(("distance", "rate"), [(250.0, 0.01), (500.0, 0.08), (800.0, 1 / 3)])
def test_error_rates_at_these_distances(distance: float, rate: float) -> None:
    assert fq.Wireless(distances=(distance,)).rates(0, 0)[0] == pytest.approx(rate, abs=0.03 * (rate > 0.1) + 0.005)
