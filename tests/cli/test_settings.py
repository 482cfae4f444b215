"""Settings of `fedquilt run`: files, flags, defaults, and the line that names their source."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import fedquilt as fq
from fedquilt.cli.main import COMMANDS, main
from fedquilt.cli.options import FLAGS, _given_once, refuse_repeated
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import Uniform
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.saved_state import load_state
from fedquilt.runs.tracking import TensorBoard
from tests.cli.commands import TINY, json_of, values
from tests.conftest import shortened

SETTINGS = """
rounds = 2
method = { name = "fedrolex", shift = 1 }
model = "mine.py:net"
data = "mine.py:data"
fleet = { cohort = 3, budgets = { "1.0" = 0.5, "0.5" = 0.5 } }
engine = "sequential"
"""


def test_a_file_holds_an_experiment_and_flags_change_it(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.toml").write_text(SETTINGS)
    asked = [
        "--rounds",
        "1",
        "--set",
        "method.shift=2",
        "--set",
        "method.local.norm=tracked",
        "--lr",
        "0.3",
    ]
    summary = json_of(capsys, "run", "a.toml", *asked, "--out", "d")
    assert (summary["method"], summary["engine"], summary["rounds"]) == (
        "fedrolex",
        "sequential",
        1,
    )
    written = tomllib.loads(Path("d/config.toml").read_text())
    assert written["method"]["shift"] == 2
    assert written["method"]["local"]["norm"] == "tracked"
    assert written["method"]["local"]["optimizer"]["lr"] == 0.3
    assert written["fleet"]["clients"] == 6


def test_the_resolved_file_alone_repeats_the_run_bit_for_bit(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        *shortened(TINY, ["--data", "mine.py:pool"]),
        "--rounds",
        "3",
        "--seed",
        "5",
        "--labels",
        "2",
    ]
    more = ["--set", "method.local.optimizer.momentum=0", "--clients", "5"]
    first = json_of(capsys, "run", *asked, *more, "--out", "one")
    again = json_of(capsys, "run", "one/config.toml", "--out", "two")
    assert first | {"seconds": 0} == again | {"seconds": 0}
    assert Path("one/config.toml").read_text() == Path("two/config.toml").read_text()
    ours, theirs = load_state("one").weights, load_state("two").weights
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_all_problems_are_reported_at_once(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text(
        SETTINGS.replace("shift", "shfit").replace("cohort", "cohrot") + "seed = true\n"
    )
    assert main(["run", "a.toml", "--engine", "vectorised", "--lr", "0", "--set", "a.b=1"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "ConfigError: 6 problems in a.toml:"
    assert [line.split(": ")[0].strip() for line in lines] == [
        "method.shfit",
        "method.local.optimizer.lr (--lr)",
        "fleet.cohrot",
        "engine.name (--engine)",
        "seed",
        "a (--set)",
    ]


def asked(*args: str) -> Experiment:
    """What a command line without a file asks for."""
    request = tyro.cli(COMMANDS["run"], args=args)
    return request.experiment(request.config, request.method)


LISTED = ["--method", "fedrolex"], ["--method", "fedrescue"], ["--method", "mine.py:Mine"], []


@pytest.mark.parametrize("method", LISTED, ids=" ".join)
def test_the_demos_federation_belongs_to_its_data_and_model(own: Path, method: list[str]) -> None:
    """With another model or other data the method's defaults hold, those that `fedquilt list
    methods` shows.
    """
    demo = asked(*method, "--labels", "2", "--set", "model.norm=group", "--set", "data.public=0.1")
    assert demo.fleet == Devices(cohort=0.5, budgets=Uniform((1.0, 0.5, 0.25)))
    local = demo.method.local
    assert (local.optimizer.lr, local.batch_size, local.epochs) == (0.1, 16, 2)
    for parts in (
        ["--model", "mine.py:net"],
        ["--data", "mine.py:pool"],
        ["--data", "digits"],
        ["--set", "model=mlp"],
        ["--set", "data.name=digits"],
    ):
        found = asked(*method, *parts)
        assert found.method == type(found.method)()
        assert (found.fleet, found.rounds) == (Devices(), 20)


def test_defaults_are_those_that_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json_of(capsys, "list", "methods", "fedrolex")["fedrolex"]["defaults"]["local"]
    local = asked("--method", "fedrolex", "--model", "mlp").method.local
    assert listed["optimizer"]["lr"] == local.optimizer.lr
    assert (listed["batch_size"], listed["epochs"]) == (local.batch_size, local.epochs)


def test_a_function_in_a_file_sets_local_training_itself(own: Path) -> None:
    """A class does not, any more than one with a name of ours: it is trained as what it is compared
    with.
    """
    local = asked("--method", "mine.py:method").method.local
    assert (local.optimizer.lr, local.batch_size, local.epochs) == (0.03, 5, 1)
    assert asked("--method", "mine.py:method", "--lr", "0.2").method.local.optimizer.lr == 0.2


OTHER = [*TINY[:4], "--cohort", "2"]


def default_values(training: str = "lr 0.05, 1 epoch, batch 32") -> str:
    return values(training, "2 of 6", "1, 0.5, 0.25, 0.125, 0.0625")


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (["run"], [f"settings: demo {values()}"]),
        (["run", "--method", "fedrolex"], [f"settings: demo {values()}"]),
        (
            ["run", "--method", "fedrolex", *OTHER],
            [f"settings: fedrolex's defaults {default_values()}"],
        ),
        (
            ["run", "--method", "mine.py:method"],
            [f"settings: demo, mine.py:method's defaults {values('lr 0.03, 1 epoch, batch 5')}"],
        ),
        (
            ["run", "--method", "fedavg", *OTHER, "--set", "method.preset='cifar10'"],
            [
                "settings: fedavg's preset cifar10 "
                f"{default_values('lr 0.01 (steps), 5 epochs, batch 128')}"
            ],
        ),
        (
            ["run", "a.toml", "--set", "method.local.optimizer.name=adam"],
            [f"settings: a.toml {values('adam, lr 0.001, 1 epoch, batch 32', '3 of 6', '1, 0.5')}"],
        ),
        (["compare", "fedavg", "heterofl"], [f"settings: demo {values()}"]),
        (
            ["compare", "fedavg", "fedrescue", "heterofl", *OTHER],
            [
                "settings of fedavg, heterofl: fedavg's defaults, heterofl's defaults "
                f"{default_values()}",
                "settings of fedrescue: fedrescue's defaults "
                f"{default_values('lr 0.1, 1 epoch, batch 32')}",
            ],
        ),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_the_first_line_names_the_source_of_the_settings_and_their_values(
    own: Path, capsys: pytest.CaptureFixture[str], args: list[str], lines: list[str]
) -> None:
    Path("a.toml").write_text(SETTINGS)
    assert main([*args, "--rounds", "1"]) == 0
    said = [
        line for line in capsys.readouterr().out.splitlines() if "a module may talk" not in line
    ]
    assert said[: len(lines)] == lines
    assert not said[len(lines)].startswith("settings")


def test_a_resumed_runs_settings_come_from_its_folder(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_of(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    assert main(["run", "--resume", "d", "--rounds", "2"]) == 0
    assert capsys.readouterr().out.startswith(
        "settings: d/config.toml (lr 0.05, 1 epoch, batch 32, 3 of 6 clients, "
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["compare", "fedavg", "heterofl", "--seed", "0", "--seed", "1"],
            "--seed was given as 0 and again as 1",
        ),
        (["run", "--lr", "0.1", "--lr=0.3"], "--lr was given as 0.1 and again as 0.3"),
        (
            ["run", "--batch-size", "4", "--batch_size", "8"],
            "--batch-size was given as 4 and again as 8",
        ),
        (
            ["run", "--out", "a", "--rounds", "1", "--out", "b"],
            "--out was given as a and again as b",
        ),
        (
            ["export", "r", "--params", "9", "--max-params", "8", "--out", "x"],
            "--params was given as 9 and again as 8",
        ),
        (
            ["list", "data", "--plot", "--by", "class", "--by", "domain"],
            "--by was given as class and again as domain",
        ),
        (
            ["probe", "--device", "cpu", "--device", "cuda"],
            "--device was given as cpu and again as cuda",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_flag_of_one_value_is_given_once(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last value was used, without a word about the others."""
    assert main(args) == 2
    assert capsys.readouterr().err == f"ConfigError: {said}; it takes one value.\n"


def test_a_flag_of_several_values_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "fedavg", "--seeds", "0", "--seeds", "1"]) == 2
    said = "--seeds was given as 0 and again as 1; give all values at once, as in --seeds A B."
    assert capsys.readouterr().err == f"ConfigError: {said}\n"
    assert main(["compare", "fedavg", "--grid", "method.local.epochs=1,", "2"]) == 2
    said = (
        "--grid method.local.epochs=1, 2 was asked for; write values without spaces: "
        "method.local.epochs=1,2."
    )
    assert capsys.readouterr().err == f"ConfigError: {said}\n"
    assert main(["compare", "--resume", "folder", "--seeds", "5"]) == 2
    flags = "--target, --jobs, --baseline, --metric, --format, --yes, --trust and --json"
    said = f"--rounds (to train longer), {flags} go with it."
    assert said in capsys.readouterr().err


def test_flags_that_make_lists_may_be_given_again() -> None:
    lists = {name: _given_once(kind) for name, kind in COMMANDS.items()}
    assert not {
        "--set",
        "--assign",
        "--track",
        "--share",
        "--json",
        "--force",
        "--plot",
    } & set().union(*lists.values())
    assert {"--seed", "--lr", "--config", "--method", "--resume"} <= {
        *lists["run"],
        *lists["compare"],
    }
    refuse_repeated(
        COMMANDS["run"],
        ["--set", "seed=1", "--set", "rounds=2", "--track", "mlflow", "--track", "wandb"],
    )
    refuse_repeated(COMMANDS["export"], ["r", "--share", "1", "--share", "0.5"])


def test_every_flag_is_a_setting(own: Path) -> None:
    """The table of shortcuts names fields that exist."""
    Path("a.toml").write_text(SETTINGS)
    Path("x").touch()
    values: dict[str, Any] = {
        "method": "fedavg", "model": ("tiny_resnet",), "data": "digits",
        "engine": "vectorized", "device": "cpu", "precision": "fp64", "rounds": 7, "seed": 8,
        "init": "x", "clients": 9, "cohort": 0.25, "labels": 4, "lr": 0.7, "batch_size": 3,
        "epochs": 5, "track": ("tensorboard",), "link": "lq8", "task": "classification",
        "max_bytes": 10**9,
    }  # fmt: skip
    assert {*values, "supernet"} == FLAGS.keys()  # A supernet stands in the place of a model.
    experiment = COMMANDS["run"](**values).experiment("a.toml", "fedavg")
    assert experiment.names == {
        "method": "fedavg",
        "model": "tiny_resnet",
        "data": "digits",
        "engine": "vectorized",
    }
    local = experiment.method.local
    assert (local.optimizer.lr, local.batch_size, local.epochs) == (0.7, 3, 5)
    assert (experiment.rounds, experiment.seed, experiment.init) == (7, 8, "x")
    assert (experiment.fleet.clients, experiment.fleet.cohort) == (9, 0.25)
    assert experiment.data.partition == fq.data.Labels(labels=4)
    assert (experiment.engine.device, experiment.engine.precision) == ("cpu", "fp64")
    assert experiment.trackers == (TensorBoard(),)
    assert experiment.link == fq.Link.preset("lq8")
