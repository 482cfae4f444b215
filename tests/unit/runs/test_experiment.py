"""From settings to a run: layers, files, names, and the resolved configuration."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedquilt as fq
from fedquilt.cli.options import Options
from fedquilt.config.settings import leaves, read
from fedquilt.data import Domains, Iid, Labels, Natural, Partition, Pool
from fedquilt.errors import ConfigError, DataError
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import Uniform
from fedquilt.methods import METHODS, FedAvg, FedBN, FedRolex, HeteroFL
from fedquilt.models import MODELS
from fedquilt.round import Evaluation
from fedquilt.round.training.optimizers import SGD, Adam
from fedquilt.runs.experiment import (
    DEMO,
    Experiment,
    Machine,
    Model,
    Source,
    assign,
    choose,
    demo,
    load_weights,
    offered,
    overlay,
    parse_assignment,
    parse_toml,
    read_toml,
)
from fedquilt.tasks import MultiLabel
from tests.conftest import assert_same

OWN = """
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
import torch
from torch import nn
import fedquilt as fq
from fedquilt.data import Pool

if TYPE_CHECKING:
    from somewhere import Unseen

@dataclass(frozen=True)
class Mine(fq.methods.Method):
    pace: int = 1  # of the walk
    seen: Unseen | None = None

def method(lr: float = 0.03):
    return Mine(local=fq.LocalTraining(optimizer=fq.optimizers.SGD(lr=lr), batch_size=5), pace=7)

def released():
    return fq.methods.HeteroFL.preset("released")

def hidden():
    @dataclass(frozen=True)
    class Inner(fq.methods.Method):
        pass
    return Inner()

def net(num_classes, width: int = 8, seen: Unseen | None = None):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, num_classes))

def pool(samples: int = 60):
    x, y = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)), torch.arange(samples) % 3
    return Pool.of((x, y), (x, y))

def dealt():
    return pool().partition(6)

def nothing():
    return 3

def broken():
    raise ValueError("on purpose")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(**settings: Any) -> Experiment:
    """An experiment on the user's own tiny model and data."""
    plain = {
        "method": "fedavg",
        "model": "mine.py:net",
        "data": "mine.py:pool",
        "fleet": {"clients": 6},
        **settings,
    }
    return Experiment.of(plain)


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        small(**settings)
    return str(caught.value)


# --- layers -------------------------------------------------------------------------------------


def test_the_demo_is_what_the_readme_says() -> None:
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
def test_the_demo_runs_any_method_its_own_way(name: str) -> None:
    method, usual = Experiment.of(demo(name)).method, METHODS[name]()
    faster = replace(usual.local.optimizer, lr=0.1)
    assert method.local == replace(usual.local, optimizer=faster, batch_size=16, epochs=2)
    own = {"name": name, **METHODS[name].demo}
    settled = Experiment.of({"method": own, "data": {"name": "digits", "public": 0.2}}).method
    assert method == settled.with_local(optimizer=faster, batch_size=16, epochs=2)


def test_a_method_from_a_file_keeps_its_own_local_training(own: Path) -> None:
    local = Experiment.of(demo("mine.py:method")).method.local
    assert (local.optimizer.lr, local.batch_size, local.epochs) == (0.03, 5, 1)


def test_reading_leaves_the_demo_as_it_was() -> None:
    settings = demo()
    assign(settings, ["fleet", "budgets", "shares"], [1.0])
    assert DEMO["fleet"]["budgets"]["shares"] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("method.shift=2", ["method", "shift"], 2),
        ("method.shift = -1", ["method", "shift"], -1),
        ("lr=1e-3", ["lr"], 1e-3),
        ("a.b=true", ["a", "b"], True),
        ("method=fedavg", ["method"], "fedavg"),
        ("data=x.npz", ["data"], "x.npz"),
        ('a="quoted"', ["a"], "quoted"),
        ("a=[1, 2]", ["a"], [1, 2]),
        ("a={ name = 'income' }", ["a"], {"name": "income"}),
        ('fleet.budgets."0.5"=0.3', ["fleet", "budgets", "0.5"], 0.3),
        ("a=", ["a"], ""),
        ("a=b=c", ["a"], "b=c"),
        ("a=1\nb=2", ["a"], "1\nb=2"),
    ],
)
def test_assignments_take_toml_values_and_bare_words(
    text: str, path: list[str], value: object
) -> None:
    assert parse_assignment(text) == (path, value)


