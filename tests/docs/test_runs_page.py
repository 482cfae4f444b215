"""docs/runs.md: its commands and its Python run, and its tables list the keys there are."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import torch

import fedquilt as fq
from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_commands_run_and_leave_what_the_page_lists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin, go_on = (shlex.split(line, comments=True)[1:] for line in blocks("sh")[0].splitlines())
    short = ["--rounds", "2", "--clients", "4", "--cohort", "1", "--epochs", "1"]
    assert main(shortened(begin, short)) == 0
    assert main([*go_on, "--rounds", "3"]) == 0
    there = {path.name for path in Path("runs/one").iterdir()}
    files = PAGE.split("## The folder")[1].split("A line of")[0]
    listed = {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", files, re.MULTILINE)}
    assert there == listed - {"tracking.json"}  # which tracked runs have
    record = json.loads(Path("runs/one/rounds.jsonl").read_text().splitlines()[-1])
    lines = PAGE.split("A line of")[1].split("`summary.json` has")[0]
    rows = re.findall(r"^\| (`.*?`) \|", lines, re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(record)
    summary = PAGE.split("`summary.json` has")[1].split("## ")[0]
    assert set(re.findall(r"`(\w+)`", summary)) == set(
        json.loads(Path("runs/one/summary.json").read_text())
    )


def test_python_begins_and_resumes(tmp_path, monkeypatch, perceptron, make_data):
    monkeypatch.chdir(tmp_path)
    parts = {
        "method": fq.methods.FedAvg(),
        "family": perceptron,
        "data": make_data(perceptron, (4, 4)),
    }
    names = {**parts, "fleet": fq.Fleet.of((1.0,), 2)}
    code = blocks("python")[0]
    exec(code.replace("rounds=500", "rounds=1"), names)
    exec(code.replace("rounds=500", "rounds=2"), names)
    assert [record.round for record in names["run"].records] == [1, 2]
    assert fq.load_state("runs/one").round == 2


def test_the_command_line_opens_the_run_of_the_pages_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    net, script = blocks("python")[1:3]
    Path("nets.py").write_text(net)
    Path("train.py").write_text(
        script.replace("20, cohort=10", "4, cohort=2").replace("partition(20)", "partition(4)")
    )
    code = Path("train.py").read_text().replace("rounds=20", "rounds=1")
    exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    _, resume, export = (
        shlex.split(line, comments=True)[1:] for line in blocks("sh")[1].splitlines()
    )
    assert main([*resume, "--rounds", "2"]) == 0
    assert main(export) == 0
    assert Path("small.safetensors").is_file()


def test_the_page_shows_the_error_message(tmp_path, monkeypatch, capsys, perceptron, make_data):
    monkeypatch.chdir(tmp_path)
    family = fq.trace(lambda: torch.nn.Linear(4, 3), torch.zeros(2, 4))
    fq.run(
        fq.methods.FedAvg(),
        family,
        make_data(perceptron, (4, 4)),
        fq.Fleet.of((1.0,), 2),
        rounds=1,
        out="runs/one",
    )
    assert main(["run", "--resume", "runs/one"]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("  data:")
    ]
    message = re.sub(r"\w+\.py, line \d+", "train.py, line 6", " ".join(" ".join(lines).split()))
    (shown,) = (
        block
        for block in re.findall(r"```\n(ConfigError.*?)```", PAGE, re.DOTALL)
        if "script" in block
    )
    assert message == " ".join(shown.split())


def test_the_best_round_is_stored_as_the_page_says(tmp_path, perceptron, make_data):
    data, out = make_data(perceptron, (4, 4)).with_validation(0.5), tmp_path / "run"
    run = fq.run(fq.methods.FedAvg(), perceptron, data, fq.Fleet.of((1.0,), 2), rounds=2, out=out)
    names = {"run": run}
    exec(blocks("python")[5], names)
    assert names["earlier"].server.round == run.best.round
    assert "validation" in json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
    assert json.loads((out / "summary.json").read_text())["best"].keys() == {
        "round",
        "figures",
        "value",
    }


def test_clients_are_reported_as_the_page_says(
    tmp_path, monkeypatch, perceptron, make_data, capsys
):
    monkeypatch.chdir(tmp_path)
    quick = ["--rounds", "1", "--clients", "4", "--cohort", "1", "--epochs", "1"]
    assert main(["run", *quick, "--out", "runs/one"]) == 0
    capsys.readouterr()
    (line,) = blocks("sh")[3].splitlines()
    assert main([*shlex.split(line, comments=True)[1:], "--json"]) == 0
    client = json.loads(capsys.readouterr().out)["clients"][0]
    section = PAGE.split("## By client")[1]
    assert all(f"`{key}`" in section or f".{key}" in section for key in client.keys() - {"client"})
    run = fq.run(
        fq.methods.FedAvg(),
        perceptron,
        make_data(perceptron, (4, 4)),
        fq.Fleet.of((1.0, 0.5), 2, 2),
        rounds=1,
    )
    exec(blocks("python")[4], {"run": run})


def test_targets_are_reported_as_the_page_says(
    tmp_path, monkeypatch, perceptron, make_data, capsys
):
    monkeypatch.chdir(tmp_path)
    begin, again = (shlex.split(line, comments=True)[1:] for line in blocks("sh")[2].splitlines())
    assert (
        main(
            shortened(begin, ["--rounds", "2", "--clients", "4", "--cohort", "1", "--epochs", "1"])
        )
        == 0
    )
    assert main([*again, "--json"]) == 0
    found = json.loads(Path("runs/two/compare.json").read_text())
    assert (found["target"], list(found["entries"])) == (0.7, ["fedavg", "heterofl"])
    data = replace(
        make_data(perceptron, (4, 4)),
        test_domains=torch.arange(24) % 2,
        domain_names=("mnist", "svhn"),
    )
    run = fq.run(fq.methods.FedAvg(), perceptron, data, fq.Fleet.of((1.0, 0.5), 2, 2), rounds=1)
    exec(blocks("python")[3], {"run": run})
