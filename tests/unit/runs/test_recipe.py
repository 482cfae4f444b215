"""Settings of runs that scripts started, and reasons if a part cannot be written."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.fleets.availability import Diurnal
from fedquilt.fleets.presets import net_budgets
from fedquilt.models import MLP
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.fingerprint import fingerprint
from fedquilt.runs.recipe import config_text, settings_of
from fedquilt.runs.tracking import TensorBoard


def net(hidden: int = 6, num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
    )


@fq.data.source
def samples(count: int = 40, classes: int = 3) -> fq.data.Pool:
    """Return images that a function of this file creates."""
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return fq.data.Pool.of(
        (x, torch.arange(count) % classes), (x[:9], torch.arange(9) % classes), name="own"
    )


class Net(nn.Module):
    """A class with two ways to create an instance."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.layers = net(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def wide() -> Net:
        return Net(8)


@dataclass(frozen=True)
class Own(fq.methods.HeteroFL):
    """A method of this file."""

    pace: float = 0.5


@pytest.fixture(scope="module")
def data() -> fq.FederatedData:
    return fq.data.digits().partition(4)


@pytest.fixture
def prepared(data):
    """Return a function that prepares a run of these parts, with defaults for those that are left
    out.
    """

    def prepare(
        method=fq.methods.FedAvg(), factory=net, data=data, fleet=None, **options
    ) -> fq.Run:
        family = factory if isinstance(factory, fq.Family) else fq.trace(factory, data.example)
        return fq.prepare(method, family, data, fleet or fq.Fleet.of((1.0, 0.5), 4, 2), **options)

    return prepare


def reason(run: fq.Run, part: str, rounds: int = 3) -> str:
    """Return why a part cannot be written, after checking that it is the only one."""
    _, missing = settings_of(run, rounds)
    (line,) = missing
    assert line.startswith(f"{part}: ")
    return line


def check_equal(run: fq.Run, **options) -> dict:
    """Check that settings give the same run again, and return them."""
    text = config_text(run, 3, **options)
    plain = tomllib.loads(text)
    assert "python" not in plain, plain
    again = Experiment.of(plain).prepare()
    assert fingerprint(again) == fingerprint(run)
    return plain


# --- what can be written ------------------------------------------------------------------------


def test_all_parts_are_written(prepared, data):
    method = Own(pace=0.25).with_local(lr=0.2, epochs=2)
    run = prepared(
        method,
        seed=3,
        precision="fp64",
        link=fq.Link.preset("lossy-mild"),
        evaluation=fq.Evaluation(every=2, shares=(0.75,)),
        client_state_memory=1 << 20,
    )
    plain = check_equal(run, checkpoint=Checkpointing(rounds=2))
    assert (plain["rounds"], plain["seed"]) == (3, 3)
    assert plain["method"]["name"].endswith("test_recipe.py:Own")
    assert (plain["method"]["pace"], plain["method"]["local"]["optimizer"]["lr"]) == (0.25, 0.2)
    assert plain["model"]["name"].endswith("test_recipe.py:net")
    assert plain["model"]["num_classes"] == 10  # which the data would fill in
    assert "hidden" not in plain["model"]
    assert (plain["data"]["name"], plain["data"]["partition_seed"], plain["fleet"]["seed"]) == (
        "digits",
        0,
        0,
    )
    assert plain["engine"]["client_state_memory"] == 1 << 20
    assert plain["checkpoint"]["rounds"] == 2


@pytest.mark.parametrize(
    ("factory", "written"),
    [
        (
            partial(MLP, 10, in_features=64, hidden=(5,)),
            {"name": "mlp", "hidden": [5], "num_classes": 10},
        ),
        (partial(net, 3), {"hidden": 3}),
        (Net, {}),
        (Net.wide, {}),
    ],
    ids=["listed", "options", "class", "method of a class"],
)
def test_models_are_written_by_their_names(prepared, factory, written):
    plain = check_equal(prepared(factory=factory))["model"]
    assert written.items() <= plain.items()
    assert "tracing" not in plain


def test_options_of_tracing_are_written(prepared, data):
    family = fq.trace(net, data.example, fixed=["1"], class_dim=1)
    plain = check_equal(prepared(factory=family))["model"]
    assert plain["tracing"] == {"fixed": ["1"], "parts": {}, "heads": "inside", "class_dim": 1}


