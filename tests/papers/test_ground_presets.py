"""`fedquilt reproduce ground`: all methods under the same conditions."""

from __future__ import annotations

from typing import Any

import pytest

import fedquilt as fq
from fedquilt.methods import METHODS
from fedquilt.methods.rafl_nets import knowledge_net, macs_of, private_nets
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.papers import Preset, papers, parsed_preset

TABLES = papers()["ground"]
BOUNDS = ("FedAvg without budgets", "FedAvg ×1/8, the smallest common model")
# Settings that methods may differ in. RaFL has a model and limits of its own, because it searches.
OWN = {"SCAFFOLD": "optimizer", "RaFL": "model fleet"}


def rows(name: str, scale: str = "full") -> dict[str, dict[str, Any]]:
    return dict(parsed_preset(name).rows_at(scale))


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Preset:
    return parsed_preset(request.param)


def test_there_are_five_grounds() -> None:
    assert [name.partition("/")[2] for name in TABLES] == [
        "cifar10-three-labels",
        "cifar10-two-labels",
        "digits5-domains",
        "lossy-link",
        "mnist-writers",
    ]


def test_every_listed_method_has_a_row(table: Preset) -> None:
    methods = {settings["method"]["name"] for settings in rows(table.name).values()}
    assert methods == set(METHODS)
    assert [row.name for row in table.rows][:2] == list(BOUNDS)


def test_all_tables_have_the_same_rows() -> None:
    first, *others = (parsed_preset(name).rows for name in TABLES)
    assert all(other == first for other in others)


def test_rows_differ_in_their_method_alone(table: Preset) -> None:
    by_row = rows(table.name)
    common = by_row["HeteroFL"]
    for name, settings in by_row.items():
        own = OWN.get(name, "").split()
        assert settings["data"] == common["data"]
        assert settings.get("link") == common.get("link")
        for key in ("clients", "cohort"):
            assert settings["fleet"][key] == common["fleet"][key]
        if "model" not in own:
            assert settings["model"] == common["model"]
        for key, value in common["method"]["local"].items():
            if key not in own:
                assert settings["method"]["local"][key] == value, (name, key)


def test_budgets_are_ignored_only_by_rows_that_say_so(table: Preset) -> None:
    for name, settings in rows(table.name).items():
        shares = settings["fleet"]["budgets"].get("shares")
        if "without budgets" in name or "common model" in name:
            assert shares == [1.0]
        elif name != "RaFL":
            assert shares == [1.0, 0.5, 0.25, 0.125]


def test_the_grid_and_the_tuning_runs_are_the_same_for_all_rows(table: Preset) -> None:
    assert list(table.grid) == ["method.local.optimizer.lr"]
    assert len(table.grid["method.local.optimizer.lr"]) == 3
    assert table.tuning_at("full")["rounds"] == 100


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cifar10-two-labels", (3, 32, 32)), ("digits5-domains", (3, 28, 28))],
)
def test_the_bound_on_bytes_is_what_heterofl_sends(name: str, shape: tuple[int, ...]) -> None:
    """The bound is the mean member in both directions, times clients of 400 rounds, rounded up."""
    table = parsed_preset(f"ground/{name}")
    (column,) = (column for column in table.columns if column.value.startswith("within"))
    settings = rows(table.name)["HeteroFL"]
    data = {"name": "generated", "shape": list(shape), "train": 100, "test": 10}
    experiment = Experiment.of({**settings, "data": data})
    family = experiment.ground().family
    sizes = [
        family.cost(family.fit(fq.Budget(share=share))).params
        for share in settings["fleet"]["budgets"]["shares"]
    ]
    sent = 2 * 4 * sum(sizes) / len(sizes) * settings["fleet"]["cohort"] * settings["rounds"]
    bound = float(column.value.split()[1])
    assert sent <= bound <= 1.03 * sent


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cifar10-two-labels", (3, 32, 32)),
        ("digits5-domains", (3, 28, 28)),
        ("mnist-writers", (1, 28, 28)),
    ],
)
def test_a_net_is_found_within_every_limit_of_rafl(name: str, shape: tuple[int, ...]) -> None:
    settings = rows(f"ground/{name}")["RaFL"]
    data = {"name": "generated", "shape": list(shape), "train": 1078, "test": 10}
    data |= {"partition": "iid"}
    ground = Experiment.of({**settings, "data": data, "seed": 0}).ground()
    family = ground.family
    assert family.member(knowledge_net(family)).macs <= settings["model"]["knowledge_macs"]
    smallest = min(macs_of(family, net) for net in private_nets(family))
    assert all(budget.macs is not None and smallest <= budget.macs for budget in ground.fleet.kinds)


def test_nothing_claims_a_number_that_was_not_measured(table: Preset) -> None:
    assert all(not any(row.paper) for row in table.rows)
    assert any("run it" in note for note in table.notes)
