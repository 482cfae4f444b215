"""Tables, plain values and data frames of a comparison, from runs made by hand."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest

from fedquilt.errors import ConfigError
from fedquilt.studies.frames import frame, rounds, rows
from fedquilt.studies.plain_values import to_json
from fedquilt.studies.report import comparison
from fedquilt.studies.statistics import PERCENTAGES


@pytest.fixture
def study(result):
    """Return two rows of three seeds: `a` is better by 10 points at every seed."""
    figures = {"a": (0.5, 0.6, 0.7), "b": (0.4, 0.5, 0.6)}
    return [
        result(name, seed, [figure / 2, figure])
        for name, values in figures.items()
        for seed, figure in enumerate(values)
    ]


def with_summary(results, **values):
    return [replace(one, summary={**one.summary, **values}) for one in results]


def column(table, title):
    place = list(table.head).index(title)
    return [row[place].text for row in table.cells]


# --- the main table -----------------------------------------------------------------------------


def test_mean_deviation_and_costs_of_each_row(study):
    """Two rounds with 100 bytes down, 10 up, 1000 multiply-adds and half a second each."""
    table, sizes = comparison(study)
    assert table.title == "accuracy, mean ± sample deviation over 3 seeds"
    assert table.text.splitlines()[1:4] == [
        "method             1    to clients  back  client MACs  seconds",
        "a       60.0 ± 10.0% *       200 B  20 B           2k      1.0",
        "b       50.0 ± 10.0%         200 B  20 B           2k      1.0",
    ]
    assert sizes.text.splitlines() == [
        "sizes",
        "share  parameters  MACs a sample",
        "1           1,234             56",
    ]


def test_one_note_names_the_marked_rows(study):
    (note,) = comparison(study)[0].notes
    assert note == (
        "a is marked as best because the mean paired difference of a to b, 10.00 points, is more "
        "than "
        "twice its standard error, 0.00 points."
    )


def test_one_seed_has_no_deviation_and_no_mark(study):
    table = comparison([one for one in study if one.seed == 0])[0]
    assert table.title == "accuracy, seed 0"
    assert column(table, "1") == ["50.0%", "40.0%"]
    assert table.notes == ["Nothing is marked because there are fewer than three seeds."]
    assert not any(cell.is_best for row in table.cells for cell in row)


def test_equal_reasons_are_noted_once(study):
    """Shares 0.5 and 0.25 are ties; at share 1 row a is better. Labels name the shares."""
    shares = {"0.5": 0.3, "0.25": 0.2}
    runs = [
        with_summary(
            [one],
            metrics={"accuracy": {**one.metric(), **shares}},
            labels={"0.5": "3M"},
        )[0]
        for one in study
    ]
    table = comparison(runs)[0]
    assert list(table.head[1:4]) == ["1", "3M", "0.25"]
    of_best, of_ties = table.notes  # a line each
    assert of_best.startswith("Share 1: a is marked as best because the mean paired difference")
    assert of_ties == "Shares 3M, 0.25: nothing is marked because a and b are a tie."


def test_missing_and_diverged_runs_are_named(study):
    runs = [one for one in study if (one.entry, one.seed) != ("b", 1)]
    runs = [with_summary([one], diverged=2)[0] if one.seed == 2 else one for one in runs]
    table = comparison(runs, seeds=(0, 1, 2, 3))[0]
    assert column(table, "1") == ["60.0 ± 10.0%", "50.0 ± 14.1%"]  # b: 0.4 and 0.6
    assert list(table.notes) == [
        "Nothing is marked because missing runs leave a and b 2 common seeds, fewer than three.",
        "a: no run of seed 3; the means are over the others.",
        "a: the run of seed 2 diverged in round 2; its last figures count.",
        "b: no run of seeds 1, 3; the means are over the others.",
        "b: the run of seed 2 diverged in round 2; its last figures count.",
    ]


def test_a_figure_that_is_not_a_number_is_shown_and_never_marked(study, result):
    runs = [*study[:5], result("b", 2, [0.3, math.nan], diverged=2)]
    table = comparison(runs)[0]
    assert column(table, "1")[1] == "nan ± nan%"
    assert table.notes[0].startswith("Nothing is marked because a figure of a or b is not a finite")


def test_notes_of_methods_appear_once_per_row(study):
    runs = [*with_summary(study[:3], note="reads public data"), *study[3:]]
    assert [n for n in comparison(runs)[0].notes if "public" in n] == ["a: reads public data"]


def test_rounds_and_bytes_to_a_target(study):
    """Row a reaches 0.5 in round 2 at all seeds, row b at seeds 1 and 2."""
    main, table, _ = comparison(study, target=0.5)
    assert table.title == "cost until a share first had 50%"
    assert [row[:2] for row in table.rows] == [["a", "1"], ["b", "1"]]
    assert column(table, "rounds") == ["2", "2 (2 of 3)"]
    assert column(table, "bytes") == ["220 B", "220 B (2 of 3)"]
    assert column(table, "client MACs") == ["2k", "2k (2 of 3)"]
    assert column(main, "rounds to 50%") == ["2", "2 (2 of 3)"]
    assert column(main, "bytes to 50%") == ["220 B", "220 B (2 of 3)"]
    assert main.head[:-2] == comparison(study)[0].head


def test_a_link_with_a_clock_has_a_column(study):
    """Every round takes 617 s over the link; row b reaches 0.5 in round 2, at two seeds."""
    timed = [
        replace(one, records=[replace(record, link_seconds=617.0) for record in one.records])
        for one in with_summary(study, link_seconds=1234.0)
    ]
    main, costs, _ = comparison(timed, target=0.5)
    assert column(main, "over the link") == ["1,234.0 s", "1,234.0 s"]
    assert column(costs, "over the link") == ["1,234.0 s", "1,234.0 s (2 of 3)"]
    assert "over the link" not in comparison(study)[0].head


def test_a_deadline_has_a_column(study):
    dropped = with_summary(study, late=12)
    assert column(comparison(dropped)[0], "late") == ["12", "12"]
    assert "late" not in comparison(study)[0].head


def test_a_metric_that_is_no_rate_has_four_digits(result):
    lower = {"main": "rmse", "higher_is_better": False, "percent": False}
    runs = [
        result(name, seed, [value + seed], **lower)
        for name, value in (("a", 1.23456), ("b", 2.0))
        for seed in range(3)
    ]
    table, costs, *_ = comparison(runs, target=1.5)
    assert column(table, "1") == ["2.235 ± 1", "3 ± 1"]
    assert table.cells[0][1].is_best
    assert "0.7654" in table.notes[0]
    assert costs.title.endswith("had rmse 1.5")
    assert column(costs, "rounds") == ["1 (1 of 3)", "–"]


def test_another_metric_has_its_own_direction_and_unit(study):
    runs = [
        with_summary(
            [one], metrics={**one.summary["metrics"], "loss": {"1.0": 1 - one.metric()["1.0"]}}
        )[0]
        for one in study
    ]
    table = comparison(runs, metric="loss")[0]
    assert table.title.startswith("loss (lower is better), mean")
    assert column(table, "1") == ["0.4 ± 0.1", "0.5 ± 0.1"]
    assert table.cells[0][1].is_best


# --- the other tables ---------------------------------------------------------------------------


def test_domains_at_the_widest_share(study):
    metrics = {
        "accuracy": {"0.5": 0.1, "1.0": 0.2},
        "accuracy/mnist": {"0.5": 0.3, "1.0": 0.4},
        "accuracy/svhn": {"0.5": 0.5, "1.0": 0.6},
    }
    table = comparison(with_summary(study, metrics=metrics))[1]
    assert table.title == "accuracy by domain, share 1"
    assert list(table.head) == ["method", "mnist", "svhn"]
    assert [cell.text for cell in table.cells[0]] == ["a", "40.0 ± 0.0%", "60.0 ± 0.0%"]


def test_robustness_is_no_domain(study):
    metrics = {"robust": {"1.0": 0.2}, "robust/0.5": {"1.0": 0.3}}
    runs = [with_summary([one], metrics={**one.summary["metrics"], **metrics})[0] for one in study]
    titles = [table.title for table in comparison(runs, metric="robust")]
    assert titles == ["robust, mean ± sample deviation over 3 seeds", "sizes"]


def test_cost_tables_refer_to_the_baseline(study):
    """The best of b is 80, 83 and 86 % of a's, in round 2; in round 1 it is half of that."""
    _, rounds_table, bytes_table, macs_table, _ = comparison(study, baseline="a")
    assert rounds_table.title == "rounds to a percentage of the best accuracy of a"
    assert list(rounds_table.head) == ["method", *(f"{p:g}%" for p in PERCENTAGES)]
    assert [cell.text for cell in rounds_table.cells[0]] == ["a", "1", *["2"] * 9]
    assert [cell.text for cell in rounds_table.cells[1]] == ["b", "2", "2", "2", "2", *["–"] * 6]
    assert column(bytes_table, "50%") == ["110 B", "220 B"]
    assert column(macs_table, "50%") == ["1k", "2k"]