def test_unions_are_written_with_the_names_of_their_nets(prepared, data):
    nets = {"large": fq.trace(net, data.example), "small": fq.trace(partial(net, 3), data.example)}
    family = fq.union(nets)
    fleet = fq.Fleet.of(net_budgets(family), 4, 2)
    plain = check_equal(prepared(factory=family, fleet=fleet))
    assert [model["net_name"] for model in plain["model"]] == ["large", "small"]
    assert plain["fleet"]["budgets"]["name"] == "given"
    same = fq.union(
        {"untyped": fq.trace(untyped, data.example), "Net": fq.trace(Net, data.example)}
    )
    plain = check_equal(prepared(factory=same, fleet=fleet))
    assert ["net_name" in model for model in plain["model"]] == [False, False]


def test_data_of_a_function_is_written(prepared):
    pool = samples(count=30)
    assert pool.origin is not None
    assert replace(pool, targets=1 - pool.targets.clamp(max=1)).origin is None
    data = pool.partition(4, fq.data.Dirichlet(5.0), seed=2).with_validation(0.25)
    plain = check_equal(prepared(factory=partial(net, 3, 3), data=data))["data"]
    assert plain["name"].endswith("test_recipe.py:samples")
    assert (plain["count"], plain["partition_seed"], plain["validation"]) == (30, 2, 0.25)
    assert plain["partition"]["alpha"] == 5.0


def test_a_name_of_data_is_remembered(prepared, tmp_path):
    file = tmp_path / "own.npz"
    np.savez(
        file,
        x=np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32),
        y=np.arange(40) % 3,
    )
    plain = check_equal(
        prepared(factory=partial(net, 3, 3), data=fq.data.npz(file, max_bytes=1 << 20).partition(4))
    )
    assert plain["data"]["name"] == "npz"
    assert (plain["data"]["path"], plain["data"]["max_bytes"]) == (str(file), 1 << 20)
    named = fq.data.source(f"{__file__}:samples")(classes=2).partition(4)
    assert check_equal(prepared(factory=partial(net, 3, 2), data=named))["data"]["classes"] == 2


@pytest.mark.parametrize(
    ("fleet", "written"),
    [
        (fq.Fleet.of([1, 0.5], 4, 2), {"name": "uniform", "shares": [1.0, 0.5]}),
        (fq.Fleet.mixed({1.0: 0.25, 0.5: 0.75}, 4, 2), {"1.0": 0.25, "0.5": 0.75}),
        (
            fq.Fleet.of(fq.fleets.Clusters(), 4, 2, seed=5),
            {"name": "clusters", "shares": [0.25, 0.5, 0.75, 1.0]},
        ),
        (
            fq.Fleet.mixed({fq.Budget(macs="1k"): 0.5, 0.5: 0.5}, 4, 2),
            {"name": "given", "kinds": [{"macs": 1000.0}, {"share": 0.5}], "portions": [0.5, 0.5]},
        ),
        (
            fq.Fleet.of([1], 4, 2, dynamic=True, availability=Diurnal()),
            {"name": "uniform", "shares": [1.0]},
        ),
    ],
    ids=["shares", "portions", "preset", "budgets", "available"],
)
def test_fleets_are_written(prepared, fleet, written):
    plain = check_equal(prepared(fleet=fleet))["fleet"]
    assert plain["budgets"] == written
    assert plain.get("seed") == (5 if written.get("name") == "clusters" else None)


def test_an_example_of_another_size_and_trackers_are_written(prepared):
    family = fq.trace(net, torch.zeros(1, 1, 8, 8))
    plain = check_equal(prepared(factory=family), trackers=(TensorBoard(),))
    assert [tracker["name"] for tracker in plain["trackers"]] == ["tensorboard"]


def test_a_run_from_settings_is_written_with_these_settings():
    experiment = Experiment.of(
        {
            "method": "fedavg",
            "data": "digits",
            "model": {"name": "mlp", "hidden": [4]},
            "fleet": {"clients": 4},
        }
    )
    plain = tomllib.loads(config_text(experiment.prepare(), 2))
    assert (plain["model"]["hidden"], plain["rounds"], plain["data"]["partition"]["name"]) == (
        [4],
        2,
        "iid",
    )


# --- what cannot --------------------------------------------------------------------------------


