"""The presets of Split-Mix's tables and figures: the paper's numbers, and the settings of appendix
A.2.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.data import Domains, Iid, Labels
from fedquilt.fleets.presets import Groups, LogNormal, Quarters, Step, Uniform
from fedquilt.methods import METHODS, FedAvg, SplitMix
from fedquilt.round.training.schedules import Cosine, Steps
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import overlay
from fedquilt.studies.papers import papers, parsed_preset, read_preset
from fedquilt.studies.reproduce import plan_of
from fedquilt.studies.study import run_plan

ROWS = {
    "table1-digits": 6,
    "table1-cifar10": 6,
    "table1-sizes": 6,
    "table4": 16,
    "table5": 12,
    "figure4-digits": 3,
    "figure4-cifar10": 3,
    "figure5-digits": 3,
    "figure5-cifar10": 3,
    "figure6": 6,
    "figure7-digits-full": 8,
    "figure7-digits-widths": 7,
    "figure7-cifar10-full": 8,
    "figure7-cifar10-widths": 7,
    "figure9-digits": 3,
    "figure9-cifar10": 3,
    "figure11": 24,
    "figure12": 10,
    "figure13-digits": 5,
    "figure13-cifar10": 5,
}
WIDTHS = (1.0, 0.5, 0.25, 0.125)
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # λn of FedAvg + AT (section 5.2)
SGD = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=5e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data files that are there, so that settings which name them can be read."""
    path = tmp_path_factory.mktemp("data")
    homes = np.arange(20) % 5
    domains = {
        "domain_train": homes,
        "domain_test": homes,
        "domains": ["mnist", "svhn", "usps", "syn", "mnistm"],
    }
    for name, side, more in (("digits5", 28, domains), ("cifar10", 32, {})):
        x = np.zeros((20, side, side, 3), np.uint8)
        y = np.arange(20) % 10
        np.savez(path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y, **more)
    return path


@pytest.fixture
def resolve(folder):
    """Return a function that gives the experiments of a preset by the names of its rows."""

    def experiments(name, scale="full"):
        rows = parsed_preset(f"splitmix/{name}").rows_at(scale, folder)
        return {row: Experiment.of(settings) for row, settings in rows}

    return experiments


# --- what the paper prints ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_every_preset_is_sound(name):
    preset = read_preset(f"splitmix/{name}")
    assert len(preset.rows) == ROWS[name]
    assert preset.scales.keys() == {"smoke", "short", "full"}
    assert preset.notes


def test_there_are_no_further_presets():
    assert set(papers()["splitmix"]) == {f"splitmix/{name}" for name in ROWS}


@pytest.mark.parametrize(
    ("name", "row", "numbers"),
    [
        ("table1-digits", "Split-Mix", "84.6 87.5 89.0 89.8"),
        ("table1-digits", "SHeteroFL", "86.8 87.9 86.9 81.3"),
        ("table1-digits", "FedAvg ×0.25", "87.3"),
        ("table1-cifar10", "Split-Mix", "48.0 51.1 52.1 52.7"),
        ("table1-cifar10", "SHeteroFL", "49.1 51.4 51.5 49.9"),
        ("table1-cifar10", "FedAvg ×1", "53.3"),
        ("table1-sizes", "CNN, Digits: base nets mixed", "0.2 0.4 0.9 1.8 0.1 0.2 0.5 0.9"),
        (
            "table1-sizes",
            "AlexNet, DomainNet: one whole net",
            "0.9 3.6 14.3 57.1 2.5 7.5 25.5 92.5",
        ),
        ("table4", "batch average, no rescaling", "81.1 84.3 86.2 87.3"),
        ("table4", "post average, both rescaled", "84.9 87.8 89.3 90.2"),
        ("table4", "tracked, layers rescaled", "9.4 10.6 10.6 10.6"),
        ("table4", "locally tracked, initialisation rescaled", "84.9 87.7 89.1 90.0"),
        ("table5", "Split-Mix, 100 %", "80.9 83.4 85.2 86.0"),
        ("table5", "SHeteroFL, 50 %", "77.2 79.7 80.1 75.5"),
        ("table5", "FedAvg ×0.5, 50 %", "83.2"),
    ],
)
def test_the_papers_numbers(name, row, numbers):
    rows = {one.name: one for one in parsed_preset(f"splitmix/{name}").rows}
    assert [text for text in rows[row].paper if text] == numbers.split()


