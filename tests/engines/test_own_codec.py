"""A user's codecs in a file: the same numbers on every engine, from Python and from TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.run import RunRequest
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS
from fedquilt.names import find
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import choose
from tests.conftest import LOCAL, assert_same, with_local

OTHERS = sorted(set(LOCAL) - {"sequential"})
RAGGED = (7, 4, 9, 5, 8, 4)
SHARES = (1.0, 0.5, 0.25)

MINE = '''
from dataclasses import dataclass

import torch
from torch import nn

from fedquilt import noise
from fedquilt.data import Pool
from fedquilt.round.link import BaseCodec


@dataclass(frozen=True)
class TopK(BaseCodec):
    """Codec that sends the largest values and their positions."""

    keep: float = 0.2  # Part of the values that are sent.
    feedback: bool = False
    down: bool = False

    def encode(self, change, spec, keys):
        places = change.abs().topk(max(1, round(self.keep * len(change)))).indices.sort().values
        if spec.arrives is not None:
            places = places[spec.arrives[places]]
        return torch.cat([places.int().view(torch.uint8), change[places].view(torch.uint8)])

    def decode(self, message, spec):
        count = len(message) // (4 + spec.dtype.itemsize)
        places = message[: 4 * count].clone().view(torch.int32).long()
        values = message[4 * count :].clone().view(spec.dtype)
        return values.new_zeros(spec.count).index_copy_(0, places, values)


@dataclass(frozen=True)
class Ternary(BaseCodec):
    """-1, 0 or 1 drawn at random, times the largest value of the tensor (Wen et al. 2017)."""

    def encode(self, change, spec, keys):
        scales = torch.stack([one.abs().max() for one in change.split(spec.lengths)])
        scale = scales.repeat_interleave(torch.tensor(spec.lengths, device=change.device))
        key = torch.tensor(keys[0], device=change.device)
        drawn = noise.uniform(key, change.shape, change.dtype)
        codes = change.sign() * (drawn * scale < change.abs()) + 1
        if spec.arrives is not None:
            codes = codes[spec.arrives]
        return torch.cat([scales.view(torch.uint8), codes.to(torch.uint8)])

    def decode(self, message, spec):
        head = len(spec.shapes) * spec.dtype.itemsize
        scales = message[:head].clone().view(spec.dtype)
        scale = scales.repeat_interleave(torch.tensor(spec.lengths, device=message.device))
        signs = message[head:].to(spec.dtype) - 1
        if spec.arrives is not None:
            signs = torch.zeros_like(scale).masked_scatter_(spec.arrives, signs)
        return signs * scale


def half():
    return TopK(0.5)


def net(num_classes):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_classes))


def pool():
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return Pool.of((x, y), (x, y))
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codec(name: str, **options: Any) -> Any:
    return find({}, f"mine.py:{name}", "codec")(**options)


def small(**settings: Any) -> Experiment:
    plain = {"method": "heterofl", "model": "mine.py:net", "data": "mine.py:pool", "rounds": 2}
    plain |= {"fleet": {"clients": 6, "cohort": 4}, **settings}
    return Experiment.of(plain)


LOSS = fq.links.ColumnLoss((0.1, 0.3), 0.4)
LINKS = {
    "feedback": lambda: fq.Link(codec=codec("TopK", feedback=True)),
    "everything": lambda: fq.Link(LOSS, codec("TopK", feedback=True, down=True)),
    "random": lambda: fq.Link(LOSS, codec("Ternary")),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "splitmix"])
def test_a_users_codec_is_equal_on_every_engine(name, link, mine, residual, play, make_data):
    sharp = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
    method = with_local(METHODS[name](), batch_size=4, optimizer=sharp)
    data = make_data(residual, RAGGED, labels=2)
    fleet = fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True)
    truth, *others = (
        play(method, residual, data, fleet=fleet, engine=engine, rounds=3, link=LINKS[link]())
        for engine in ("sequential", *OTHERS)
    )
    assert truth.records[-1].bytes_up > 0
    for other in others:
        assert_same(truth, other)


def test_bytes_of_a_users_codec_are_those_of_its_messages(mine, perceptron, play, make_data):
    link = fq.Link(codec=codec("TopK"))
    run = play(fq.methods.FedAvg(), perceptron, make_data(perceptron, (8, 8)), link=link)
    assert perceptron.count(perceptron.whole) == 51
    # Two clients send a fifth of 51 values: four bytes of a position and eight of a float64.
    assert [record.bytes_up for record in run.records] == [2 * 10 * (4 + 8)] * 2


@pytest.mark.parametrize("engine", LOCAL)
def test_a_users_codec_in_a_file_gives_the_same_run_as_in_python(mine: Path, engine: str) -> None:
    table = {"name": "mine.py:TopK", "keep": 0.3, "feedback": True}
    link = {"loss": {"name": "columns", "rate": 0.3}, "codec": table}
    experiment = small(link=link, engine={"name": engine, "precision": "fp64"})
    made = fq.Link(fq.links.ColumnLoss(0.3), codec("TopK", keep=0.3, feedback=True))
    assert experiment.link == made
    again = Experiment.of(tomllib.loads(experiment.to_toml()))
    assert again == experiment
    assert 'name = "mine.py:TopK"' in experiment.to_toml()

    run = again.prepare().train(2)
    ground = experiment.ground()
    method, family, data, fleet = experiment.method, ground.family, ground.data, ground.fleet
    python = fq.run(method, family, data, fleet, "sequential", 2, link=made, precision="fp64")
    weights = dict(python.server.weights)
    torch.testing.assert_close(dict(run.server.weights), weights, rtol=0, atol=1e-9)
    assert [one.bytes_up for one in run.records] == [one.bytes_up for one in python.records]


def test_a_function_in_a_file_may_return_the_codec(mine: Path) -> None:
    assert small(link={"codec": "mine.py:half"}).link.codec == codec("TopK", keep=0.5)


def test_a_flag_names_another_codec_without_the_options_of_the_first(mine: Path) -> None:
    parts = 'method = "fedavg"\nmodel = "mine.py:net"\ndata = "mine.py:pool"\n'
    Path("base.toml").write_text(parts + "link = { codec = { bits = 4 } }")

    def link(*assign: str) -> fq.Link:
        return RunRequest(config="base.toml", assign=assign).experiment("base.toml", None).link

    assert link() == fq.Link(codec=fq.links.Codec(4))
    assert link("link.codec.name=linear") == fq.Link(codec=fq.links.Codec(4))
    assert link("link.codec.name=mine.py:TopK") == fq.Link(codec=codec("TopK"))
    chosen = link("link.codec.name=mine.py:TopK", "link.codec.keep=0.5")
    assert chosen == fq.Link(codec=codec("TopK", keep=0.5))
    settings = {"link": {"codec": {"name": "mine.py:TopK", "keep": 0.5}}}
    assert choose(settings, ["link", "codec"], "linear") == {"link": {"codec": {"name": "linear"}}}


def test_a_table_without_a_name_is_the_built_in_codec(mine: Path) -> None:
    """Files of earlier versions have no name."""
    table = {"bits": 4, "feedback": True}
    assert small(link={"codec": table}).link.codec == fq.links.Codec(4, feedback=True)
    assert small(link={"codec": {}}).link.codec == fq.links.Codec()
    assert small(link={"codec": "linear"}).link.codec == fq.links.Codec()
    assert small(link={"name": "lq8", "codec": {"keep": 0.5}}).link.codec == fq.links.Codec(8, 0.5)
    assert tomllib.loads(small(link="lq8").to_toml())["link"]["codec"]["name"] == "linear"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "liner",
            r"\.name: there is no codec named 'liner'\. Did you mean 'linear'\? Known: linear\.",
        ),
        (
            "mine.py:TopQ",
            r"\.name: there is no class or function in mine\.py named 'TopQ'\. Did you mean "
            r"'TopK'\?",
        ),
        ("other.py:TopK", r"\.name: the codec 'other\.py:TopK' was asked for; there is no file"),
        ("mine.py:net", r": mine\.py:net was called and failed: TypeError"),
        ("mine.py:pool", r": mine\.py:pool was called for a BaseCodec; it returned a Pool\."),
        (
            {"name": "mine.py:TopK", "bits": 8},
            r"\.bits: mine\.py:TopK has no such key\..* Known: keep,",
        ),
        (8, r": 8 was found; a codec by its name, or a table would fit\."),
    ],
)
def test_values_that_are_not_codecs_are_refused(table: Any, message: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match=rf"link\.codec{message}"):
        small(link={"codec": table})
