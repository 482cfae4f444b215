"""`Experiment`: settings are read, settled, written, and repeated by another run."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.config.listing import leaves
from fedquilt.config.reading import read
from fedquilt.data import Iid, Labels
from fedquilt.errors import ConfigError
from fedquilt.fleets.fleet import Devices
from fedquilt.methods import METHODS, FedAvg, FedBN, FedRolex
from fedquilt.round import Evaluation
from fedquilt.round.training.optimizers import SGD, Adam
from fedquilt.runs.data_settings import Source
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.machine import Machine
from fedquilt.runs.model_settings import Model
from tests.conftest import assert_same
from tests.unit.runs.experiments import OWN, refused, small


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


def test_open_settings_are_filled_in_by_a_run(own: Path) -> None:
    experiment = small(rounds=25, fleet={})
    ground = experiment.ground()
    run = experiment.prepare(ground)
    settled = experiment.settled(run, ground)
    assert settled.fleet.clients == run.fleet.num_clients == 20
    assert settled.engine.threads == 1  # a small model
    assert settled.evaluation == Evaluation(every=3)
    assert settled.data.partition == Iid()
    assert settled.settled(settled.prepare(ground), ground) == settled


def test_data_that_was_partitioned_already_is_written_without_a_partition(own: Path) -> None:
    experiment = small(data="mine.py:partitioned")
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


def test_a_table_is_merged_into_a_link_by_name(own: Path) -> None:
    link = small(link={"name": "lossy-mild", "loss": {"upto": 0.4}, "codec": {"bits": 8}}).link
    assert link == fq.Link(fq.links.ColumnLoss(0.1, 0.4), fq.links.Codec(8))
    assert small(link=LINK).link.loss == fq.links.Wireless(
        distances=(100, 300), fading="constant", granularity=0.25
    )


def test_a_rate_above_its_upper_bound_is_refused_with_a_remedy(own: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"link\.loss\.upto: 0\.2 was asked for.*Set upto too, or upto to none"
    ):
        small(link={"name": "lossy-mild", "loss": {"rate": 0.5}})
    assert small(
        link={"name": "lossy-mild", "loss": {"rate": 0.5, "upto": "none"}}
    ).link.loss == fq.links.ColumnLoss(0.5)


def test_all_problems_of_a_link_are_reported(own: Path) -> None:
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


def test_tf32_is_refused_on_a_cpu_beside_other_problems(own: Path) -> None:
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
def test_a_device_that_this_machine_lacks_is_refused(own: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' was asked for; this machine has cpu"):
        small(engine={"device": device}).prepare()


def test_methods_in_files_are_created_read_and_named(own: Path) -> None:
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
def test_mistakes_with_files_are_reported(own: Path, settings: dict[str, Any], said: str) -> None:
    assert said in refused(**settings)


def test_files_with_the_same_name_in_two_folders_are_distinct(
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


def test_an_unknown_name_does_not_hide_other_problems_of_its_table():
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


def test_methods_on_one_ground_share_an_engine_and_do_not_affect_each_other(own: Path) -> None:
    one, other = (Experiment.of(demo(name)) for name in ("fedavg", "heterofl"))
    ground = one.ground()
    shared = [experiment.prepare(ground).train(1) for experiment in (one, other, one)]
    assert shared[0].engine is shared[1].engine is shared[2].engine
    for run, experiment in zip(shared, (one, other, one), strict=True):
        assert_same(experiment.prepare(experiment.ground()).train(1), run, atol=0)


def test_a_table_that_may_contain_itself_is_listed_once():
    """ProgFed trains over any method. Listing ProgFed over ProgFed over ProgFed would not end."""
    found = leaves(METHODS["progfed"])
    assert "over.local.epochs" in found
    assert "over.shift (fedrolex)" in found
    assert not [path for path in found if path.endswith("(progfed)")]
