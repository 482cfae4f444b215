"""The whole experiments of FedResCuE and Split-Mix in examples/: they can be read, and are those of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.cli import COMMANDS
from fedquilt.config import Experiment
from fedquilt.data import Domains, Iid, Labels
from fedquilt.fleets import Clusters, Quarters, Uniform
from fedquilt.methods import METHODS, FedResCuE, SplitMix
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


def test_a_preresnet_starts_with_an_output_bias_of_zero_as_the_authors_does():
    named = [path for path in EXAMPLES.glob("*/*.toml") if "preresnet18" in path.read_text()]
    assert len(named) == 1
    for path in named:
        assert read(f"{path.parent.name}/{path.stem}").model.options == {"zero_output_bias": True}


def test_every_folder_is_looked_at():
    found = {path.parent.name + "/" + path.stem for path in EXAMPLES.glob("*/*.toml")}
    ours = {"fedrescue/cifar10-clusters", "fedrescue/cifar10-lossy", "fedrescue/digits"}
    assert found == ours | {"splitmix/digits", "splitmix/cifar10"}


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


@pytest.mark.parametrize(
    ("name", "clients", "sample", "partition"),
    [("digits", 50, 50, Domains(max_size=223)), ("cifar10", 100, 10, Labels(3))],
)
def test_splitmix_is_trained_under_budgets(name, clients, sample, partition):
    found = read(f"splitmix/{name}")
    assert (found.fleet.clients, found.fleet.sample, found.fleet.budgets) == (clients, sample, Quarters())
    assert (found.data.partition, found.rounds, found.method) == (partition, 400, SplitMix.preset(name))


@pytest.mark.parametrize("name", ["digits", "cifar10"])
@pytest.mark.parametrize("method", ["sheterofl", "heterofl", "fedavg"])
def test_what_splitmix_is_compared_with_is_trained_alike(name, method):
    """A.2: the same rates, schedules, epochs, batches, masks and norms. Split-Mix and HeteroFL rescale layers."""
    found, mix = read(f"splitmix/{name}", method).method, SplitMix.preset(name)
    assert type(found) is METHODS[method]
    assert found.local == replace(mix.local, scaler=method == "heterofl")
    assert METHODS[method].preset("domainnet").local.optimiser == SplitMix.preset("domainnet").local.optimiser


def test_the_variants_that_the_comments_name():
    strong = read("fedrescue/cifar10-lossy", assign=("fleet.budgets.shares=[1.0]",), link="lossy-strong")
    assert strong.link == fq.Link.preset("lossy-strong")
    assert strong.fleet.budgets == Clusters((1.0,))
    assert read("fedrescue/cifar10-clusters", assign=("method.samples=8",)).method.samples == 8
    plain = read("splitmix/digits", assign=("method.rescale_init=false", "method.local.norm=post"))
    assert (plain.method.rescale_init, plain.method.local.norm.name) == (False, "post")
    iid = read("splitmix/cifar10", assign=("data.partition.name=iid", 'method.local.masked=""'))
    assert (iid.data.partition, iid.method.local.masked) == (Iid(), "")