def test_a_baseline_that_diverged_at_once_leaves_the_other_tables(study, result):
    """An error would come after the last run, and hide what all runs have found."""
    runs = [*study, *(result("dead", seed, [math.nan], diverged=1) for seed in range(3))]
    main, sizes = comparison(runs, baseline="dead")
    assert (
        "The baseline dead has no evaluated round, so that nothing can be compared with its best."
        in main.notes
    )
    assert sizes.title == "sizes"
    assert "to_baseline" not in to_json(runs, baseline="dead")["entries"]["a"]


def test_a_seed_that_the_baseline_lacks_is_noted(study):
    runs = [one for one in study if (one.entry, one.seed) != ("a", 2)]
    notes = comparison(runs, baseline="a")[3].notes
    assert notes[1] == "a has no run of seed 2; its mean best is used there."


def test_sizes_are_grouped_where_members_differ(study):
    other = with_summary(study[3:], members={"1.0": {"params": 5, "macs": 6}})
    titles = [table.title for table in comparison([*study[:3], *other])[1:]]
    assert titles == ["sizes (a)", "sizes (b)"]


# --- errors -------------------------------------------------------------------------------------


def test_no_runs_cannot_be_compared():
    with pytest.raises(ConfigError, match="a comparison was asked for; there are no runs"):
        comparison([])