@pytest.mark.parametrize("text", ["", "method.shift", "=3", "a..b=1", "a b=1"])
def test_assignments_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as --set method"):
        parse_assignment(text)


def test_a_name_becomes_a_table_when_a_key_of_it_is_set() -> None:
    assert assign({"method": "fedrolex"}, ["method", "shift"], 2) == {
        "method": {"name": "fedrolex", "shift": 2}
    }
    assert assign({}, ["a", "b", "c"], 1) == {"a": {"b": {"c": 1}}}
    assert assign({"a": {"x": 1, "y": 2}}, ["a"], {"z": 3}) == {"a": {"z": 3}}
    assert assign({"rounds": 3}, ["rounds", "x"], 1) == {"rounds": {"x": 1}}


def test_another_name_takes_over_what_all_of_them_have() -> None:
    own = {"name": "fedrolex", "shift": 2, "preset": "paper", "local": {"epochs": 3}}
    assert choose({"method": own, "rounds": 2}, ["method"], "fedavg") == {
        "method": {"preset": "paper", "local": {"epochs": 3}, "name": "fedavg"},
        "rounds": 2,
    }
    assert choose({"method": own}, ["method"], "fedrolex") == {"method": own}
    assert choose({"method": "fedrolex"}, ["method"], "fedavg") == {"method": {"name": "fedavg"}}
    assert choose({}, ["method"], "fedavg") == {"method": {"name": "fedavg"}}
    assert choose({"model": {"name": "vit", "depth": 2}}, ["model"], "vgg11") == {
        "model": {"name": "vgg11"}
    }
    data = {"name": "digits", "public": 0.1, "partition": "labels"}
    assert choose({"data": data}, ["data"], "x.npz") == {
        "data": {"name": "x.npz", "partition": "labels"}
    }


def test_a_preset_that_another_method_lacks_is_refused() -> None:
    """It was dropped, and the other method was compared untuned."""
    parts = {"model": "tiny_resnet", "data": "digits"}
    asked = {"method": {"name": "splitmix", "preset": "cifar10-robust"}, **parts}
    with pytest.raises(
        ConfigError,
        match=r"method\.preset: 'cifar10-robust' was found; fedavg has no preset of that",
    ) as caught:
        Experiment.of(choose(asked, ["method"], "fedavg"))
    assert f"Known: {', '.join(METHODS['fedavg'].presets)}." in str(caught.value)
    for method in ("splitmix", "sheterofl", "heterofl", "fedavg"):
        digits = {"method": {"name": "splitmix", "preset": "digits"}, **parts}
        found = Experiment.of(choose(digits, ["method"], method)).method
        assert found == METHODS[method].preset("digits")


def test_settings_are_laid_over_one_another_table_by_table() -> None:
    base = {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": {"optimizer": {"lr": 0.1}, "epochs": 2}},
    }
    over = {"method": {"local": {"optimizer": {"momentum": 0.9}, "batch_size": 5}}, "seed": 3}
    local = {"optimizer": {"lr": 0.1, "momentum": 0.9}, "epochs": 2, "batch_size": 5}
    assert overlay(base, over) == {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": local},
        "seed": 3,
    }
    assert base == {
        "rounds": 9,
        "method": {"name": "fedrolex", "local": {"optimizer": {"lr": 0.1}, "epochs": 2}},
    }
    assert overlay(base, {}) == base
    assert overlay(base, {})["method"] is not base["method"]
    assert overlay({}, base) == base


def test_another_name_drops_the_options_of_the_one_below() -> None:
    base = {
        "method": {"name": "fedrolex", "preset": "paper", "shift": 2, "local": {"epochs": 2}},
        "data": {"name": "x.npz", "channels": "last", "partition": {"name": "labels", "labels": 2}},
        "fleet": {"clients": 8, "budgets": {"name": "two_level", "rho": 0.1}},
    }
    over = {
        "method": {"local": {"epochs": 3}, "weighting": "data", "name": "fedavg"},
        "data": {"name": "generated", "train": 8, "partition": {"labels": 3}},
        "fleet": {"budgets": "uniform"},
    }
    assert overlay(base, over) == {
        "method": {
            "name": "fedavg",
            "preset": "paper",
            "local": {"epochs": 3},
            "weighting": "data",
        },
        "data": {"name": "generated", "train": 8, "partition": {"name": "labels", "labels": 3}},
        "fleet": {"clients": 8, "budgets": {"name": "uniform"}},
    }
    assert overlay(base, {"fleet": {"budgets": "two_level"}}) == base
    assert overlay(base, {"fleet": {"budgets": {"name": "two_level"}}}) == base


