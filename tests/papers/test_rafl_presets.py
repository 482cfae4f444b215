"""The presets of RaFL's tables and figures: counted bytes, utilisations, the paper's numbers and
settings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt.data import Dirichlet, Natural
from fedquilt.errors import ConfigError, DataError
from fedquilt.fleets.presets import FlopLimited, Uniform
from fedquilt.methods import FedAvg, FedNova, FedProx, RaFL
from fedquilt.round.training.optimizers import SGD
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.measures import MEASURES
from fedquilt.studies.papers import papers, parsed_preset, read_preset
from fedquilt.studies.values import TableValue
from fedquilt.supernet import Supernet, TinySpace, save_supernet

ROWS = {
    "figure2": 10,
    "figure2-mobilenet": 4,
    "figure5": 8,
    "figure6": 2,
    "section3-3": 3,
    "table1-costs": 12,
    "table3": 8,
}
GIB = 2**30
RESNET18, RESNET34 = 11_227_812, 21_335_972  # parameters with the stem of ImageNet and 100 classes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with small files in place of the data and the supernets."""
    for name in ("cifar10-public", "mnist_writers"):
        np.savez(tmp_path / f"{name}.npz", x_train=np.zeros(1))
    for name in ("resnet50", "mobilenetv3"):
        save_supernet(Supernet(TinySpace()), tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.fixture
def resolve(folder: Path):
    """Return a function that gives the experiments of a preset by the names of its rows."""

    def experiments(name: str, scale: str = "full") -> dict[str, Experiment]:
        rows = parsed_preset(f"rafl/{name}").rows_at(scale, folder)
        return {row: Experiment.of(settings) for row, settings in rows}

    return experiments


def counted(name: str, row: str) -> dict[str, float]:
    """Return what the measure of a preset counts for a row at full scale."""
    preset = parsed_preset(f"rafl/{name}")
    experiment = Experiment.of(dict(preset.rows_at("full"))[row])
    return dict(MEASURES[preset.measure](experiment.prepare(), experiment.rounds))


def test_every_preset_is_sound() -> None:
    assert set(papers()["rafl"]) == {f"rafl/{name}" for name in ROWS}
    for name, count in ROWS.items():
        preset = read_preset(f"rafl/{name}")
        assert len(preset.rows) == count
        assert preset.scales.keys() == {"smoke", "short", "full"}
        assert preset.notes


# --- Table 1: bytes of a round, counted ---------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "params", "macs", "copies", "clients", "gib"),
    [
        ("FedAvg, ResNet-18, 10 clients", RESNET18, 37.06, 1, 10, "0.837"),
        pytest.param(
            "FedAvg, ResNet-18, 40 clients", RESNET18, 37.06, 1, 40, "3.346", marks=pytest.mark.slow
        ),
        ("FedAvg, ResNet-34, 10 clients", RESNET34, 74.81, 1, 10, "1.590"),
        pytest.param(
            "FedAvg, ResNet-34, 40 clients", RESNET34, 74.81, 1, 40, "6.359", marks=pytest.mark.slow
        ),
        pytest.param(
            "FedProx, ResNet-18, 10 clients",
            RESNET18,
            37.06,
            1,
            10,
            "0.837",
            marks=pytest.mark.slow,
        ),
        ("FedNova, ResNet-18, 10 clients", RESNET18, 37.06, 2, 10, "1.673"),
        pytest.param(
            "FedNova, ResNet-34, 10 clients",
            RESNET34,
            74.81,
            2,
            10,
            "3.179",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "FedNova, ResNet-18, 40 clients",
            RESNET18,
            37.06,
            2,
            40,
            "6.692",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "FedNova, ResNet-34, 40 clients",
            RESNET34,
            74.81,
            2,
            40,
            "12.717",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bytes_of_a_round_are_those_of_table_1(
    row: str, params: int, macs: float, copies: int, clients: int, gib: str
) -> None:
    """Four bytes for each parameter, to all clients and back. FedNova is charged twice."""
    found = counted("table1-costs", row)
    assert found["params"] == params
    assert found["macs"] == pytest.approx(macs * 1e6, abs=5e3)
    assert found["round_bytes"] == 4 * 2 * params * copies * clients
    assert TableValue.parse("round_bytes GiB").shown(found["round_bytes"]) == gib


@pytest.mark.slow
def test_a_round_of_rafl_has_the_bytes_of_its_knowledge_net() -> None:
    found = counted("table1-costs", "RaFL, knowledge net of 28 M, 10 clients")
    assert found["round_bytes"] == 4 * 2 * found["params"] * 10
    assert 27e6 <= found["macs"] <= 28e6
    assert found["round_bytes"] < 0.837 * GIB


# --- Table 3: utilisation -----------------------------------------------------------------------


def test_the_utilisations_of_table_3_follow_from_its_columns() -> None:
    """Mean capacity over mean limit is 99, 93, 96 and 90 %."""
    for row in parsed_preset("rafl/table3").rows:
        limit, capacity, utilization, *_ = row.paper
        assert round(100 * float(capacity) / float(limit)) == int(utilization)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["evolved", "random"])
@pytest.mark.parametrize(
    ("space", "mean"),
    [
        ("ResNet-50", "48.01"),
        ("ResNet-50", "79.70"),
        ("MobileNetV3", "13.57"),
        ("MobileNetV3", "15.49"),
    ],
)
def test_eight_nets_use_most_of_the_limits(space: str, mean: str, strategy: str) -> None:
    found = counted("table3", f"{space}, mean limit {mean} M, {strategy}")
    assert found["limit"] == pytest.approx(float(mean) * 1e6)
    assert found["utilisation"] >= 0.9
    assert found["common_utilisation"] <= 0.75
    assert found["nets"] <= 8


# --- settings -----------------------------------------------------------------------------------


def test_figure_2_has_the_settings_of_its_page(resolve) -> None:
    for scale, rounds in (("full", 300), ("short", 60)):
        rows = resolve("figure2", scale)
        for experiment in rows.values():
            local = experiment.method.local
            assert experiment.rounds == rounds
            assert experiment.data.partition == Dirichlet(0.5, min_size=10)
            assert (experiment.fleet.clients, experiment.fleet.cohort) == (100, 10)
            assert (local.epochs, local.batch_size, local.optimizer) == (
                5,
                64,
                SGD(lr=0.01 if isinstance(experiment.method, RaFL) else 0.05, momentum=0.0),
            )
            assert experiment.method.weighting == "data"


def test_settings_a_b_and_c_of_rafl(resolve, folder: Path) -> None:
    rows = resolve("figure2")
    a, b, c = (rows[name] for name in ("RaFL (a)", "RaFL (b), public data", "RaFL (c), supernet"))
    alone = rows["no mutual learning"]
    for experiment in (a, b, c, alone):
        assert isinstance(experiment.method, RaFL)
        assert experiment.method.limit == "private"
        limits = [budget.macs for budget in experiment.fleet.fleet(100, 0).kinds]
        assert (min(limits), max(limits), len(limits)) == (
            pytest.approx(40e6),
            pytest.approx(56e6),
            100,
        )
    assert [one.method.needs_public for one in (a, b, c)] == [False, True, False]
    assert [one.method.transfer for one in (a, b, c)] == [False, False, True]
    assert c.model is not None
    assert dict(c.models[0].options)["supernet"] == str(folder / "resnet50.safetensors")
    assert (a.method.mutual_weight, alone.method.mutual_weight) == (1, 0)
    assert a.models == alone.models
    assert a.fleet == alone.fleet


def test_baselines_train_resnets_on_every_device(resolve) -> None:
    rows = resolve("figure2")
    kinds = {"FedAvg": FedAvg, "FedProx": FedProx, "FedNova": FedNova}
    for name, kind in kinds.items():
        for depth in (18, 34):
            experiment = rows[f"{name}, ResNet-{depth}"]
            assert type(experiment.method) is kind
            assert experiment.models[0].name == f"resnet{depth}"
            assert dict(experiment.models[0].options) == {"stem": "imagenet"}
            assert experiment.fleet.budgets == Uniform((1.0,))


def test_other_figures_vary_what_they_are_about(resolve) -> None:
    sizes = [
        dict(one.models[0].options)["knowledge_macs"] for one in resolve("section3-3").values()
    ]
    assert sizes == [19e6, 28e6, 51e6]
    writers = resolve("figure6")
    assert all(one.data.partition == Natural() for one in writers.values())
    assert {(one.fleet.clients, one.fleet.cohort) for one in writers.values()} == {(539, 54)}
    mobile = resolve("figure2-mobilenet")
    assert {(one.fleet.clients, one.fleet.cohort) for one in mobile.values()} == {(30, 12)}
    assert isinstance(mobile["RaFL (b), public data"].fleet.budgets, FlopLimited)
    assert (
        resolve("figure2")["RaFL (a)"].method
        == resolve("section3-3")["knowledge net of 28 M"].method
    )


def test_figure_5_trains_the_nets_of_table_3(resolve) -> None:
    """Both have the same limits, spaces and strategies; the training is that of Figure 2 (a)."""
    trained, counted_rows = resolve("figure5"), resolve("table3")
    assert trained.keys() == counted_rows.keys()
    for name, experiment in trained.items():
        assert experiment.models == counted_rows[name].models
        assert experiment.fleet == counted_rows[name].fleet
        assert experiment.method == resolve("figure2")["RaFL (a)"].method
        assert experiment.data == resolve("figure2")["RaFL (a)"].data
        assert experiment.rounds == 300


# --- supernet files -----------------------------------------------------------------------------


def test_a_missing_supernet_is_named_with_the_command_that_makes_it(folder: Path) -> None:
    (folder / "resnet50.safetensors").unlink()
    with pytest.raises(DataError) as caught:
        parsed_preset("rafl/figure2").rows_at("full", folder)
    command = (
        f"fedquilt supernet train resnet50 --data {folder / 'cifar10-public.npz'} --out "
        f"{folder / 'resnet50.safetensors'}"
    )
    assert command in str(caught.value)
    assert parsed_preset("rafl/figure2").rows_at("smoke", folder)  # which needs none


def test_a_smoke_run_that_needs_a_supernet_is_refused(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "fedquilt/papers/rafl/figure2.toml").read_text()
    file = tmp_path / "figure.toml"
    file.write_text(text.replace(', model = { supernet = "" }', ""))
    with pytest.raises(
        ConfigError, match=r"the supernet file 'resnet50\.safetensors' is needed; a smoke run"
    ):
        read_preset(str(file))
