"""`fedquilt run`: what it prints while it trains, and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.methods import METHODS
from fedquilt.models import MODELS
from fedquilt.runs.summary_file import read_summary
from tests.cli.commands import (
    QUICK,
    SUMMARY,
    THREE,
    TINY,
    command,
    json_of,
    on_a_terminal,
)
from tests.conftest import shortened


def test_the_demo_learns(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = json_of(capsys, "run", "--rounds", "8")["accuracy"]
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
        json_of(capsys, "run", *TINY, "--rounds", "1", "--seed", seed)["accuracy"]
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
        json_of(capsys, "run", "--method", name, *shortened(QUICK, rounds), "--labels", "3")[
            "method"
        ]
        == name
    )


def test_a_run_may_start_from_given_weights(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = fq.trace(MODELS["tiny_resnet"].factory, torch.zeros(2, 1, 8, 8))
    save_file({name: weight + 1 for name, weight in family.init(0).items()}, "start.safetensors")
    first = json_of(capsys, "run", *QUICK)["accuracy"]
    assert json_of(capsys, "run", *QUICK, "--init", "start.safetensors")["accuracy"] != first
    assert main(["run", *QUICK, "--init", "mine.py"]) == 2
    assert "cannot be read as safetensors" in capsys.readouterr().err


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
    listed = json_of(capsys, "list", "methods")
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
    assert json_of(capsys, "run", *quick, "--set", "evaluation.domains=false")[
        "metrics"
    ].keys() == {
        "accuracy",
        "loss",
        "local_accuracy",
    }


def test_the_cost_of_a_target_is_printed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = [*TINY[:4], *THREE, "--cohort", "3", "--rounds", "3"]
    found = json_of(capsys, "run", "--method", "fedavg", *quick, "--out", "c", "--target", "0.01")
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
    found = json_of(capsys, "run", "--method", "fedavg", *asked, "--out", "timed")
    over = found["reached"]["1.0"]["link_seconds"]
    assert over == found["link_seconds"]
    assert main(["run", "--resume", "timed", "--target", "0.01"]) == 0
    assert f", {over:,.1f} s over the link" in capsys.readouterr().out.splitlines()[1]