def test_names_alone_lists_and_none_are_laid_over_tables() -> None:
    base = {
        "method": "fedavg",
        "model": "mlp",
        "data": {"name": "digits", "partition": "iid"},
        "trackers": ["wandb"],
    }
    assert overlay(base, {"method": {"share": 0.5}})["method"] == {"name": "fedavg", "share": 0.5}
    assert overlay(base, {"data": {"partition": "none"}})["data"] == {
        "name": "digits",
        "partition": "none",
    }
    assert overlay(base, {"trackers": []})["trackers"] == []
    norms = overlay(
        {"method": {"name": "fedavg", "local": {"norm": "post"}}},
        {"method": {"local": {"norm": "batch"}}},
    )
    assert Experiment.of({**norms, "data": "digits"}).method.local.norm.name == "batch"


def test_another_name_below_takes_over_what_all_there_have() -> None:
    def chosen(held: Any, name: str, *path: str) -> Any:
        settings = choose(assign({}, path, held), path, name)
        for key in path:
            settings = settings[key]
        return settings

    optimizer = "method", "local", "optimizer"
    assert chosen({"lr": 0.1, "momentum": 0.5}, "adam", *optimizer) == {"lr": 0.1, "name": "adam"}
    assert chosen({"lr": 0.1, "momentum": 0.5}, "sgd", *optimizer) == {
        "lr": 0.1,
        "momentum": 0.5,
        "name": "sgd",
    }
    assert chosen({"name": "labels", "labels": 2, "fraction": 0.5}, "iid", "data", "partition") == {
        "name": "iid",
        "fraction": 0.5,
    }
    assert chosen({"name": "uniform", "shares": [1.0]}, "income", "fleet", "budgets") == {
        "name": "income"
    }
    assert chosen({"name": "ray", "workers": 2}, "vectorized", "engine") == {
        "name": "vectorized",
        "workers": 2,
    }
    assert chosen(3, "x", "rounds") == {"name": "x"}


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a = 1\nb = = 2", r"x\.toml:2:5: this is not TOML: Invalid value\."),
        (b"a = 1\na = 2", r"x\.toml:2:6: this is not TOML: Cannot overwrite a value\."),
        (b"a = \xff", r"x\.toml is not text in UTF-8: byte 4 is 0xff\."),
        (b"a = " + b"[" * 5000, r"x\.toml nests too deeply|x\.toml:1:\d+: this is not TOML"),
        (b"a = " + b"9" * 5000, r"x\.toml: this is not TOML: Exceeds the limit"),
        (b"a = [1", r"x\.toml:1:7: this is not TOML: Unclosed array\."),
    ],
)
def test_what_is_not_toml_is_placed(text: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_toml(text, "x.toml")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.toml was asked for; it cannot be read: No such file"
    ):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        read_toml(tmp_path)


def test_all_problems_of_a_file_are_told_with_who_asked() -> None:
    settings = {
        "method": "fedrolx",
        "model": "tiny_resnet",
        "data": "digits",
        "rounds": 0,
        "engine": "vectorised",
    }
    with pytest.raises(ConfigError) as caught:
        Experiment.of(settings, {"method": "--method"}, "a.toml")
    first, *told = str(caught.value).split("\n  ")
    assert first == "3 problems in a.toml:"
    assert told[0].startswith(
        "method.name (--method): there is no method named 'fedrolx'. Did you mean 'fedrolex'?"
    )
    assert told[1].startswith(
        "engine.name: 'vectorised' was asked for; there is no such engine. It is called 'vect"
    )
    assert told[2] == "rounds: 0 was asked for; it must lie in [1, inf)."


# --- the whole ----------------------------------------------------------------------------------