def test_figures_have_no_printed_numbers():
    """A row that leaves out the list has no number for each column."""
    for name in ROWS:
        preset = parsed_preset(f"splitmix/{name}")
        assert all(len(row.paper) == len(preset.columns) for row in preset.rows)
        assert any(any(row.paper) for row in preset.rows) == name.startswith("table")


# --- appendix A.2 -------------------------------------------------------------------------------

DIGITS = (
    "table1-digits",
    "table4",
    "figure4-digits",
    "figure6",
    "figure9-digits",
    "figure11",
    "figure12",
)
CIFAR10 = ("table1-cifar10", "table5", "figure4-cifar10", "figure9-cifar10", "figure13-cifar10")


@pytest.mark.parametrize(
    "name", [*DIGITS, "figure13-digits", "figure7-digits-full", "figure7-digits-widths"]
)
def test_digits_are_trained_as_the_appendix_says(name, resolve):
    """One epoch, a rate from 0.1 to 0 on a cosine; 50 clients, at most a tenth of 2,231 images
    each.
    """
    for row, found in resolve(name).items():
        local = found.method.local
        assert (local.optimizer, local.epochs, local.batch_size, local.masked) == (
            SGD,
            1,
            32,
            "",
        ), row
        assert found.fleet.clients == 50
        assert found.data.partition == Domains(max_size=223)
        assert found.model.name == "digits_cnn_norm"
        assert found.rounds == {"figure9-digits": 200, "figure12": 300}.get(name, 400)
        if name != "figure12":
            assert found.fleet.cohort == 50


@pytest.mark.parametrize("name", CIFAR10)
def test_cifar10_is_trained_as_the_appendix_says(name, resolve):
    """Five epochs of batches of 128, a rate of 0.01 that falls after 150 and 250 rounds, and a
    masked loss.
    """
    for row, found in resolve(name).items():
        local = found.method.local
        assert (local.optimizer, local.epochs, local.batch_size) == (
            replace(SGD, lr=0.01),
            5,
            128,
        ), row
        assert local.schedule == Steps((150, 250), 0.1)
        assert local.norm.name == "batch"
        assert (found.fleet.clients, found.fleet.cohort) == (100, 100)
        assert found.model.options == {"zero_output_bias": True}
        assert found.rounds == (200 if name == "figure9-cifar10" else 400)
        if name == "table5":
            assert local.masked == ""
            assert found.data.partition == Iid(fraction=0.5 if row.endswith(", 50 %") else 1.0)
        else:
            assert local.masked == "client"
            assert found.data.partition == Labels(3)


@pytest.mark.parametrize("scale", ["smoke", "short", "full"])
def test_a_cosine_ends_with_the_run_at_every_scale(scale, resolve):
    for name in (*DIGITS, "figure13-digits", "figure7-digits-full", "figure7-digits-widths"):
        for found in resolve(name, scale).values():
            assert found.method.local.schedule == Cosine(found.rounds), (name, scale)


@pytest.mark.parametrize("name", ["table1-digits", "table1-cifar10"])
def test_compared_methods_are_trained_alike(name, resolve):
    """Split-Mix alone rescales layers. FedAvg trains one width as if there were no budgets."""
    kind = name.removeprefix("table1-")
    rows = resolve(name)
    assert rows["Split-Mix"].method == SplitMix.preset(kind)
    assert rows["SHeteroFL"].method == METHODS["sheterofl"].preset(kind)
    assert rows["SHeteroFL"].method.local == replace(rows["Split-Mix"].method.local, scaler=False)
    for row in ("Split-Mix", "SHeteroFL"):
        assert rows[row].fleet.budgets == Quarters()
        assert rows[row].evaluation.shares == WIDTHS
    for width in WIDTHS:
        found = rows[f"FedAvg ×{width:g}"]
        assert found.method == replace(FedAvg.preset(kind), share=width)
        assert (found.fleet.budgets, found.evaluation.shares) == (Uniform((1.0,)), ())