def test_the_error_for_an_unrecorded_metric_lists_recorded_ones(study):
    with pytest.raises(ConfigError, match=r"'f1' was asked for; no run has it\. Known: accuracy"):
        comparison(study, metric="f1")


def test_different_data_and_tasks_are_listed(study):
    other = with_summary(study[3:], data="cifar10", task="regression", main="rmse")
    with pytest.raises(ConfigError) as error:
        comparison([*study[:3], *other])
    assert str(error.value) == (
        "a comparison was asked for; these rows differ:\n"
        "  data digits: a\n"
        "  data cifar10: b\n"
        "  task classification: a\n"
        "  task regression: b\n"
        "  main metric accuracy: a\n"
        "  main metric rmse: b\n"
        "Compare runs on the same data with the same task."
    )


def test_summaries_of_early_versions_name_no_task(study):
    early = with_summary(study[3:], task=None)
    assert comparison([*study[:3], *early])


def test_an_unknown_baseline_and_an_impossible_target(study):
    with pytest.raises(ConfigError, match=r"the baseline 'c' was asked for\. Known: a, b"):
        comparison(study, baseline="c")
    with pytest.raises(ConfigError, match="a target of 60 was asked for; accuracy is in"):
        comparison(study, target=60)


# --- plain values -------------------------------------------------------------------------------


def test_json_has_spreads_costs_and_verdicts(study):
    plain = json.loads(json.dumps(to_json(study, target=0.5, baseline="a", seeds=range(4))))
    assert (plain["metric"], plain["target"], plain["baseline"]) == ("accuracy", 0.5, "a")
    assert plain["seeds"] == [0, 1, 2, 3]
    figures = plain["entries"]["b"]["figures"]["1.0"]
    assert figures["by_seed"] == {"0": 0.4, "1": 0.5, "2": 0.6}
    assert figures["mean"] == pytest.approx(0.5)
    assert figures["deviation"] == pytest.approx(0.1)
    assert figures["count"] == 3
    assert plain["entries"]["b"]["missing_seeds"] == [3]
    assert plain["entries"]["b"]["macs"]["mean"] == 2000
    to_target = plain["entries"]["b"]["to_target"]["1.0"]
    assert (to_target["rounds"], to_target["reached"], to_target["count"]) == (2, 2, 3)
    assert to_target["by_seed"]["0"] is None
    assert plain["entries"]["b"]["to_baseline"]["99.95"]["rounds"] is None
    assert plain["verdicts"]["1.0"]["entry"] == "a"
    assert plain["verdicts"]["1.0"]["difference"] == pytest.approx(0.1)


def test_a_plain_comparison_has_no_costs_unless_requested(study):
    plain = to_json(study)
    assert not {"target", "baseline"} & plain.keys()
    assert not {"to_target", "to_baseline"} & plain["entries"]["a"].keys()


def test_rows_have_one_line_for_each_share(study):
    metrics = {"accuracy": {"1.0": 0.5, "0.5": 0.25}, "loss": {"1.0": 2.0}}
    flat = rows(with_summary(study[:1], metrics=metrics))
    assert flat[0] == {
        "entry": "a",
        "seed": 0,
        "share": 1.0,
        "accuracy": 0.5,
        "loss": 2.0,
        "rounds": 2,
        "bytes_down": 200,
        "bytes_up": 20,
        "macs": 2000,
        "seconds": 1.0,
        "parameters": 1234,
        "macs_per_sample": 56,
    }
    assert flat[1]["share"] == 0.5
    assert (flat[1]["accuracy"], flat[1]["loss"], flat[1]["parameters"]) == (0.25, None, None)
    assert len(flat) == 2


def test_rounds_have_one_line_for_each_round_and_share(study, record):
    run = replace(study[0], records=[record(1), record(2, {"1.0": 0.5, "0.5": 0.4})])
    flat = rounds([run])
    assert [(row["round"], row["share"], row["accuracy"]) for row in flat] == [
        (1, None, None),
        (2, 1.0, 0.5),
        (2, 0.5, 0.4),
    ]
    assert (flat[0]["train_loss"], flat[0]["clients"], flat[0]["macs"]) == (1.0, 2, 1000)


def test_a_frame_has_the_rows(study):
    pandas = pytest.importorskip("pandas")
    table = frame(study)
    assert isinstance(table, pandas.DataFrame)
    assert table.groupby("entry")["accuracy"].mean().round(6).to_dict() == {"a": 0.6, "b": 0.5}
    assert len(frame(study, by_round=True)) == 12


@pytest.mark.parametrize(("by_round", "function"), [(False, "rows"), (True, "rounds")])
def test_without_pandas_the_error_says_how_to_install_it(study, monkeypatch, by_round, function):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=rf"pip install pandas\. .*frames\.{function} returns"):
        frame(study, by_round)