def everything() -> Experiment:
    return Experiment(
        method=FedRolex.preset("paper", shift=3, overlap=0.5),
        model=Model("resnet18", {"norm": "group", "widths": (8, 16, 32, 64)}),
        data=Source("digits", {"public": 0.2}, partition=Labels(labels=3)),
        fleet=Devices(clients=30, cohort=5, budgets={"1.0": 0.5, "0.5": 0.5}, dynamic=True),
        engine=Machine("sequential", precision="fp64", threads=2),
        evaluation=Evaluation(every=3),
        rounds=7,
        seed=11,
        init=__file__,  # any file: it is not read here
    )


@pytest.mark.parametrize(
    "experiment",
    [
        Experiment.of(demo()),
        everything(),
        replace(
            everything(), method=FedAvg(local=fq.LocalTraining(optimizer=Adam())), evaluation=None
        ),
        *(Experiment.of(demo(name)) for name in METHODS),
    ],
)
def test_the_resolved_file_is_the_same_experiment(experiment: Experiment) -> None:
    assert Experiment.of(tomllib.loads(experiment.to_toml())) == experiment


def test_every_preset_can_be_asked_for_by_name() -> None:
    for name, kind in METHODS.items():
        for preset in kind.presets:
            assert small_method(name, preset=preset) == kind.preset(preset)
    assert small_method("fedrolex", preset="released-settings", shift=5) == FedRolex.preset(
        "released-settings", shift=5
    )


def small_method(name: str, **settings: Any) -> Any:
    plain = {"method": {"name": name, **settings}, "model": "tiny_resnet", "data": "digits"}
    return Experiment.of(plain).method


def test_tables_change_single_values_of_nested_settings() -> None:
    method = small_method(
        "fedbn", local={"optimizer": {"lr": 0.3}, "schedule": {"name": "cosine", "rounds": 9}}
    )
    assert method == FedBN(
        local=replace(FedBN().local, optimizer=SGD(lr=0.3), schedule=fq.schedules.Cosine(9))
    )


def test_what_was_left_open_is_settled_by_a_run(own: Path) -> None:
    experiment = small(rounds=25, fleet={})
    ground = experiment.ground()
    run = experiment.prepare(ground)
    settled = experiment.settled(run, ground)
    assert settled.fleet.clients == run.fleet.num_clients == 20
    assert settled.engine.threads == 1  # a small model
    assert settled.evaluation == Evaluation(every=3)
    assert settled.data.partition == Iid()
    assert settled.settled(settled.prepare(ground), ground) == settled


def test_data_that_came_dealt_is_written_without_a_partition(own: Path) -> None:
    experiment = small(data="mine.py:dealt")
    ground = experiment.ground()
    assert experiment.settled(experiment.prepare(ground), ground).data.partition is None


def test_an_experiment_repeats_its_run_bit_for_bit(own: Path) -> None:
    one = small(rounds=3, method={"name": "fedprox", "local": {"batch_size": 4}})
    ground = one.ground()
    run = one.prepare(ground).train(3)
    again = Experiment.of(tomllib.loads(one.settled(run, ground).to_toml())).prepare().train(3)
    for name, weight in run.server.weights.items():
        assert torch.equal(weight, again.server.weights[name])


LINK = {
    "loss": {
        "name": "wireless",
        "distances": [100.0, 300.0],
        "fading": "constant",
        "granularity": 0.25,
    },
    "codec": {"bits": 4, "keep": 0.5, "feedback": True},
    "clock": {"down": [1e6, 2e6], "compute": 1e9},
}


@pytest.mark.parametrize(
    "link", ["lossy-mild", "lq8+sp25", {"name": "sp10", "clock": {"up": 1e6}}, LINK, {}]
)
def test_a_link_is_written_and_read_again(own: Path, link: Any) -> None:
    experiment = small(link=link)
    again = Experiment.of(tomllib.loads(experiment.to_toml()))
    assert again == experiment
    # what a name stood for is spelt out
    assert "name" not in tomllib.loads(experiment.to_toml()).get("link", {})
    by_name = {"lossy-mild": fq.links.ColumnLoss(0.1, 0.2)}
    assert experiment.link.loss == by_name.get(str(link), experiment.link.loss)


def test_a_table_is_laid_over_a_link_by_name(own: Path) -> None:
    link = small(link={"name": "lossy-mild", "loss": {"upto": 0.4}, "codec": {"bits": 8}}).link
    assert link == fq.Link(fq.links.ColumnLoss(0.1, 0.4), fq.links.Codec(8))
    assert small(link=LINK).link.loss == fq.links.Wireless(
        distances=(100, 300), fading="constant", granularity=0.25
    )


