"""FedRolex's settings (appendix A.7): Tables 8 to 13 as presets of methods."""

from __future__ import annotations

import pytest

import fedquilt as fq
from fedquilt.cli.main import COMMANDS
from fedquilt.methods import FedAvg, FedDropout, FedRolex, HeteroFL
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Steps

# batch size, learning rate, milestones: Tables 8 and 13 of partial training, and Table 9 of one
# common model
TABLE_8 = {
    "fedrolex-cifar10-high": (10, 2e-4, (800, 1500)),
    "fedrolex-cifar10-low": (10, 2e-4, (800, 1250)),
    "fedrolex-cifar100": (24, 1e-4, (1000, 1500)),
    "fedrolex-stackoverflow": (24, 2e-4, (600, 800)),
}
TABLE_9 = {
    "fedrolex-cifar10-high": (10, 2e-4, (500, 1000)),
    "fedrolex-cifar10-low": (10, 2e-4, (500, 1000)),
    "fedrolex-cifar100": (24, 1e-4, (1000, 1500)),
    "fedrolex-stackoverflow": (24, 2e-4, (300,)),
}


# Tables 10 and 11: for high and low heterogeneity alike.
FIGURE_3 = {
    "fedrolex-figure3-cifar10-mid": (10, 2e-4, (700, 1200)),
    "fedrolex-figure3-cifar10-ends": (10, 2e-4, (500, 1000)),
    "fedrolex-figure3-cifar100": (24, 1e-4, (1000, 1500)),
    "fedrolex-figure3-stackoverflow": (24, 2e-4, (800,)),
}
# Table 12: for all of γ = 2, 4, 8 and 16
FIGURE_4 = {
    "fedrolex-figure4-cifar10": (10, 2e-4, (800, 1200)),
    "fedrolex-figure4-cifar100": (24, 1e-4, (800, 1200)),
    "fedrolex-figure4-stackoverflow": (24, 2e-4, (800,)),
}


def numbers(local: LocalTraining) -> tuple[int, float, tuple[int, ...]]:
    """Return the settings that tables vary, after a check of the common ones."""
    assert isinstance(local.schedule, Steps)
    assert (local.epochs, local.schedule.factor) == (1, 0.1)
    assert local.optimizer == SGD(lr=local.optimizer.lr, momentum=0.9, weight_decay=5e-4)
    # section 4: static norms, a scaler after each convolution
    assert (local.norm.name, local.scaler) == (
        "post",
        True,
    )
    return local.batch_size, local.optimizer.lr, local.schedule.milestones


@pytest.mark.parametrize("kind", [FedRolex, HeteroFL, FedDropout])
@pytest.mark.parametrize("name", TABLE_8)
def test_table_8_partial_training(kind, name):
    method = kind.preset(name)
    assert numbers(method.local) == TABLE_8[name]
    assert bool(method.local.crop) == ("cifar" in name)  # section 4: images are cropped
    assert method.weighting == "uniform"


@pytest.mark.parametrize("name", TABLE_9)
def test_table_9_model_homogeneous_baselines(name):
    assert numbers(FedAvg.preset(name, share=1 / 16).local) == TABLE_9[name]


@pytest.mark.parametrize("kind", [FedRolex, HeteroFL, FedDropout])
@pytest.mark.parametrize("name", FIGURE_3)
def test_tables_10_and_11_two_levels_of_clients(kind, name):
    method = kind.preset(name)
    assert numbers(method.local) == FIGURE_3[name]
    assert (bool(method.local.crop), method.weighting) == ("cifar" in name, "uniform")


@pytest.mark.parametrize("kind", [FedRolex, FedDropout])
@pytest.mark.parametrize("name", FIGURE_4)
def test_table_12_a_larger_server_model(kind, name):
    method = kind.preset(name)
    assert numbers(method.local) == FIGURE_4[name]
    assert (bool(method.local.crop), method.weighting) == ("cifar" in name, "uniform")


def test_all_of_appendix_a_7_is_presets():
    """HeteroFL cannot train a model that no client holds, and one common model has no levels."""
    assert {name for name in FedRolex.presets if name.startswith("fedrolex-")} == {
        *TABLE_8,
        *FIGURE_3,
        *FIGURE_4,
    }
    assert not {*FIGURE_4} & {*HeteroFL.presets}
    assert not {*FIGURE_3, *FIGURE_4} & {*FedAvg.presets}


def test_the_paper_is_its_first_column():
    assert FedRolex.preset("paper") == FedRolex.preset("fedrolex-cifar10-high")


def test_a_preset_in_the_terminal_is_not_trained_as_the_demo_is():
    asked = COMMANDS["run"](assign=("method.preset=paper",)).experiment(None, "fedrolex")
    assert asked.method == fq.methods.FedRolex.preset("paper")
