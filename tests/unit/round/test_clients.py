"""Who takes part: fleets, budgets and cohorts."""

from __future__ import annotations

from collections import Counter

import pytest

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.round.clients import FIVE_SHARES


def shares(fleet: fq.Fleet) -> list[float]:
    return [budget.share for budget in fleet.budgets]


def test_shares_are_dealt_in_turn():
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), 7, 2)
    assert shares(fleet) == [1, 0.5, 0.25, 1, 0.5, 0.25, 1]
    assert fleet.num_clients == 7
    assert [budget.share for budget in fleet.kinds] == [1, 0.5, 0.25]
    assert FIVE_SHARES == (1, 0.5, 0.25, 0.125, 0.0625)


def test_the_cohort_is_a_tenth_unless_told():
    assert fq.Fleet.of((1.0,), 100).sample == 10
    assert fq.Fleet.of((1.0,), 3).sample == 1
    assert fq.Fleet.of((1.0,), 100, 7).sample == 7


def test_proportions_of_figure_7():
    fleet = fq.Fleet.mixed({1.0: 0.06, 0.5: 0.10, 0.25: 0.11, 0.125: 0.18, 0.0625: 0.55}, 100)
    assert Counter(shares(fleet)) == {1.0: 6, 0.5: 10, 0.25: 11, 0.125: 18, 0.0625: 55}


def test_proportions_need_not_sum_to_one_and_serve_every_client():
    fleet = fq.Fleet.mixed({1.0: 1, 0.5: 2}, 9)
    assert Counter(shares(fleet)) == {1.0: 3, 0.5: 6}
    assert len(fq.Fleet.mixed({1.0: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3}, 10).budgets) == 10


@pytest.mark.parametrize("sample", [0, -1, 4])
def test_a_cohort_the_fleet_does_not_have_is_refused(sample):
    with pytest.raises(ConfigError, match=f"a cohort of {sample} was asked for; the fleet has 3"):
        fq.Fleet.of((1.0,), 3, sample)
    with pytest.raises(ConfigError, match="cohort"):
        fq.Fleet.mixed({1.0: 1.0}, 3, sample)


def test_cohorts_are_distinct_sorted_and_change_with_round_and_seed():
    fleet = fq.Fleet.of((1.0,), 30, 10)
    cohorts = [fleet.cohort(round, seed) for round, seed in ((0, 0), (1, 0), (0, 1))]
    for cohort in cohorts:
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 10
    assert len(set(map(tuple, cohorts))) == 3
    assert fleet.cohort(0, 0) == cohorts[0]


def test_every_client_is_as_likely_to_take_part():
    fleet = fq.Fleet.of((1.0,), 10, 3)
    met = Counter(id for round in range(1000) for id in fleet.cohort(round, 0))
    assert all(abs(count - 300) < 60 for count in met.values())  # four standard deviations of 14.5
    assert len(met) == 10


def test_dynamic_budgets_are_redrawn_every_round_and_fixed_ones_are_not():
    fleet = fq.Fleet.of((1.0, 0.5), 4, 2, dynamic=True)
    drawn = Counter(fleet.budget(1, round, 0).share for round in range(200))
    assert set(drawn) == {1.0, 0.5}
    assert abs(drawn[1.0] - 100) < 30
    assert fleet.budget(1, 3, 0) == fleet.budget(1, 3, 0)
    fixed = fq.Fleet.of((1.0, 0.5), 4, 2)
    assert {fixed.budget(1, round, 0).share for round in range(20)} == {0.5}


def test_a_client_knows_its_budget_and_how_much_data_it_has():
    client = fq.Fleet.of((1.0, 0.5), 4, 2).client(3, round=0, seed=0, size=17)
    assert client == fq.Client(3, fq.Budget(share=0.5), 17)


# --- budgets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, -0.5, float("nan")])
def test_a_share_of_nothing_is_refused(share):
    with pytest.raises(BudgetError, match="must be above 0"):
        fq.Budget(share=share)


def test_a_share_above_one_is_refused():
    with pytest.raises(BudgetError, match=r"1\.5 was asked for; shares lie in \(0, 1\]"):
        fq.Budget(share=1.5)


def test_an_empty_budget_is_refused_and_a_full_one_reads_well():
    with pytest.raises(BudgetError, match="at least one of share="):
        fq.Budget()
    assert str(fq.Budget(share=0.5, params=1e6)) == "share 0.5 params 1e+06"