def test_a_rate_above_its_upper_bound_is_told_what_would_help(own: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"link\.loss\.upto: 0\.2 was asked for.*Set upto too, or upto to none"
    ):
        small(link={"name": "lossy-mild", "loss": {"rate": 0.5}})
    assert small(
        link={"name": "lossy-mild", "loss": {"rate": 0.5, "upto": "none"}}
    ).link.loss == fq.links.ColumnLoss(0.5)


def test_all_that_is_wrong_with_a_link_is_told(own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        small(
            link={
                "name": "lossy-mid",
                "loss": {"name": "colums"},
                "codec": {"bits": 3, "kept": 1},
                "clok": {},
            }
        )
    told = str(caught.value)
    assert (
        "link.name: 'lossy-mid' was found; link has no preset of that name. Did you mean "
        "'lossy-mild'?" in told
    )
    assert "there is no loss named 'colums'. Did you mean 'columns'?" in told
    assert "link.codec.bits: 3 was found; one of 2, 4, 8, 32 would fit." in told
    assert "link.codec.kept: linear has no such key. Did you mean 'keep'?" in told
    assert "link.clok: link has no such key. Did you mean 'clock'?" in told


def test_runs_on_one_ground_have_their_own_links(own: Path) -> None:
    lossy, perfect = small(link="lossy-strong"), small()
    ground = lossy.ground()
    runs = [lossy.prepare(ground), perfect.prepare(ground)]
    assert runs[0].engine is runs[1].engine
    for run in runs:
        run.train(1)
    assert runs[0].records[0].bytes_up < runs[1].records[0].bytes_up
    assert_same(runs[1], small().prepare().train(1), atol=0)


def test_settings_reach_the_run(own: Path) -> None:
    run = small(
        engine={"name": "vectorized", "memory": 1000, "precision": "fp64"}, seed=5
    ).prepare()
    assert run.engine.memory == 1000
    assert run.world.dtype == torch.float64
    assert run.engine.precision == run.summary["precision"] == "fp64"
    assert run.world.seed == 5


def test_tf32_is_refused_where_there_is_none_and_told_with_the_rest(own: Path) -> None:
    told = refused(engine={"precision": "tf32"}, rounds=0)
    assert "2 problems" in told
    assert (
        "engine.precision: 'tf32' was asked for on cpu; only NVIDIA GPUs have it. 'fp32', 'bf16' or"
        in told
    )
    assert small(engine={"precision": "tf32", "device": "cuda"}).engine.precision == "tf32"
    assert "'fp16' was found; one of 'fp32', 'tf32', 'bf16', 'fp64' would fit" in refused(
        engine={"precision": "fp16"}
    )


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "mps:x", ""])
def test_a_device_this_machine_has_not_is_refused(own: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' was asked for; this machine has cpu"):
        small(engine={"device": device}).prepare()


# --- models -------------------------------------------------------------------------------------


def test_models_are_offered_what_the_data_is(own: Path) -> None:
    images = Pool.of(
        (torch.zeros(4, 3, 16, 16), torch.arange(4)), (torch.zeros(1, 3, 16, 16), torch.tensor([6]))
    )
    assert offered(images) == {
        "num_classes": 7,
        "num_outputs": 7,
        "in_features": 768,
        "in_channels": 3,
        "image_size": 16,
    }
    rows = Pool.of((torch.zeros(4, 5), torch.arange(4)), (torch.zeros(1, 5), torch.tensor([0])))
    assert offered(rows) == {"num_classes": 4, "num_outputs": 4, "in_features": 5}
    tokens = torch.zeros(4, 9, dtype=torch.int64)
    text = Pool.of((tokens, tokens), (tokens, tokens), num_classes=50)
    assert offered(text) == {"num_classes": 50, "num_outputs": 50, "max_length": 9}
    numbers = Pool.of((torch.zeros(4, 5), torch.zeros(4)), (torch.zeros(1, 5), torch.zeros(1)))
    assert offered(numbers) == {"num_classes": 1, "num_outputs": 1, "in_features": 5}
    # whole numbers are classes, unless a task says that they are labels
    yes_or_no = torch.tensor([[0, 1, 1]] * 4)
    labels = Pool.of((torch.zeros(4, 5), yes_or_no), (torch.zeros(4, 5), yes_or_no))
    assert offered(labels)["num_outputs"] == 2
    assert offered(labels, MultiLabel())["num_outputs"] == 3


@pytest.mark.parametrize("name", ["num_classes", "num_outputs"])
def test_a_factory_gets_the_number_of_outputs_by_the_name_it_has(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.py"
    text = (
        f"from torch import nn\ndef net({name}: int, in_features: int):\n    return "
        f"nn.Linear(in_features, {name})"
    )
    file.write_text(text)
    y = torch.zeros(4, 3)
    family = Model(f"{file}:net").trace(Pool.of((torch.zeros(4, 5), y), (torch.zeros(4, 5), y)))
    assert family.layout.sizes["class"] == 3
    assert Model("mlp").trace(fq.data.diabetes()).num_outputs == 1
    assert Model("tiny_resnet").trace(fq.data.digits_labels()).num_classes == 3


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (
            torch.zeros(4, 7),
            r"data has numbers of shape \(7,\)\. Made for these: mlp; or a module of yours",
        ),
        (
            torch.zeros(4, 9, dtype=torch.int64),
            r"data has tokens of shape \(9,\)\. Made for these: transformer_lm;",
        ),
        (torch.zeros(4, 1, 8, 8, 8), r"numbers of shape \(1, 8, 8, 8\)\. Made for these: unet3d;"),
        (
            torch.zeros(4, 1, 2, 2, 2, 2),
            r"numbers of shape .*\. Made for these: none of those by name; or",
        ),
    ],
)
def test_a_model_for_other_samples_is_refused_with_those_that_fit(
    inputs: torch.Tensor, told: str
) -> None:
    targets = torch.arange(4) % 3
    pool = Pool.of((inputs, targets), (inputs, targets))
    with pytest.raises(
        ConfigError,
        match=rf"'tiny_resnet' was asked for; it is for samples such as \(1, 8, 8\).*{told}",
    ):
        Model("tiny_resnet").trace(pool)


