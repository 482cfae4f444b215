"""The commands, run as a user runs them: what they print, write and exit with."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from safetensors.torch import save_file

import fedquilt as fq
from fedquilt.cli.main import COMMANDS, main
from fedquilt.cli.options import FLAGS, _given_once, refuse_repeated
from fedquilt.engines import ENGINES
from fedquilt.family.norms import NORM_POLICIES
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import Uniform
from fedquilt.methods import METHODS
from fedquilt.models import MODELS
from fedquilt.round.link import CODECS
from fedquilt.round.training.objectives import OBJECTIVES
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.saved_state import load_state
from fedquilt.runs.summary_file import read_summary
from fedquilt.runs.tracking import TensorBoard
from fedquilt.studies.papers import presets
from tests.conftest import shortened

ROOT = Path(__file__).parents[2]
QUICK = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--epochs", "1"]
SUMMARY = {
    "method",
    "model",
    "data",
    "engine",
    "precision",
    "seed",
    "rounds",
    "seconds",
    "bytes_down",
    "bytes_up",
    "accuracy",
    "metrics",
    "task",
    "main",
    "higher_is_better",
    "percent",
    "members",
    "devices",
    "note",
    "fedquilt",
}
ROUND = {"round", "seconds", "clients", "bytes_down", "bytes_up", "macs", "loss"}


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fedquilt", *args]
    return subprocess.run(
        line, capture_output=True, text=True, env=ENVIRONMENT, check=False, **options
    )


OWN_METHOD = '''
from dataclasses import dataclass

import fedquilt as fq


@dataclass(frozen=True)
class Slow(fq.methods.FedAvg):
    """FedAvg with a pause after every round."""

    pause: float = 0.0  # Seconds between rounds. 0 gives FedAvg.


@dataclass(frozen=True, kw_only=True)
class Needy(Slow):
    """Slow, with a number of pauses that has to be given."""

    pauses: int  # Pauses after a round.


def slow():
    return Slow(pause=1.0)
'''
THREE = ["--set", "fleet.budgets.shares=[1.0,0.5,0.25]"]
TINY = ["--model", "mine.py:net", "--data", "mine.py:data", "--method", "fedavg", "--cohort", "3"]


def told(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    """What a command with --json says on standard output."""
    assert main([*args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


# --- run ----------------------------------------------------------------------------------------


def test_the_demo_learns(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = told(capsys, "run", "--rounds", "8")["accuracy"]
    assert accuracy["1.0"] > 0.9
    assert accuracy["0.5"] > 0.7
    assert accuracy["0.25"] > 0.4


def test_output_that_is_no_terminal_is_plain_text() -> None:
    done = command("run", *QUICK)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "│" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "settings: demo (lr 0.1, 1 epoch, batch 16, 2 of 4 clients, shares 1, 0.5, 0.25, 1 round, "
        "seed 0)"
    )
    assert lines[1] == "heterofl on digits: tiny_resnet for 4 clients, 2 a round, vectorized on cpu"
    assert lines[2].startswith("round 1/1  loss ")
    assert lines[3].split() == ["share", "accuracy", "parameters", "MACs", "a", "sample"]
    assert [line.split()[0] for line in lines[4:7]] == ["1", "0.5", "0.25"]
    assert lines[4].split()[2] == "11,230"
    assert lines[7].startswith("1 round in ")


def on_a_terminal(*args: str, cwd: Path | None = None) -> str:
    parent, child = pty.openpty()
    environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "100"}
    line = [sys.executable, "-m", "fedquilt", *args]
    with subprocess.Popen(line, stdout=child, stderr=child, env=environment, cwd=cwd) as process:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 4096):
                shown += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_a_terminal_gets_a_bar_and_a_frame() -> None:
    text = on_a_terminal("run", *QUICK)
    assert "rounds/s" in text
    assert "╭" in text


def test_json_is_all_there_is_on_standard_output(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [
        "--model",
        "mine.py:net",
        "--method",
        "mine.py:method",
        "--data",
        "mine.py:data",
        *THREE,
    ]
    assert main(["run", *parts, "--rounds", "2", "--json"]) == 0
    said = capfd.readouterr()
    summary = json.loads(said.out)
    assert set(summary) == SUMMARY
    assert set(summary["accuracy"]) == {"1.0", "0.5", "0.25"}
    assert summary["rounds"] == 2
    assert summary["method"] == "mine.py:Mine"
    assert summary["model"] == "mine.py:net"
    assert summary["bytes_down"] > 0
    assert said.err.count("a module may talk") == 1


def test_a_seed_repeats_a_run(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        told(capsys, "run", *TINY, "--rounds", "1", "--seed", seed)["accuracy"]
        for seed in ("3", "3", "4")
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


# They take the time of their relatives.
ABLATIONS = (
    "fedseq",
    "fedrush",
    "fedslim",
    "fjord",
    "sheterofl",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ABLATIONS else name for name in METHODS],
)
def test_every_method_runs_by_its_name_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = ["--rounds", "2"] if name == "progfed" else []  # one for each stage
    assert (
        told(capsys, "run", "--method", name, *shortened(QUICK, rounds), "--labels", "3")["method"]
        == name
    )


def test_a_run_may_start_from_given_weights(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = fq.trace(MODELS["tiny_resnet"].factory, torch.zeros(2, 1, 8, 8))
    save_file({name: weight + 1 for name, weight in family.init(0).items()}, "start.safetensors")
    first = told(capsys, "run", *QUICK)["accuracy"]
    assert told(capsys, "run", *QUICK, "--init", "start.safetensors")["accuracy"] != first
    assert main(["run", *QUICK, "--init", "mine.py"]) == 2
    assert "cannot be read as safetensors" in capsys.readouterr().err


# --- settings -----------------------------------------------------------------------------------

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
    summary = told(capsys, "run", "a.toml", *asked, "--out", "d")
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
    first = told(capsys, "run", *asked, *more, "--out", "one")
    again = told(capsys, "run", "one/config.toml", "--out", "two")
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
    listed = told(capsys, "list", "methods", "fedrolex")["fedrolex"]["defaults"]["local"]
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


def values(
    training: str = "lr 0.1, 2 epochs, batch 16",
    clients: str = "10 of 20",
    shares: str = "1, 0.5, 0.25",
) -> str:
    return f"({training}, {clients} clients, shares {shares}, 1 round, seed 0)"


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
    told(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
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


# --- folders ------------------------------------------------------------------------------------


def test_a_run_leaves_a_folder(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = own / "deep" / "run"
    summary = told(capsys, "run", *TINY, "--rounds", "2", "--out", str(out))
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert read_summary(out) == summary
    assert [record["round"] for record in rounds] == [1, 2]
    assert ROUND <= set(rounds[0]) <= ROUND | {"accuracy", "metrics", "main", "stacks", "check"}
    assert rounds[-1]["accuracy"] == summary["accuracy"]
    assert sum(record["bytes_up"] for record in rounds) == summary["bytes_up"]
    assert main(["run", *TINY, "--out", str(out)]) == 2
    assert "a run is there already" in capsys.readouterr().err


def test_a_finished_run_prints_its_summary_or_trains_longer(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = told(capsys, "run", *TINY, "--rounds", "2", "--out", "d")
    assert told(capsys, "run", "--resume", "d") == summary
    assert main(["run", "--resume", "d", "--rounds", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == summary
    assert (
        "--rounds 1 was asked for; the run in d has 2 behind it, and this is what they came to."
        in said.err
    )
    assert main(["run", "--resume", "d", "--rounds", "2"]) == 0
    assert "was asked for" not in capsys.readouterr().err
    assert main(["run", "--resume", "d"]) == 0
    head, *rows, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["share", "accuracy", "parameters", "MACs", "a", "sample"]
    assert [row.split()[::2] for row in rows] == [
        [f"{float(share):g}", f"{member['params']:,}"]
        for share, member in summary["members"].items()
    ]
    assert last.startswith("2 rounds in ")
    longer = told(capsys, "run", "--resume", "d", "--rounds", "4")
    assert longer["rounds"] == 4
    assert tomllib.loads(Path("d/config.toml").read_text())["rounds"] == 4
    told(capsys, "run", *TINY, "--rounds", "4", "--out", "whole")
    ours, theirs = load_state("d").weights, load_state("whole").weights
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_a_resumed_run_keeps_its_own_settings(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    assert main(["run", "--resume", "d", "--seed", "3", "--set", "rounds=3"]) == 2
    assert "--resume d was asked for together with --seed, --set" in capsys.readouterr().err
    assert main(["run", "--resume", "absent"]) == 2
    assert "--resume absent was asked for; there is no such folder." in capsys.readouterr().err
    Path("empty").mkdir()
    assert main(["run", "--resume", "empty"]) == 2
    assert "--resume empty was asked for; there is no run in it." in capsys.readouterr().err
    Experiment.of(tomllib.loads(Path("d/config.toml").read_text())).prepare().save("scripted")
    assert main(["run", "--resume", "scripted"]) == 0


def started(*args: str, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "fedquilt", *args]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=cwd
    )


@pytest.mark.parametrize(
    "by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_names_the_command_that_resumes_it(
    own: Path, by: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 130 and a checkpoint, and the resumed run has the same result."""
    rounds = own / "a run" / "rounds.jsonl"
    with started("run", *TINY, "--rounds", "3000", "--out", "a run", "--json", cwd=own) as process:
        until = time.monotonic() + 60
        while not (rounds.is_file() and rounds.read_text().count("\n") > 2):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(by)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    done = rounds.read_text().count("\n")
    assert (
        f"The run was stopped after round {done} of 3000. Continue with: fedquilt run "
        "--resume 'a run'" in err
    )
    assert load_state("a run").round == done
    assert told(capsys, "run", "--resume", "a run", "--rounds", str(done + 2))["rounds"] == done + 2
    told(capsys, "run", *TINY, "--rounds", str(done + 2), "--out", "whole")
    ours, theirs = load_state("a run").weights, load_state("whole").weights
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])


