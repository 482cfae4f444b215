"""`fedquilt list`: every entry, its options and defaults, and plots of samples."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from fedquilt.engines import ENGINES
from fedquilt.family.norms import NORM_POLICIES
from fedquilt.methods import METHODS
from fedquilt.models import MODELS
from fedquilt.round.link import CODECS
from fedquilt.round.training.objectives import OBJECTIVES
from fedquilt.runs.experiment import Experiment
from fedquilt.studies.papers import presets
from tests.cli.commands import json_of

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


def test_methods_are_listed_with_paper_options_and_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = json_of(capsys, "list", "methods")
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
    entry = json_of(capsys, "list", "methods", "slow.py:Slow")["slow.py:Slow"]
    assert entry["summary"] == "FedAvg with a pause after every round."
    assert entry["help"]["pause"] == "Seconds between rounds. 0 gives FedAvg."

    assert main(["list", "methods", "slow.py:Slow"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "pause float 0.0 Seconds between rounds. 0 gives FedAvg." in rows

    needy = json_of(capsys, "list", "methods", "slow.py:Needy")["slow.py:Needy"]
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


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json_of(capsys, "list")
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
    listed = json_of(capsys, "list", "papers")
    assert list(listed) == list(presets())
    assert listed["fedrolex/table3"]["data"] == "cifar10"
    assert set(listed["fedrolex/table3"]["scales"].split()) == {"smoke", "short", "full"}
    assert list(json_of(capsys, "list", "papers", "fedrolex")) == [
        name for name in presets() if "fedrolex/" in name
    ]
    one = json_of(capsys, "list", "papers", "fedrolex/table4")["fedrolex/table4"]
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
    counts = json_of(capsys, "list", "data", "--plot", "--clients", "4", "--labels", "2")["counts"]
    assert [sum(count > 0 for count in client) for client in counts] == [2, 2, 2, 2]
    assert main(["list", "data", "--plot", "--data", "mine.py:data", "--out", "x.png"]) == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["list", "models", "--plot"]) == 2
    assert "list data --plot draws who holds what" in capsys.readouterr().err
    assert main(["list", "data", "--labels", "2"]) == 2
    assert "add --plot" in capsys.readouterr().err


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
