"""Statistics over seeds, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedquilt.errors import ConfigError
from fedquilt.runs.milestones import Milestone
from fedquilt.studies.statistics import (
    PERCENTAGES,
    CostToTarget,
    Spread,
    Verdict,
    best_entry,
    by_entry,
    cost_to_percentages,
    cost_to_target,
    missing_seeds,
    paired_difference,
    part_of_best,
    values_by_seed,
)


def seeds(*values):
    return dict(enumerate(values))


# --- mean and deviation -------------------------------------------------------------------------


def test_the_deviation_is_that_of_a_sample():
    """The squared differences of 2, 4 and 9 to their mean 5 are 9, 1 and 16: 26 / 2 = 13."""
    spread = Spread.of([2, 4, 9])
    assert spread == Spread(5.0, math.sqrt(13), 3)
    assert spread.error == pytest.approx(math.sqrt(13 / 3))


def test_one_value_has_no_deviation():
    assert Spread.of([0.5]) == Spread(0.5, None, 1)
    assert Spread.of([0.5]).error is None


def test_no_values_have_no_mean():
    with pytest.raises(ValueError, match="the mean of no values was asked for"):
        Spread.of([])


def test_a_figure_that_is_not_a_number_shows():
    assert math.isnan(Spread.of([1.0, math.nan]).mean)
    assert Spread.of([math.inf, 1.0]).mean == math.inf


# --- paired comparison --------------------------------------------------------------------------


def test_differences_are_taken_seed_by_seed():
    """The differences 1, 2 and 3 have the mean 2, the deviation 1 and the error 1 / √3."""
    difference = paired_difference(seeds(11, 22, 33), {2: 30, 1: 20, 0: 10, 7: 99})
    assert difference == Spread(2.0, 1.0, 3)
    assert difference.error == pytest.approx(1 / math.sqrt(3))
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(("shift", "marked"), [(0.01, "a"), (-0.01, None)])
def test_the_best_is_marked_above_twice_the_standard_error(shift, marked):
    """Differences of m - 1, m and m + 1 have the error 1 / √3, so that the limit is 2 / √3."""
    mean = 2 / math.sqrt(3) + shift
    rows = {"b": seeds(10, 20, 30), "a": seeds(10 + mean - 1, 20 + mean, 30 + mean + 1)}
    verdict = best_entry(rows)
    assert verdict.entry == marked
    assert verdict.difference.mean == pytest.approx(mean)
    words = "more than" if marked else "within"
    assert verdict.reason == (
        f"the mean paired difference of a to b, {mean:.4g}, is {words} twice its standard error, "
        f"{1 / math.sqrt(3):.4g}"
    )


def test_pairs_count_and_not_the_spread_between_seeds():
    """Seeds differ by 100, rows by 1 at every seed: the error of the difference is 0."""
    verdict = best_entry({"a": seeds(101, 201, 301), "b": seeds(100, 200, 300)})
    assert verdict.entry == "a"
    assert verdict.difference == Spread(1.0, 0.0, 3)


def test_only_the_next_best_matters():
    rows = {"c": seeds(1, 9, 2), "a": seeds(11, 21, 31), "b": seeds(10, 20, 30)}
    assert best_entry(rows).entry == "a"
    assert "a to b" in best_entry(rows).reason


def test_where_lower_is_better_the_lowest_mean_is_marked():
    rows = {"a": seeds(0.3, 0.4, 0.5), "b": seeds(0.1, 0.2, 0.3)}
    verdict = best_entry(rows, higher_is_better=False)
    assert verdict.entry == "b"
    assert verdict.difference.mean == pytest.approx(0.2)
    assert best_entry(rows).entry == "a"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({}, "no row has a figure"),
        ({"a": seeds(1, 2, 3)}, "only one row has figures"),
        ({"a": seeds(1, 2, 3), "b": {}}, "only one row has figures"),
        ({"a": seeds(5), "b": seeds(1)}, "there are fewer than three seeds"),
        ({"a": seeds(5, 6), "b": seeds(1, 2)}, "there are fewer than three seeds"),
        ({"a": seeds(1, 2, 3), "b": seeds(1, 2, 3)}, "a and b are a tie"),
        ({"a": seeds(0.3, 0.5, 0.4), "b": seeds(0.1 + 0.2, 0.5, 0.4)}, "b and a are a tie"),
        (
            {"a": seeds(5, 6, 7), "b": seeds(1, 2)},
            "missing runs leave a and b 2 common seeds, fewer than three",
        ),
        (
            {"a": {0: 5.0, 1: 6.0}, "b": {2: 1.0}},
            "missing runs leave a and b no common seeds, fewer than three",
        ),
        (
            {"a": {0: 1.0, 1: 1.0, 2: 1.0, 3: 99.0}, "b": seeds(2, 2, 2)},
            "a has the best mean, but b is better on their common seeds",
        ),
        (
            {"a": seeds(1, 2, 3), "b": seeds(1, math.nan, 3)},
            "a figure of a or b is not a finite number",
        ),
    ],
)
def test_notes_give_the_reason_if_no_row_is_marked(rows, reason):
    verdict = best_entry(rows)
    assert (verdict.entry, verdict.reason) == (None, reason)


def test_a_row_that_is_not_a_number_is_behind_all_others():
    rows = {"bad": seeds(math.nan, 9, 9), "b": seeds(1, 2, 3), "a": seeds(2, 3, 4)}
    assert best_entry(rows).entry == "a"


def test_differences_are_shown_as_asked():
    verdict = best_entry(
        {"a": seeds(0.3, 0.4, 0.5), "b": seeds(0.1, 0.2, 0.3)}, show="{:.1%}".format
    )
    assert verdict == Verdict(
        "a",
        "the mean paired difference of a to b, 20.0%, is more than twice its standard error, 0.0%",
        verdict.difference,
    )


# --- rows ---------------------------------------------------------------------------------------


def test_runs_are_grouped_by_row_and_sorted_by_seed(result):
    runs = [result("b", 2, [0.1]), result("a", 0, [0.3]), result("b", 1, [0.2])]
    rows = by_entry(runs)
    assert list(rows) == ["b", "a"]
    assert values_by_seed(rows["b"], "1.0") == {1: 0.2, 2: 0.1}
    assert values_by_seed(rows["b"], "0.5") == {}
    assert missing_seeds(rows["b"], [0, 1, 2]) == [0]


def test_a_seed_counts_once(result):
    with pytest.raises(ConfigError, match=r"runs of a were to be compared; .* with the seed 3"):
        by_entry([result("a", 3, [0.1]), result("a", 3, [0.2])])


# --- cost to a target ---------------------------------------------------------------------------


def test_costs_are_means_over_the_seeds_that_reach_the_target(result):
    runs = [
        result("a", 0, [0.1, 0.6, 0.7]),
        result("a", 1, [0.1, 0.2, 0.3, 0.6]),
        result("a", 2, [0.1]),
    ]
    cost = cost_to_target(runs, 0.6)["1.0"]
    assert cost.by_seed == {
        0: Milestone(round=2, bytes=220, macs=2000, seconds=1.0),
        1: Milestone(round=4, bytes=440, macs=4000, seconds=2.0),
        2: None,
    }
    assert (cost.rounds, cost.bytes, cost.macs) == (3.0, 330.0, 3000.0)
    assert cost.shown(cost.rounds, "{:g}".format) == "3 (2 of 3)"


def test_costs_that_all_or_none_have():
    milestone = Milestone(2, 220, 2000, 1.0)
    assert CostToTarget({0: milestone}).shown(2.0, "{:g}".format) == "2"
    never = CostToTarget({0: None})
    assert never.rounds is None
    assert never.shown(never.rounds, "{:g}".format) == "–"


def test_runs_without_records_reach_nothing(result):
    bare = replace(result("a", 0, [0.5]), records=())
    assert cost_to_target([bare], 0.1) == {}
    cost = cost_to_target([bare, result("a", 1, [0.5])], 0.1)["1.0"]
    assert cost.by_seed[0] is None
    assert cost.rounds == 1


def test_a_part_of_the_best_is_never_better_than_it():
    assert part_of_best(0.8, 50) == 0.4
    assert part_of_best(0.8, 50, higher_is_better=False) == 1.6
    assert part_of_best(-2.0, 50) == -4.0
    assert part_of_best(-2.0, 50, higher_is_better=False) == -1.0
    for best in (0.1, 0.7, 1 / 3, -0.3, 0.0):
        assert part_of_best(best, 100) == best
        assert part_of_best(best, 100, higher_is_better=False) == best


def test_cost_to_percentages_of_the_baselines_best(result):
    """Seed 0's baseline is best in round 2 with 0.8, not in the last: 50 % is 0.4, 90 % 0.72."""
    runs = [result("base", 0, [0.4, 0.8, 0.6]), result("other", 0, [0.39, 0.5, 0.72])]
    costs = cost_to_percentages(runs, "base")
    assert tuple(costs["base"]) == PERCENTAGES
    rounds = {name: [cost.rounds for cost in row.values()] for name, row in costs.items()}
    #                   50  60  70  80  90  98    99    99.5  99.95 100
    assert rounds["base"] == [1, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert rounds["other"] == [2, 2, 3, 3, 3, None, None, None, None, None]
    assert (costs["other"][70.0].bytes, costs["other"][70.0].macs) == (330, 3000)


def test_runs_are_paired_with_the_baselines_run_of_their_seed(result):
    """Seed 2 has no baseline, whose mean best is 0.6: half of it, 0.3, is reached in round 2."""
    runs = [
        result("base", 0, [0.8]),
        result("base", 1, [0.4]),
        result("other", 0, [0.2, 0.3, 0.4]),
        result("other", 1, [0.2, 0.3, 0.4]),
        result("other", 2, [0.2, 0.3, 0.4]),
    ]
    cost = cost_to_percentages(runs, "base")["other"][50.0]
    assert {seed: milestone.round for seed, milestone in cost.by_seed.items()} == {0: 3, 1: 1, 2: 2}
    assert cost.rounds == 2


def test_where_lower_is_better_the_target_is_an_upper_bound(result):
    """The baseline's best error is 0.5: 50 % is an error of at most 1.0."""
    lower = {"main": "rmse", "higher_is_better": False, "percent": False}
    runs = [result("base", 0, [2.0, 0.5, 0.7], **lower), result("b", 0, [1.1, 1.0, 0.5], **lower)]
    costs = cost_to_percentages(runs, "base")
    assert costs["b"][50.0].rounds == 2
    assert costs["b"][60.0].rounds == 3
    assert costs["b"][100.0].rounds == 3
    assert costs["base"][100.0].rounds == 2


def test_a_diverged_baseline_counts_until_it_diverges(result):
    runs = [result("base", 0, [math.nan, 0.4, math.nan], diverged=3), result("b", 0, [0.2, 0.4])]
    costs = cost_to_percentages(runs, "base")
    assert costs["b"][100.0].rounds == 2
    assert costs["b"][50.0].rounds == 1


def test_a_baseline_must_be_there_and_evaluated(result):
    runs = [result("fedavg", 0, [0.5]), result("dead", 0, [math.nan])]
    with pytest.raises(ConfigError, match=r"'fedavgg' was asked for\. Did you mean 'fedavg'"):
        cost_to_percentages(runs, "fedavgg")
    with pytest.raises(ConfigError, match="'dead' was asked for; none of its runs has records"):
        cost_to_percentages(runs, "dead")