def test_without_a_folder_nothing_is_kept(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedquilt.runs.run.Run.train", interrupted)
    assert main(["run", *TINY]) == 130
    assert capsys.readouterr().err == (
        "Interrupted. The run was stopped after round 0 of 20. "
        "Nothing of it is kept; with --out DIR it could be resumed.\n"
    )


def test_a_folder_is_written_by_one_run_at_a_time(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedquilt.runs.folder import Folder

    told(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    with Folder.resume("d"):
        assert main(["run", "--resume", "d", "--rounds", "2"]) == 2
    assert f"the run of process {os.getpid()} is writing there" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("closed").mkdir(mode=0o500)
    assert main(["run", *TINY, "--out", "closed/d"]) == 2
    assert "cannot be written to: Permission denied" in capsys.readouterr().err


def test_a_name_the_system_does_not_take_is_refused_in_a_line(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 300 * "a"
    assert main(["run", *TINY, "--out", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(name)
    assert told.endswith(" cannot be used: File name too long.\n")


def test_a_full_disk_fails_the_run_with_a_message(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    Path("d/summary.json").unlink()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["run", "--resume", "d", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        "RecordError: d/summary.json could not be written: No space left on device"
    )


def test_a_finished_run_with_damaged_files_shows_its_summary_and_reports_them(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = told(capsys, "run", *TINY, "--rounds", "2", "--out", "d")
    file = Path("d/checkpoint/00000002.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["run", "--resume", "d", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == summary
    assert said.err.startswith(
        "RecordError: the run in d is finished and its summary is intact, but other files are"
    )
    assert "checkpoint 00000002: 00000002.safetensors has" in said.err


@pytest.mark.parametrize(
    ("old", "new"), [('"members"', '"membars"'), ('"rounds": 1', '"rounds": 2'), ("{", "[")]
)
def test_a_damaged_summary_is_an_error_that_names_it(
    own: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    told(capsys, "run", *TINY, "--rounds", "1", "--out", "d")
    file = Path("d/summary.json")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert main(["run", "--resume", "d"]) == 1
    assert "d/summary.json is damaged" in capsys.readouterr().err
    file.unlink()
    assert told(capsys, "run", "--resume", "d")["rounds"] == 1


def test_a_summary_of_another_run_is_noticed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        told(
            capsys,
            "run",
            *TINY,
            "--rounds",
            "1",
            "--seed",
            str(len(name) + ord(name)),
            "--out",
            name,
        )
    shutil.copy("a/summary.json", "b/summary.json")
    assert main(["run", "--resume", "b"]) == 1
    assert (
        "config.toml: it is not the one that the run had when it ended" in capsys.readouterr().err
    )


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--method", "fedrolx"], "Did you mean 'fedrolex'?"),
        (["--model", "tiny_resnt"], "Did you mean 'tiny_resnet'?"),
        (["--data", "digit"], "Did you mean 'digits'?"),
        (["--engine", "vectorised"], "It is called 'vectorized' now."),
        (["--rounds", "0"], "rounds (--rounds): 0 was asked for; it must lie in [1, inf)."),
        (["--lr", "nan"], "method.local.optimizer.lr (--lr): nan was found; a finite number"),
        (["--cohort", "50"], "a cohort of 50 was asked for; the fleet has 20 clients"),
        (["--clients", "5000"], "5000 clients were asked for"),
        (["--labels", "11"], "11 labels a client were asked for; digits has 10 classes"),
        (["--device", "nonsense"], "device 'nonsense' was asked for; this machine has"),
        (["--out", "/dev/null/x", *QUICK], "cannot be written to"),
        (["--model", "vgg16"], "VGG does not run on"),
        (["--model", "absent.py:net"], "there is no file 'absent.py'"),
        (["--model", "mine.py"], "Write mine.py:NAME"),
        (["--model", "mine.py:nt"], "Did you mean 'net'?"),
        (
            ["--model", "mine.py:nothing"],
            "mine.py:nothing was called for a Module; it returned an int",
        ),
        (
            ["--data", "mine.py:broken"],
            "mine.py:broken was called and failed: ValueError: on purpose",
        ),
        (
            ["--data", "mine.py:data", "--labels", "2"],
            "mine.py:data returned data that is partitioned already",
        ),
        (
            ["absent.toml"],
            "absent.toml was asked for; it cannot be read: No such file or directory.",
        ),
        (["mine.py"], "mine.py:2:6: this is not TOML"),
        (["--set", "rounds"], "--set rounds was asked for; write it as --set method.shift=2."),
        (
            ["--set", "model={depth=2}"],
            "model.name (--set): nothing was found; the name of a model",
        ),
        (
            ["--labels", "2", "--set", "data.partition=iid"],
            "together with --labels, which sets data.partition. One of",
        ),
        (
            ["--labels", "2", "--set", "data.partition.name=iid"],
            "together with --labels, which sets data.partition.",
        ),
        (
            ["--model", "vit", "--set", "model={depth=2}"],
            "together with --model, which sets model.name. One of them",
        ),
        (
            ["--lr", "1", "--set", "method.local.optimizer.lr=2"],
            "with --lr, which sets method.local.optimizer.lr.",
        ),
        (["--set", "rounds=ten"], "rounds (--set): 'ten' was found; a whole number would fit."),
        (["--set", "method.local={epochs=0}"], "method.local.epochs (--set): 0 was asked for"),
    ],
)
def test_a_wrong_request_exits_with_2(
    own: Path, args: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *args]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    "args", [[], ["rn"], ["run", "--ronds", "3"], ["list", "data", "--by", "age"]]
)
def test_unknown_arguments_exit_with_2(
    args: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_run_that_fails_exits_with_1(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["run", *TINY, "--rounds", "3", "--lr", "1e30", "--json", "--out", "d"]
    assert main(wild) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "\nDivergenceError: client " in said.err


def test_methods_that_ignore_budgets_say_so(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the table of accuracies by share, which are of one common net then, and in the list of
    methods.
    """
    quick = ["--clients", "4", "--cohort", "1", "--rounds", "1"]
    assert main(["run", "--method", "fedprox", "--set", "method.share=0.5", *quick]) == 0
    *_, note, _ = capsys.readouterr().out.splitlines()
    small = "1 of 4 devices cannot hold the net that they train"
    assert note == f"fedprox: every client trains share 0.5, whatever its budget; {small}"
    assert main(["run", "--method", "heterofl", *quick]) == 0
    assert "whatever its budget" not in capsys.readouterr().out
    listed = told(capsys, "list", "methods")
    assert {name for name, entry in listed.items() if "whatever its budget" in entry["note"]} == {
        *("fedavg", "fedavgm", "fedadam", "fedyogi", "fedprox", "fednova", "fedbn", "progfed")
    }


def test_domains_have_a_table_of_their_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [
        "--model",
        "mine.py:net",
        "--data",
        "mine.py:homes",
        *THREE,
        "--cohort",
        "3",
        "--rounds",
        "1",
    ]
    assert main(["run", "--method", "heterofl", *quick]) == 0
    *_, space, head, one, other, below, last = capsys.readouterr().out.splitlines()
    assert (space, head.split(), below) == ("", ["domain", "1", "0.5", "0.25"], "")
    assert (one.split()[0], other.split()[0]) == ("mnist", "syn")
    assert last.startswith("1 round in ")
    assert told(capsys, "run", *quick, "--set", "evaluation.domains=false")["metrics"].keys() == {
        "accuracy",
        "loss",
        "local_accuracy",
    }


def test_the_cost_of_a_target_is_printed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [*TINY[:4], *THREE, "--cohort", "3", "--rounds", "3"]
    found = told(capsys, "run", "--method", "fedavg", *quick, "--out", "c", "--target", "0.01")
    plain = read_summary(Path("c"))
    assert plain == {key: value for key, value in found.items() if key not in ("target", "reached")}
    first = json.loads(Path("c/rounds.jsonl").read_text().splitlines()[0])
    sent = first["bytes_down"] + first["bytes_up"]
    cost = {
        "round": 1,
        "bytes": sent,
        "macs": first["macs"],
        "seconds": first["seconds"],
        "link_seconds": None,
    }
    assert (found["target"], found["reached"]["1.0"]) == (0.01, cost)
    assert main(["run", "--resume", "c", "--target", "1"]) == 0  # from what is on disk
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["share", "accuracy", "to", "100%"]
    assert row.split()[2] == "–"
    Path("c/rounds.jsonl").write_text("{")
    assert main(["run", "--resume", "c", "--target", "1"]) == 1
    assert "c/rounds.jsonl is not what was written" in capsys.readouterr().err


def test_the_cost_of_a_target_includes_the_time_of_the_link(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*TINY[:4], "--cohort", "3", "--rounds", "1", "--link", "mobile", "--target", "0.01"]
    found = told(capsys, "run", "--method", "fedavg", *asked, "--out", "timed")
    over = found["reached"]["1.0"]["link_seconds"]
    assert over == found["link_seconds"]
    assert main(["run", "--resume", "timed", "--target", "0.01"]) == 0
    assert f", {over:,.1f} s over the link" in capsys.readouterr().out.splitlines()[1]


# --- list and probe -----------------------------------------------------------------------------


def test_methods_are_listed_with_paper_options_and_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = told(capsys, "list", "methods")
    assert list(listed) == list(METHODS)
    rolex = listed["fedrolex"]
    assert rolex["paper"] == "Alam et al. 2022"
    assert rolex["options"]["shift"] == "int"
    assert rolex["defaults"]["shift"] == 1
    assert rolex["defaults"]["local"]["optimizer"]["name"] == "sgd"
    assert rolex["help"]["shift"].startswith(
        "Channels that the window moves each round. 0 gives HeteroFL"
    )
    assert {"paper", "released-settings"} <= set(rolex["presets"])
    for name, entry in listed.items():
        assert entry["paper"], name
        assert entry["summary"], name
        assert set(entry["defaults"]) == set(entry["options"]), name


def test_a_users_method_is_listed_with_its_options(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "slow.py").write_text(OWN_METHOD)
    entry = told(capsys, "list", "methods", "slow.py:Slow")["slow.py:Slow"]
    assert entry["summary"] == "FedAvg with a pause after every round."
    assert entry["help"]["pause"] == "Seconds between rounds. 0 gives FedAvg."

    assert main(["list", "methods", "slow.py:Slow"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "pause float 0.0 Seconds between rounds. 0 gives FedAvg." in rows

    needy = told(capsys, "list", "methods", "slow.py:Needy")["slow.py:Needy"]
    assert (needy["options"]["pauses"], "pauses" in needy["defaults"]) == ("int", False)

    assert main(["list", "methods", "slow.py:slow"]) == 2
    assert (
        "list methods slow.py:slow was asked for; that is no class of a method"
        in capsys.readouterr().err
    )
    assert main(["list", "methods", "slow.py:Slo"]) == 2
    assert "Did you mean 'Slow'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what", ["methods", "data", "partitions", "tasks", "metrics", "fleets", "engines", "trackers"]
)
def test_listed_summaries_are_whole_sentences(what: str) -> None:
    from fedquilt.cli.listing import entries

    cut = {
        name: entry["summary"]
        for name, entry in entries(what).items()
        if entry["summary"][-1] not in ".…" or entry["summary"].startswith("Return")
    }
    assert not cut


def test_the_seed_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "random seed; if not given, that of the settings file, else 0" in text


def test_commands_to_copy_are_quoted_for_the_shell(tmp_path: Path) -> None:
    from fedquilt.data.prepare import missing_message
    from fedquilt.studies.papers import missing_supernet
    from fedquilt.studies.plan import runs_outside_a_study

    folder = tmp_path / "with space"
    (folder / "a run").mkdir(parents=True)
    (folder / "a run" / "rounds.jsonl").touch()
    assert f"fedquilt run --resume '{folder}/a run'," in runs_outside_a_study(folder)
    assert f"`fedquilt data prepare cifar10 --out '{folder}'` prepares it" in missing_message(
        "cifar10", folder
    )
    made = str(missing_supernet("net.safetensors", "", "public.npz", folder, "rafl/table1"))
    assert (
        f"`fedquilt supernet train SPACE --data '{folder}/public.npz' --out "
        f"'{folder}/net.safetensors'` makes"
    ) in made


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "list")
    assert list(listed) == [
        "methods",
        "models",
        "data",
        "partitions",
        "tasks",
        "metrics",
        "fleets",
        "links",
        "codecs",
        "engines",
        "trackers",
        "formats",
        "norms",
        "objectives",
        "papers",
    ]
    assert (list(listed["codecs"]), list(listed["objectives"])) == (list(CODECS), list(OBJECTIVES))
    assert listed["codecs"]["linear"]["defaults"]["bits"] == 32
    assert listed["objectives"]["proximal"]["defaults"] == {"mu": 0.01}
    assert list(listed["norms"]) == list(NORM_POLICIES)
    assert all(entry["summary"] for entry in listed["norms"].values())
    assert listed["norms"]["per_client-all"]["defaults"] == {"affine": "local"}
    assert list(listed["models"]) == list(MODELS)
    assert listed["models"]["preresnet18"]["parameters"] == 11_172_170
    assert listed["data"]["digits"]["defaults"]["public"] == 0.0
    assert listed["partitions"]["labels"]["defaults"]["labels"] == 2
    assert listed["fleets"]["two_level"]["defaults"]["rho"] == 0.5
    assert main(["list", "engines"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        *ENGINES,
        "flower",
        "auto",
    ]
    assert main(["run", "--engine", "flower"]) == 2
    assert "`fedquilt serve` with the same settings starts it" in capsys.readouterr().err
    assert main(["list", "method"]) == 2
    assert "Did you mean 'methods'?" in capsys.readouterr().err


def test_tables_of_papers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "list", "papers")
    assert list(listed) == list(presets())
    assert listed["fedrolex/table3"]["data"] == "cifar10"
    assert set(listed["fedrolex/table3"]["scales"].split()) == {"smoke", "short", "full"}
    assert list(told(capsys, "list", "papers", "fedrolex")) == [
        name for name in presets() if "fedrolex/" in name
    ]
    one = told(capsys, "list", "papers", "fedrolex/table4")["fedrolex/table4"]
    assert one["rows"]["FedRolex, low heterogeneity"]["global accuracy"] == "80.14 ± 0.52"
    assert one["sizes"]["full"]["seeds"] == "0 1 2 3 4"
    assert main(["list", "papers", "fedrolex/table4"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "80.14 ± 0.52",
        "its numbers mean nothing",
        "A tenth of the paper's rounds",
        "bounding box crop",
    ):
        assert text in printed
    assert main(["list", "papers", "fedrolex"]) == 0
    assert "80.14" not in capsys.readouterr().out
    assert main(["list", "papers", "fedrolx"]) == 2
    said = capsys.readouterr().err
    known = "distillation, fedrescue, fedrolex, ground, progfed, rafl, splitmix"
    assert f"Did you mean 'fedrolex'? Known: {known}. `fedquilt list papers` shows all." in said
    assert main(["list", "papers", "fedrolex/tabel4"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'fedrolex/table4'?" in said
    assert "fedrolex/figure3" in said
    assert "splitmix/" not in said


def test_a_run_uses_a_link_by_name(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        link: told(capsys, "run", *TINY, "--link", link, "--rounds", "2", "--out", f"runs/{link}")
        for link in ("perfect", "lossy-mild", "mobile")
    }
    assert (
        found["lossy-mild"]["bytes_up"]
        < found["perfect"]["bytes_up"]
        == found["mobile"]["bytes_up"]
    )
    assert set(found["lossy-mild"]) == SUMMARY
    assert set(found["mobile"]) == SUMMARY | {"link_seconds"}
    record = json.loads(Path("runs/mobile/rounds.jsonl").read_text().splitlines()[0])
    assert record["link_seconds"] > 0
    written = tomllib.loads(Path("runs/lossy-mild/config.toml").read_text())["link"]
    assert written == {"loss": {"name": "columns", "granularity": 0.125, "rate": 0.1, "upto": 0.2}}
    longer = told(capsys, "run", "--resume", "runs/lossy-mild", "--rounds", "3")
    assert longer["rounds"] == 3
    assert main(["run", *TINY, "--link", "lossy"]) == 2
    assert (
        "link.name (--link): 'lossy' was found; link has no preset of that name."
        in capsys.readouterr().err
    )


def test_a_link_by_name_can_be_changed_and_is_shown(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "--rounds", "1", "--link", "lq8", "--set", "link.clock.up=1e6"]) == 0
    shown = capsys.readouterr().out
    assert "on cpu; 8 bits a value; 20 Mbit/s down, 1 Mbit/s up" in shown
    assert "s over the link" in shown.splitlines()[-1]


def test_a_deadline_is_set_shown_and_listed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [
        "--link",
        "mobile",
        "--set",
        "link.clock.up=[1e6, 1e3, 1e6]",
        "--set",
        "link.clock.deadline=1",
    ]
    assert main(["run", *TINY, "--rounds", "1", *slow, "--clients", "3", "--out", "late"]) == 0
    shown = capsys.readouterr().out
    assert "updates dropped after 1 s" in shown
    assert shown.splitlines()[-1].endswith("1.0 s over the link, 1 late update dropped")
    record = json.loads(Path("late/rounds.jsonl").read_text())
    assert (record["late"], record["late_clients"]) == (1, [1])
    assert json.loads(Path("late/summary.json").read_text())["late"] == 1
    assert main(["clients", "late"]) == 0
    assert "rounds late" in capsys.readouterr().out
    assert [one["late"] for one in told(capsys, "clients", "late")["clients"]] == [0, 1, 0]

    assert main(["list", "links", "mobile"]) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("clock.deadline")
    ]
    assert "Seconds of simulated time after which updates are dropped" in row
    assert main(["run", *TINY, *slow[:-1], "link.clock.deadline=0"]) == 2
    assert (
        "link.clock.deadline (--set): 0.0 was asked for; it must lie in (0, inf)"
        in capsys.readouterr().err
    )


def test_a_link_by_name_replaces_that_of_a_file(own: Path) -> None:
    from fedquilt.cli.run import RunRequest

    Path("base.toml").write_text("\n".join(BASE))

    def link(*assign: str, **flags: str) -> fq.Link:
        return (
            RunRequest(config="base.toml", assign=assign, **flags)
            .experiment("base.toml", None)
            .link
        )

    own_link = fq.Link(loss=fq.links.ColumnLoss(0.3), codec=fq.links.Codec(4))
    assert link() == own_link
    assert link(link="lq8") == fq.Link(codec=fq.links.Codec(8))
    assert link("link.loss.name=wireless", link="lq8") == fq.Link(
        fq.links.Wireless(), fq.links.Codec(8)
    )
    assert link("link.loss.name=wireless") == replace(own_link, loss=fq.links.Wireless())
    assert link("link.codec.keep=0.5") == replace(own_link, codec=fq.links.Codec(4, 0.5))
    assert link("link.name=sp10") == fq.Link(codec=fq.links.Codec(keep=0.1))


BASE = [
    'method = "fedavg"',
    'model = "mine.py:net"',
    'data = "mine.py:data"',
    'link = { loss = { name = "columns", rate = 0.3 }, codec = { bits = 4 } }',
]


def test_links_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "list", "links")
    assert listed["lossy-strong"]["settings"] == {
        "loss": {"name": "columns", "granularity": 0.125, "rate": 0.2, "upto": 0.3}
    }
    assert main(["list", "links", "lq8"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"loss.rate", "loss.bandwidth", "codec.keep", "clock.latency"} <= set(rows)


def test_one_of_them_is_listed_with_all_one_can_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods", "fedrolex"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert rows["local.optimizer"].split()[1:7] == ["sgd", "|", "adam", "|", "adamw", "sgd"]
    assert "Channels that the window moves each round" in rows["shift"]
    assert "fedrolex-cifar10-low | " in rows["preset"]
    assert main(["list", "data", "digits"]) == 0
    assert "that is held back for validation. 0: none" in capsys.readouterr().out
    assert main(["list", "methods", "fedrolx"]) == 2
    assert "there is no method named 'fedrolx'. Did you mean 'fedrolex'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", METHODS)
def test_listed_options_can_be_set(name: str) -> None:
    """Setting every path that is listed to the default that is listed changes nothing."""
    from fedquilt.cli.listing import options
    from fedquilt.config.toml import assign

    parts = {"model": "tiny_resnet", "data": "digits"}
    settings = {"method": {"name": name}, **parts}
    rows = options("methods", name)
    # tables that are not there
    absent = tuple(path for path, row in rows.items() if row["default"] == "none")
    for path, row in rows.items():
        if path.startswith(absent):
            continue
        # by its name
        chosen = row["type"].startswith(("fedavg", "sgd", "constant", "plain", "batch |"))
        if row["default"] != "null" and "(" not in path:
            keys = ["method", *path.split("."), *(["name"] if chosen else [])]
            assign(settings, keys, row["default"] if chosen else json.loads(row["default"]))
    assert Experiment.of(settings) == Experiment.of({"method": name, **parts})


@pytest.mark.parametrize("name", METHODS)
def test_listed_options_of_other_entries_can_be_set_with_their_name(name: str) -> None:
    """`local.optimizer.beta1 (adam)` is an option of Adam, with the default that it has."""
    from fedquilt.cli.listing import options
    from fedquilt.config.schema import label
    from fedquilt.config.toml import assign
    from fedquilt.round.server_optimizers import Plain

    listed = options("methods", name)
    # What belongs to the method that ProgFed trains with is set below its name, or as if it were
    # ProgFed's own.
    rows = {path.removeprefix("over."): row for path, row in listed.items() if path.count("(") == 1}
    needed = {"local.schedule.milestones (steps)": "[3]", "local.schedule.rounds (cosine)": "9"}
    own_server = (
        METHODS[name]().server_optimizer if name in ("fedavgm", "fedadam", "fedyogi") else Plain()
    )
    servers = {"server_momentum", "server_adam", "server_yogi"} - {label(type(own_server))}
    last_options = {"server_momentum": "momentum", "server_adam": "tau", "server_yogi": "tau"}
    server_rows = {f"server_optimizer.{last_options[server]} ({server})" for server in servers}
    assert {
        "local.optimizer.beta1 (adam)",
        "local.schedule.factor (steps)",
        *server_rows,
        *needed,
    } <= {*rows}
    others = {"adam", "adamw", "steps", "cosine"} | servers
    # which takes plain SGD alone
    for other in sorted(others - ({"adam", "adamw"} if name == "scaffold" else set())):
        own = {path.split()[0]: row for path, row in rows.items() if f" ({other})" in path}
        values = {
            path: needed.get(f"{path} ({other})", row["default"]) for path, row in own.items()
        }
        # adamw has two where the server trains nets
        tables = {path.rpartition(".")[0] for path in own}
        assert tables
        least = {path: value for path, value in values.items() if own[path]["default"] == "needed"}
        asked = [{"method": name, "model": "tiny_resnet", "data": "digits"} for _ in range(2)]
        for settings, given in zip(asked, (values, least), strict=True):
            for table in tables:
                assign(settings, ["method", *table.split("."), "name"], other)
            for path, value in given.items():
                assign(settings, ["method", *path.split(".")], json.loads(value))
        assert Experiment.of(asked[0]) == Experiment.of(asked[1])


def test_samples_of_each_client_are_plotted(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "data", "--plot", "--clients", "4", "--labels", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits: 4 clients")
    assert len(lines) == 5
    counts = told(capsys, "list", "data", "--plot", "--clients", "4", "--labels", "2")["counts"]
    assert [sum(count > 0 for count in client) for client in counts] == [2, 2, 2, 2]
    assert main(["list", "data", "--plot", "--data", "mine.py:data", "--out", "x.png"]) == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["list", "models", "--plot"]) == 2
    assert "list data --plot draws who holds what" in capsys.readouterr().err
    assert main(["list", "data", "--labels", "2"]) == 2
    assert "add --plot" in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_is_probed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "probe")
    assert found["memory"] > 0
    assert found["samples_per_second"] > 0
    assert found["budget"]["macs"] > 0
    assert main(["probe", "--model", "mine.py:net"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:-2]] == ["measured", "proposed"]
    assert lines[-1].startswith("proposed: macs ")
    assert main(["probe", "--model", "tiny_resnt"]) == 2
    assert "Did you mean 'tiny_resnet'?" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedquilt 0.")


# --- start-up -----------------------------------------------------------------------------------


def test_importing_the_library_needs_nothing_of_the_command_line() -> None:
    others = (
        "('rich', 'tyro', 'tomli_w', 'sklearn', 'torchvision', 'datasets', 'matplotlib', "
        "'fedquilt.supernet')"
    )
    code = f"import sys, fedquilt; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.strip() == "[]"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom fedquilt.cli.main import main\ntry:\n    main(['run', '--help'])\nexcept "
        "SystemExit:\n    pass\n"
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert "any setting by its path" in done.stdout


def test_stages_of_a_model_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "models", "progfed_cnn"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "stages.1", "18,496", "650"] in lines
    assert main(["list", "models", "unet2d"]) == 0
    printed = capsys.readouterr().out
    assert "stage (symmetric)" in printed
    assert "decoder.3" in printed
    assert main(["list", "models", "progfed_cnn", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["progfed_cnn"]["stages"]["stage"]
    assert stages["2"] == {
        "ends with": "stages.1",
        "parameters": 18_496,
        "parameters of its head": 650,
    }