@pytest.mark.parametrize("kind", ["digits", "cifar10", "domainnet"])
@pytest.mark.parametrize("method", ["sheterofl", "heterofl", "fedavg"])
def test_methods_have_the_settings_in_which_they_are_compared(kind, method):
    """The same rates, schedules, epochs, batches, masks and norms. Split-Mix and HeteroFL rescale
    layers.
    """
    local = METHODS[method].preset(kind).local
    assert local == replace(SplitMix.preset(kind).local, scaler=method == "heterofl")


def test_the_ablation_has_every_combination(resolve):
    found = {
        (one.method.local.norm.name, one.method.rescale_init, one.method.local.scaler)
        for one in resolve("table4").values()
    }
    norms = ("batch", "post", "tracked", "per_client")
    assert found == {
        (norm, init, layer) for norm in norms for init in (False, True) for layer in (False, True)
    }


def test_curves_are_of_validation_accuracy(resolve):
    """Half of Digits and a tenth of CIFAR-10 are held back, as in the released code."""
    for figure in ("figure4", "figure9", "figure13"):
        for kind, share in (("digits", 0.5), ("cifar10", 0.1)):
            for found in resolve(f"{figure}-{kind}").values():
                assert (found.data.validation, found.evaluation.on) == (share, "validation")


def test_budgets_of_figure_11(resolve):
    rows = resolve("figure11")
    for divisors in ("8-4-2-1", "8-4-4-1", "8-2-2-1", "8-2-1-1", "8-1-1-1"):
        for method in ("Split-Mix", "SHeteroFL"):
            assert rows[f"{method}, {divisors}"].fleet.budgets == Groups(divisors)
    for step, widths in ((0.25, (1.0, 0.75, 0.5, 0.25)), (0.125, (0.5, 0.375, 0.25, 0.125))):
        slim = rows[f"SHeteroFL, steps of {step}"]
        assert slim.fleet.budgets == rows[f"Split-Mix, steps of {step}"].fleet.budgets == Step(step)
        assert slim.method.widths == slim.evaluation.shares == widths
    assert rows["HeteroFL, log-normal"].method == METHODS["heterofl"].preset("digits")
    assert (
        rows["HeteroFL, log-normal"].fleet.budgets
        == rows["Split-Mix, log-normal"].fleet.budgets
        == LogNormal()
    )


def test_contact_rates_of_figure_12(resolve):
    rows = resolve("figure12")
    for count in (2, 5, 10, 20, 30):
        for method in ("Split-Mix", "SHeteroFL"):
            assert rows[f"{method}, {count} of 50 clients"].fleet.cohort == count


# --- Figure 7 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["digits", "cifar10"])
def test_robust_rows_compare_what_the_paper_does(kind, resolve):
    """Whole nets: no budgets, one base net. Widths: FedAvg trains the narrowest net, and OAT is
    left out.
    """
    full = resolve(f"figure7-{kind}-full")
    widths = resolve(f"figure7-{kind}-widths")
    assert [one.method.local.adversarial.weight for one in full.values()] == [
        0.5,
        (0.0, 0.1, 0.2, 0.3, 0.4, 1.0),
        *WEIGHTS,
    ]
    assert [one.method.local.adversarial.weight for one in widths.values()] == [0.5, *WEIGHTS]
    assert [(one.model.dual, one.model.conditioned) for one in full.values()] == [
        (True, False),
        (False, True),
        *[(False, False)] * 6,
    ]
    assert (full["Split-Mix + DAT"].method.base, widths["Split-Mix + DAT"].method.base) == (
        1.0,
        0.125,
    )
    assert (full["Split-Mix + DAT"].fleet.budgets, widths["Split-Mix + DAT"].fleet.budgets) == (
        Uniform((1.0,)),
        Quarters(),
    )
    assert {one.method.share for row, one in full.items() if row.startswith("FedAvg")} == {1.0}
    assert {one.method.share for row, one in widths.items() if row.startswith("FedAvg")} == {0.125}