def test_rows_of_numbers_have_a_model() -> None:
    x, y = torch.zeros(4, 7), torch.arange(4) % 3
    family = Model("mlp", {"hidden": (6,)}).trace(Pool.of((x, y), (x, y)))
    assert family.count(family.whole) == 7 * 6 + 6 + 6 * 3 + 3


def test_what_the_user_sets_wins_over_what_the_data_offers() -> None:
    pool = fq.data.digits()
    assert Model("tiny_resnet").trace(pool).num_classes == 10
    assert Model("tiny_resnet", {"num_classes": 12}).trace(pool).num_classes == 12


def test_layers_that_a_paper_leaves_whole_stay_whole() -> None:
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    pool = Pool.of((tokens, tokens), (tokens, tokens), num_classes=50)
    options = {"width": 8, "heads": 2, "head_dim": 4, "hidden": 16}
    family = Model("transformer_lm", options).trace(pool)
    assert Model("transformer_lm").fixed == MODELS["transformer_lm"].fixed
    assert {name for name, axis in family.layout.axes.items() if axis.fixed}


def test_model_options_are_read_by_the_signature(own: Path) -> None:
    assert small(model={"name": "mine.py:net", "width": 12}).model.options == {"width": 12}
    assert "model.width: 'x' was found; a whole number would fit." in refused(
        model={"name": "mine.py:net", "width": "x"}
    )
    assert "mine.py:net has no such option. Did you mean 'width'?" in refused(
        model={"name": "mine.py:net", "widht": 1}
    )


def test_runs_may_start_from_a_file_of_weights(own: Path) -> None:
    family = small().ground().family
    start = {name: torch.randn(weight.shape) for name, weight in family.init(3).items()}
    save_file(start, "start.safetensors")
    run = small(init="start.safetensors").prepare()
    for name, weight in start.items():
        assert torch.equal(run.server.weights[name], weight)
    broken = {
        "0.weight": torch.zeros(2, 2),
        "0.bais": torch.zeros(8),
        "2.weight": start["2.weight"],
    }
    save_file(broken, "broken.safetensors")
    with pytest.raises(ConfigError) as caught:
        small(init="broken.safetensors").prepare()
    told = str(caught.value)
    assert "0.bias is not in the file" in told
    assert "0.bais is not in the model. Did you mean '0.bias'?" in told
    assert "0.weight is (2, 2) in the file and (8, 4) in the model" in told
    with pytest.raises(ConfigError, match="cannot be read as safetensors: its header"):
        small(init="mine.py").prepare()


