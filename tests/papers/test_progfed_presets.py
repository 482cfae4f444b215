"""The presets of ProgFed's tables: the paper's numbers, and the settings of Table 6."""

from __future__ import annotations

import numpy as np
import pytest

from fedquilt.data import Iid
from fedquilt.methods import FedAvg, FedProx, HeteroFL, ProgFed
from fedquilt.round.training.schedules import Cosine
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.papers import papers, parsed_preset, read_preset
from tests.conftest import load_example

ROWS = {
    "table2-costs": 4,
    "table3-costs": 6,
    "table3-cifar10": 2,
    "table3-hippocampus": 3,
    "table4": 17,
    "table5": 6,
    "table10-ratios": 8,
    "table11": 4,
    "composition": 4,
}


@pytest.fixture
def resolve(tmp_path):
    """Return a function that gives the experiments of a preset by the names of its rows."""
    for name in ("cifar10", "hippocampus", "mnist_writers"):
        np.savez(tmp_path / f"{name}.npz", x_train=np.zeros(1))

    def experiments(name, scale="full"):
        rows = parsed_preset(f"progfed/{name}").rows_at(scale, tmp_path)
        return {row: Experiment.of(settings) for row, settings in rows}

    return experiments


def test_every_preset_is_sound():
    assert set(papers()["progfed"]) == {f"progfed/{name}" for name in ROWS}
    for name, count in ROWS.items():
        preset = read_preset(f"progfed/{name}")
        assert len(preset.rows) == count
        assert preset.scales.keys() == {"smoke", "short", "full"}
        assert preset.notes


@pytest.mark.parametrize(
    ("name", "row", "number"),
    [
        ("table3-cifar10", "FedAvg", "84.67 ± 0.14"),
        ("table3-cifar10", "ProgFed", "84.85 ± 0.30"),
        ("table3-hippocampus", "FedAvg", "86.77 ± 0.45"),
        ("table3-hippocampus", "ProgFed, asymmetric", "87.66 ± 0.49"),
        ("table3-hippocampus", "ProgFed, symmetric", "87.96 ± 0.03"),
        ("table4", "FedAvg, float", "52.54 ± 0.44"),
        ("table4", "ProgFed, LQ-8", "53.07 ± 1.00"),
        ("table4", "FedAvg, LQ-8 + SP-10", "50.25 ± 1.03"),
        ("table4", "ProgFed without warm-up, float", "51.09"),
        ("table5", "mixed", "75.04 ± 1.26"),
        ("table11", "FedProx with ProgFed", "86.03"),
        ("table10-ratios", "LQ-8 + SP-25", "6.25"),
    ],
)
def test_the_papers_numbers(name, row, number):
    rows = {one.name: one for one in parsed_preset(f"progfed/{name}").rows}
    assert rows[row].paper[0] == number


def test_cifar10_has_table_6_and_the_released_local_settings(resolve):
    """Both rows have the same local settings, and a tenth of the rounds keeps the proportions."""
    for scale, rounds in (("full", 2000), ("short", 200)):
        rows = resolve("table3-cifar10", scale)
        baseline, grown = rows["FedAvg"], rows["ProgFed"]
        assert isinstance(baseline.method, FedAvg)
        assert isinstance(grown.method, ProgFed)
        assert baseline.method == grown.method.over
        local = grown.method.local
        assert (local.batch_size, local.epochs, local.keep_optimizer) == (50, 5, True)
        assert (local.crop, local.flip, local.schedule) == (4, True, Cosine(rounds))
        assert baseline.method.weighting == "uniform"
        assert grown.method.settled(rounds).lengths(4) == (rounds // 8,) * 3 + (rounds * 5 // 8,)
        assert (baseline.fleet.clients, baseline.fleet.cohort) == (100, 10)
        assert baseline.data.partition == Iid()


def test_volumes_grow_in_quarters(resolve):
    rows = resolve("table3-hippocampus")
    assert [type(one.method) for one in rows.values()] == [FedAvg, ProgFed, ProgFed]
    for name in ("symmetric", "asymmetric"):
        method = rows[f"ProgFed, {name}"].method
        assert method.stages == name
        assert method.settled(100).lengths(4) == (25, 25, 25, 25)
        assert method.over == rows["FedAvg"].method
    local = rows["FedAvg"].method.local
    assert (local.batch_size, local.epochs) == (3, 3)


def test_codecs_of_table_4(resolve):
    rows = resolve("table4")
    coded = {
        name.removeprefix("ProgFed, "): one.link.codec
        for name, one in rows.items()
        if "ProgFed, " in name
    }
    kept = {name: (codec.bits, codec.keep) for name, codec in coded.items() if codec is not None}
    assert coded["float"] is None
    assert kept == {
        "LQ-8": (8, 1.0),
        "LQ-4": (4, 1.0),
        "LQ-2": (2, 1.0),
        "SP-25": (32, 0.25),
        "SP-10": (32, 0.1),
        "LQ-8 + SP-25": (8, 0.25),
        "LQ-8 + SP-10": (8, 0.1),
    }
    assert rows["ProgFed, float"].method.warmup == 2
    assert rows["ProgFed without warm-up, float"].method.warmup == 0


def test_other_methods_train_the_stages(resolve):
    rows = resolve("table11")
    inner = rows["FedProx with ProgFed"].method.over
    assert isinstance(inner, FedProx)
    assert inner == rows["FedProx"].method
    assert rows["FedAvg with ProgFed"].method.over == rows["FedAvg"].method
    rows = resolve("composition")
    assert isinstance(rows["ProgFed over HeteroFL"].method.over, HeteroFL)
    for name in ("HeteroFL", "FedRolex"):
        assert rows[f"ProgFed over {name}"].method.over == rows[name].method


@pytest.mark.slow
def test_masks_at_budgets_of_bytes(tmp_path):
    """Symmetric growth reaches a budget in which the whole model has not finished one round."""
    script = load_example("progfed_masks")
    file = tmp_path / "masks.npz"
    script.main(["train", str(file), "--scale", "smoke"])
    with np.load(file) as arrays:
        assert arrays["masks"].shape == (3, 4, 2, 16, 16)
        assert arrays["rounds"].tolist() == [[0, 0, 1, 4], [0, 0, 1, 4], [0, 3, 4, 4]]
        assert (arrays["masks"][0, 1] == -1).all()
        assert (arrays["masks"][2, 1] >= 0).all()
        assert arrays["spent"][0, -1] == 1
    script.main(["draw", str(file), str(tmp_path / "masks.png")])
    assert (tmp_path / "masks.png").stat().st_size > 0
