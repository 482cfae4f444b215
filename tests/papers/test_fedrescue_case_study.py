"""FedResCuE's case study (appendix A.1, Tables 1, 7 and 8): its method and its preset, on a few
drawn images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.config.toml import Settings
from fedquilt.data import npz
from fedquilt.errors import ConfigError
from fedquilt.family.cut import prefix
from fedquilt.papers.fedrescue_case_study import ProgressiveColumns
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import overlay
from fedquilt.studies.entries import Entry
from fedquilt.studies.papers import parsed_preset
from fedquilt.studies.plan import Plan
from fedquilt.studies.study import run_plan
from tests.conftest import save_images

TABLE = "fedrescue/table7"
SMALL = {
    "model": "tiny_resnet",
    "data": {"partition": {"max_size": 20}},
    "method": {"local": {"epochs": 2}},
}
# These move weights of masked gradients.
SHAKEN = {
    "lr": 0.05,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three domains of 8×8 pixels, in another order than that in which they are
    learnt.
    """
    path = tmp_path_factory.mktemp("digits")
    save_images(path / "digits5.npz", 90, 3, domains=np.array(["syn", "svhn", "mnist"]))
    return path


def settings_of(row: str, folder: Path) -> Settings:
    """Return the settings of a row with less to do."""
    rows = dict(parsed_preset(TABLE).rows_at("full", folder))
    return overlay(rows[row], SMALL)


def test_the_first_client_has_mnist_and_half_of_the_net(folder):
    run = Experiment.of(settings_of("progressive, 371 images, plain", folder)).prepare()
    everything = npz(folder / "digits5.npz", mean=(0.5,), std=(0.5,))
    for client, domain in enumerate(("mnist", "syn")):
        part = run.data.parts[client]
        assert len(part) == 20
        number = everything.domain_names.index(domain)
        images = everything.inputs[everything.domains == number]
        assert all(bool((images == run.data.inputs[row]).flatten(1).all(1).any()) for row in part)
    assert [float(run.fleet.budget(client, 0, 1).share) for client in (0, 1)] == [0.5, 1.0]


@pytest.mark.parametrize("way", ["progressive", "overwriting"])
def test_the_narrow_net_stays_bit_for_bit_or_is_overwritten(way, folder):
    """With momentum and weight decay, which would move a weight whose gradient is masked."""
    settings = settings_of(f"{way}, 743 images, momentum", folder)
    run = Experiment.of(overlay(settings, {"method": {"local": {"optimizer": SHAKEN}}})).prepare()
    family = run.world.family
    half = prefix(family.fit(fq.Budget(share=0.5)))

    def narrow_net():
        return family.cutter.gather(run.server.weights, half, family.trainable)

    fresh = narrow_net()
    first = {name: weight.clone() for name, weight in run.train(1).server.weights.items()}
    learnt = narrow_net()
    assert all(not torch.equal(fresh[name], learnt[name]) for name in learnt)

    run.train(2)
    same = {name: torch.equal(weight, narrow_net()[name]) for name, weight in learnt.items()}
    assert all(same.values()) if way == "progressive" else not any(same.values())
    wider = [
        name for name in family.trainable if run.server.weights[name].shape != learnt[name].shape
    ]
    assert wider
    assert all(not torch.equal(first[name], run.server.weights[name]) for name in wider)
    assert [record.loss is not None for record in run.records] == [True, True]


def test_all_rows_are_the_papers():
    """Rate, epochs, batches, images and seeds are those of A.1; momentum and decay those of Table
    17.
    """
    preset = parsed_preset(TABLE)
    assert preset.seeds == (1, 3, 5, 7, 9, 11)
    assert len(preset.rows) == 8
    for name, settings in preset.rows_at("full"):
        way, images, steps = name.split(", ")
        # The file is not there, and is not needed to read the method.
        found = Experiment.of(
            {**settings, "data": {"name": "generated", "domains": ["mnist", "syn"]}}
        )
        plain = fq.optimizers.SGD(lr=0.01, momentum=0.0)
        shaken = fq.optimizers.SGD(lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
        local = fq.LocalTraining(
            optimizer=plain if steps == "plain" else shaken, epochs=10, batch_size=32, norm="batch"
        )
        assert found.method == ProgressiveColumns(local=local, progressive=way == "progressive")
        assert settings["data"]["partition"]["max_size"] == int(images.split()[0])
        assert (found.rounds, found.fleet.clients, found.fleet.cohort) == (2, 2, 2)
        assert found.model is not None
        assert found.model.name == "digits_cnn"


def test_the_papers_numbers():
    rows = {row.name: row.paper for row in parsed_preset(TABLE).rows}
    assert rows["progressive, 743 images, plain"] == (
        "77.95 ± 7.93",
        "69.48 ± 1.93",
        "74.99 ± 11.26",
    )
    assert rows["overwriting, 371 images, momentum"] == (
        "19.60 ± 17.53",
        "19.03 ± 16.32",
        "19.23 ± 16.21",
    )


def test_a_smoke_run_has_all_numbers_of_the_table():
    preset = parsed_preset(TABLE)
    entries = [
        Entry(name, settings)
        for name, settings in preset.rows_at("smoke")
        if "743" in name and "plain" in name
    ]
    study = run_plan(Plan(tuple(entries), preset.seeds_at("smoke")))
    assert [result.entry.split(",")[0] for result in study.results] == [
        "progressive",
        "overwriting",
    ]
    for result in study.results:
        assert all(column.parsed.of(result) is not None for column in preset.columns)


def test_a_share_of_the_narrower_net_is_checked():
    with pytest.raises(ConfigError, match="inner"):
        ProgressiveColumns(inner=1.0)


def test_the_net_is_the_papers():
    spec = fq.models.MODELS["digits_cnn"]
    assert sum(weight.numel() for weight in spec.factory().parameters()) == 14_214_090  # Table 16
