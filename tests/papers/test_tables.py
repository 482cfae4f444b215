"""The scripts that reproduce tables: every case can be made, and a run that is written down is not made again."""

from __future__ import annotations

import argparse
import json
import tomllib

import pytest
import torch

import fedquilt as fq
from fedquilt import settings
from fedquilt.errors import TrainingError
from fedquilt.methods import HeteroFL, Method
from tests.conftest import load_example, with_local

FEDRESCUE = ("sufficiency", "clusters", "loss", "samples", "parts", "norms", "digits")


@pytest.mark.parametrize("table", FEDRESCUE)
def test_fedrescues_cases(table):
    script = load_example("fedrescue_tables")
    cases = list(script.cases(table, 0.2))
    counts = {"sufficiency": 8, "clusters": 4, "loss": 16, "samples": 15, "parts": 6, "norms": 3, "digits": 5}
    assert len(cases) == len(set(cases)) == counts[table]
    assert all(isinstance(case.how, Method) and case.link in (*script.RATES, "by domain") for case in cases)
    assert all(script.fleet(case.setting, 20, 3).num_clients == 20 for case in cases)


def test_a_run_that_is_written_down_is_not_made_again(residual, make_data, tmp_path):
    reproducing = load_example("reproducing")
    data, fleet, how = make_data(residual, (6, 6)), fq.Fleet.of((1.0, 0.5), 2, 2), fq.Evaluation(every=1)
    method, out, known = with_local(HeteroFL(), batch_size=4), tmp_path / "runs.jsonl", {"table": "a", "method": "b"}
    first = reproducing.Runs(residual, out, "cpu", "fp64").run(known, method, data, fleet, 2, how, seed=5)
    assert json.loads(out.read_text())["accuracy"] == first["accuracy"]
    again = reproducing.Runs(residual, out, "cpu", "fp64")
    assert again.run(known, method, data, fleet, 2, how, seed=5) == json.loads(out.read_text())
    assert again.engine == "vectorised"  # none was made
    again.run(known, method, data, fleet, 2, how, seed=6)
    assert len(out.read_text().splitlines()) == 2


def test_a_run_leaves_a_small_folder_that_repeats_it_and_is_found_again(residual, make_data, tmp_path):
    reproducing, results = load_example("reproducing"), load_example("results")
    data, fleet, how = make_data(residual, (6, 9)), fq.Fleet.of((1.0, 0.5), 2, 2), fq.Evaluation(every=1)
    method, link = with_local(HeteroFL(), batch_size=4), fq.Link(loss=fq.Columns(0.3))
    names = {"name": "table-HeteroFL, ×0.5", "link": link, "seed": 5}

    def run(known, where="results"):
        runs = reproducing.Runs(residual, tmp_path / "runs.jsonl", "cpu", "fp64", results=tmp_path / where)
        return runs, runs.run(known, method, data, fleet, 3, how, **names)

    _, line = run({"table": "a"})
    folder = tmp_path / "results" / "table-heterofl-0.5-seed5"
    assert {path.name for path in folder.iterdir()} == {"config.toml", "summary.json", "rounds.jsonl.gz"}
    config = tomllib.loads((folder / "config.toml").read_text())
    assert settings.read(Method, config["method"], "method", []) == method
    assert settings.read(fq.Link, config["link"], "link", []) == link
    assert (config["seed"], config["rounds"], config["precision"], config["case"]["table"]) == (5, 3, "fp64", "a")
    assert config["data"]["samples_of_clients"] == [6, 9]
    assert [config["fleet"]["budgets"][kind] for kind in config["fleet"]["budget_of_clients"]] == [
        {"share": 1.0},
        {"share": 0.5},
    ]
    assert [record["round"] for record in results.rounds_of(folder)] == [1, 2, 3]
    again, found = run({"table": "a"})
    assert again.engine == "vectorised"  # none was made
    assert found == json.loads(json.dumps(line))
    with pytest.raises(FileExistsError, match="table = 'a'"):
        run({"table": "b"})
    assert run({"table": "a"}, "elsewhere")[1]["accuracy"] == line["accuracy"]  # made again: its folder is not there


def test_the_best_round_is_the_widest_models(residual, make_data, tmp_path):
    reproducing = load_example("reproducing")
    data, fleet, how = make_data(residual, (6, 6)), fq.Fleet.of((1.0, 0.5), 2, 2), fq.Evaluation(every=1)
    method = with_local(HeteroFL(), batch_size=4, optimiser=fq.SGD(lr=0.5))
    line = reproducing.Runs(residual, tmp_path / "runs.jsonl", "cpu", "fp64").run({}, method, data, fleet, 6, how)
    curve = {at: accuracy["1.0"] for at, accuracy in line["curves"].items()}
    assert curve[str(line["best"]["round"])] == max(curve.values()) > line["accuracy"]["1.0"]
    assert line["best"]["accuracy"] == line["curves"][str(line["best"]["round"])]
    (last,), (best,) = reproducing.last_and_best([line]).values()
    assert last["accuracy"] == line["accuracy"]
    assert best["accuracy"] == line["best"]["accuracy"]
    assert best["metrics"] == line["best"]["metrics"]


