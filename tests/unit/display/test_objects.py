"""`print` and notebooks show families, fleets, data, runs and studies as short tables."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

import fedquilt as fq
from fedquilt.terms import Budget

MAX_LINES = 20


def test_a_family_shows_its_axes_and_sizes(perceptron):
    assert str(perceptron).splitlines() == [
        "Perceptron: 51 parameters, 1 axis that can be cut",
        "axis   channels",
        "first         6",
        "class         3  kept whole",
        "Parameters by share: 51 at 1, 27 at 0.5, 11 at 0.25, 11 at 0.125",
    ]
    assert repr(perceptron) == "Family(Perceptron: 51 parameters, 1 axis that can be cut)"
    assert "<td" in perceptron._repr_html_()


def test_a_long_list_of_axes_is_shortened():
    layers = [torch.nn.Linear(3, 3) for _ in range(30)]
    family = fq.trace(torch.nn.Sequential(*layers), torch.zeros(2, 3))
    text = str(family)
    assert len(text.splitlines()) <= MAX_LINES
    assert "… and 18 more axes" in text


def test_axes_are_a_dictionary_that_prints_as_a_table(perceptron):
    axes = perceptron.axes
    assert axes == {
        "first.weight": "first 4",
        "first.bias": "first",
        "last.weight": "class first",
        "last.bias": "class",
    }
    assert repr(axes) == repr(dict(axes))
    assert str(axes).splitlines() == [
        "first.weight  first 4",
        "first.bias    first",
        "last.weight   class first",
        "last.bias     class",
    ]
    assert axes._repr_html_().count("<tr>") == 4


def test_a_fleet_shows_the_clients_of_each_budget():
    fleet = fq.Fleet.of(
        [1.0, Budget(macs="28M", memory=2e6), 0.25], num_clients=7, cohort=2, dynamic=True
    )
    assert str(fleet).splitlines() == [
        "7 clients, 2 a round, 3 budgets",
        "budget                 clients",
        "share 1                      3",
        "macs 28M, memory 2 MB        2",
        "share 0.25                   2",
        "In every round, each client has the budget of a random client.",
    ]
    assert repr(fleet) == "Fleet(7 clients, 2 a round, 3 budgets)"


def test_a_fleet_of_many_budgets_is_short():
    fleet = fq.Fleet.of([Budget(params=100 + number) for number in range(500)], 1_000_000, 10)
    assert repr(fleet) == "Fleet(1,000,000 clients, 10 a round, 500 budgets)"
    assert len(str(fleet).splitlines()) <= MAX_LINES
    assert "… and 488 more budgets" in str(fleet)


def test_data_shows_sizes_and_a_picture_of_classes():
    targets = torch.tensor([0, 0, 1, 1, 2, 2])
    samples = torch.zeros(6, 4), targets
    data = fq.FederatedData.of(samples, samples, [[0, 1, 2, 3], [4, 5]], name="<b>small")
    assert str(data).splitlines() == [
        "<b>small: 6 training and 6 test samples of (4,), 3 classes",
        "clients                                      2",
        "training samples of a client  2 to 4, median 2",
    ]
    html = data._repr_html_()
    assert "<b>small" not in html
    picture = re.search(r"<svg.*</svg>", html)
    boxes = [box.attrib for box in ElementTree.fromstring(picture[0]) if box.tag == "rect"]
    # Client 0 has two samples of classes 0 and 1 each, and client 1 has class 2 only.
    assert [(b["x"], b["y"], b["fill-opacity"]) for b in boxes] == [
        ("0", "0", "0.50"),
        ("12", "0", "0.50"),
        ("24", "12", "1.00"),
    ]


def test_a_pool_is_one_line_and_data_without_classes_has_no_picture():
    samples = torch.zeros(6, 4), torch.zeros(6)
    pool = fq.data.Pool.of(samples, samples, name="real")
    assert f"Pool({pool})" == repr(pool)
    assert "svg" not in pool.partition(2)._repr_html_()


@pytest.fixture
def run(perceptron, make_data, play):
    data = make_data(perceptron, (5, 6, 4, 7))
    fleet = fq.Fleet.of((1.0, 0.5), 4, 2)
    return play(fq.methods.HeteroFL(), perceptron, data, fleet=fleet, rounds=2)


def test_a_run_shows_its_metrics_and_costs(run):
    title, head, whole, half, costs = str(run).splitlines()
    assert title == f"HeteroFL on {run.data.name} with Perceptron: 2 rounds, seed 0"
    assert head.split()[:2] == ["share", "accuracy"]
    assert whole.split()[:2] == ["1", f"{run.accuracy['1.0']:.1%}"]
    assert half.split()[:2] == ["0.5", f"{run.accuracy['0.5']:.1%}"]
    assert re.fullmatch(r"[\d.]+ k?B down, [\d.]+ k?B up, [\d.]+[kM]? MACs, [\d.e-]+ s", costs)
    assert repr(run) == f"Run({title})"
    assert run._repr_html_().count("<tr>") == 3


def test_a_run_that_has_not_begun_says_so(perceptron, make_data):
    fleet = fq.Fleet.of((1.0,), 4, 2)
    data = make_data(perceptron, (5, 6, 4, 7))
    run = fq.prepare(fq.methods.FedAvg(), perceptron, data, fleet)
    assert str(run).splitlines()[1:] == ["No round is recorded."]


def test_a_study_shows_the_table_of_the_comparison():
    settings = {"data": "diabetes", "rounds": 1, "fleet": {"clients": 4}, "method": "heterofl"}
    study = fq.study({"one": settings}, seeds=(0, 1))
    lines = str(study).splitlines()
    assert lines[0] == "study of one: 2 of 2 runs are finished"
    assert lines[1].split()[:2] == ["method", "1"]
    assert lines[2].startswith("one ")
    assert repr(study) == "Study(study of one: 2 of 2 runs are finished)"
