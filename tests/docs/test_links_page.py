"""docs/links.md: its settings are read, its commands and its Python run, its table is complete, its
numbers hold.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
import fedquilt.runs.experiment  # it knows the tables of names
from fedquilt.cli.main import main
from fedquilt.config.reading import read
from fedquilt.config.tables import Problem
from fedquilt.methods import FedDropout, FedRolex, HeteroFL, Method, SplitMix
from fedquilt.round.link import LINKS, ChangeSpec
from fedquilt.round.link.coding import check_codec
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "links.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder outside of the package that has the page's own file."""
    (source,) = (block for block in blocks("python") if block.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("block", blocks("toml"))
def test_settings_make_a_link(block: str) -> None:
    problems: list[Problem] = []
    link: fq.Link = read(fq.Link, tomllib.loads(block)["link"], "link", problems)
    assert not problems
    link.check(20)
    assert link != fq.Link()


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)[1:]
    quick = (
        ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
        if words[0] == "run"
        else []
    )
    assert main(shortened(words, quick)) == 0
    assert ("over the link" in capsys.readouterr().out) == ("clock" in line)


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "\n".join(blocks("python"))
        .replace("partition(20)", "partition(4)")
        .replace("20, cohort=10", "4, cohort=2")
    )
    exec(compile(code, "links.md", "exec", dont_inherit=True), {"__name__": "links"})
    assert len(capsys.readouterr().out.split()) == 2


def test_every_link_is_on_the_page() -> None:
    assert re.findall(r"^\| `([\w+-]+)` \|", PAGE, re.MULTILINE) == list(LINKS)
    assert '`link = "lq8"`' in PAGE


@pytest.mark.parametrize(("distance", "rate"), [(250.0, 0.01), (500.0, 0.08), (800.0, 1 / 3)])
def test_error_rates_at_these_distances(distance: float, rate: float) -> None:
    assert fq.links.Wireless(distances=(distance,)).rates(0, 0)[0] == pytest.approx(
        rate, abs=0.03 * (rate > 0.1) + 0.005
    )


def test_the_part_that_is_lost_follows_from_the_rate() -> None:
    """The pages that name an error rate say what it costs: 1 − ((1 − e) + … + (1 − e)^8) / 8 of
    eight columns.
    """
    lost = {e: 1 - sum((1 - e) ** n for n in range(1, 9)) / 8 for e in (0.05, 0.15, 0.25, 0.3)}
    words = [f"{100 * part:.0f} %" for part in lost.values()]
    text = " ".join(PAGE.split())
    assert words == ["20 %", "48 %", "66 %", "73 %"]
    assert (
        "{} are lost at a rate of 0.05, {} at 0.1 to 0.2, {} at 0.2 to 0.3 and {} at 0.3.".format(
            *words
        )
        in text
    )
    for name, rates, part in (("mild", "0.1 to 0.2", words[1]), ("strong", "0.2 to 0.3", words[2])):
        assert (
            f"| `lossy-{name}` | a column fails at a rate of {rates}: of eight columns {part} are "
            "lost |" in text
        )
    results = (Path(__file__).parents[2] / "docs" / "results" / "fedrescue.md").read_text()
    assert not re.search(
        r"los[et][^.|]* 0\.2 to 0\.3 of the columns|0\.2 to 0\.3 of the columns lost", results
    )
    assert words[1] in results
    assert words[2] in results


def test_an_upload_reveals_labels_where_the_page_says_so(perceptron: fq.Family) -> None:
    """Masked, its class rows are the client's classes; with all rows, positions do not depend on
    data.
    """
    section = PAGE.split("## What an upload reveals")[1].split("## ")[0]
    assert "reveal the client's labels" in section
    world, client = (
        fq.methods.api.World(perceptron),
        fq.methods.api.Client(0, fq.Budget(share=1.0), 4),
    )
    held = torch.tensor([True, False, True])

    def rows(method: Method) -> object:
        submodel, *_ = method.plan(fq.methods.api.Server(0, {}), client, world)
        upload = method.learner(fq.methods.api.Job(client, submodel, 0), world).upload(
            perceptron.member(perceptron.whole), submodel, held
        )
        return list(upload.index["class"]) if "class" in upload.index else "all"

    names = {"HeteroFL": HeteroFL, "FedRolex": FedRolex, "Federated Dropout": FedDropout}
    for name, kind in names.items():
        assert name in section
        assert rows(kind()) == [0, 2]
        assert rows(kind().with_local(masked="")) == "all"
    assert rows(SplitMix().with_local(masked="client")) == "all"


@pytest.mark.usefixtures("mine")
def test_the_codec_on_the_page_sends_what_it_says(perceptron: fq.Family) -> None:
    """Of ten values the two largest arrive where they were, and over a loss those that arrive."""
    codec = read(fq.Link, {"codec": {"name": "mine.py:TopK", "keep": 0.2}}, "link", []).codec
    change = torch.tensor([0.0, 3.0, -5.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    spec = ChangeSpec({"weight": torch.Size([2, 5])}, change.dtype, change.device)
    message = codec.encode(change, spec, (0, 0))
    assert len(message) == 2 * (4 + 4)
    assert codec.decode(message, spec).tolist() == [0.0, 3.0, -5.0, *[0.0] * 7]
    half = replace(spec, arrives=torch.arange(10) < 2)
    message = codec.encode(change, half, (0, 0))
    assert len(message) == 4 + 4
    assert codec.decode(message, half).tolist() == [0.0, 3.0, *[0.0] * 8]
    check_codec(codec, fq.methods.api.World(perceptron), lossy=True)