@pytest.mark.parametrize("kind", ["digits", "cifar10"])
@pytest.mark.parametrize("figure", ["full", "widths"])
def test_robust_rows_are_trained_alike_on_images_from_0_to_1(kind, figure, resolve):
    rows = resolve(f"figure7-{kind}-{figure}")
    local = rows["Split-Mix + DAT"].method.local
    assert (local.norm.name, local.scaler) == ("tracked", False)
    assert not rows["Split-Mix + DAT"].method.rescale_init
    if kind == "cifar10":  # the released adversarial runs
        assert (local.optimizer.lr, local.schedule, local.masked) == (
            0.1,
            Steps((200, 300), 0.1),
            "",
        )
        assert (local.crop, local.flip) == (4, True)
    for found in rows.values():
        assert replace(found.method.local, adversarial=local.adversarial) == local
        assert found.method.local.adversarial.attack == fq.attacks.PGD(8 / 255, 7, 2 / 255)
        assert found.data.options["normalize"] == "none"
        assert found.data.partition == (Iid() if kind == "cifar10" else Domains(max_size=223))
        assert found.evaluation == fq.Evaluation(
            every=0, robustness=(0.0, 0.2, 0.5, 0.8, 1.0), per_client=False, domains=False
        )


@pytest.mark.slow
def test_one_run_has_a_whole_curve_and_a_net_of_adversarial_training_one_point(folder):
    preset = read_preset("splitmix/figure7-digits-full")
    study = run_plan(plan_of(preset, "smoke", data_folder=folder, rows=("DAT", "λn 0.5")))
    shown = {
        result.entry: {
            column.title for column in preset.columns if column.parsed.of(result) is not None
        }
        for result in study.results
    }
    curve = {f"{what} λ {at}" for what in ("SA", "RA") for at in ("0", "0.2", "0.5", "0.8", "1")}
    assert shown == {
        "Split-Mix + DAT": curve,
        "FedAvg + AT, λn 0.5": {"SA one net", "RA one net"},
    }


# --- training -----------------------------------------------------------------------------------


def losses_of(settings, rounds):
    """Return the losses of a few rounds of two of ten clients, which must be finite and must not
    explode.
    """
    few = {"rounds": rounds, "fleet": {"clients": 10, "cohort": 2}, "evaluation": {"every": 0}}
    run = Experiment.of(overlay(settings, few)).prepare().train(rounds)
    losses = [record.loss for record in run.records]
    assert len(losses) == rounds
    assert all(math.isfinite(loss) for loss in losses), losses
    assert max(losses) < 2 * losses[0], losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table1-digits", "table1-cifar10"])
def test_nets_learn_with_the_settings_of_the_appendix(name):
    """Images are generated ones of the right size."""
    domains = ["mnist", "svhn", "usps", "syn", "mnistm"] if name == "table1-digits" else []
    side = 28 if domains else 32
    data = {
        "name": "generated",
        "shape": [3, side, side],
        "train": 400,
        "test": 50,
        "domains": domains,
    }
    for _, settings in read_preset(f"splitmix/{name}").rows_at("full")[:2]:
        losses_of(overlay(settings, {"data": data}), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"), [("table1-digits", "digits5.npz"), ("table1-cifar10", "cifar10.npz")]
)
def test_split_mix_learns_on_real_data(name, file):
    """The environment variable FEDQUILT_DATA names the folder of the data files."""
    folder = Path(os.environ.get("FEDQUILT_DATA", ""))
    if "FEDQUILT_DATA" not in os.environ or not (folder / file).is_file():
        pytest.skip(f"FEDQUILT_DATA names no folder with {file}")
    _, settings = read_preset(f"splitmix/{name}").rows_at("full", folder)[0]
    losses = losses_of(settings, 10)
    assert min(losses[-3:]) < losses[0]
