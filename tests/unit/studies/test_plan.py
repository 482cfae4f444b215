"""A study as values: its problems, its runs and their folders, and what `study.toml` holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.errors import ConfigError
from fedquilt.studies.entries import Entry, at_point, find_entry, folder_name
from fedquilt.studies.plan import STUDY_FILE, Plan

LR = "method.local.optimizer.lr"
HERE = Path("folder")


def make_entry(name="fedavg", method="fedavg", rounds=2, grid=None, **more):
    return Entry(name, {"method": method, "data": "digits", "rounds": rounds, **more}, grid or {})


def test_all_problems_are_listed_at_once():
    entries = (
        make_entry("a", grid={LR: ()}),
        make_entry("a"),
        make_entry("B:c", grid={LR: (0.1, 0.1), "seed": (1, 2), "a..b": (1,)}),
        make_entry("b_c", rounds="2"),
        make_entry("Compare.JSON"),
        Entry("d", 3),
    )
    with pytest.raises(ConfigError) as caught:
        Plan(entries, (0, 0), validation=1.0, tuning_seeds=3, tuning=3, measure="sizs")
    lines = str(caught.value).splitlines()
    assert lines[0] == "a study was asked for that cannot be run:"
    for line in (
        "a is given 2 times; give each entry once, or another name.",
        "the name 'B:c' gives the same folder as another one; give it another name.",
        "the name 'b_c' gives the same folder as another one; give it another name.",
        "the name 'Compare.JSON' is that of a file of every study; give it another name.",
        "the seeds 0 0 repeat one; give each once.",
        "validation = 1.0 was given; a share of the training samples in (0, 1) fits.",
        "tuning with 3 seeds was asked for; there are 2.",
        "tuning = 3 was given; a table of settings fits.",
        "a: the grid over method.local.optimizer.lr has no values.",
        "B:c: the grid over seed was asked for; seeds are not tuned. Name them as the seeds of the "
        "study.",
        "B:c: the grid over a..b was asked for; write a path as in method.local.optimizer.lr.",
        "b_c: rounds = '2' was given; a whole number fits.",
        "d: 3 was given; a table of settings fits.",
    ):
        assert f"  {line}" in lines
    assert any(line.startswith("  there is no measure 'sizs'.") for line in lines)
    assert any(
        line.startswith("  B:c: the grid over method.local.optimizer.lr repeats a value")
        for line in lines
    )
    assert len(lines) == 16


@pytest.mark.parametrize("seeds", [(), (-1,), (1.0,), ("0",), (True,), (2**63,)])
def test_seeds_are_whole_numbers_from_0_on(seeds):
    with pytest.raises(ConfigError, match="seed"):
        Plan((make_entry(),), seeds)


def test_a_plan_needs_an_entry():
    with pytest.raises(ConfigError, match="it has no entries"):
        Plan(())


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("fedavg", "fedavg"),
        ("mine.py:method", "mine.py_method"),
        ("../../etc", "etc"),
        ("..", "entry"),
        ("", "entry"),
        ("/abs/base.toml", "abs_base.toml"),
        ("FedAvg ×1/8", "FedAvg_1_8"),
    ],
)
def test_a_folder_has_a_name_that_stays_inside(name, folder):
    assert folder_name(name) == folder


@pytest.mark.parametrize("letter", ["a", "é", "文", "𝔸"])
def test_long_names_are_cut_and_stay_different(letter):
    names = [folder_name(letter * 300 + end) for end in ("1", "2")]
    assert len(set(names)) == 2
    assert all(len(name.encode()) <= 80 for name in names)


def test_runs_of_a_plan_have_folders_of_their_own_inside_the_study():
    shares = ([1.0], [1.0, 0.5], "1.0", "1/0", "1_0")
    grid = {"fleet.budgets.shares": shares, LR: (0.1, 1e-05, 1, -1)}
    plan = Plan(
        (make_entry("..", grid=grid), make_entry("b/../c", grid=grid), make_entry("x" * 200)),
        (0, 1),
    )
    folders = [run.folder.casefold() for run in (*plan.tuning_runs, *plan.final_runs({}))]
    assert len(set(folders)) == len(folders) == plan.num_runs == 2 * 20 + 6
    for folder in folders:
        assert (HERE / folder).resolve().is_relative_to(HERE.resolve())


@pytest.mark.parametrize("values", [("a", "A"), (1, "1"), (True, "True")])
def test_values_that_would_share_a_folder_are_refused(values):
    with pytest.raises(
        ConfigError, match="repeats a value, or has two that differ in type or in capital letters"
    ):
        Plan((make_entry(grid={"method.local.norm": values}),))


def test_points_are_all_combinations_in_the_order_given():
    entry = make_entry(grid={"a.b": (2, 1), "c": ("x", "y")})
    assert [tuple(point.values()) for point in entry.points] == [
        (2, "x"),
        (2, "y"),
        (1, "x"),
        (1, "y"),
    ]
    assert make_entry().points == [{}]  # the one point of an empty grid
    assert Plan((make_entry(),)).tuning_runs == []


def test_runs_are_counted_without_being_made():
    values = tuple(range(1000))
    plan = Plan((make_entry(grid={"a": values, "b": values, "c": values}),))
    assert plan.num_runs == 10**9 + 1
    with pytest.raises(ConfigError, match=r"a study of 1,000,000,001 runs was asked for; .* --yes"):
        plan.check()


def test_more_runs_than_usual_are_accepted_when_they_are_confirmed():
    plan = Plan((make_entry(),), tuple(range(1001)))
    with pytest.raises(ConfigError, match="1,001 runs"):
        plan.check()
    plan.check(confirmed=True)


@pytest.mark.parametrize("path", ["data", "data.name", "task", "task.name"])
def test_data_and_tasks_are_not_tuned(path):
    """Tuning would choose between figures that cannot be compared."""
    with pytest.raises(
        ConfigError, match=f"the grid over {path} was asked for; figures on other data"
    ):
        Plan((make_entry(grid={path: ("digits", "diabetes")}),))


def test_settings_that_do_not_fit_are_listed_for_all_entries():
    plan = Plan(
        (
            make_entry("a", method="fedavgg"),
            make_entry("b", grid={"method.shift": (1, 2)}),
            make_entry("c"),
        )
    )
    with pytest.raises(ConfigError) as caught:
        plan.check()
    text = str(caught.value)
    assert text.count("a: a problem") == text.count("b: a problem") == 1
    assert "c: " not in text
    alike = Plan((make_entry("a", method="fedavgg"), make_entry("b", method="fedavgg")))
    with pytest.raises(
        ConfigError, match=r"^a; b: a problem:\n.*no method named 'fedavgg'"
    ) as caught:
        alike.check()
    assert str(caught.value).count("fedavgg") == 1


def test_a_tuning_run_sees_the_validation_part_alone():
    grid = {LR: (0.1, 0.2)}
    plan = Plan(
        (make_entry(grid=grid),), (3, 4, 5), validation=0.2, tuning_seeds=2, tuning={"rounds": 1}
    )
    runs = plan.tuning_runs
    assert [(run.seed, run.point[LR]) for run in runs] == [(3, 0.1), (3, 0.2), (4, 0.1), (4, 0.2)]
    experiment = runs[1].experiment
    assert (experiment.rounds, experiment.seed, experiment.data.validation) == (1, 3, 0.2)
    assert experiment.evaluation.on == "validation"
    assert experiment.method.local.optimizer.lr == 0.2
    assert runs[0].title == "fedavg, lr 0.1, tuning"
    final = plan.final_runs({"fedavg": {LR: 0.2}})
    assert [run.folder for run in final] == ["fedavg/seed3", "fedavg/seed4", "fedavg/seed5"]
    assert final[0].experiment.evaluation is None
    assert final[0].experiment.data.validation == 0
    assert final[0].rounds == 2


def test_values_are_laid_at_quoted_keys_and_names_come_first():
    settings = {"method": {"name": "fedrolex", "shift": 2}}
    point = {"method.rounding": "ceil", "method.name": "heterofl", 'fleet.budgets."0.5"': 1.0}
    assert at_point(settings, point) == {
        "method": {"name": "heterofl", "rounding": "ceil"},
        "fleet": {"budgets": {"0.5": 1.0}},
    }
    assert settings == {"method": {"name": "fedrolex", "shift": 2}}


def test_an_entry_is_found_before_a_setting():
    assert find_entry(["a"], "method.shift=1:2", "--set") == ("", "method.shift=1:2")
    assert find_entry(["f.py:g"], "f.py:g:method.shift=2", "--set") == ("f.py:g", "method.shift=2")
    with pytest.raises(ConfigError, match="there is no entry 'b'"):
        find_entry(["a"], "b:x=1", "--set")


# --- data and tasks -----------------------------------------------------------------------------


def test_entries_with_other_data_or_tasks_are_listed():
    plan = Plan(
        (make_entry("a"), make_entry("b", data="diabetes"), make_entry("c", task="multilabel"))
    )
    with pytest.raises(ConfigError, match=r"data digits: a, c\n  data diabetes: b\n"):
        plan.check_comparable()
    Plan((make_entry("a"), make_entry("b", task="classification"))).check_comparable()


# --- the file -----------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written(tmp_path):
    entries = (
        make_entry("a", grid={LR: (0.1, 1e-05), "method.local.norm": ("batch", "tracked")}),
        make_entry("b:é"),
    )
    plan = Plan(
        entries,
        (2, 0),
        validation=0.25,
        tuning_seeds=2,
        tuning={"rounds": 1, "fleet": {"clients": 3}},
    )
    (tmp_path / STUDY_FILE).write_text(plan.to_toml())
    assert Plan.read(tmp_path) == plan
    assert Plan.read(tmp_path).to_toml() == plan.to_toml()


def test_a_file_that_was_changed_is_pointed_out(tmp_path, caplog):
    text = Plan((make_entry(),), (2, 0)).to_toml()
    # An earlier version wrote no checksum.
    (tmp_path / STUDY_FILE).write_text(text.rpartition("#")[0])
    assert Plan.read(tmp_path).seeds == (2, 0)
    assert not caplog.text
    (tmp_path / STUDY_FILE).write_text(text.replace("2", "3", 1))
    assert Plan.read(tmp_path).seeds == (3, 0)
    assert f"{tmp_path / STUDY_FILE} is not as it was written" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds", "sseeds", "KeyError 'seeds'"),
        ("0.1", '"x"', "TypeError"),
        ('name = "fedavg"', "name = 3", "TypeError"),
        ("seeds = [\n    0,\n]", 'seeds = "01"', "the seed '0' was given"),
        ("settings = {", "setting = {", "KeyError 'settings'"),
        ("grid = {}", "grid = 3", "AttributeError"),
        ("entries = [", "entries = ", "this is not TOML"),
        ("rounds = 2", 'rounds = "two"', "rounds = 'two' was given"),
    ],
)
def test_a_damaged_file_is_one_clear_error(old, new, said, tmp_path):
    text = Plan((make_entry(),)).to_toml()
    assert old in text
    (tmp_path / STUDY_FILE).write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        Plan.read(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / STUDY_FILE) in str(caught.value)


def test_an_error_for_a_folder_without_a_study_names_its_content(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such folder\.$"):
        Plan.read(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"there is no study in it\.$"):
        Plan.read(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("file", "run/config.toml"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"this is a file\. Name the folder that --out named\.$"):
        Plan.read(tmp_path / "file")
    with pytest.raises(
        ConfigError, match=r"a single run is in it\. Name the folder of the whole study"
    ):
        Plan.read(tmp_path / "run")
    for name in ("heterofl", "fedavg"):  # as earlier versions of `compare` wrote them
        (tmp_path / name).mkdir()
        (tmp_path / name / "rounds.jsonl").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"runs fedavg, heterofl, .*fedquilt run --resume .*fedavg, or name another",
    ):
        Plan.read(tmp_path)


# --- a folder that is extended ------------------------------------------------------------------

GRID = {LR: (0.1, 0.2)}
THERE = Plan((make_entry("a"), make_entry("b", grid=GRID)), (0, 1))


@pytest.mark.parametrize(
    "plan",
    [
        THERE,
        replace(THERE, seeds=(0, 1, 2)),
        replace(THERE, seeds=(0, 5)),
        replace(THERE, entries=(*THERE.entries, make_entry("c"))),
        Plan((make_entry("b", grid=GRID),)),
        Plan((make_entry("a", rounds=3), make_entry("b", grid=GRID, rounds=4)), (0, 1)),
        Plan((make_entry("a"),), (7,), validation=0.5),  # nothing is tuned
        Plan((make_entry("a", seed=3),)),
    ],
    ids=["same", "seeds", "other seeds", "entries", "fewer", "rounds", "untuned", "seed"],
)
def test_more_of_the_same_is_accepted(plan):
    plan.check_extends(THERE, HERE)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((make_entry("a", rounds=1),)), "a: rounds is 2 there, 1 was asked for"),
        (
            Plan((make_entry("a", data="diabetes"),)),
            "a: data is digits there, diabetes was asked for",
        ),
        (
            Plan((make_entry("a", fleet={"clients": 3}),)),
            "a: fleet.clients is nothing there, 3 was asked for",
        ),
        (
            Plan((make_entry("a", grid=GRID),)),
            f"a: {LR} is nothing there, [0.1, 0.2] was asked for",
        ),
        (
            Plan((make_entry("b", grid={LR: (0.1,)}),)),
            f"b: {LR} is [0.1, 0.2] there, [0.1] was asked for",
        ),
        (replace(THERE, validation=0.3), "validation is 0.1 there, 0.3 was asked for"),
        (replace(THERE, tuning={"rounds": 1}), "tuning.rounds is nothing there, 1 was asked for"),
        (replace(THERE, tuning_seeds=2), "seeds of tuning is [0] there, [0, 1] was asked for"),
        (replace(THERE, seeds=(1, 0)), "seeds of tuning is [0] there, [1] was asked for"),
        (replace(THERE, measure="sizes"), "measure is training there, sizes was asked for"),
    ],
)
def test_requests_that_would_change_existing_runs_are_refused(plan, said):
    with pytest.raises(ConfigError) as caught:
        plan.check_extends(THERE, HERE)
    assert said in str(caught.value)
    assert "name another folder" in str(caught.value)


def test_rounds_that_are_not_named_are_the_default():
    plain = Plan((Entry("a", {"method": "fedavg", "data": "digits"}),))
    more = Plan((make_entry("a", rounds=21),))
    more.check_extends(plain, HERE)
    with pytest.raises(ConfigError, match="rounds is 20 there, 19 was asked for"):
        Plan((make_entry("a", rounds=19),)).check_extends(plain, HERE)


def test_the_file_keeps_entries_that_a_smaller_request_leaves_out():
    asked = Plan((make_entry("c"), make_entry("a", rounds=5)), (2, 1), validation=0.5)
    kept = asked.extending(THERE)
    assert [entry.name for entry in kept.entries] == ["a", "b", "c"]
    assert kept.entries[0].settings["rounds"] == 5
    assert kept.seeds == (0, 1, 2)
    assert kept.validation == THERE.validation  # that of the grid there
    assert THERE.extending(asked).validation == THERE.validation
