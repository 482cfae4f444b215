"""A study from its plan to its tables: tuned, run, interrupted, extended and read again."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.errors import ConfigError, RecordError, TrainingError
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.lock import locked
from fedquilt.studies import study as module
from fedquilt.studies.entries import Entry
from fedquilt.studies.plan import STUDY_FILE, Plan
from fedquilt.studies.study import Study, run_plan, study

LR = "method.local.optimizer.lr"


def figures(found):
    return [(result.entry, result.seed, result.summary["metrics"]) for result in found.results]


def test_the_example_of_the_docstring_is_right():
    (example,) = doctest.DocTestFinder(recurse=False).find(study, "study", module=module, globs={})
    assert doctest.DocTestRunner().run(example).failed == 0
    assert len(example.examples) == 4


# --- what is asked for --------------------------------------------------------------------------


def test_experiments_settings_names_and_files_are_the_same_study(own, settings):
    plain = settings()
    by_settings = study({"fedavg": plain}, seeds=np.arange(2))
    by_experiment = study({"fedavg": Experiment.of(plain)}, seeds=(0, 1))
    assert figures(by_settings) == figures(by_experiment)
    assert by_settings.plan.seeds == (0, 1)
    (own / "base.toml").write_text(Experiment.of({**plain, "seed": 7}).to_toml())
    by_file = study(["base.toml"], seeds=(0, 1))
    assert [one[1:] for one in figures(by_file)] == [one[1:] for one in figures(by_settings)]


@pytest.mark.parametrize(
    ("entries", "more", "said"),
    [
        ("fedavg", {}, r"study\('fedavg'\) was called; a list of names or a mapping fits"),
        ([], {}, "it has no entries"),
        ({}, {}, "it has no entries"),
        ([3], {}, r"study\(\[3\]\) was called"),
        (["fedavg", "fedavg"], {}, "give 'fedavg' once"),
        (["fedavgg"], {}, "fedavg"),
        (["absent.toml"], {}, "absent.toml was asked for; it cannot be read"),
        ({"a": 3}, {}, "an Experiment or a table of settings fits"),
        (["fedavg"], {"seeds": 3}, "study was called with 3 as seeds; a list fits"),
        (["fedavg"], {"seeds": (0.5,)}, "whole numbers fit"),
        (["fedavg"], {"seeds": (-1,)}, "the seed -1 was given"),
        (
            ["fedavg"],
            {"grid": {LR: "0.1"}},
            f"study was called with '0.1' as the values of {LR}; a list fits",
        ),
        (["fedavg"], {"grid": {LR: 0.1}}, "a list fits"),
        (["fedavg"], {"grid": {LR: ()}}, "has no values"),
        (["fedavg"], {"jobs": 0}, "0 jobs were asked for"),
        (["fedavg"], {"seeds": range(2000)}, r"2,000 runs .* confirmed=True"),
    ],
)
def test_wrong_arguments_are_one_clear_error(entries, more, said):
    with pytest.raises(ConfigError, match=said):
        study(entries, **more)


# --- a folder -----------------------------------------------------------------------------------


def test_a_study_is_read_as_it_was_run(own, settings, counting):
    entries = {name: settings(name) for name in ("fedavg", "heterofl")}
    found = study(entries, seeds=(0, 1), grid={LR: (0.05, 0.1)}, out="s")
    again = Study.read("s")
    assert again.plan == found.plan
    assert figures(again) == figures(found)
    assert (again.chosen, again.trials) == (found.chosen, found.trials)
    assert again.to_json() == found.to_json()
    watch = counting()
    assert figures(
        study(entries, seeds=(0, 1), grid={LR: (0.05, 0.1)}, out="s", watch=watch)
    ) == figures(found)
    assert watch.begun == []


def test_an_unfinished_study_has_the_runs_that_are_over(own, settings, counting):
    entries = {"a": settings("fedavg"), "b": settings("heterofl")}
    with pytest.raises(KeyboardInterrupt):
        study(entries, seeds=(0, 1), out="s", watch=counting(5))
    found = Study.read("s")
    assert [(result.entry, result.seed) for result in found.results] == [("a", 0), ("b", 0)]
    assert "a: no run of seed 1" in found.tables()[0].render("text")
    with pytest.raises(KeyboardInterrupt):  # between tuning and final runs
        study({"c": settings()}, grid={LR: (0.05, 0.1)}, out="t", watch=counting(4))
    found = Study.read("t")
    assert found.results == ()
    with pytest.raises(ConfigError, match="there are no runs"):
        found.tables()


def test_a_smaller_request_forgets_nothing(own, settings):
    """Else runs with other settings could take the place of those that are there."""
    study({"a": settings(), "b": settings("heterofl")}, seeds=(0, 1), out="s")
    found = study({"b": settings("heterofl")}, seeds=(2,), out="s")
    assert [(result.entry, result.seed) for result in found.results] == [("b", 2)]
    kept = Plan.read(own / "s")
    assert [entry.name for entry in kept.entries] == ["a", "b"]
    assert kept.seeds == (0, 1, 2)
    with pytest.raises(ConfigError, match="a: rounds is 2 there, 1 was asked for"):
        study({"a": settings(rounds=1)}, out="s")


def test_one_process_at_a_time_runs_a_study(own, settings):
    said = r"the folder s was asked for; the run of process \d+ is writing there"
    with locked(own / "s"), pytest.raises(ConfigError, match=said):
        study({"a": settings()}, out="s")
    study({"a": settings()}, out="s")  # the lock is free again


def test_a_folder_with_something_else_is_refused(own, settings):
    (own / "run").mkdir()
    (own / "run" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="a run is there"):
        study({"a": settings()}, out="run")
    (own / "older" / "fedavg").mkdir(parents=True)
    (own / "older" / "fedavg" / "rounds.jsonl").write_text("")
    with pytest.raises(ConfigError, match="It has the runs fedavg, which an earlier version"):
        study({"a": settings()}, out="older")
    assert not (own / "older" / STUDY_FILE).exists()
    (own / "file").write_text("")
    with pytest.raises(ConfigError, match="the folder file was asked for; a file is there"):
        study({"a": settings()}, out="file")


# --- tuning -------------------------------------------------------------------------------------


def test_tuning_never_looks_at_the_test_set(own, settings):
    plan = Plan((Entry("a", settings(), {LR: (0.001, 0.1, 0.5)}),), validation=0.3)
    other = replace(
        plan,
        entries=(replace(plan.entries[0], settings=settings() | {"data": "own.py:other_tests"}),),
    )
    found, garbage = run_plan(plan), run_plan(other)
    assert found.trials == garbage.trials
    assert found.chosen == garbage.chosen
    assert figures(found) != figures(garbage)  # the test set is another one


def test_the_best_point_on_the_validation_part_is_run_with_all_seeds(own, settings):
    found = study(
        {"a": settings()}, seeds=(0, 1, 2), grid={LR: (1e-6, 0.1)}, tuning_seeds=2, out="s"
    )
    trials = found.trials["a"]
    assert [set(trial.figures) for trial in trials] == [{0, 1}, {0, 1}]
    assert found.chosen["a"] == max(trials, key=lambda trial: trial.mean).point
    assert [result.seed for result in found.results] == [0, 1, 2]
    assert [row[2] for row in found.tables()[-1].rows] == [f"{trial.mean:.1%}" for trial in trials]
    tuned = json.loads((own / "s" / "a" / "tuned.json").read_text())
    assert tuned["chosen"] == found.chosen["a"]


def test_a_lower_error_is_better(own):
    plain = {
        "method": "fedavg",
        "data": "diabetes",
        "model": "mlp",
        "fleet": {"clients": 3},
        "rounds": 1,
    }
    found = study({"a": plain}, grid={LR: (1e-9, 0.01)})
    trials = found.trials["a"]
    assert trials[0].mean > trials[1].mean
    assert found.chosen["a"] == {LR: 0.01}


def test_a_point_that_diverged_is_never_chosen(own, settings):
    found = study({"a": settings()}, grid={LR: (1e30, 1e-6)}, out="s")
    assert found.chosen["a"] == {LR: 1e-6}
    assert "diverged" in found.tables()[-1].render("text")
    assert found.to_json()["tuned"]["a"]["trials"][0]["figures"] == {"0": None}
    assert Study.read("s").chosen == found.chosen


def test_a_grid_of_which_all_points_diverge_is_one_error(own, settings, counting):
    said = f"a: every point of the grid over {LR} diverged. Try smaller rates."
    with pytest.raises(TrainingError, match=said):
        study({"a": settings()}, grid={LR: (1e30, 1e31)}, out="s")
    watch = counting()
    with pytest.raises(TrainingError, match=said):
        study({"a": settings()}, grid={LR: (1e30, 1e31)}, out="s", watch=watch)
    assert watch.begun == []


def test_runs_of_another_point_are_not_resumed(own, settings):
    """More rounds may lead to another choice."""
    study({"a": settings(rounds=1)}, grid={LR: (1e-6, 0.1)}, out="s")
    file = own / "s" / "a" / "tuned.json"
    tuned = json.loads(file.read_text())
    (other,) = ({LR: value} for value in (1e-6, 0.1) if {LR: value} != tuned["chosen"])
    file.write_text(json.dumps({**tuned, "chosen": other}))
    with pytest.raises(
        ConfigError, match=rf"a: tuning chose {LR} = .*; the runs in s/a have {LR} = "
    ):
        study({"a": settings(rounds=2)}, grid={LR: (1e-6, 0.1)}, out="s")
    file.write_text("[]")
    with pytest.raises(RecordError, match=r"tuned\.json is damaged"):
        study({"a": settings(rounds=2)}, grid={LR: (1e-6, 0.1)}, out="s")


# --- tables -------------------------------------------------------------------------------------


def test_a_run_that_diverged_is_named_in_the_table(own, settings):
    wild = settings()
    wild["method"] = {**wild["method"], "local": {"optimizer": {"lr": 1e30}}}
    found = study({"tame": settings(), "wild": wild})
    assert "wild: the run of seed 0 diverged in round 2" in found.tables()[0].render("text")
    assert found.to_json()["entries"]["wild"]["diverged"] == {"0": 2}


def test_a_data_frame_has_a_line_for_each_entry_seed_and_share(own, settings):
    pytest.importorskip("pandas")
    found = study({"a": settings(), "b": settings("heterofl")}, seeds=(0, 1))
    frame = found.frame()
    assert len(frame) == 4 * len(found.results[0].metric())
    assert set(frame["entry"]) == {"a", "b"}
    assert len(found.frame(by_round=True)) == 2 * len(frame)


@pytest.mark.slow
def test_several_jobs_give_the_same_numbers(own, settings):
    entries = {"a": settings(rounds=1), "b": settings("heterofl", rounds=1)}
    assert figures(study(entries, jobs=9)) == figures(study(entries))


def test_the_function_is_public():
    assert fq.study is study
