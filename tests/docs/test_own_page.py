"""docs/own-model-and-data.md: saved, run and traced as a reader would."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "own-model-and-data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the reader's file in it."""
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_commands_run_as_written(mine, capsys):
    lines = blocks("sh")[0].splitlines()
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)[1:]
        short = ["--rounds", "1", "--epochs", "1"] if words[0] == "run" else []
        assert main(shortened(words, short)) == 0, line
    assert "motion: 12 clients" in capsys.readouterr().out


def test_the_settings_run(mine, capsys):
    block, _ = blocks("toml")
    (mine / "motion.toml").write_text(block)
    assert tomllib.loads(block)["data"]["users"] == 20
    assert main(["run", "motion.toml", "--rounds", "1"]) == 0
    assert "for 20 clients, 6 a round" in capsys.readouterr().out


def test_schedules_of_the_learning_rate_run_as_written(mine, capsys):
    (mine / "warm.toml").write_text(blocks("toml")[1])
    assert main(["run", "warm.toml", "--rounds", "1", "--cohort", "2"]) == 0
    assert (
        "adamw, lr 0.01 (within a round warm-up of 10 %, cosine to 0.1), 2 epochs"
        in capsys.readouterr().out
    )
    assert main([*shlex.split(blocks("sh")[1])[1:], "--rounds", "1", "--cohort", "2"]) == 0
    assert "(within a round warm-up of 1 step, linear to 0)" in capsys.readouterr().out
    names: dict[str, object] = {}
    exec(compile(blocks("python")[2], "own-model-and-data.md", "exec"), names)
    assert names["method"].local.within_round == names["within_round"]
    assert capsys.readouterr().out.startswith("[0.5, 1.0, ")


def test_the_script_runs_and_learns(mine, capsys):
    names: dict[str, object] = {}
    exec(compile(blocks("python")[1], "own-model-and-data.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines[:2]] == ["4292", "1380"]
    assert int(lines[2].split()[-1]) <= 30_000
    assert names["run"].accuracy["1.0"] > 0.8
    small = names["small"]
    assert type(small).__name__ == "Motion"
    assert small.stem.out_channels == 8


def test_the_axes_are_those_the_page_shows(mine):
    from mine import Motion

    axes = fq.trace(Motion, torch.zeros(2, 6, 50)).axes
    shown = re.findall(r"^(\w+\.weight) {2,}(\w+(?: \w+)*)", PAGE, re.MULTILINE)
    assert len(shown) == 4
    assert {name: axes[name] for name, _ in shown} == dict(shown)
    printed = dict(line.split("  ", 1) for line in str(axes).splitlines())
    assert {name: printed[name].strip() for name, _ in shown} == dict(shown)


def test_the_error_is_the_one_the_page_shows(mine):
    from mine import Motion

    class Fixed(Motion):
        def forward(self, x):
            return self.head(self.stem(x).reshape(-1, 32, 50).mean(2))

    with pytest.raises(fq.errors.TraceError) as found:
        fq.trace(Fixed, torch.zeros(2, 6, 50))
    shown = " ".join(re.search(r"TraceError: (.*?)```", PAGE, re.DOTALL)[1].split())
    place = re.compile(r"\([^()]*\.py:\d+\)")
    assert place.sub("", shown) == place.sub("", str(found.value))
    assert fq.trace(Fixed, torch.zeros(2, 6, 50), fixed=["stem"])


def test_decisions_that_depend_on_values_are_refused(mine):
    from mine import Motion

    class Undecided(Motion):
        def forward(self, x):
            x = self.stem(x).mean(2)
            return self.head(x if x.sum() > 0 else -x)

    with pytest.raises(fq.errors.TraceError, match=r"test_own_page\.py:\d+.*torch\.where"):
        fq.trace(Undecided, torch.zeros(2, 6, 50))


def test_linked_pages_exist():
    docs = Path(__file__).parents[2] / "docs"
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", PAGE):
        path, _, anchor = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (docs / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in [
            heading.lower().replace(" ", "-") for heading in headings
        ], link
