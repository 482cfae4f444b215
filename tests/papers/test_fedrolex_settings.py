"""FedRolex's settings (appendix A.7): Tables 8 to 13 as presets and as whole experiments in examples/fedrolex."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli import COMMANDS
from fedquilt.config import Experiment, read_toml
from fedquilt.data import Labels, Natural
from fedquilt.errors import ConfigError
from fedquilt.fleets import Income, TwoLevel, Uniform
from fedquilt.methods import METHODS, FedAvg, FedDropout, FedRolex, HeteroFL
from fedquilt.round.training.local import Local
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.schedules import Steps

EXAMPLES = Path(__file__).parents[2] / "examples" / "fedrolex"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.toml"))

# batch size, learning rate, milestones: Tables 8 and 13 of partial training, and Table 9 of one common model
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


# Tables 10 and 11 by ρ, without a column for 0.5: decay schedule and rounds, for high and low
# heterogeneity alike.
RHO = {
    **dict.fromkeys((0.0, 0.1, 0.2, 0.8, 0.9, 1.0), ((500, 1000), 1250)),
    **dict.fromkeys((0.3, 0.4, 0.6, 0.7), ((700, 1200), 1500)),
}
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


def numbers(local: Local) -> tuple[int, float, tuple[int, ...]]:
    """What the tables vary; what they have in common is checked."""
    assert isinstance(local.schedule, Steps)
    assert (local.epochs, local.schedule.factor) == (1, 0.1)
    assert local.optimiser == SGD(lr=local.optimiser.lr, momentum=0.9, decay=5e-4)
    assert (local.norm.name, local.scaler) == ("post", True)  # section 4: static norms, a scaler after each convolution
    return local.batch_size, local.optimiser.lr, local.schedule.milestones


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
    assert {name for name in FedRolex.presets if name.startswith("fedrolex-")} == {*TABLE_8, *FIGURE_3, *FIGURE_4}
    assert not {*FIGURE_4} & {*HeteroFL.presets}
    assert not {*FIGURE_3, *FIGURE_4} & {*FedAvg.presets}


@pytest.mark.parametrize("rho", RHO)
def test_figure_3_is_asked_for_by_rho(rho):
    """As the comment in the file says."""
    milestones, rounds = RHO[rho]
    changes = {"assign": (f"fleet.budgets.rho={rho}",)}
    if rounds == 1250:
        changes = {"assign": (*changes["assign"], "method.preset=fedrolex-figure3-cifar10-ends"), "rounds": rounds}
    found = read("figure3-cifar10-high", labels=5, **changes)
    assert (found.fleet.budgets, found.rounds, found.data.partition) == (TwoLevel(rho), rounds, Labels(5))
    assert numbers(found.method.local)[2] == milestones


def test_the_paper_is_its_first_column():
    assert FedRolex.preset("paper") == FedRolex.preset("fedrolex-cifar10-high")


def read(name: str, method: str | None = None, **flags: object) -> Experiment:
    return COMMANDS["run"](**flags).experiment(str(EXAMPLES / f"{name}.toml"), method)


@pytest.fixture(autouse=True)
def beside_the_text(tmp_path, monkeypatch):
    """Stack Overflow's file is the user's to make."""
    monkeypatch.chdir(tmp_path)
    Path("stackoverflow.npz").touch()


# labels, cohort, rounds, budgets, milestones
EXPERIMENTS = {
    "table3-cifar10-high": (2, 10, 2500, Uniform(), (800, 1500)),
    "table3-cifar10-low": (5, 10, 2000, Uniform(), (800, 1250)),
    "table3-cifar100-high": (20, 10, 3500, Uniform(), (1000, 1500)),
    "table3-stackoverflow": (None, 200, 1200, Uniform(), (600, 800)),
    "table4-cifar10-high": (2, 10, 2500, Income(), (800, 1500)),  # Table 13
    "figure3-cifar10-high": (2, 10, 1500, TwoLevel(0.5), (700, 1200)),  # Tables 10 and 11
    "figure4-cifar10-high": (2, 10, 1500, Uniform((0.5,)), (800, 1200)),  # Table 12
}


@pytest.mark.parametrize("name", NAMES)
def test_whole_experiments_are_those_of_the_tables(name):
    labels, cohort, rounds, budgets, milestones = EXPERIMENTS[name]
    found = read(name)
    assert found.data.partition == (Natural() if labels is None else Labels(labels))
    assert (found.fleet.sample, found.fleet.budgets, found.rounds) == (cohort, budgets, rounds)
    assert found.fleet.clients == (None if labels is None else 100)
    assert numbers(found.method.local)[2] == milestones
    assert found.model.name == ("transformer_lm" if labels is None else "preresnet18")


def test_every_whole_experiment_is_in_the_table():
    assert sorted(EXPERIMENTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["heterofl", "feddropout", "fedavg"])
def test_other_methods_are_compared_in_the_same_setting(name, method):
    preset = read_toml(EXAMPLES / f"{name}.toml")["method"]["preset"]
    if preset not in METHODS[method].presets:
        assert name.startswith("figure")
        with pytest.raises(ConfigError, match=f"'{preset}' was found; {method} has no preset of that name"):
            read(name, method)
        return
    found = read(name, method).method
    assert type(found) is METHODS[method]
    assert found == METHODS[method].preset(preset)


def test_the_variants_that_the_comments_name():
    assert read("table3-cifar100-high", labels=50).data.partition == Labels(50)
    small = read("table3-cifar10-high", "fedavg", rounds=1250, assign=("method.share=0.0625",))
    assert (small.method.share, small.rounds) == (1 / 16, 1250)
    income = read("table4-cifar10-high", labels=5, rounds=2000, assign=("method.preset=fedrolex-cifar10-low",))
    assert income.method == FedRolex.preset("fedrolex-cifar10-low")
    assert read("figure4-cifar10-high", assign=("fleet.budgets.shares=[0.25]",)).fleet.budgets == Uniform((0.25,))


def test_a_preset_in_the_terminal_is_not_trained_as_the_demo_is():
    asked = COMMANDS["run"](assign=("method.preset=paper",)).experiment(None, "fedrolex")
    assert asked.method == fq.methods.FedRolex.preset("paper")