def test_files_that_are_missing_are_told_with_all_other_mistakes(own: Path) -> None:
    told = refused(
        rounds=0,
        init="absent.safetensors",
        model="absent.py:net",
        data={"name": "npz", "path": "absent.npz"},
        fleet={"clients": 6, "budgets": {"name": "csv", "file": "a.csv"}, "availability": "b.csv"},
    )
    assert "6 problems" in told
    for path, file in {
        "init": "absent.safetensors",
        "model.name": "absent.py",
        "data.path": "absent.npz",
        "fleet.budgets.file": "a.csv",
        "fleet.availability": "b.csv",
    }.items():
        (line,) = (line for line in told.splitlines() if line.startswith(f"  {path}: "))
        assert f"{file}" in line
        assert "there is no" in line


def test_a_run_begins_where_another_ended(own: Path) -> None:
    ended = small(rounds=2).prepare().train(2)
    ended.save("one")
    begun = small(init="one", seed=7).prepare()
    for name, weight in ended.server.weights.items():
        assert torch.equal(begun.server.weights[name], weight)
    Path("empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"init = 'empty' was asked for: .* there is no checkpoint there"
    ):
        small(init="empty").prepare()


def test_norm_statistics_may_be_missing_from_a_file_of_weights(tmp_path: Path) -> None:
    module = MODELS["tiny_resnet"].factory()
    save_file(
        {name: value.detach() for name, value in module.named_parameters()},
        tmp_path / "x.safetensors",
    )
    load_weights(module, str(tmp_path / "x.safetensors"))


def test_initial_weights_may_take_as_many_bytes_as_data(own: Path) -> None:
    small(rounds=1).prepare().train(1).save("one")
    (weights,) = Path("one/checkpoint").glob("0*.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"init = .* takes .* bytes in memory, and max_bytes allows 99\. --max-bytes",
    ):
        small(init=str(weights), data={"name": "mine.py:pool", "max_bytes": 99}).prepare()


# --- data ---------------------------------------------------------------------------------------


def test_data_may_take_so_many_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.zeros((10, 100)), y_train=np.arange(10) % 2)
    size = 8 * 10 * 101
    named = {"name": str(tmp_path / "x.npz"), "partition": "iid"}
    options = Options(data=named["name"], max_bytes=size - 1)
    settings, asked = options.layers({"method": "fedavg"})
    assert (settings["data"]["max_bytes"], asked["data.max_bytes"]) == (size - 1, "--max-bytes")
    with pytest.raises(
        DataError, match=rf"takes {size:,} bytes in memory, and max_bytes allows {size - 1:,}"
    ):
        Experiment.of({"method": "fedavg", "data": {**named, "max_bytes": size - 1}}).data.federate(
            2, 0
        )
    assert dealt(
        Experiment.of({"method": "fedavg", "data": {**named, "max_bytes": size}}).data, 2
    ) == (2, Iid())
    assert "max_bytes" in refused(data={**named, "max_bytes": -1})


def dealt(source: Source, clients: int | None = None) -> tuple[int, Partition | None]:
    data, partition = source.federate(clients, 0)
    return data.num_clients, partition


def test_data_is_dealt_as_asked(own: Path) -> None:
    assert dealt(small().data, 6) == (6, Iid())
    assert dealt(Source("mine.py:pool")) == (20, Iid())
    assert dealt(Source("mine.py:dealt")) == (6, None)
    asked = small(data={"name": "mine.py:pool", "samples": 30, "partition": "labels"}).data
    assert asked == Source("mine.py:pool", {"samples": 30}, Labels())
    with pytest.raises(ConfigError, match=r"mine\.py:dealt returned data that is dealt already"):
        Source("mine.py:dealt", partition=Iid()).federate(None, 0)


