"""Names of results, and settings that a method fixes from the number of rounds."""

from __future__ import annotations

import io
import json
import tomllib
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.cli.results import show_clients, show_result
from fedquilt.methods import FedAvg, HeteroFL
from fedquilt.round.federation import World
from fedquilt.round.labels import bounds_label, labels_by_share
from fedquilt.units import amount, size


def test_amounts_and_sizes_have_three_digits_and_a_unit():
    assert [amount(count) for count in (7, 1500, 28e6, 2.5e9)] == ["7", "1.5k", "28M", "2.5G"]
    assert [size(count) for count in (7, 1500, 8e6, 4.0231e9)] == [
        "7 B",
        "1.5 kB",
        "8 MB",
        "4.02 GB",
    ]


def test_budgets_are_named_by_their_bounds_and_else_by_their_share(residual):
    world, method = World(residual), HeteroFL()
    assert method.label(fq.Budget(share=0.5), world) == "0.5"
    assert method.label(fq.Budget(share=1.0), world) == "1"
    assert method.label(fq.Budget(memory=8e6), world) == "8 MB"
    assert method.label(fq.Budget(macs=28e6), world) == "28M MACs"
    assert bounds_label(fq.Budget(params=1200, macs=28e6)) == "1.2k parameters, 28M MACs"


def test_labels_are_listed_for_shares_whose_name_is_not_the_number(residual):
    world, method = World(residual), HeteroFL()
    assert labels_by_share(method, [fq.Budget(share=0.5)], world, (0.25,)) == {}
    macs = residual.member(residual.fit(fq.Budget(share=0.5))).macs
    few, more = fq.Budget(macs=macs), fq.Budget(macs=macs + 1, params=1e9)
    found = labels_by_share(method, [few, more, fq.Budget(memory=1e12)], world)
    assert found == {
        "0.5": f"{amount(macs)} MACs | 1G parameters, {amount(macs + 1)} MACs",
        "1.0": "1 TB | 1",
    }


@dataclass(frozen=True)
class Vague(HeteroFL):
    """A method whose names do not tell budgets apart."""

    def label(self, budget, world):
        return "small" if (budget.share or 1.0) < 1 else "large"


def test_equal_labels_are_distinguished_by_the_share(residual):
    found = labels_by_share(Vague(), [fq.Budget(share=0.5), fq.Budget(share=0.25)], World(residual))
    assert found == {"0.5": "small (0.5)", "0.25": "small (0.25)", "1.0": "large"}


def test_tables_show_labels_and_files_keep_shares(residual, make_data, play):
    macs = residual.member(residual.fit(fq.Budget(share=0.5))).macs
    fleet = fq.Fleet.of([fq.Budget(macs=macs), fq.Budget(share=0.25)], 2, 2)
    run = play(HeteroFL(), residual, make_data(residual, (8, 8)), fleet=fleet, rounds=1)
    assert set(run.accuracy) == {"1.0", "0.5", "0.25"}
    assert run.summary["labels"] == {"0.5": f"{amount(macs)} MACs"}
    console = Console(file=io.StringIO(), width=200)
    show_result(console, run.summary)
    show_clients(console, run.per_client())
    lines = [line.split("  ")[0] for line in console.file.getvalue().splitlines()]
    assert lines.count(f"{amount(macs)} MACs") == 2
    assert "0.5" not in lines
    assert lines.count("0.25") == 2
    plain = play(HeteroFL(), residual, make_data(residual, (8, 8)), (1.0, 0.5), rounds=1)
    assert "labels" not in plain.summary


def test_budgets_can_be_found_by_the_keys_of_results(residual, make_data, play):
    macs = residual.member(residual.fit(fq.Budget(share=0.5))).macs
    few, more, large = fq.Budget(macs=macs), fq.Budget(macs=macs + 1), fq.Budget(memory="1TB")
    fleet = fq.Fleet.of([few, more, large], 3, 3)
    run = play(HeteroFL(), residual, make_data(residual, (8, 8, 8)), fleet=fleet, rounds=1)
    assert run.devices == {"0.5": (few, more), "1.0": (large,)}
    assert set(run.devices) == set(run.accuracy)
    devices = json.loads(json.dumps(run.summary))["devices"]
    assert devices == {"0.5": [{"macs": macs}, {"macs": macs + 1}], "1.0": [{"memory": 1e12}]}


# --- what depends on the number of rounds -------------------------------------------------------


@dataclass(frozen=True)
class Halfway(FedAvg):
    """A method with a setting that is half of the rounds unless it is given."""

    turn: int = 0  # Round in the middle; 0: half of the run's

    def settled(self, rounds):
        return self if self.turn else replace(self, turn=rounds // 2)


@pytest.mark.parametrize(("given", "turn"), [(0, 3), (5, 5)])
def test_a_run_in_python_has_the_settled_method(given, turn, perceptron, make_data, play):
    run = play(Halfway(turn=given), perceptron, make_data(perceptron, (8,)), rounds=6)
    assert run.method.turn == turn


def test_a_continued_run_in_python_stays_settled(tmp_path, perceptron, make_data, play):
    data = make_data(perceptron, (8,))
    play(Halfway(), perceptron, data, rounds=2, out=tmp_path / "run")
    run = play(Halfway(), perceptron, data, rounds=4, out=tmp_path / "run", resume=True)
    assert (run.server.round, run.method.turn) == (4, 1)


HALFWAY = """
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedquilt.data import Pool
from fedquilt.methods import FedAvg


def net(num_classes):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, num_classes))


def pool():
    x, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    return Pool.of((x, y), (x, y))


@dataclass(frozen=True)
class Halfway(FedAvg):
    turn: int = 0  # Round in the middle; 0: half of the run's

    def settled(self, rounds):
        return self if self.turn else replace(self, turn=rounds // 2)
"""


def test_the_settled_method_is_written_and_stays_when_a_run_is_continued(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.py").write_text(HALFWAY)
    monkeypatch.chdir(tmp_path)
    mine = ["--method", "mine.py:Halfway", "--model", "mine.py:net", "--data", "mine.py:pool"]
    main(["run", *mine, "--clients", "2", "--rounds", "4", "--out", "found", "--json"])
    config = tomllib.loads((tmp_path / "found" / "config.toml").read_text())
    assert config["method"]["turn"] == 2
    capsys.readouterr()
    main(["run", "--resume", "found", "--rounds", "5", "--json"])
    assert json.loads(capsys.readouterr().out)["rounds"] == 5
    assert tomllib.loads((tmp_path / "found" / "config.toml").read_text())["method"]["turn"] == 2
