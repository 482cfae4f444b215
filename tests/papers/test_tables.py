"""The scripts that reproduce tables: every case can be made, and a run that is written down is not made again."""

from __future__ import annotations

import argparse
import json
import tomllib

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt import settings
from fedquilt.errors import TrainingError
from fedquilt.methods import FedDropout, FedRolex, HeteroFL, Method
from tests.conftest import load_example, with_local

FEDRESCUE = ("sufficiency", "clusters", "loss", "samples", "parts", "norms", "digits")
SPLITMIX = ("digits", "ablation", "budgets", "contact", "cifar10", "iid")


@pytest.mark.parametrize("table", FEDRESCUE)
def test_fedrescues_cases(table):
    script = load_example("fedrescue_tables")
    cases = list(script.cases(table, 0.2))
    counts = {"sufficiency": 8, "clusters": 4, "loss": 16, "samples": 15, "parts": 6, "norms": 3, "digits": 5}
    assert len(cases) == len(set(cases)) == counts[table]
    assert all(isinstance(case.how, Method) and case.link in (*script.RATES, "by domain") for case in cases)
    assert all(script.fleet(case.setting, 20, 3).num_clients == 20 for case in cases)


@pytest.mark.parametrize("table", SPLITMIX)
def test_splitmixs_cases(table):
    cases = list(load_example("splitmix_tables").cases(table))
    assert len(cases) == {"digits": 6, "cifar10": 6, "iid": 6, "ablation": 16, "budgets": 14, "contact": 4}[table]
    assert all(fq.Fleet.of(case.fleet, 50, case.contact).num_clients == 50 for case in cases)


@pytest.mark.parametrize(
    ("labels", "fleet", "rounds", "milestones"),
    [
        (2, "uniform", 2500, (800, 1500)),  # Table 8
        (5, "income", 2000, (800, 1250)),  # Table 13
        (2, "share:1", 1250, (500, 1000)),  # Table 9
        (5, "share:0.0625", 1500, (500, 1000)),
        (2, "rho:0.2", 1250, (500, 1000)),  # Tables 10 and 11
        (2, "rho:0.5", 1500, (700, 1200)),
        (5, "gamma:4", 1500, (800, 1200)),  # Table 12
    ],
)
def test_fedrolexs_schedules_and_fleets(labels, fleet, rounds, milestones):
    script = load_example("fedrolex_table3")
    kind, _, at = fleet.partition(":")
    schedule = script.scheduled(labels, kind, float(at or 1))
    assert schedule == script.Schedule(rounds, milestones) == schedule.within(0)
    assert schedule.within(rounds // 10) == script.Schedule(rounds // 10, tuple(one // 10 for one in milestones))
    assert fq.Fleet.of(script.FLEETS[kind](float(at or 1)), 100, 10).num_clients == 100


def test_a_tenth_is_held_out_of_every_client(perceptron, make_data):
    data = make_data(perceptron, (20, 11))
    found = load_example("fedrolex_table3").held_out(data)
    assert [len(part) for part in found.parts] == [18, 9]
    assert torch.equal(found.test_inputs, data.inputs[[0, 10, 20, 30]])
    assert not {0, 10, 20, 30} & {int(row) for part in found.parts for row in part}


def test_a_rolling_window_is_even_by_channel_and_not_by_entry(make_data, tmp_path):
    """After one turn of eight rounds: all channels alike, but those half an axis apart are never held together."""
    script, results = load_example("fedrolex_table3"), load_example("results")
    layers = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
    family = fq.trace(lambda: nn.Sequential(*layers), torch.zeros(2, 1, 6, 6))
    data, fleet = make_data(family, (6, 6)), fq.Fleet.of((0.5,), 2, 2)
    folder = tmp_path / "results"
    runs = load_example("reproducing").Runs(family, tmp_path / "runs.jsonl", "cpu", "fp32", results=folder)

    def counted(kind):
        known = {"method": kind.__name__, "fleet": "half", "rounds": 8, "seed": 0}
        script.coverage(runs, known, fleet, data, kind(), 0)
        return results.summary_of(folder / f"coverage-{kind.__name__.lower()}-half-rounds8-seed0")

    rolling, random = counted(FedRolex), counted(FedDropout)
    assert rolling["channel"] == {"least": 8, "mean": 8.0, "deviation": 0.0}
    assert random["channel"]["mean"] == 8
    assert random["channel"]["deviation"] > 0
    assert rolling["entry"]["least"] == 0
    assert rolling["entry"]["mean"] == random["entry"]["mean"] == 4
    assert rolling["entry"]["deviation"] > random["entry"]["deviation"]


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


@pytest.mark.parametrize("table", SPLITMIX)
def test_stored_runs_of_splitmix_have_names_of_their_own(table):
    script = load_example("splitmix_tables")
    slug = load_example("reproducing").slug
    names = [slug(script.name_of(case, argparse.Namespace(part=0.3, rounds=0))) for case in script.cases(table)]
    assert len(set(names)) == len(names)
    short = [slug(script.name_of(case, argparse.Namespace(part=0.15, rounds=9))) for case in script.cases(table)]
    assert not set(names) & set(short)


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
