"""A table of a paper as a study: its rows, what is laid over them, and where results are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.errors import ConfigError
from fedquilt.studies.execute import Unwatched
from fedquilt.studies.papers import read_preset
from fedquilt.studies.reproduce import Storing, check_rows_in, chosen_rows, plan_of
from fedquilt.studies.stored import read_config, read_stored
from fedquilt.studies.study import run_plan

PRESET = """
title = "Two rows"
seeds = [4, 5]
columns = [{title = "accuracy", value = "accuracy 1.0 %"}]
rows = [
    {name = "FedAvg", paper = ["1"], settings.method = "fedavg"},
    {name = "HeteroFL ×1", paper = ["2"], settings.method = "heterofl"},
]

[settings]
data = "own.py:pool"
model = "own.py:net"
fleet = {clients = 4, cohort = 2}
rounds = 1

[scales.smoke]
note = "the same"
"""


@pytest.fixture
def preset(own):
    (own / "tables").mkdir()
    (own / "tables" / "mine.toml").write_text(PRESET)
    return read_preset("tables/mine.toml")


def test_a_table_is_a_study(preset):
    plan = plan_of(preset, data_folder=Path())
    assert [entry.name for entry in plan.entries] == ["FedAvg", "HeteroFL ×1"]
    assert plan.seeds == (4, 5)
    assert plan_of(preset, data_folder=Path(), seeds=(7,)).seeds == (7,)


def test_rows_are_chosen_by_a_part_of_their_name(preset):
    assert [row.name for row in chosen_rows(preset, ["heterofl"])] == ["HeteroFL ×1"]
    assert len(chosen_rows(preset, [])) == 2
    with pytest.raises(
        ConfigError, match=r"the row 'rolex' of tables/mine\.toml was asked for; no row has it"
    ):
        chosen_rows(preset, ["fedavg", "rolex"])


def test_a_whole_name_means_that_row_alone(preset):
    rows = [
        replace(row, name=name)
        for row, name in zip(preset.rows, ("LQ-8", "LQ-8 + SP-25"), strict=True)
    ]
    preset = replace(preset, rows=tuple(rows))
    assert [row.name for row in chosen_rows(preset, ["lq-8"])] == ["LQ-8"]
    assert [row.name for row in chosen_rows(preset, ["lq"])] == ["LQ-8", "LQ-8 + SP-25"]


def test_names_that_have_commas_are_listed_with_semicolons(preset):
    preset = replace(
        preset, rows=tuple(replace(row, name=f"{row.name}, low") for row in preset.rows)
    )
    with pytest.raises(ConfigError, match=r"Known: FedAvg, low; HeteroFL ×1, low\.$"):
        chosen_rows(preset, ["rolex"])


def test_the_folder_of_another_study_is_refused(preset):
    check_rows_in(preset, Path("study"))
    plan = plan_of(preset, data_folder=Path(), rows=["FedAvg"], seeds=(4,))
    run_plan(plan, "study")
    check_rows_in(preset, Path("study"))
    others = replace(preset, rows=preset.rows[1:])
    with pytest.raises(
        ConfigError,
        match=r"it has a study of FedAvg, which tables/mine\.toml does not have as rows",
    ):
        check_rows_in(others, Path("study"))


def test_names_are_laid_before_other_settings(preset):
    asked = [
        (["method", "shift"], 2),
        (["method", "name"], "fedrolex"),
        (["engine", "device"], "cpu"),
    ]
    for entry in plan_of(preset, data_folder=Path(), assignments=asked).entries:
        assert entry.settings["method"]["name"] == "fedrolex"
        assert entry.settings["method"]["shift"] == 2
        assert entry.settings["engine"] == {"device": "cpu"}
    assert "engine" not in plan_of(preset, data_folder=Path()).entries[0].settings


def storing(preset, scale="full"):
    return Storing(Unwatched(), preset, scale, Path("study"), Path("results"), {"command": "c"})


def test_every_run_is_stored_once(preset):
    plan = plan_of(preset, data_folder=Path())
    watch = storing(preset)
    study = run_plan(plan, "study", watch=watch)
    folders = watch.folders
    assert [folder.as_posix() for folder in folders] == [
        "results/tables/mine-fedavg-seed4",
        "results/tables/mine-heterofl-1-seed4",
        "results/tables/mine-fedavg-seed5",
        "results/tables/mine-heterofl-1-seed5",
    ]
    for folder, result in zip(folders, study.results, strict=True):
        found = read_stored(folder)
        assert found.metric() == result.metric()
        assert found.summary["about"]["row"] == result.entry
        assert read_config(folder)["seed"] == result.seed
    again = storing(preset)
    run_plan(plan, "study", watch=again)
    assert again.folders == folders


def test_a_stopped_study_has_stored_its_finished_runs(preset):
    class Stopped(Unwatched):
        def begin(self, planned, display):
            if planned.entry != "FedAvg":
                raise KeyboardInterrupt
            return super().begin(planned, display)

    watch = replace(storing(preset), watch=Stopped())
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_of(preset, data_folder=Path(), seeds=(4,)), "study", watch=watch)
    assert [folder.name for folder in watch.folders] == ["mine-fedavg-seed4"]
    assert read_stored(watch.folders[0]).summary["about"]["command"] == "c"


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("fedrolex/table3", "fedrolex/table3"),
        ("mine.toml", "own/mine"),
        ("../../mine.toml", "own/mine"),
    ],
)
def test_results_of_any_file_stay_in_the_folder(preset, name, folder):
    watch = storing(replace(preset, name=name), "smoke")
    run_plan(plan_of(preset, data_folder=Path(), seeds=(0,), rows=["FedAvg"]), "study", watch=watch)
    (found,) = watch.folders
    assert found.as_posix() == f"results/{folder}-fedavg-smoke-seed0"