def test_data_with_clients_of_its_own_goes_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(
        "import torch\nfrom fedquilt.data import Pool\n"
        "def pool():\n    x, y = torch.zeros(12, 4), torch.arange(12) % 2\n"
        "    return Pool.of((x, y), (x, y), clients=torch.arange(12) // 4, domains=y)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert dealt(Source("ours.py:pool")) == (3, Natural())
    assert dealt(Source("ours.py:pool", partition=Natural()), 2) == (2, Natural())
    asked = Experiment.of({**demo(), "data": {"name": "ours.py:pool", "partition": "domains"}})
    assert dealt(asked.data) == (2, Domains())


# --- methods in files ---------------------------------------------------------------------------


def test_methods_in_files_are_made_read_and_named(own: Path) -> None:
    made = small(method={"name": "mine.py:method", "lr": 0.5, "pace": 3, "local": {"epochs": 4}})
    assert type(made.method).__name__ == "Mine"
    assert (made.method.pace, made.method.local.epochs, made.method.local.optimizer.lr) == (
        3,
        4,
        0.5,
    )
    assert made.names["method"] == "mine.py:Mine"
    assert Experiment.of(tomllib.loads(made.to_toml())) == made
    assert small(method={"name": "mine.py:Mine", "pace": 2}).method.pace == 2
    # its hint is for type checkers alone
    assert small(method={"name": "mine.py:Mine", "seen": 2}).method.seen == 2
    assert small(method="mine.py:released").names["method"] == "heterofl"
    with pytest.raises(ConfigError, match="is made inside a function"):
        small(method="mine.py:hidden").to_toml()
    assert small(method="mine.py:hidden").names["method"] == "Inner"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"method": "mine.py:nothing"},
            "method: mine.py:nothing was called for a Method; it returned an int.",
        ),
        (
            {"method": "mine.py:broken"},
            "method: mine.py:broken was called and failed: ValueError: on purpose",
        ),
        (
            {"method": "mine.py:Pool"},
            "method.name: mine.py:Pool was asked for as a method; it is another kind of class. One "
            "derived from Method fits.",
        ),
        (
            {"method": "mine.py:metod"},
            "method.name: there is no class or function in mine.py named 'metod'. Did you mean "
            "'method'?",
        ),
        ({"method": "mine.py"}, "Write mine.py:NAME, with the name of a class or function."),
        ({"method": "absent.py:x"}, "there is no file 'absent.py' in "),
        (
            {"method": {"name": "mine.py:method", "lr": "x"}},
            "method.lr: 'x' was found; a finite number would fit.",
        ),
        (
            {"method": {"name": "mine.py:method", "pcae": 1}},
            "method.pcae: mine.py:Mine has no such key. Did you mean",
        ),
    ],
)
def test_mistakes_with_files_are_told(own: Path, settings: dict[str, Any], said: str) -> None:
    assert said in refused(**settings)


def test_files_of_one_name_in_two_folders_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for place, pace in (("a", 1), ("b", 2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(OWN.replace("pace=7", f"pace={pace}"))
        monkeypatch.chdir(tmp_path / place)
        found.append(small(method="mine.py:method").method)
    assert [method.pace for method in found] == [1, 2]
    assert type(found[0]) is not type(found[1])


def test_a_name_nobody_has_does_not_hide_what_is_wrong_below_it():
    settings = {
        "method": {
            "name": "fedrolx",
            "overlap": 2.0,
            "local": {"epochs": "two", "optimizer": "sgdd"},
        },
        "model": "tiny_resnet",
        "data": {"name": "digits", "partition": {"name": "dirichlt", "alpha": -0.3}},
    }
    problems: list = []
    read(Experiment, settings, "", problems)
    told = {problem.path for problem in problems}
    assert told >= {
        "method.name",
        "method.overlap",
        "method.local.epochs",
        "method.local.optimizer.name",
        "data.partition.name",
        "data.partition.alpha",
    }


def test_methods_on_one_ground_share_an_engine_and_give_the_numbers_of_their_own(own: Path) -> None:
    one, other = (Experiment.of(demo(name)) for name in ("fedavg", "heterofl"))
    ground = one.ground()
    shared = [experiment.prepare(ground).train(1) for experiment in (one, other, one)]
    assert shared[0].engine is shared[1].engine is shared[2].engine
    for run, experiment in zip(shared, (one, other, one), strict=True):
        assert_same(experiment.prepare(experiment.ground()).train(1), run, atol=0)


def test_a_table_that_may_have_itself_as_a_part_is_listed_once():
    """ProgFed trains over any method. Listing ProgFed over ProgFed over ProgFed would not end."""
    found = leaves(METHODS["progfed"])
    assert "over.local.epochs" in found
    assert "over.shift (fedrolex)" in found
    assert not [path for path in found if path.endswith("(progfed)")]
