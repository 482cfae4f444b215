"""The fingerprint of a run: other settings are refused with their differences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.fleets.availability import Diurnal, Trace
from fedquilt.methods import FedAvg, FedProx
from fedquilt.runs import fingerprint as fingerprints
from fedquilt.runs import folder as folders


def test_another_run_is_refused_with_the_differences(start, tmp_path, data, perceptron, make_data):
    out = tmp_path / "run"
    start(FedProx(mu=0.5), rounds=1, out=out)
    before = {path: path.read_bytes() for path in (out / "checkpoint").iterdir()}
    others = {
        r"method\.mu: 0\.5 there, 0\.25 here": {"method": FedProx(mu=0.25)},
        r"method: FedProx there, FedAvg here": {"method": FedAvg()},
        r"seed: 0 there, 1 here": {"seed": 1},
        r"data\.targets: int64\[22\] \w+ there, int64\[22\] \w+ here": {
            "data": replace(data, targets=data.targets.flip(0))
        },
        r"fleet\.cohort: 2 there, 3 here": {"fleet": fq.Fleet.of((1.0, 0.5), 4, 3)},
        r"fleet\.presence: None there, \w+ here": {
            "fleet": fq.Fleet.of((1.0, 0.5), 4, 2, availability=Diurnal())
        },
        r"engine: Sequential there, Vectorized here": {"engine": "vectorized"},
        r"model: \w+ there, \w+ here": {
            "family": perceptron,
            "data": make_data(perceptron, (5, 6, 4, 7)),
        },
    }
    for message, change in others.items():
        options = {"method": FedProx(mu=0.5), **change}
        with pytest.raises(
            ConfigError,
            match=rf"the run in {out} was to be resumed, but it is another one[^@]*{message}",
        ):
            start(rounds=2, out=out, resume=True, **options)
    assert {path: path.read_bytes() for path in (out / "checkpoint").iterdir()} == before
    assert start(FedProx(mu=0.5), rounds=2, out=out, resume=True).server.round == 2


def test_a_run_from_before_a_field_was_added_is_resumed(start, tmp_path, monkeypatch):
    """A field that a checkpoint does not have counts as its default."""
    out, link = tmp_path / "run", fq.Link(codec=fq.links.Codec(bits=8))
    fingerprint = fingerprints.fingerprint

    def earlier(run):
        return {
            name: value
            for name, value in fingerprint(run).items()
            if not name.endswith((".keep_optimizer", ".rotate"))
        }

    with monkeypatch.context() as patched:
        patched.setattr(folders, "fingerprint", earlier)
        start(FedAvg(), rounds=1, out=out, link=link)
    others = {
        r"method\.local\.keep_optimizer: nothing there, True here": {
            "method": FedAvg().with_local(keep_optimizer=True)
        },
        r"rotate: nothing there, True here": {
            "link": fq.Link(codec=fq.links.Codec(bits=8, rotate=True))
        },
    }
    for message, change in others.items():
        options = {"method": FedAvg(), "link": link, **change}
        with pytest.raises(ConfigError, match=message):
            start(rounds=2, out=out, resume=True, **options)
    assert start(FedAvg(), rounds=2, out=out, link=link, resume=True).server.round == 2


def test_a_default_with_more_values_is_a_difference():
    @dataclass
    class Widths:
        shares: tuple[float, ...] = (1.0, 0.5)

    saved = {leaf.name: leaf.value for leaf in fingerprints._leaves("fleet", Widths((1.0,)))}
    with pytest.raises(ConfigError, match=r"fleet\.shares\[1\]: nothing there, 0\.5 here"):
        fingerprints.check_same_run(
            saved, list(fingerprints._leaves("fleet", Widths())), "a run was to be resumed"
        )


def test_other_initial_weights_are_noticed(start, tmp_path, residual):
    """A module with its own initial weights has the same axes and other weights."""
    out = tmp_path / "run"
    start(rounds=1, out=out)
    other = fq.trace(lambda: torch.manual_seed(9) and residual._factory(), residual.example_inputs)
    with pytest.raises(ConfigError, match=r"initial"):
        start(rounds=2, out=out, resume=True, family=other)


def test_another_trace_is_noticed_but_not_another_path_of_its_file(start, tmp_path):
    out = tmp_path / "run"

    def go_on(rounds, name, text):
        (tmp_path / name).write_text(text)
        fleet = fq.Fleet.of((1.0, 0.5), 4, 2, availability=Trace(str(tmp_path / name)))
        return start(rounds=rounds, out=out, resume=True, fleet=fleet)

    all_of_them, one = "client,start\n0,0\n1,0\n2,0\n3,0\n", "client,start\n0,0\n"
    go_on(1, "trace.csv", all_of_them)
    with pytest.raises(ConfigError, match=r"fleet\.presence: \w+ there, \w+ here"):
        go_on(2, "trace.csv", one)
    assert go_on(2, "moved.csv", all_of_them).server.round == 2


class Scaled(torch.nn.Sequential):
    """A net whose output is multiplied by a constant, which is no weight and in no checkpoint."""

    def __init__(self, scale: float) -> None:
        super().__init__(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return super().forward(x * self.scale)


def test_other_constants_are_noticed(start, tmp_path, make_data):
    out = tmp_path / "run"
    one, other = (
        fq.trace(lambda scale=scale: Scaled(scale), torch.zeros(2, 6)) for scale in (1.0, 2.0)
    )
    options = {"method": FedAvg(), "data": make_data(one, (5, 6, 4, 7)), "out": out, "resume": True}
    start(rounds=1, family=one, **options)
    with pytest.raises(
        ConfigError, match=r"constants\.scale: float32\[\] \w+ there, float32\[\] \w+ here"
    ):
        start(rounds=2, family=other, **options)
    assert start(rounds=2, family=one, **options).server.round == 2


def test_large_arrays_are_compared_by_some_of_their_rows(monkeypatch):
    monkeypatch.setattr(fingerprints, "MAX_HASHED_BYTES", 64)
    one = torch.arange(1000)
    other = one.clone()
    other[1] = 7
    first = one.clone()
    first[0] = 7
    assert fingerprints._digest(one) == fingerprints._digest(other) != fingerprints._digest(first)
