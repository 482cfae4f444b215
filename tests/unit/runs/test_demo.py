"""The settings of the demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.config.toml import assign
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import Uniform
from fedquilt.methods import METHODS, HeteroFL
from fedquilt.round.training.optimizers import SGD
from fedquilt.runs.demo import DEMO, demo
from fedquilt.runs.experiment import Experiment


def test_the_demo_has_the_settings_of_the_readme() -> None:
    experiment = Experiment.of(demo())
    assert isinstance(experiment.method, HeteroFL)
    local = experiment.method.local
    assert (local.optimizer, local.batch_size, local.epochs) == (SGD(lr=0.1), 16, 2)
    assert local.norm.name == "post"  # the method's own way of training is kept
    assert experiment.names == {
        "method": "heterofl",
        "model": "tiny_resnet",
        "data": "digits",
        "engine": "vectorized",
    }
    assert experiment.fleet == Devices(cohort=0.5, budgets=Uniform((1.0, 0.5, 0.25)))
    assert experiment.rounds == 20


@pytest.mark.parametrize("name", METHODS)
def test_the_demo_has_settings_for_every_method(name: str) -> None:
    method, usual = Experiment.of(demo(name)).method, METHODS[name]()
    faster = replace(usual.local.optimizer, lr=0.1)
    assert method.local == replace(usual.local, optimizer=faster, batch_size=16, epochs=2)
    own = {"name": name, **METHODS[name].demo}
    settled = Experiment.of({"method": own, "data": {"name": "digits", "public": 0.2}}).method
    assert method == settled.with_local(optimizer=faster, batch_size=16, epochs=2)


def test_a_method_from_a_file_keeps_its_own_local_training(own: Path) -> None:
    local = Experiment.of(demo("mine.py:method")).method.local
    assert (local.optimizer.lr, local.batch_size, local.epochs) == (0.03, 5, 1)


def test_reading_does_not_change_the_demo() -> None:
    settings = demo()
    assign(settings, ["fleet", "budgets", "shares"], [1.0])
    assert DEMO["fleet"]["budgets"]["shares"] == [1.0, 0.5, 0.25]