def local_net() -> nn.Module:
    """Return a function that cannot be found by a name."""

    def inner() -> nn.Module:
        return net()

    return inner


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (
            lambda: net(3),
            r"the lambda in test_recipe.py, line \d+ has no name. Write it as a function at the "
            r"top level",
        ),
        (local_net(), "local_net.<locals>.inner in .* is made inside a function"),
        (net(), "fq.trace was given a Sequential that was made already"),
        (fq.with_stages(net, ["1", "2"]), r"ProgFed\(stages=…\)"),
    ],
    ids=["lambda", "local", "module", "stages"],
)
def test_models_without_a_name_are_named(prepared, factory, why):
    assert re.search(why, reason(prepared(factory=factory), "model"))


def test_without_a_writer_of_toml_the_reason_is_its_package(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    (line,) = tomllib.loads(config_text(prepared(), 3))["python"]["missing"]
    assert "pip install 'fedquilt[cli]'" in line


@fq.data.source
def partitioned_samples() -> fq.FederatedData:
    return samples().partition(4, fq.data.Quantity())


def test_data_that_a_function_partitioned_is_not_partitioned_again(prepared):
    data = partitioned_samples()
    assert "partition" not in check_equal(prepared(factory=partial(net, 3, 3), data=data))["data"]
    assert data.partition(4).origin is None
    assert samples().partition(2).partition(4).origin.num_clients == 4


def test_data_of_unknown_origin_is_named(prepared, data):
    changed = replace(data, test_targets=data.test_targets.flip(0))
    assert "@fq.data.source above it" in reason(prepared(data=changed), "data")
    few = fq.Fleet.of((1.0,), 3, 2)
    assert "partitioned among 4 clients, and the fleet has 3" in reason(prepared(fleet=few), "data")


def test_other_parts_that_files_cannot_hold_are_named(prepared, data):
    class Engine(Vectorized):
        """An engine of the user."""

    fleet = fq.Fleet.of((1.0, 0.5), 4, 2)
    assert "put together from its fields" in reason(
        prepared(fleet=replace(fleet, cohort=1)), "fleet"
    )
    assert "the engine is a Engine; files have" in reason(prepared(engine=Engine(data)), "engine")
    assert "0 rounds were asked for" in reason(prepared(), "rounds", rounds=0)
    grown = prepared(fq.methods.ProgFed(stages=("1", "2"), rounds=4).settled(4))
    assert settings_of(grown, 3)[1] == []
    text = config_text(prepared(fleet=replace(fleet, cohort=1)), 3)
    table = tomllib.loads(text)["python"]
    assert table["rounds"] == 3
    assert table["missing"] == [reason(prepared(fleet=replace(fleet, cohort=1)), "fleet")]


def untyped(hidden=None) -> nn.Module:
    return net(hidden or 6)


def test_arguments_that_files_cannot_hold_are_named(prepared):
    """Without a type hint, None would be read back as text."""
    assert "untyped(hidden='None'): a file cannot hold this value" in reason(
        prepared(factory=partial(untyped, None)), "model"
    )
    assert settings_of(prepared(factory=untyped), 3)[1] == []
    assert "(activation=" in reason(prepared(factory=partial(activated, nn.Tanh)), "model")


def activated(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), activation(), nn.Linear(6, 10))


SCRIPT = """
import fedquilt as fq
from torch import nn
from fedquilt.runs.recipe import settings_of

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def go():
    data = fq.data.digits().partition(4)
    family, fleet = fq.trace(net, data.example), fq.Fleet.of((1.0,), 4, 2)
    run = fq.prepare(fq.methods.FedAvg(), family, data, fleet)
    return settings_of(run, 3)

{guard}
    found = go()
"""


@pytest.mark.parametrize("guard", ["if True:", 'if __name__ == "__main__":'])
def test_a_script_that_would_run_again_is_named(tmp_path, guard):
    """Importing a script runs its top level and therefore the training, unless that is under the
    usual guard.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    settings, missing = runpy.run_path(str(script), run_name="__main__")["found"]
    if "__name__" in guard:
        assert missing == []
        assert settings["model"]["name"] == f"{script}:net"
    else:
        (line,) = missing
        assert line.startswith(
            f"model: {script}:net is in the file that starts this run in line 16"
        )
        assert 'Put the run under `if __name__ == "__main__":`' in line


def test_a_file_that_needs_its_package_is_named(tmp_path, monkeypatch, prepared):
    package = tmp_path / "uninstalled"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("from torch import nn\n")
    (package / "nets.py").write_text(
        "from .layers import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, "
        "10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from uninstalled.nets import net

    assert "imports from its own package in line 1" in reason(prepared(factory=net), "model")
