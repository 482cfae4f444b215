"""The whole experiments of FedResCuE in examples/: they can be read, and are those of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import COMMANDS
from fedquilt.config import Experiment
from fedquilt.data import Domains, Iid
from fedquilt.fleets import Clusters, Uniform
from fedquilt.methods import METHODS, FedResCuE
from fedquilt.methods.nested import TABLE_17

EXAMPLES = Path(__file__).parents[2] / "examples"


def read(name: str, method: str | None = None, **flags: object) -> Experiment:
    return COMMANDS["run"](**flags).experiment(str(EXAMPLES / f"{name}.toml"), method)


@pytest.fixture(autouse=True)
def beside_the_digits(tmp_path, monkeypatch):
    """Their file is the user's to make."""
    monkeypatch.chdir(tmp_path)
    x, y, home = np.zeros((20, 28, 28, 3), np.uint8), np.arange(20) % 10, np.arange(20) % 5
    domains = {"domain_train": home, "domain_test": home, "domains": ["mnist", "svhn", "usps", "syn", "mnistm"]}
    np.savez("digits5.npz", x_train=x, y_train=y, x_test=x, y_test=y, **domains)


def test_every_folder_is_looked_at():
    found = {path.parent.name + "/" + path.stem for path in EXAMPLES.glob("*/*.toml")}
    ours = {"fedrescue/cifar10-clusters", "fedrescue/cifar10-lossy", "fedrescue/digits"}
    assert found == ours


@pytest.mark.parametrize(
    ("name", "clients", "rounds", "partition", "budgets", "link"),
    [
        ("cifar10-clusters", 20, 300, Iid(fraction=0.2), Clusters(), fq.Link()),
        ("cifar10-lossy", 20, 300, Iid(), Clusters(), fq.Link.preset("lossy-mild")),
        (
            "digits",
            10,
            100,
            Domains(max_size=186),
            Uniform((1.0,)),
            fq.Link(loss=fq.Columns((0.3, 0.3, 0.05, 0.05, 0.3, 0.3, 0.05, 0.05, 0.05, 0.05))),
        ),
    ],
)
def test_fedrescue_is_trained_as_table_17_says(name, clients, rounds, partition, budgets, link):
    found = read(f"fedrescue/{name}")
    assert (found.fleet.clients, found.fleet.sample, found.rounds) == (clients, 5, rounds)
    assert (found.data.partition, found.fleet.budgets, found.link) == (partition, budgets, link)
    own = FedResCuE.preset("fedrescue-digits") if name == "digits" else FedResCuE()
    local = replace(TABLE_17, optimiser=replace(TABLE_17.optimiser, lr=0.03))  # at the table's 0.1 losses jump
    assert found.method == replace(own, local=local)
    for other in ("fjord", "fedslim", "heterofl", "fedavg", "local"):
        alike = read(f"fedrescue/{name}", other).method
        assert type(alike) is METHODS[other]
        assert (alike.local, alike.weighting) == (local, "uniform")


def test_the_variants_that_the_comments_name():
    strong = read("fedrescue/cifar10-lossy", assign=("fleet.budgets.shares=[1.0]",), link="lossy-strong")
    assert strong.link == fq.Link.preset("lossy-strong")
    assert strong.fleet.budgets == Clusters((1.0,))
    assert read("fedrescue/cifar10-clusters", assign=("method.samples=8",)).method.samples == 8