@pytest.mark.parametrize("table", FEDRESCUE)
def test_stored_runs_of_fedrescue_have_names_of_their_own(table):
    script = load_example("fedrescue_tables")
    asked = {"part": None, "lr": 0.1, "clip": 0, "freeze": "update", "augment": True, "rounds": 0}

    def names(**more):
        given = argparse.Namespace(**{**asked, **more})
        return [script.name_of(case, case.how, given) for case in script.cases(table)]

    assert len(set(names())) == len(names())
    others = {"part": 0.5, "lr": 0.03, "clip": 1.0, "freeze": "gradient", "augment": False, "rounds": 9}
    for name, value in others.items():
        assert not set(names()) & set(names(**{name: value}))


def test_a_run_that_was_stopped_goes_on_from_what_was_kept(residual, make_data, tmp_path, monkeypatch):
    reproducing = load_example("reproducing")
    data, fleet, how = make_data(residual, (6, 6)), fq.Fleet.of((1.0, 0.5), 2, 2), fq.Evaluation(every=1)
    method, known, told = with_local(HeteroFL(), batch_size=4), {"table": "a", "method": "b, ✓"}, []

    def until(last):
        def tell(self, known, record, began):
            told.append(record.round)
            if record.round == last:
                raise KeyboardInterrupt

        monkeypatch.setattr(reproducing.Runs, "_tell", tell)

    def line(name, keep=None):
        out = tmp_path / name
        found = reproducing.Runs(residual, out, "cpu", "fp64", keep).run(known, method, data, fleet, 4, how)
        return {key: value for key, value in found.items() if key != "seconds"}

    until(2)
    with pytest.raises(KeyboardInterrupt):
        line("stopped.jsonl", tmp_path / "kept")
    assert not (tmp_path / "stopped.jsonl").exists()
    until(None)
    assert line("stopped.jsonl", tmp_path / "kept") == line("whole.jsonl")
    assert told == [1, 2, 3, 4, 1, 2, 3, 4]


def test_a_run_that_diverges_is_told_with_what_it_left(residual, make_data, tmp_path):
    reproducing = load_example("reproducing")
    data, fleet, how = make_data(residual, (6, 6)), fq.Fleet.of((1.0,), 2, 2), fq.Evaluation(every=0)
    method = with_local(HeteroFL(), batch_size=4, optimiser=fq.SGD(lr=1e300))
    line = reproducing.Runs(residual, tmp_path / "runs.jsonl", "cpu", "fp64").run({}, method, data, fleet, 9, how)
    assert line["diverged"] < 9
    assert set(line["accuracy"]) == {"1.0"}
    assert reproducing.told_of("HeteroFL", [line, {}]) == f"HeteroFL, diverged in round {line['diverged']}"
    assert reproducing.told_of("HeteroFL", [{}]) == "HeteroFL"


def test_a_part_of_digits_is_that_of_the_papers_set():
    """5 % and 10 % of it are the 371 and 743 images of FedResCuE's appendix A.1."""
    reproducing = load_example("reproducing")
    some = torch.zeros(10_000, 1), torch.zeros(10_000).long()
    pool = fq.data.Pool.of(some, some, domains=torch.arange(10_000) % 5)
    assert [int(2000 * reproducing.of_digits(part, pool)) for part in (0.05, 0.1, 0.3)] == [371, 743, 2000]


def test_means_over_seeds():
    reproducing = load_example("reproducing")
    assert reproducing.percent([0.5, 0.7]) == "60.0 ± 10.0"
    assert reproducing.percent([0.5]) == "50.0"
    assert reproducing.percent([]) == "–"
    assert reproducing.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_a_run_that_fails_is_not_written_down_as_one_that_diverged(residual, make_data, tmp_path, monkeypatch):
    reproducing = load_example("reproducing")

    def full(*_given, **_named):
        raise TrainingError("client 3 failed") from RuntimeError("out of memory")

    monkeypatch.setattr(fq, "run", full)
    runs, data = reproducing.Runs(residual, tmp_path / "runs.jsonl", "cpu", "fp64"), make_data(residual, (6, 6))
    with pytest.raises(TrainingError, match="client 3"):
        runs.run({"method": "a"}, HeteroFL(), data, fq.Fleet.of((1.0,), 2, 2), 2, fq.Evaluation(every=1))
    assert not (tmp_path / "runs.jsonl").exists()
